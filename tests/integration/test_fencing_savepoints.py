"""What was fenced once stays fenced to the end of the outermost transaction, whatever becomes of savepoints in it."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from celery_syncguard import InSavepoint, Lease, LeaseLost, NotInTransaction, SyncGuard
from celery_syncguard.core.store import Grant, Held, Renewal
from tests.fixtures.callers import (
    Caller,
    django_alias,
    django_database,
    engine_of,
    psycopg_autocommit,
    psycopg_implicit,
    sqlalchemy_connection,
    sqlalchemy_session,
)
from tests.fixtures.leases import expire, paused, take

LEVELS = list(psycopg.IsolationLevel)


class Stop(Exception):
    """An error in a savepoint."""


CALLERS = [psycopg_autocommit, psycopg_implicit, sqlalchemy_connection, sqlalchemy_session, django_alias]


@pytest.fixture
def db(pg_dsn: str) -> Iterator[Any]:
    with closing(psycopg.connect(pg_dsn, autocommit=True)) as connection:
        connection.execute("create table t (id int primary key, owner text)")
        connection.execute("insert into t values (1, 'nobody')")
        yield connection


@pytest.fixture(params=CALLERS, ids=lambda kind: kind.__name__)
def caller(request: pytest.FixtureRequest, pg_dsn: str, db: Any) -> Iterator[Caller]:
    with request.param(pg_dsn) as caller:
        yield caller


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def conn(request: pytest.FixtureRequest, pg_dsn: str, db: Any) -> Iterator[psycopg.Connection[Any]]:
    """psycopg's, at every isolation level."""
    with closing(psycopg.connect(pg_dsn, autocommit=True)) as conn:
        conn.isolation_level = request.param
        yield conn


INSERT = "insert into t values (1, 'first')"  # which is there already
UPDATE = "update t set owner = 'first' where id = 1"


@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_a_transaction_in_a_transaction_stays_fenced_when_its_savepoint_is_rolled_back(
    guard: SyncGuard, caller: Caller, db: Any, caught: str
) -> None:
    lease = paused(guard)
    with caller.outer():
        with pytest.raises(Exception, match=r"duplicate key|Stop"), lease.transaction(caller.target):
            if caught == "outside":
                caller.execute(INSERT)
            with pytest.raises(Exception, match="duplicate key"), caller.inner():
                caller.execute(INSERT)
            raise Stop("Stop")
        expire(db)
        assert isinstance(take(guard), Held)
        caller.execute(UPDATE)
    assert db.execute("select owner from t").fetchone() == ("first",)
    assert isinstance(take(guard), Grant)


@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_it_stays_fenced_at_every_isolation_level(
    guard: SyncGuard, conn: psycopg.Connection[Any], db: Any, caught: str
) -> None:
    lease = paused(guard)
    with conn.transaction():
        conn.execute("select 1")
        with pytest.raises((Stop, psycopg.errors.UniqueViolation)), lease.transaction(conn):
            if caught == "outside":
                conn.execute(INSERT)
            with pytest.raises(psycopg.errors.UniqueViolation), lease.transaction(conn):
                conn.execute(INSERT)
            raise Stop
        expire(db)
        assert isinstance(take(guard), Held)
        conn.execute(UPDATE)
    assert isinstance(take(guard), Grant)


def test_a_proof_inside_a_savepoint_is_refused_and_one_before_it_is_not(
    guard: SyncGuard, caller: Caller, db: Any
) -> None:
    lease = paused(guard)
    lease.run_key, lease.run_ttl = "once", 60.0
    for prove in (lease.fenced, lease.complete, lambda target: lease.transaction(target).__enter__()):
        with caller.outer():
            with pytest.raises(InSavepoint, match="before its first savepoint") as refused, caller.inner():
                prove(caller.target)
            assert isinstance(refused.value, NotInTransaction)
            assert (refused.value.key, refused.value.what) == ("k", "lease.fenced()")
    with caller.outer():
        lease.fenced(caller.target)
        with caller.inner():
            caller.execute(UPDATE)
            lease.fenced(caller.target)
        with pytest.raises(Stop), caller.inner():
            caller.execute(UPDATE)
            lease.fenced(caller.target)
            raise Stop
        expire(db)
        assert isinstance(take(guard), Held)
    assert not lease.lost


def test_a_refused_proof_lets_nothing_of_its_savepoint_commit(guard: SyncGuard, caller: Caller, db: Any) -> None:
    """Also where the error is swallowed."""
    lease = paused(guard)
    with pytest.raises(Exception, match=r"abort|rollback|rolled back|until the end|transaction"):
        with caller.outer(), caller.inner():
            caller.execute("insert into t values (2, 'late')")
            with pytest.raises(InSavepoint):
                lease.fenced(caller.target)
            caller.execute(UPDATE)
    assert db.execute("select owner from t").fetchall() == [("nobody",)]


def test_with_the_proof_inside_the_savepoint_two_transactions_would_commit_under_one_lock(
    guard: SyncGuard, conn: psycopg.Connection[Any], db: Any
) -> None:
    """The negative control: the proof without its refusal."""
    lease = paused(guard)
    with conn.transaction():
        with pytest.raises(psycopg.errors.UniqueViolation), conn.transaction():
            row = (lease.key, lease.lock_id, int(lease.fence))
            assert conn.execute("select syncguard_fenced(%s, %s, %s, true)", row).fetchone() == (True,)
            conn.execute(INSERT)
        expire(db)
        assert isinstance(take(guard), Grant)  # while the first transaction is open
        db.execute("insert into t values (3, 'second')")
        conn.execute("insert into t values (2, 'first, late')")
    assert len(db.execute("select 1 from t").fetchall()) == 3


# --- every state that the row can be in when it is proved -------------------------------------------------------------


def renewed(guard: SyncGuard, lease: Lease) -> None:
    renewal = Renewal(key=lease.key, lock_id=lease.lock_id, ttl=lease.ttl)
    assert guard.store.renew([renewal]) == {lease.lock_id: True}


@contextmanager
def nobody_else(guard: SyncGuard, lease: Lease, dsn: str) -> Iterator[None]:
    yield


@contextmanager
def another_fenced_transaction(guard: SyncGuard, lease: Lease, dsn: str) -> Iterator[None]:
    with closing(psycopg.connect(dsn)) as other:
        lease.fenced(other)
        yield


@contextmanager
def a_renewal_under_way(guard: SyncGuard, lease: Lease, dsn: str) -> Iterator[None]:
    with closing(psycopg.connect(dsn)) as other:
        other.execute("update syncguard_locks set expires_at_ms = expires_at_ms + 1000")
        yield


@contextmanager
def both(guard: SyncGuard, lease: Lease, dsn: str) -> Iterator[None]:
    with another_fenced_transaction(guard, lease, dsn), a_renewal_under_way(guard, lease, dsn):
        yield


OTHERS = [nobody_else, another_fenced_transaction, a_renewal_under_way, both]


@pytest.mark.parametrize("others", OTHERS, ids=lambda others: others.__name__)
def test_whoever_else_is_at_the_row_a_first_proof_passes_in_the_transaction_and_in_no_savepoint(
    guard: SyncGuard, conn: psycopg.Connection[Any], db: Any, pg_dsn: str, others: Any
) -> None:
    lease = paused(guard)
    with others(guard, lease, pg_dsn):
        with pytest.raises(InSavepoint), conn.transaction(), conn.transaction():
            lease.fenced(conn)
        with pytest.raises(InSavepoint), conn.transaction():
            with conn.transaction():
                conn.execute(UPDATE)  # a savepoint that is over
            with conn.transaction(), conn.transaction():
                lease.fenced(conn)
        with conn.transaction():
            conn.execute("insert into t values (2, 'x')")
            with conn.transaction():
                conn.execute("insert into t values (3, 'x')")  # a savepoint that is over
            lease.fenced(conn)
            with conn.transaction():
                conn.execute("insert into t values (4, 'x')")
                lease.fenced(conn)
            with pytest.raises(Stop), conn.transaction():
                conn.execute("insert into t values (5, 'x')")
                lease.fenced(conn)
                raise Stop
            lease.fenced(conn)


def test_a_proof_outlives_renewals_at_every_isolation_level(
    guard: SyncGuard, conn: psycopg.Connection[Any], db: Any
) -> None:
    lease = paused(guard)
    with conn.transaction():
        lease.fenced(conn)
        with conn.transaction():
            for _ in range(3):
                conn.execute(UPDATE)
                renewed(guard, lease)
                lease.fenced(conn)
        # As in a transaction that lasts longer than a ttl: its snapshot shows an expiry that has passed.
        expire(db)
        lease.fenced(conn)
        renewed(guard, lease)
        lease.fenced(conn)
    assert not lease.lost


def test_several_leases_are_proved_in_one_transaction_each_for_itself(
    guard: SyncGuard, conn: psycopg.Connection[Any], db: Any
) -> None:
    first, second = paused(guard, "a"), paused(guard, "b")
    with conn.transaction():
        first.fenced(conn)
        with pytest.raises(InSavepoint), conn.transaction():
            first.fenced(conn)
            second.fenced(conn)
        second.fenced(conn)
        with pytest.raises(Stop), conn.transaction():
            first.fenced(conn)
            second.fenced(conn)
            raise Stop
        expire(db)
        assert isinstance(take(guard, "a"), Held)
        assert isinstance(take(guard, "b"), Held)
    assert isinstance(take(guard, "a"), Grant)
    # What one transaction has proved is nothing to the next.
    with pytest.raises((LeaseLost, psycopg.errors.SerializationFailure)), conn.transaction():
        first.fenced(conn)


def test_a_completion_in_a_savepoint_shares_the_fate_of_the_rows_in_it(
    guard: SyncGuard, caller: Caller, db: Any
) -> None:
    lease = paused(guard)
    lease.run_key, lease.run_ttl = "once", 60.0
    state = "select (select count(*) from t), (select count(*) from syncguard_completions)"
    with caller.outer():
        with pytest.raises(Stop), lease.transaction(caller.target):
            assert lease.complete(caller.target) is True
            caller.execute("insert into t values (2, 'x')")
            raise Stop
        expire(db)
        assert isinstance(take(guard), Held)
    assert db.execute(state).fetchone() == (1, 0)
    db.execute("update syncguard_locks set expires_at_ms = 1e15")
    with caller.outer(), lease.transaction(caller.target):
        assert lease.complete(caller.target) is True
        caller.execute("insert into t values (2, 'x')")
    assert db.execute(state).fetchone() == (2, 1)


# --- Django ---------------------------------------------------------------------------------------------------------


def test_an_atomic_block_without_a_savepoint_is_the_transaction_itself(guard: SyncGuard, pg_dsn: str, db: Any) -> None:
    from django.db import transaction

    lease = paused(guard)
    with django_database(pg_dsn) as alias, transaction.atomic(using=alias):
        with transaction.atomic(using=alias, savepoint=False):
            lease.fenced(alias)
        expire(db)
        assert isinstance(take(guard), Held)


def test_in_djangos_test_case_code_is_proved_and_refused_as_it_is_without_the_test(
    guard: SyncGuard, pg_dsn: str, db: Any
) -> None:
    """TestCase wraps each test in transactions that it rolls back, so that the code's own is a savepoint."""
    from django.db import transaction
    from django.test import TestCase

    leases = [paused(guard, key) for key in "abcde"]
    with django_database(pg_dsn) as alias:

        class Test(TestCase):
            databases = {alias}

            def test(self) -> None:
                with transaction.atomic(using=alias):
                    leases[0].fenced(alias)
                with transaction.atomic(using=alias, durable=True):
                    leases[1].fenced(alias)
                    with pytest.raises(Stop), transaction.atomic(using=alias):
                        leases[1].fenced(alias)
                        raise Stop
                with leases[2].transaction(alias):
                    pass
                with transaction.atomic(using=alias):
                    with pytest.raises(InSavepoint), transaction.atomic(using=alias):
                        leases[3].fenced(alias)
                    with transaction.atomic(using=alias), transaction.atomic(using=alias, savepoint=False):
                        pass
                    with transaction.atomic(using=alias, savepoint=False), leases[4].transaction(alias):
                        pass

        result = unittest.TestResult()
        unittest.TestSuite([Test("test")]).run(result)
    assert [text for _, text in result.errors + result.failures] == []
    assert result.testsRun == 1


# --- who opens the transaction, and who commits it -------------------------------------------------------------------


@pytest.mark.parametrize("make", [sqlalchemy_connection, sqlalchemy_session])
def test_a_transaction_that_sqlalchemy_began_by_itself_is_refused_as_by_its_own_begin(
    guard: SyncGuard, pg_dsn: str, db: Any, make: Any
) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    owner = "select owner from t"
    with make(pg_dsn) as caller:
        caller.execute(owner)
        with pytest.raises(sqlalchemy.exc.InvalidRequestError):
            caller.outer()  # SQLAlchemy's own
        with (
            pytest.raises(sqlalchemy.exc.InvalidRequestError, match=r"rollback\(\) first"),
            lease.transaction(caller.target),
        ):
            raise AssertionError("the block was entered")
        # The remedies: end it first, or commit it oneself.
        caller.target.rollback()
        with lease.transaction(caller.target):
            caller.execute(UPDATE)
        assert db.execute(owner).fetchone() == ("first",)
        caller.execute(owner)
        lease.fenced(caller.target)
        caller.execute("update t set owner = 'again'")
        caller.target.commit()
        assert db.execute(owner).fetchone() == ("again",)
        # One that was begun explicitly is the caller's to commit.
        with caller.outer():
            caller.execute(owner)
            with lease.transaction(caller.target):
                caller.execute("update t set owner = 'nested'")
        assert db.execute(owner).fetchone() == ("nested",)


def test_a_savepoint_there_would_have_committed_nothing(pg_dsn: str, db: Any) -> None:
    """The negative control."""
    with engine_of(pg_dsn) as engine, orm.Session(engine) as session:
        session.execute(sqlalchemy.text("select 1"))
        with session.begin_nested():
            session.execute(sqlalchemy.text(UPDATE))
    assert db.execute("select owner from t").fetchone() == ("nobody",)


def test_in_an_implicit_transaction_of_psycopg_the_caller_commits_as_after_its_own_transaction(
    guard: SyncGuard, pg_dsn: str, db: Any
) -> None:
    lease = guard.try_acquire("k")
    assert lease is not None
    seen = []
    for open_block in (lambda conn: conn.transaction(), lease.transaction):
        for committed in (False, True):
            with ExitStack() as stack:
                conn = stack.enter_context(closing(psycopg.connect(pg_dsn)))
                conn.execute("select 1")
                with open_block(conn):
                    conn.execute("update t set owner = owner || '.'")
                if committed:
                    conn.commit()
            seen.append(db.execute("select owner from t").fetchone()[0])
    assert seen == ["nobody", "nobody.", "nobody.", "nobody.."]
