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


def test_an_insert_is_compared_with_the_rows_of_its_key_in_every_partition(db):
    db.execute(
        "create table ledger (account int, at date not null, fence bigint) partition by range (at);"
        "create table november partition of ledger for values from ('2026-11-01') to ('2026-12-01');"
        "create table december partition of ledger for values from ('2026-12-01') to ('2027-01-01')"
    )
    attach(db, "ledger", "fence", "account")
    db.execute("insert into ledger values (1, '2026-11-30', 200), (2, '2026-11-30', 50)")
    assert refused(db, "insert into ledger values (1, '2026-12-01', 100)")
    assert refused(db, "insert into december values (1, '2026-12-01', 100)")
    assert refused(db, "update ledger set at = '2026-12-01', fence = 100 where account = 1")
    db.execute("update ledger set at = '2026-12-01', fence = 201 where account = 1")
    db.execute("insert into ledger values (2, '2026-12-01', 50)")


def test_an_update_that_moves_a_row_is_compared_with_the_rows_that_it_joins(db):
    db.execute("create table ledger (account int, kind text, fence bigint)")
    attach(db, "ledger", "fence", "account", "kind")
    db.execute("insert into ledger values (1, 'a', 200), (2, 'a', 100), (3, null, 300)")
    assert refused(db, "update ledger set account = 1 where account = 2")
    assert refused(db, "update ledger set account = 3, kind = null where account = 2")
    db.execute("update ledger set account = 1, fence = 200 where account = 2")


@pytest.mark.parametrize(
    ("kind", "first", "same"),
    [("numeric", "1", "1.0"), ("public.citext", "'a'", "'A'"), ("public.of_citext", "'a'", "'A'"),
     ("char(3)", "'a'", "'a  '"), ("double precision", "0", "-0"), ("interval", "'1 day'", "'24 hours'"),
     ("jsonb", "'1'", "'1.0'")],
)  # fmt: skip
def test_values_that_are_equal_are_one_key_however_they_are_written(db, pg_dsn, kind, first, same):
    db.execute("create extension citext; create domain of_citext as citext check (value <> '')")
    db.execute(f"create table ledger (account {kind}, fence bigint)")
    attach(db, "ledger", "fence", "account")
    with psycopg.connect(pg_dsn) as newer, psycopg.connect(pg_dsn, autocommit=True) as late:
        late.execute("set lock_timeout = '50ms'; set search_path = ''")
        newer.execute(f"insert into ledger values ({first}, 200)")
        with pytest.raises(psycopg.errors.LockNotAvailable):  # they take turns
            late.execute(f"insert into public.ledger values ({same}, 100)")
        newer.commit()
        assert refused(late, f"insert into public.ledger values ({same}, 100)")
        late.execute(f"insert into public.ledger values ({same}, 200)")


def test_where_rows_may_be_hidden_the_write_is_refused_and_the_reason_named(db, pg_dsn):
    db.execute("create table ledger (tenant text, account int, fence bigint)")
    attach(db, "ledger", "fence", "account")
    db.execute("insert into ledger values ('a', 1, 200)")
    with psycopg.connect(pg_dsn) as strict:
        strict.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="the transaction is repeatable read"):
            strict.execute("insert into ledger values ('a', 1, 200)")
    db.execute("create role tenant_of_fences login")
    try:
        db.execute(
            "grant select, insert, update on ledger to tenant_of_fences; alter table ledger enable row level security;"
            "create policy own on ledger to tenant_of_fences using (tenant = 'b') with check (true)"
        )
        with psycopg.connect(pg_dsn.replace("postgres@", "tenant_of_fences@"), autocommit=True) as tenant:
            with pytest.raises(
                psycopg.errors.FeatureNotSupported, match="row security of public.ledger applies to tenant_of"
            ):
                tenant.execute("insert into ledger values ('b', 1, 100)")
            assert tenant.execute("select * from ledger").fetchall() == []  # what it would have been compared with
    finally:
        db.execute("drop owned by tenant_of_fences; drop role tenant_of_fences")
    db.execute("insert into ledger values ('b', 1, 200)")  # the owner sees every row
    db.execute("create table made (id int, account int generated always as (id) stored, fence bigint)")
    attach(db, "made", "fence", "account")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="column account is generated"):
        db.execute("insert into made (id, fence) values (1, 1)")


@pytest.mark.parametrize("when", ["insert or update", "delete"])
def test_a_trigger_of_another_kind_says_so_at_the_first_write(db, when):
    db.execute("create table ledger (account int, fence bigint)")
    db.execute("insert into ledger values (1, 1)")
    level = "row" if when == "delete" else "statement"
    db.execute(
        f"create trigger refuse before {when} on ledger for each {level}"
        " execute function syncguard_refuse_stale_fence('fence')"
    )
    with pytest.raises(psycopg.errors.UndefinedColumn, match="for each row, for insert or update"):
        db.execute("delete from ledger" if when == "delete" else "insert into ledger values (1, 0)")


HIJACK = """
    create or replace function public.to_jsonb(report public.reports) returns jsonb language plpgsql as $$
    begin
      insert into public.as_whom values (current_user);
      return pg_catalog.to_jsonb(row_to_json(report));
    end $$;
    create or replace function public.coerced(a numeric, b bigint) returns boolean language plpgsql as $$
    begin
      insert into public.as_whom values (current_user);
      return false;
    end $$;
    create operator public.< (leftarg = numeric, rightarg = bigint, function = public.coerced)
"""


@pytest.mark.parametrize("path", ["pg_catalog, pg_temp", "public"])
def test_whoever_may_create_in_the_writers_path_does_not_become_the_writer(db, pg_dsn, path):
    db.execute("create table reports (id int primary key, fence bigint); create table as_whom (name text)")
    attach(db, "reports", "fence", "id")
    db.execute(HIJACK)
    if path == "public":  # the control: as it was
        db.execute("alter function syncguard_refuse_stale_fence() set search_path = public")
    db.execute("set search_path = public")
    db.execute("insert into reports values (1, 5)")
    db.execute("update reports set fence = 6")
    assert bool(db.execute("select name from as_whom").fetchall()) is (path == "public")


def test_no_function_of_ours_looks_for_names_in_the_callers_search_path(db):
    """Each has a path of its own, or was bound to what it names when it was created."""
    loose = "select proname from pg_proc where proname like 'syncguard%' and {} order by 1"
    open_to_all = "prosqlbody is null and coalesce(array_to_string(proconfig, ','), '') not like '%search_path=%'"
    assert db.execute(loose.format("true")).rowcount >= 20
    assert db.execute(loose.format(open_to_all)).fetchall() == []
    db.execute("alter function syncguard_fence_text reset search_path")
    assert db.execute(loose.format(open_to_all)).fetchall() == [("syncguard_fence_text",)]
