"""The trigger refuses a write with a lower fence than the stored one, whoever makes it and however many do at once."""

import threading

import psycopg
import pytest

from celery_syncguard import Fence
from tests.fixtures.polling import poll

STALE = "SG003"


@pytest.fixture
def db(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        yield connection


def attach(db, table, *arguments, when="insert or update"):
    quoted = ", ".join("'" + one + "'" for one in arguments)
    db.execute(
        f"create trigger refuse before {when} on {table} for each row"
        f" execute function syncguard_refuse_stale_fence({quoted})"
    )


def refused(db, statement, parameters=()):
    with pytest.raises(psycopg.Error) as caught:
        db.execute(statement, parameters)
    return caught.value.sqlstate == STALE and caught.value


@pytest.mark.parametrize("kind", ["bigint", "numeric", "text"])
def test_an_update_with_a_lower_fence_is_refused_and_an_equal_or_higher_one_passes(db, kind):
    db.execute(f"create table reports (id int primary key, body text, fence {kind})")
    attach(db, "reports", "fence")
    value = str if kind == "text" else int
    db.execute("insert into reports values (1, 'new', %s)", (value(Fence(10)),))
    error = refused(db, "update reports set body = 'late', fence = %s", (value(Fence(9)),))
    assert error
    assert "stale fence 9 for reports: 10 is stored" in str(error)
    assert "lost" in error.diag.message_hint
    db.execute("update reports set body = 'same', fence = %s", (value(Fence(10)),))
    db.execute("update reports set body = 'next', fence = %s", (value(Fence(11)),))
    assert refused(db, "update reports set fence = null")
    assert db.execute("select body from reports").fetchone() == ("next",)


def test_without_the_trigger_the_late_write_wins(db):
    """The negative control."""
    db.execute("create table reports (id int primary key, body text, fence bigint)")
    db.execute("insert into reports values (1, 'new', 10)")
    db.execute("update reports set body = 'late', fence = 9")
    assert db.execute("select body from reports").fetchone() == ("late",)


def test_an_upsert_is_refused_too(db):
    db.execute("create table reports (id int primary key, body text, fence bigint)")
    attach(db, "reports", "fence")
    upsert = (
        "insert into reports values (1, %s, %s)"
        " on conflict (id) do update set body = excluded.body, fence = excluded.fence"
    )
    db.execute(upsert, ("first", 10))
    db.execute(upsert, ("second", 11))
    assert refused(db, upsert, ("late", 10))
    assert db.execute("select body from reports").fetchone() == ("second",)


def test_a_row_without_a_fence_accepts_the_first(db):
    db.execute("create table reports (id int primary key, fence bigint)")
    db.execute("insert into reports values (1, null)")
    attach(db, "reports", "fence")
    db.execute("update reports set fence = null")
    db.execute("update reports set fence = 1")
    assert refused(db, "update reports set fence = 0")


def test_an_insert_is_compared_with_the_rows_of_its_key(db):
    """A table that only grows: what the fence belongs to is named by columns, nulls and odd names among them."""
    db.execute('create table "Ledger" ("Account Id" int, kind text, amount int, "Fence" bigint)')
    attach(db, '"Ledger"', "Fence", "Account Id", "kind")
    insert = 'insert into "Ledger" values (%s, %s, 5, %s)'
    db.execute(insert, (1, "a", 10))
    db.execute(insert, (2, "a", 5))
    db.execute(insert, (1, None, 5))
    assert refused(db, insert, (1, "a", 9))
    assert refused(db, insert, (1, None, 4))
    db.execute(insert, (1, "a", 10))
    assert db.execute('select count(*) from "Ledger"').fetchone() == (4,)


def test_an_insert_waits_for_a_newer_one_that_has_not_committed_yet(db, pg_dsn):
    db.execute("create table ledger (account int, fence bigint)")
    attach(db, "ledger", "fence", "account")
    states = []

    def late():
        with psycopg.connect(pg_dsn, autocommit=True) as connection:
            try:
                connection.execute("insert into ledger values (1, 9)")
            except psycopg.Error as exc:
                states.append(exc.sqlstate)

    thread = threading.Thread(target=late)
    with psycopg.connect(pg_dsn) as newer:
        newer.execute("insert into ledger values (1, 10)")
        thread.start()
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        poll(lambda: db.execute(waiting).fetchone() == (1,))
        db.execute("insert into ledger values (2, 1)")  # another account does not wait
    thread.join(10)
    assert states == [STALE]
    assert db.execute("select count(*) from ledger where account = 1").fetchone() == (1,)


@pytest.mark.parametrize(
    ("arguments", "named"), [((), "nothing"), (("fense",), "'fense'"), (("fence", "acount"), "'acount'")]
)
def test_a_trigger_that_names_no_column_says_so_at_the_first_write(db, arguments, named):
    db.execute("create table ledger (account int, fence bigint)")
    attach(db, "ledger", *arguments)
    with pytest.raises(psycopg.errors.UndefinedColumn, match=named):
        db.execute("insert into ledger values (1, 1)")


def test_it_works_in_another_schema_and_for_a_role_with_nothing_but_the_table(db, pg_dsn):
    db.execute("create schema app; create table app.ledger (account int, fence bigint)")
    attach(db, "app.ledger", "fence", "account")
    db.execute("create role clerk_of_fences login; grant usage on schema app to clerk_of_fences")
    try:
        db.execute("grant select, insert, update on app.ledger to clerk_of_fences")
        with psycopg.connect(pg_dsn.replace("postgres@", "clerk_of_fences@"), autocommit=True) as clerk:
            clerk.execute("set search_path = ''")
            clerk.execute("insert into app.ledger values (1, 2)")
            assert refused(clerk, "insert into app.ledger values (1, 1)")
    finally:
        db.execute("drop owned by clerk_of_fences; drop role clerk_of_fences")
