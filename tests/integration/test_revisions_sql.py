"""The SQL to copy: what it makes, that the rename is one-shot, and that nothing runs it by itself."""

from __future__ import annotations

import uuid

import psycopg
import pytest
from click.testing import CliRunner

from celery_syncguard import revisions
from celery_syncguard.cli.commands import main


def columns(connection, table):
    return connection.execute(
        "select column_name, data_type, is_nullable, column_default from information_schema.columns"
        " where table_name = %s order by ordinal_position",
        [table],
    ).fetchall()


def constraints(connection, table):
    return dict(
        connection.execute(
            "select conname, pg_get_constraintdef(oid) from pg_constraint where conrelid = %s::regclass and contype <> 'n'",
            [table],
        ).fetchall()
    )


def test_the_reference_migration_makes_baukits_table(empty_dsn):
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(revisions.POSTGRES_MIGRATION_SQL)
        assert columns(connection, "sync_revisions") == [
            ("owner_id", "uuid", "NO", None),
            ("last_revision", "bigint", "NO", "0"),
        ]
        assert constraints(connection, "sync_revisions") == {
            "sync_revisions_pkey": "PRIMARY KEY (owner_id)",
            "sync_revisions_last_revision_check": "CHECK ((last_revision >= 0))",
        }
        connection.execute("insert into sync_revisions (owner_id) values (%s)", [uuid.uuid4()])
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute("update sync_revisions set last_revision = -1")


def test_a_table_made_by_the_documented_convention_works(empty_dsn):
    """The example in the comment of the file is SQL that runs."""
    lines = [
        line.removeprefix("--     ")
        for line in revisions.POSTGRES_MIGRATION_SQL.splitlines()
        if line.startswith("--     ")
    ]
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(revisions.POSTGRES_MIGRATION_SQL)
        connection.execute("\n".join(lines))
        names = [name for name, *_ in columns(connection, "notes")]
        assert {"id", "owner_id", "updated_at", "deleted_at", "revision"} <= set(names)
        owner = uuid.uuid4()
        revisions.ensure_owner(connection, owner)
        connection.execute(
            "insert into notes (id, owner_id, revision, body) values (%s, %s, %s, 'hello')",
            [uuid.uuid4(), owner, revisions.next_revision(connection, owner)],
        )


OLD_SHAPE = """
create table users (id uuid primary key);
create table sync_revisions (
    user_id uuid primary key references users (id) on delete cascade,
    last_revision bigint not null default 0
);
"""


def test_the_rename_keeps_rows_and_foreign_key_and_adds_the_check(empty_dsn):
    owner = uuid.uuid4()
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(OLD_SHAPE)
        connection.execute("insert into users values (%s)", [owner])
        connection.execute("insert into sync_revisions values (%s, 41)", [owner])
        connection.execute(revisions.POSTGRES_RENAME_SQL)
        assert revisions.next_revision(connection, owner) == 42
        assert constraints(connection, "sync_revisions") == {
            "sync_revisions_pkey": "PRIMARY KEY (owner_id)",
            "sync_revisions_owner_id_fkey": "FOREIGN KEY (owner_id) REFERENCES users(id) ON DELETE CASCADE",
            "sync_revisions_last_revision_check": "CHECK ((last_revision >= 0))",
        }


def test_the_rename_fails_when_repeated_and_changes_nothing(empty_dsn):
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(OLD_SHAPE)
        connection.execute(revisions.POSTGRES_RENAME_SQL)
        connection.commit()
        before = columns(connection, "sync_revisions"), constraints(connection, "sync_revisions")
        with pytest.raises(psycopg.errors.UndefinedColumn), connection.transaction():
            connection.execute(revisions.POSTGRES_RENAME_SQL)
        assert (columns(connection, "sync_revisions"), constraints(connection, "sync_revisions")) == before


def test_the_rename_fails_on_a_table_that_has_the_new_shape(empty_dsn):
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(revisions.POSTGRES_MIGRATION_SQL)
        with pytest.raises(psycopg.errors.UndefinedColumn):
            connection.execute(revisions.POSTGRES_RENAME_SQL)


def test_the_migrations_of_the_library_do_not_touch_the_applications_tables(pg_dsn):
    with psycopg.connect(pg_dsn) as connection:
        assert connection.execute("select to_regclass('sync_revisions')").fetchone() == (None,)
        connection.execute(revisions.POSTGRES_MIGRATION_SQL)
        assert connection.execute("select to_regclass('sync_revisions')").fetchone() == ("sync_revisions",)


def test_text_constants_are_the_files():
    assert revisions.copy_sql("revisions") == revisions.POSTGRES_MIGRATION_SQL
    assert revisions.copy_sql("revisions-rename") == revisions.POSTGRES_RENAME_SQL
    assert revisions.POSTGRES_MIGRATION_SQL != revisions.POSTGRES_RENAME_SQL
    with pytest.raises(ValueError, match="revisions-rename"):
        revisions.copy_sql("locks")
    with pytest.raises(AttributeError):
        revisions.NOTHING_LIKE_IT


@pytest.mark.parametrize("name", ["revisions", "revisions-rename"])
def test_the_command_line_prints_the_same_and_needs_no_database(name, monkeypatch):
    monkeypatch.delenv("SYNCGUARD_DSN", raising=False)
    done = CliRunner().invoke(main, ["sql", name])
    assert (done.exit_code, done.output) == (0, revisions.copy_sql(name))
