"""A transaction that proved its lease and a takeover never both happen, whatever connection the caller has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import kombu.serialization
import psycopg
import pytest
import sqlalchemy

from celery_syncguard import Fence, SyncGuard, errors
from celery_syncguard.core.store import Grant, Held
from celery_syncguard.postgres.adapters import NotInTransaction
from celery_syncguard.postgres.migrate import migrate
from tests.fixtures import callers
from tests.fixtures.callers import AUTOCOMMIT, Caller, engine_of
from tests.fixtures.leases import expire, paused, take
from tests.fixtures.polling import poll

Connection = psycopg.Connection[Any]

CALLERS = [
    callers.psycopg_connection,
    callers.psycopg_autocommit,
    callers.psycopg_implicit,
    callers.psycopg_cursor,
    callers.sqlalchemy_connection,
    callers.sqlalchemy_session,
    callers.sqlalchemy_scoped_session,
    callers.django_connection,
    callers.django_alias,
]


@pytest.fixture
def connection(pg_dsn: str) -> Iterator[Connection]:
    with closing(psycopg.connect(pg_dsn, autocommit=True)) as connection:
        connection.execute("create table account (id int primary key, balance int)")
        connection.execute("insert into account values (1, 100)")
        yield connection


@pytest.fixture(params=CALLERS, ids=lambda kind: kind.__name__)
def caller(request: pytest.FixtureRequest, pg_dsn: str, connection: Connection) -> Iterator[Caller]:
    with request.param(pg_dsn) as caller:
        yield caller


PAY = "update account set balance = balance + 1"


def balance(connection: Connection) -> int:
    row = connection.execute("select balance from account").fetchone()
    assert row is not None
    return int(row[0])


# --- with every kind of connection ------------------------------------------------------------------------------------


def test_a_held_lease_lets_its_transaction_commit(guard: SyncGuard, caller: Caller, connection: Connection) -> None:
    lease = guard.try_acquire("k")
    with caller.outer():
        lease.fenced(caller.target)
        caller.execute(PAY)
    assert balance(connection) == 101
    with lease.transaction(caller.target):
        caller.execute(PAY)
    assert balance(connection) == 102


@pytest.mark.parametrize("how", ["taken over", "released by hand", "expired", "deleted"])
def test_a_lost_lease_lets_nothing_commit(guard: SyncGuard, caller: Caller, connection: Connection, how: str) -> None:
    lease = paused(guard)
    if how == "released by hand":
        guard.release("k", lock_id=lease.lock_id)
    elif how == "deleted":
        connection.execute("delete from syncguard_locks")
    else:
        expire(connection)
        if how == "taken over":
            assert isinstance(take(guard), Grant)
    lease.check()  # this process still believes in it: only the database knows
    with pytest.raises(errors.LeaseLost) as caught, caller.outer():
        caller.execute(PAY)
        lease.fenced(caller.target)
    assert (caught.value.key, caught.value.fence) == ("k", lease.fence)
    with pytest.raises(errors.LeaseLost), lease.transaction(caller.target):
        raise AssertionError("the block was entered")
    assert balance(connection) == 100
    assert lease.lost
    with pytest.raises(errors.LeaseLost):
        lease.check()


def test_without_the_proof_a_late_transaction_commits(guard: SyncGuard, caller: Caller, connection: Connection) -> None:
    """The negative control."""
    lease = paused(guard)
    expire(connection)
    assert isinstance(take(guard), Grant)
    with caller.outer():
        lease.check()
        caller.execute(PAY)
    assert balance(connection) == 101


def test_nobody_takes_the_lock_over_until_a_fenced_transaction_ends_and_is_told_who_holds_it(
    guard: SyncGuard, caller: Caller, connection: Connection
) -> None:
    lease = paused(guard)
    with caller.outer():
        lease.fenced(caller.target)
        caller.execute(PAY)
        expire(connection)
        for _ in range(3):
            held = take(guard)
            assert isinstance(held, Held)
            assert held.lock_id == lease.lock_id
    assert balance(connection) == 101
    taken = take(guard)
    assert isinstance(taken, Grant)
    assert taken.fence > lease.fence


def test_a_renewal_passes_a_fenced_transaction(guard: SyncGuard, caller: Caller) -> None:
    lease = guard.try_acquire("k", ttl=30)
    with caller.outer():
        lease.fenced(caller.target)
        before = guard.inspect("k")
        assert lease.renew() is True
        assert guard.inspect("k").expires_at > before.expires_at
        lease.fenced(caller.target)  # and it may be proved again


def test_a_completion_shares_the_fate_of_the_callers_rows(
    guard: SyncGuard, caller: Caller, connection: Connection
) -> None:
    lease = guard.try_acquire("k")
    with pytest.raises(errors.NoLease, match="run_once"), caller.outer():
        lease.complete(caller.target)
    lease.run_key, lease.run_ttl = "once", 60.0
    with pytest.raises(ZeroDivisionError), caller.outer():
        assert lease.complete(caller.target) is True
        caller.execute(PAY)
        1 / 0
    assert balance(connection) == 100
    with caller.outer():
        assert lease.complete(caller.target) is True
        caller.execute(PAY)
    with caller.outer():
        # Another run with the same run key, under another lock, may have come first: False says so.
        assert lease.complete(caller.target) is False
    assert balance(connection) == 101


@pytest.mark.parametrize("kind", AUTOCOMMIT, ids=lambda kind: kind.__name__)
def test_in_autocommit_a_proof_is_refused_because_it_would_protect_nothing(
    kind: Any, pg_dsn: str, guard: SyncGuard
) -> None:
    lease = guard.try_acquire("k")
    lease.run_key, lease.run_ttl = "once", 60.0
    with kind(pg_dsn) as target:
        for prove in (lease.fenced, lease.complete):
            with pytest.raises(NotInTransaction, match=r"(?i)autocommit"):
                prove(target)
    lease.check()


# --- with psycopg -----------------------------------------------------------------------------------------------------


def test_a_transaction_that_lasts_longer_than_the_ttl_does_not_stop_renewals(
    guard: SyncGuard, connection: Connection
) -> None:
    lease = guard.try_acquire("k", ttl=3)
    with connection.transaction():
        lease.fenced(connection)
        first = guard.inspect("k").expires_at
        poll(lambda: guard.inspect("k").since > 4)
        lease.check()
        assert guard.inspect("k").expires_at > first
        connection.execute(PAY)
        lease.fenced(connection)
    assert balance(connection) == 101


def test_a_late_write_is_refused_and_what_it_would_have_destroyed_stays(
    guard: SyncGuard, connection: Connection
) -> None:
    old = paused(guard)
    seen = balance(connection)
    expire(connection)
    assert isinstance(take(guard), Grant)
    connection.execute("update account set balance = balance + 50")  # by the new holder
    with pytest.raises(errors.LeaseLost), old.transaction(connection):
        connection.execute("update account set balance = %s", (seen - 10,))
    assert balance(connection) == 150


def test_without_fencing_the_same_late_write_is_a_lost_update(guard: SyncGuard, connection: Connection) -> None:
    """The negative control."""
    old = paused(guard)
    seen = balance(connection)
    expire(connection)
    assert isinstance(take(guard), Grant)
    connection.execute("update account set balance = balance + 50")
    old.check()  # the sleeper's own opinion
    with connection.transaction():
        connection.execute("update account set balance = %s", (seen - 10,))
    assert balance(connection) == 90


def test_transaction_commits_on_success_and_rolls_back_on_an_error(guard: SyncGuard, connection: Connection) -> None:
    lease = guard.try_acquire("k")
    with lease.transaction(connection):
        connection.execute("update account set balance = 1")
    with pytest.raises(ZeroDivisionError), lease.transaction(connection):
        connection.execute("update account set balance = 2")
        1 / 0
    assert balance(connection) == 1
    with connection.transaction(), lease.transaction(connection):  # a savepoint
        connection.execute("update account set balance = 3")
    assert balance(connection) == 3


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel))
def test_a_proof_holds_at_every_isolation_level(
    level: psycopg.IsolationLevel, guard: SyncGuard, connection: Connection, pg_dsn: str
) -> None:
    with closing(psycopg.connect(pg_dsn)) as conn:
        conn.isolation_level = level
        lease = paused(guard, ttl=1.0)
        with conn.transaction():
            lease.fenced(conn)
            poll(lambda: guard.inspect("k") is None)  # by the clock, which no other version of the row tells
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
    lease = paused(guard)
    with closing(psycopg.connect(pg_dsn)) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises((errors.LeaseLost, psycopg.errors.SerializationFailure)), conn.transaction():
            conn.execute("select 1 from account")  # the snapshot in which the lease is still ours
            expire(connection)
            assert isinstance(take(guard), Grant)
            lease.fenced(conn)


def test_a_released_lease_proves_nothing(guard: SyncGuard, connection: Connection) -> None:
    lease = guard.try_acquire("k")
    lease.release()
    with pytest.raises(errors.NoLease), connection.transaction():
        lease.fenced(connection)


def test_a_release_in_an_open_fenced_transaction_is_made_up_for_later(guard: SyncGuard, connection: Connection) -> None:
    """The row is in use by our own transaction: the caller is not stopped, and the key is free soon after the end."""
    lease = guard.try_acquire("k", ttl=30)
    with connection.transaction():
        lease.fenced(connection)
        assert lease.release() is False
        assert isinstance(take(guard), Held)
    poll(lambda: guard.inspect("k") is None)


def test_another_database_is_told_from_ours(guard: SyncGuard, empty_dsn: str) -> None:
    lease = guard.try_acquire("k")
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
        connection.execute("""set search_path = 'Own %'""")
        with pytest.raises(errors.LeaseNotVisible, match=r'schema public.*schema "Own %"'), connection.transaction():
            lease.fenced(connection)
        lease.check()
    with SyncGuard(pg_dsn, schema="Own %") as guard:
        lease = guard.try_acquire("k")
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
            lease.fenced(conn)
        lease.check()
        with lease.transaction(conn):
            pass


def test_where_our_database_cannot_be_asked_the_callers_is_believed(
    guard: SyncGuard, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = paused(guard)
    connection.execute("delete from syncguard_locks")

    def locks(*_: object) -> None:
        raise errors.StoreUnavailable("no server")

    monkeypatch.setattr(guard.store, "locks", locks)
    with pytest.raises(errors.LeaseLost), connection.transaction():
        lease.fenced(connection)


def test_a_driver_of_sqlalchemy_that_we_do_not_know_is_refused_by_name(guard: SyncGuard, pg_dsn: str) -> None:
    lease = guard.try_acquire("k")
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

    lease = paused(guard)

    async def work() -> None:
        engine = create_async_engine(pg_dsn.replace("postgresql://", "postgresql+psycopg://"))
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(lease.fenced)
            expire(connection)
            assert isinstance(take(guard), Held)
            await session.execute(sqlalchemy.text("update account set balance = 7"))
        await engine.dispose()

    asyncio.run(work())
    assert balance(connection) == 7


def test_two_runs_of_one_key_under_different_locks_complete_once(
    guard: SyncGuard, pg_dsn: str, connection: Connection
) -> None:
    """They are not kept apart by a lock; the second's completion waits for the first's transaction, and says False."""
    answers = []
    inserted = threading.Event()

    def run(key, wait):
        lease = guard.try_acquire(key)
        lease.run_key, lease.run_ttl = "once", 60.0
        with contextlib.suppress(LookupError), psycopg.connect(pg_dsn) as conn:
            done = lease.complete(conn)
            answers.append(done)
            if not done:
                raise LookupError
            conn.execute(PAY)
            inserted.set()
            if wait:
                poll(lambda: connection.execute("select 1 from pg_locks where not granted").fetchone())

    first = threading.Thread(target=run, args=("a", True))
    first.start()
    assert inserted.wait(10)
    run("b", False)
    first.join(10)
    assert answers == [True, False]
    assert balance(connection) == 101


def test_the_memory_store_proves_without_a_connection() -> None:
    with SyncGuard("memory://") as guard:
        lease = guard.try_acquire("k")
        lease.fenced(None)
        with lease.transaction(None):
            pass
        guard.release("k", lock_id=lease.lock_id)
        with pytest.raises(errors.LeaseLost), lease.transaction(None):
            raise AssertionError("the block was entered")


# --- the number itself ----------------------------------------------------------------------------------------------


def test_a_fence_travels_as_a_number_and_compares_as_text(guard: SyncGuard, pg_dsn: str) -> None:
    fence = guard.try_acquire("k").fence
    assert isinstance(fence, Fence)
    assert len(str(fence)) == len(f"{fence}") == 15
    assert sorted(["000000000000010", str(Fence(9))]) == [str(Fence(9)), str(Fence(10))]
    assert json.loads(json.dumps({"fence": fence})) == {"fence": int(fence)}
    assert fence < 2**53, "JavaScript could not read it"
    for serializer in ("json", "pickle"):
        content_type, encoding, payload = kombu.serialization.dumps(fence, serializer=serializer)
        assert kombu.serialization.loads(payload, content_type, encoding, accept=[content_type]) == fence
    assert pickle.loads(pickle.dumps(fence)) == fence
    assert str(pickle.loads(pickle.dumps(fence))) == str(fence)
    with psycopg.connect(pg_dsn) as connection:
        assert connection.execute("select %s::bigint, %s::text", (fence, str(fence))).fetchone() == (fence, str(fence))
        connection.execute("create table fences (fence bigint)")
        connection.execute("insert into fences values (%s)", (Fence(7),))
        with connection.cursor() as cursor, cursor.copy("copy fences from stdin") as copy:
            copy.write_row((Fence(8),))
        assert connection.execute("select sum(fence) from fences").fetchone() == (15,)
