"""Migrations: applied once, whoever runs them and how often; edited and half-applied ones are noticed."""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

from celery_syncguard import SyncGuard
from celery_syncguard.errors import SchemaBehind
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.migrate import Migration
from tests.fixtures import servers

NAMES = [one.name for one in migrate.migrations()]
WEIRD = ['We"ird', "per%cent %s %(x)s", "sp ace", "UPPER", "quo'te", "back\\slash", "ünïcode", "select", "a.b", "$$"]
WORST = [WEIRD[0], WEIRD[1], "back\\slash"]


def catalog(dsn: str, schema: str) -> dict[str, list]:
    """Everything of a schema that a migration can make, without the schema's name."""
    queries = {
        "columns": "select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated,"
        " pg_get_expr(d.adbin, d.adrelid) from pg_attribute a join pg_class c on c.oid = a.attrelid"
        " left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum"
        " where c.relnamespace = %(schema)s::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped"
        " order by c.relname, a.attnum",
        "indexes": "select pg_get_indexdef(i.indexrelid) from pg_index i join pg_class c on c.oid = i.indexrelid"
        " where c.relnamespace = %(schema)s::regnamespace order by c.relname",
        "constraints": "select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint"
        " where connamespace = %(schema)s::regnamespace order by 1, 2",
        "functions": "select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), l.lanname,"
        " p.provolatile, p.prosecdef, p.proconfig::text, p.prosrc from pg_proc p join pg_language l on l.oid = p.prolang"
        " where p.pronamespace = %(schema)s::regnamespace order by 1, 2",
        "triggers": "select tgname, pg_get_triggerdef(oid) from pg_trigger where tgrelid in"
        " (select oid from pg_class where relnamespace = %(schema)s::regnamespace) and not tgisinternal order by 1",
    }
    with psycopg.connect(dsn) as conn:
        quoted = sql.Identifier(schema).as_string(conn)
        conn.execute("set search_path to pg_catalog")
        found = {name: conn.execute(query, {"schema": quoted}).fetchall() for name, query in queries.items()}
        found["records"] = conn.execute(
            sql.SQL("select name, checksum from {}.syncguard_migrations order by name").format(sql.Identifier(schema))
        ).fetchall()
    # Twice quoted inside a setting, once elsewhere.
    forms = [quoted.replace("\\", "\\\\").replace('"', '\\"'), quoted, schema]

    def anywhere(value):
        for form in forms if isinstance(value, str) else []:
            value = value.replace(f"{form}.", "SCHEMA.").replace(f"{form}, pg_temp", "SCHEMA, pg_temp")
        return value

    return {
        name: rows if name == "records" else [tuple(anywhere(value) for value in row) for row in rows]
        for name, rows in found.items()
    }


def work_there(dsn: str, schema: str | None) -> None:
    """A lease's life in that schema, also inside a caller's transaction."""
    with SyncGuard(dsn, schema=schema) as guard, psycopg.connect(dsn, autocommit=True) as conn:
        with guard.hold("a", ttl=10) as lease:
            assert guard.try_acquire("a") is None
            with lease.transaction(conn):
                conn.execute("select 1")
            assert lease.renew()
            assert [row.key for row in guard.locks()] == ["a"]
        assert guard.inspect("a") is None
        guard.prune(older=0, counters=True)


def test_a_schemas_name_is_quoted_and_honoured(empty_dsn):
    for schema in WEIRD:
        assert migrate.migrate(empty_dsn, schema=schema) == NAMES
        assert migrate.migrate(empty_dsn, schema=schema) == []
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            assert migrate.check(conn, schema=schema).schema == schema
        work_there(empty_dsn, schema)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        places = conn.execute("select distinct schemaname from pg_tables where tablename like 'syncguard%'").fetchall()
    assert {name for (name,) in places} == set(WEIRD)


def test_without_a_schema_the_first_of_the_search_path_is_used(empty_dsn):
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create schema first")
    dsn = f"{empty_dsn}?options=-c%20search_path%3Dabsent,first,public"
    assert migrate.migrate(dsn) == NAMES
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert migrate.check(conn).schema == "first"
    work_there(dsn, None)
    with psycopg.connect(empty_dsn, autocommit=True) as conn, pytest.raises(SchemaBehind, match="syncguard migrate"):
        migrate.check(conn)


def test_a_search_path_without_a_schema_says_so(empty_dsn):
    with pytest.raises(SchemaBehind, match="syncguard_schema"):
        migrate.migrate(f"{empty_dsn}?options=-c%20search_path%3Dabsent")


# Twice at once


def _runner(dsn: str, rounds: int, naive: bool, start, results) -> None:
    if naive:
        execute = psycopg.Connection.execute

        def without_turns(self, query, *args, **kwargs):
            if "pg_advisory_xact_lock" in str(query):
                query = "select 1"
            return execute(self, query, *args, **kwargs)

        psycopg.Connection.execute = without_turns
    for number in range(rounds):
        start.wait(60)
        try:
            results.put((number, migrate.migrate(dsn, schema=f"round_{number}")))
        except Exception as exc:
            results.put((number, repr(exc)))


@contextmanager
def two_runners(dsn: str, *, rounds: int, naive: bool):
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(2), context.Queue()
    runners = [context.Process(target=_runner, args=(dsn, rounds, naive, start, results)) for _ in range(2)]
    for one in runners:
        one.start()
    try:
        yield results
    finally:
        for one in runners:
            one.join(30)
            one.kill()


def test_two_runners_at_once_apply_each_migration_once(empty_dsn):
    rounds = 20
    with two_runners(empty_dsn, rounds=rounds, naive=False) as results:
        answers = [results.get(timeout=60) for _ in range(2 * rounds)]
    assert [answer for answer in answers if isinstance(answer[1], str)] == []
    for number in range(rounds):
        applied = [name for which, names in answers if which == number for name in names]
        assert sorted(applied) == NAMES
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            assert migrate.check(conn, schema=f"round_{number}").ready


def test_without_taking_turns_two_runners_at_once_fail(empty_dsn):
    """The negative control of the test above."""
    with two_runners(empty_dsn, rounds=20, naive=True) as results:
        answers = []
        while len(answers) < 40:
            try:
                answers.append(results.get(timeout=20))
            except queue.Empty:  # a runner that failed may have left the other alone at the barrier
                break
    assert [answer for answer in answers if isinstance(answer[1], str)] != []


# Edited, half-applied, newer


def test_an_edited_migration_is_noticed(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        migrate.check(conn)
        conn.execute("update syncguard_migrations set checksum = 'other' where name = %s", [NAMES[0]])
        with pytest.raises(SchemaBehind, match=f"other texts of {NAMES[0]}"):
            migrate.check(conn)
    with pytest.raises(SchemaBehind, match=f"other texts of {NAMES[0]}"):
        migrate.migrate(pg_dsn)


@pytest.mark.parametrize(
    "damage, lost",
    [
        ("drop table syncguard_claims", "syncguard_claims"),
        ("drop index idx_syncguard_locks_lock_id", "idx_syncguard_locks_lock_id"),
        ("drop function syncguard_release", "syncguard_release"),
        ("drop function syncguard_acquire", "syncguard_acquire, which"),
        ("alter function syncguard_renew rename to elsewhere", "syncguard_renew"),
    ],
)
def test_an_object_that_was_lost_is_noticed(pg_dsn, damage, lost):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(damage)
        with pytest.raises(SchemaBehind, match=f"has lost {lost}"):
            migrate.check(conn)
    with pytest.raises(SchemaBehind, match=f"has lost {lost}"):
        migrate.migrate(pg_dsn)


@pytest.mark.parametrize(
    "number, kept", [(0, "syncguard_deaths"), (1, "syncguard_claims"), (1, "syncguard_completions")]
)
def test_a_migration_that_was_applied_by_hand_in_part_is_noticed_and_nothing_is_added(empty_dsn, number, kept):
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("create table {} (x int)").format(sql.Identifier(kept)))
    with pytest.raises(SchemaBehind, match=f"{NAMES[number]} is not recorded .*{kept}"):
        migrate.migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        there = {name for (name,) in conn.execute("select tablename from pg_tables where schemaname = 'public'")}
    before = {table for one in migrate.migrations()[:number] for table in (*one.tables, "syncguard_migrations")}
    assert there == before | {kept}


def test_a_column_of_ours_that_is_there_already_is_noticed(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("delete from syncguard_migrations")
    with pytest.raises(SchemaBehind, match="is not recorded"):
        migrate.migrate(pg_dsn)


def test_a_migration_that_fails_leaves_nothing_and_can_be_run_again(empty_dsn, monkeypatch):
    ours = migrate.migrations()
    broken = Migration("9000_break_halfway", "CREATE TABLE halfway (x int);\nSELECT 1 / 0;")
    monkeypatch.setattr(migrate, "migrations", lambda: [*ours, broken])
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate.migrate(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        found = migrate.state(conn)
        assert (found.applied, found.pending) == (tuple(NAMES), (broken.name,))
        assert conn.execute("select to_regclass('halfway')").fetchone() == (None,)
    mended = Migration(broken.name, "CREATE TABLE halfway (x int);")
    monkeypatch.setattr(migrate, "migrations", lambda: [*ours, mended])
    assert migrate.migrate(empty_dsn) == [mended.name]
    assert migrate.migrate(empty_dsn) == []


@pytest.mark.parametrize("count", range(1, len(NAMES)))
def test_an_upgrade_makes_the_same_schema_as_a_new_one_and_keeps_what_is_held(empty_dsn, monkeypatch, count):
    migrate.migrate(empty_dsn, schema="new")
    ours = migrate.migrations()
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "migrations", lambda: ours[:count])
        assert migrate.migrate(empty_dsn, schema="old") == NAMES[:count]
    with SyncGuard(empty_dsn, schema="old") as guard, guard.hold("a", ttl=60) as lease:
        assert migrate.migrate(empty_dsn, schema="old") == NAMES[count:]
        assert lease.renew()
        assert guard.try_acquire("a") is None
    assert catalog(empty_dsn, "old") == catalog(empty_dsn, "new")
    work_there(empty_dsn, "old")


def test_a_later_migration_changes_no_functions_arguments_or_answer(empty_dsn, monkeypatch):
    """So that processes of older versions go on calling it while the schema is newer than they are."""
    ours = migrate.migrations()
    known: dict = {}
    for count in range(1, len(ours) + 1):
        with monkeypatch.context() as patch:
            patch.setattr(migrate, "migrations", lambda count=count: ours[:count])
            migrate.migrate(empty_dsn, schema="ours")
        found = {name: signature for name, *signature in (row[:5] for row in catalog(empty_dsn, "ours")["functions"])}
        assert {name: found.get(name) for name in known} == known, ours[count - 1].name
        known = found


def test_a_process_of_an_older_version_accepts_a_newer_schema(pg_dsn, monkeypatch):
    """So that the schema can be migrated before the last old worker is gone."""
    ours = migrate.migrations()
    newer = Migration("9000_create_more", "create table syncguard_more (x int);")
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "migrations", lambda: [*ours, newer])
        with psycopg.connect(pg_dsn, autocommit=True) as conn, pytest.raises(SchemaBehind, match="behind by 9000"):
            migrate.check(conn)  # the other way round: a newer process refuses an older schema
        assert migrate.migrate(pg_dsn) == [newer.name]
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        assert migrate.check(conn).unknown == (newer.name,)


def test_a_role_without_the_right_to_create_schemas_migrates_into_one_that_is_there(empty_dsn, migrator):
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("create schema ours authorization {}").format(sql.Identifier(migrator)))
    assert migrate.migrate(as_role(empty_dsn, migrator), schema="ours") == NAMES


@pytest.fixture
def migrator(empty_dsn, pg_server):
    name = f"migrator_{empty_dsn[-8:]}"
    pg_server.execute(f"create role {name} login")
    yield name
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
    pg_server.execute(f"drop role {name}")


def as_role(dsn: str, role: str) -> str:
    return psycopg.conninfo.make_conninfo(dsn, user=role)


# The SQL to copy


def by_psql(dsn: str, text: str) -> None:
    psql(dsn, text, "-1").check_returncode()


def psql(dsn: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    # Not every distribution of the server has it; any version of it reads our SQL.
    folders = [servers.postgres_bin(), servers.postgres_bin(system=False)]
    program = next(folder / "psql" for folder in folders if (folder / "psql").exists())
    command = [program, "-X", "-q", "-v", "ON_ERROR_STOP=1", *options, "-d", dsn, "-f", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True)


def by_psycopg(dsn: str, text: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(text.encode())


def by_sqlalchemy(dsn: str, text: str) -> None:
    """As Alembic's op.execute does, in a transaction that goes on afterwards."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as conn:
        conn.execute(sqlalchemy.text("create table tool (version text)"))
        conn.execute(sqlalchemy.text(text))
        conn.execute(sqlalchemy.text("insert into tool values ('abc')"))
    engine.dispose()


def by_django(dsn: str, text: str) -> None:
    """As a migration with RunSQL does."""
    from django.db import connections, transaction

    parameters = psycopg.conninfo.conninfo_to_dict(dsn)
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure(DATABASES={})
        django.setup()
    connections.databases["copy"] = connections.configure_settings(
        {"default": {}, "copy": {
            "ENGINE": "django.db.backends.postgresql", "NAME": parameters["dbname"], "USER": parameters["user"],
            "HOST": parameters["host"], "PORT": parameters["port"], "PASSWORD": parameters.get("password", ""),
        }}
    )["copy"]  # fmt: skip
    try:
        with transaction.atomic("copy"), connections["copy"].schema_editor() as editor:
            editor.execute("create table tool (version text)")
            for statement in connections["copy"].ops.prepare_sql_script(text):
                editor.execute(statement, params=None)
            editor.execute("insert into tool values ('abc')")
    finally:
        connections["copy"].close()
        del connections["copy"]
        del connections.databases["copy"]


@pytest.mark.parametrize("apply", [by_psql, by_psycopg, by_sqlalchemy, by_django])
def test_the_sql_to_copy_makes_the_same_schema_as_migrate(empty_dsn, apply):
    """Also where a tool goes on in the same transaction, with its own tables on its own search path."""
    migrate.migrate(empty_dsn, schema="reference")
    ours = catalog(empty_dsn, "reference")
    assert len(ours["functions"]) >= 12
    for schema in [None, *(WEIRD if apply is by_psycopg else WORST)]:
        apply(empty_dsn, migrate.copyable_sql(schema=schema))
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            conn.execute("drop table if exists public.tool")
            migrate.check(conn, schema=schema)
        assert catalog(empty_dsn, schema or "public") == ours, schema
        assert migrate.migrate(empty_dsn, schema=schema) == []
        work_there(empty_dsn, schema)


def test_the_comparison_of_schemas_sees_a_difference(empty_dsn):
    """The negative control of the test above."""
    for schema in ("schema_one", "schema_two"):
        migrate.migrate(empty_dsn, schema=schema)
    for change in (
        "alter table {}.syncguard_claims add column x int",
        "drop index {}.idx_syncguard_claims_expires",
        "alter function {}.syncguard_release set lock_timeout = '3s'",
        "alter table {}.syncguard_claims alter column holder set not null",
    ):
        assert catalog(empty_dsn, "schema_one") == catalog(empty_dsn, "schema_two")
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            conn.execute(change.format("schema_one").encode())
            assert catalog(empty_dsn, "schema_one") != catalog(empty_dsn, "schema_two"), change
            conn.execute(change.format("schema_two").encode())


@pytest.mark.parametrize("schema", [None, "ours"])
def test_the_sql_to_copy_refuses_to_run_outside_a_transaction(empty_dsn, schema):
    """There, its search path would be forgotten after a statement, and the tables would land anywhere."""
    done = psql(empty_dsn, migrate.copyable_sql(schema=schema))
    assert done.returncode != 0
    assert "in one transaction" in done.stderr
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select tablename from pg_tables where tablename like 'syncguard%'").fetchall() == []
