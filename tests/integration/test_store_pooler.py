"""Locks behind pgbouncer in transaction mode, where sessions belong to nobody."""

from __future__ import annotations

import psycopg
import pytest

from celery_syncguard import SyncGuard, errors
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire, Grant, Held
from celery_syncguard.postgres.store import PostgresStore
from tests.fixtures.polling import poll
from tests.fixtures.races import race_threads


def test_exactly_one_wins_behind_a_pooler(pgbouncer_dsn: str) -> None:
    store = PostgresStore(pgbouncer_dsn, pool_size=9)
    for answers in race_threads(store, threads=8, rounds=50):
        assert sum(isinstance(answer, Grant) for answer in answers) == 1
    store.close()


def test_a_lease_lives_is_proved_and_is_released_behind_a_pooler(pgbouncer_dsn: str, pg_dsn: str) -> None:
    with SyncGuard(pgbouncer_dsn) as guard:
        lease = guard.try_acquire("k", ttl=2.0)
        assert lease is not None
        deadline = lease.deadline
        poll(lambda: lease.deadline > deadline + 0.5)
        with psycopg.connect(pgbouncer_dsn, prepare_threshold=None) as connection, lease.transaction(connection):
            connection.execute("select 1")
            with pytest.raises(ZeroDivisionError), lease.transaction(connection):
                connection.execute("create table rolled_back ()")
                1 / 0
            assert isinstance(guard.store.acquire(Acquire(key="k", lock_id=new_lock_id(), ttl=2.0)), Held)
        with (
            psycopg.connect(pgbouncer_dsn, prepare_threshold=None) as connection,
            pytest.raises(errors.SyncGuardError, match="savepoint"),
            connection.transaction(),
            connection.transaction(),
        ):
            # Another transaction on the same server session, for which nothing has been proved.
            lease.fenced(connection)
        assert lease.release()
        assert guard.locks() == []
        with pytest.raises(errors.NoLease):
            lease.check()
    # Nothing of it stays on the pooled sessions.
    with psycopg.connect(pg_dsn) as session:
        row = session.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone()
    assert row == (0,)
