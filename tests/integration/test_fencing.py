"""Exact fencing: a fenced transaction and a takeover never both happen, whatever connection the caller has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from celery_syncguard import Lease, SyncGuard, errors
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire, Grant, Held
from celery_syncguard.postgres.adapters import NotInTransaction
from celery_syncguard.postgres.migrate import migrate
from tests.fixtures.polling import poll
from tests.integration.test_revisions_callers import (
    django_connection,
    django_name,
    engine_of,
    psycopg_autocommit_connection,
    psycopg_connection,
    sqlalchemy_connection,
    sqlalchemy_scoped_session,
    sqlalchemy_session,
)

Connection = psycopg.Connection[Any]

CALLERS = {
    "psycopg": psycopg_connection,
    "psycopg in autocommit": psycopg_autocommit_connection,
    "sqlalchemy connection": sqlalchemy_connection,
    "sqlalchemy session": sqlalchemy_session,
    "sqlalchemy scoped session": sqlalchemy_scoped_session,
    "django connection": django_connection,
    "django alias": django_name,
}


@pytest.fixture
def guard(pg_dsn: str) -> Iterator[SyncGuard]:
    with SyncGuard(pg_dsn) as guard:
        yield guard


@pytest.fixture
def connection(pg_dsn: str) -> Iterator[Connection]:
    with closing(psycopg.connect(pg_dsn, autocommit=True)) as connection:
        connection.execute("create table account (id int primary key, balance int)")
        connection.execute("insert into account values (1, 100)")
        yield connection


def left_alone(guard: SyncGuard, key: str = "k", *, ttl: float = 1.0) -> Lease:
    """A lease whose holder is about to pause: it believes in it for long, and nobody renews it."""
    lease = guard.try_acquire(key, ttl=ttl)
    assert lease is not None
    guard._renewer.remove(lease)
    lease.deadline += 3600  # as if the process slept between check() and what it does next
    return lease


def take(guard: SyncGuard, key: str = "k") -> Any:
    return guard.store.acquire(Acquire(key=key, lock_id=new_lock_id(), ttl=60.0))


def expire(guard: SyncGuard, key: str = "k") -> None:
    poll(lambda: guard.inspect(key) is None)


def balance(connection: Connection) -> int:
    row = connection.execute("select balance from account").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("kind", CALLERS)
def test_nobody_takes_the_lock_over_until_a_fenced_transaction_ends(
    kind: str, pg_dsn: str, guard: SyncGuard, connection: Connection
) -> None:
    with CALLERS[kind](pg_dsn) as begin:
        with begin():
            pass  # connected from now on
        lease = left_alone(guard)
        with begin() as conn:
            lease.fenced(conn)
            expire(guard)
            for _ in range(3):
                held = take(guard)
                assert isinstance(held, Held)
                assert held.lock_id == lease.lock_id
        taken = take(guard)
        assert isinstance(taken, Grant)
        assert taken.fence > lease.fence
        with pytest.raises(errors.LeaseLost) as caught, begin() as conn:
            lease.fenced(conn)
    assert (caught.value.key, caught.value.fence) == ("k", lease.fence)
    assert lease.lost


def test_a_renewal_passes_a_fenced_transaction(guard: SyncGuard, connection: Connection) -> None:
    lease = guard.try_acquire("k", ttl=30)
    assert lease is not None
    with connection.transaction():
        lease.fenced(connection)
        before = guard.inspect("k")
        assert lease.renew() is True
        after = guard.inspect("k")
        assert before is not None
        assert after is not None
        assert after.expires_at > before.expires_at
        lease.fenced(connection)  # and it may be proved again


@pytest.mark.parametrize("how", ["taken over", "released by hand", "expired", "deleted"])
def test_a_lease_that_is_gone_proves_nothing(how: str, guard: SyncGuard, connection: Connection) -> None:
    lease = left_alone(guard)
    if how == "released by hand":
        guard.release("k", lock_id=lease.lock_id)
    elif how == "deleted":
        connection.execute("delete from syncguard_locks")
    else:
        expire(guard)
        if how == "taken over":
            assert isinstance(take(guard), Grant)
    with pytest.raises(errors.LeaseLost), connection.transaction():
        lease.fenced(connection)
        raise AssertionError("the transaction went on")
    with pytest.raises(errors.LeaseLost):
        lease.check()


def test_a_late_write_is_refused_and_what_it_would_have_destroyed_stays(
    guard: SyncGuard, connection: Connection
) -> None:
    old = left_alone(guard)
    seen = balance(connection)
    expire(guard)
    assert isinstance(take(guard), Grant)
    connection.execute("update account set balance = balance + 50")  # by the new holder
    with pytest.raises(errors.LeaseLost), old.transaction(connection):
        connection.execute("update account set balance = %s", (seen - 10,))
    assert balance(connection) == 150


def test_without_fencing_the_same_late_write_is_a_lost_update(guard: SyncGuard, connection: Connection) -> None:
    """The negative control."""
    old = left_alone(guard)
    seen = balance(connection)
    expire(guard)
    assert isinstance(take(guard), Grant)
    connection.execute("update account set balance = balance + 50")
    old.check()  # the sleeper's own opinion
    with connection.transaction():
        connection.execute("update account set balance = %s", (seen - 10,))
    assert balance(connection) == 90


def test_transaction_commits_on_success_and_rolls_back_on_an_error(guard: SyncGuard, connection: Connection) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    with lease.transaction(connection):
        connection.execute("update account set balance = 1")
    with pytest.raises(ZeroDivisionError), lease.transaction(connection):
        connection.execute("update account set balance = 2")
        1 / 0
    assert balance(connection) == 1
    with connection.transaction(), lease.transaction(connection):  # a savepoint
        connection.execute("update account set balance = 3")
    assert balance(connection) == 3


def autocommit_psycopg(dsn: str) -> Iterator[Any]:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        yield connection
        yield connection.cursor()


def autocommit_sqlalchemy(dsn: str) -> Iterator[Any]:
    with engine_of(dsn, isolation_level="AUTOCOMMIT") as engine:
        with engine.connect() as connection:
            yield connection
        with orm.Session(engine) as session:
            yield session


def autocommit_django(dsn: str) -> Iterator[Any]:
    from django.db import connections

    from tests.integration.test_revisions_callers import django_alias

    with django_alias(dsn) as alias:
        yield connections[alias]
        yield alias


@pytest.mark.parametrize("make", [autocommit_psycopg, autocommit_sqlalchemy, autocommit_django])
def test_in_autocommit_a_proof_is_refused_because_it_would_protect_nothing(
    make: Callable[[str], Iterator[Any]], pg_dsn: str, guard: SyncGuard
) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    for conn in make(pg_dsn):
        with pytest.raises(NotInTransaction, match="autocommit"):
            lease.fenced(conn)
    lease.check()


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel))
def test_a_proof_holds_at_every_isolation_level(
    level: psycopg.IsolationLevel, guard: SyncGuard, connection: Connection, pg_dsn: str
) -> None:
    with closing(psycopg.connect(pg_dsn)) as conn:
        conn.isolation_level = level
        lease = left_alone(guard)
        with conn.transaction():
            lease.fenced(conn)
            expire(guard)
            assert isinstance(take(guard), Held)
            conn.execute("update account set balance = 7")
        assert isinstance(take(guard), Grant)
        assert balance(connection) == 7
        with pytest.raises((errors.LeaseLost, psycopg.errors.SerializationFailure)), conn.transaction():
            conn.execute("select 1 from account")
            lease.fenced(conn)


def test_an_old_snapshot_does_not_prove_a_lease_that_was_taken(
    guard: SyncGuard, connection: Connection, pg_dsn: str
) -> None:
    lease = left_alone(guard)
    with closing(psycopg.connect(pg_dsn)) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises((errors.LeaseLost, psycopg.errors.SerializationFailure)), conn.transaction():
            conn.execute("select 1 from account")  # the snapshot in which the lease is still ours
            expire(guard)
            assert isinstance(take(guard), Grant)
            lease.fenced(conn)


def test_a_released_lease_proves_nothing(guard: SyncGuard, connection: Connection) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    lease.release()
    with pytest.raises(errors.NoLease), connection.transaction():
        lease.fenced(connection)


def test_a_release_in_an_open_fenced_transaction_is_made_up_for_later(guard: SyncGuard, connection: Connection) -> None:
    """The row is in use by our own transaction: the caller is not stopped, and the key is free soon after the end."""
    lease = guard.try_acquire("k", ttl=30)
    assert lease is not None
    with connection.transaction():
        lease.fenced(connection)
        assert lease.release() is False
        assert isinstance(take(guard), Held)
    poll(lambda: guard.inspect("k") is None)


def test_another_database_is_told_from_ours(guard: SyncGuard, empty_dsn: str) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    with (
        closing(psycopg.connect(empty_dsn)) as conn,
        pytest.raises(errors.SchemaBehind, match="database in which the locks live"),
        conn.transaction(),
    ):
        lease.fenced(conn)


def test_a_lease_that_is_alive_elsewhere_is_not_lost_and_both_places_are_named(
    guard: SyncGuard, pg_dsn: str, empty_dsn: str
) -> None:
    """As in Django's test database, which has the tables too."""
    migrate(empty_dsn)
    lease = guard.try_acquire("k")
    assert lease is not None
    with closing(psycopg.connect(empty_dsn)) as conn, conn.transaction():
        with pytest.raises(errors.LeaseNotVisible) as caught:
            lease.fenced(conn)
    here, there = empty_dsn.rpartition("/")[2], pg_dsn.rpartition("/")[2]
    assert f"alive in database {there}" in str(caught.value)
    assert f"leads to database {here}" in str(caught.value)
    assert (caught.value.key, here in caught.value.here, there in caught.value.there) == ("k", True, True)
    lease.check()
    with closing(psycopg.connect(pg_dsn)) as conn, lease.transaction(conn):
        pass


def test_another_schema_of_the_same_database_is_told_from_ours(pg_dsn: str, connection: Connection) -> None:
    connection.execute('create schema "Own %"')
    migrate(pg_dsn, schema="Own %")
    with SyncGuard(pg_dsn) as guard:
        lease = guard.try_acquire("k")
        assert lease is not None
        connection.execute("""set search_path = 'Own %'""")
        with pytest.raises(errors.LeaseNotVisible, match=r'schema public.*schema "Own %"'), connection.transaction():
            lease.fenced(connection)
        lease.check()
    with SyncGuard(pg_dsn, schema="Own %") as guard:
        lease = guard.try_acquire("k")
        assert lease is not None
        connection.execute("set search_path = public")
        with lease.transaction(connection):  # the schema is named, whatever the path is
            pass


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_snapshot_older_than_the_lease_does_not_lose_it(level: str, guard: SyncGuard, pg_dsn: str) -> None:
    with closing(psycopg.connect(pg_dsn)) as conn:
        conn.isolation_level = psycopg.IsolationLevel[level]
        with pytest.raises(errors.LeaseNotVisible, match="older than the lease"), conn.transaction():
            conn.execute("select 1 from syncguard_locks")
            lease = guard.try_acquire("k")
            assert lease is not None
            lease.fenced(conn)
        lease.check()
        with lease.transaction(conn):
            pass


def test_where_our_database_cannot_be_asked_the_callers_is_believed(
    guard: SyncGuard, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = left_alone(guard)
    connection.execute("delete from syncguard_locks")

    def locks(*_: object) -> None:
        raise errors.StoreUnavailable("no server")

    monkeypatch.setattr(guard.store, "locks", locks)
    with pytest.raises(errors.LeaseLost), connection.transaction():
        lease.fenced(connection)


def test_a_driver_of_sqlalchemy_that_we_do_not_know_is_refused_by_name(guard: SyncGuard, pg_dsn: str) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    with engine_of(pg_dsn) as engine:
        engine.dialect.driver = "asyncpg"
        with (
            engine.begin() as conn,
            pytest.raises(TypeError, match=r"asyncpg is not supported: use psycopg or psycopg2"),
        ):
            lease.fenced(conn)
        lease.check()


def test_asyncio_fences_through_run_sync(guard: SyncGuard, connection: Connection, pg_dsn: str) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    lease = left_alone(guard)

    async def work() -> None:
        engine = create_async_engine(pg_dsn.replace("postgresql://", "postgresql+psycopg://"))
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(lease.fenced)
            expire(guard)
            assert isinstance(take(guard), Held)
            await session.execute(sqlalchemy.text("update account set balance = 7"))
        await engine.dispose()

    asyncio.run(work())
    assert balance(connection) == 7


def test_a_completion_shares_the_fate_of_the_callers_rows(guard: SyncGuard, connection: Connection) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    with pytest.raises(errors.NoLease, match="run_once"), connection.transaction():
        lease.complete(connection)
    lease.run_key, lease.run_ttl = "run", 60.0
    with pytest.raises(ZeroDivisionError), connection.transaction():
        assert lease.complete(connection) is True
        1 / 0
    with connection.transaction():
        assert lease.complete(connection) is True
        connection.execute("update account set balance = balance + 1")
    with connection.transaction():
        assert lease.complete(connection) is False
    assert balance(connection) == 101


def test_the_memory_store_proves_without_a_connection() -> None:
    with SyncGuard("memory://") as guard:
        lease = guard.try_acquire("k")
        assert lease is not None
        lease.fenced(None)
        with lease.transaction(None):
            pass
        guard.release("k", lock_id=lease.lock_id)
        with pytest.raises(errors.LeaseLost), lease.transaction(None):
            raise AssertionError("the block was entered")
