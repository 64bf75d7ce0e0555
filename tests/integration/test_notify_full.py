"""The server's queue of notifications is full: somebody's session listens and stands still in a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from celery_syncguard import SyncGuard
from celery_syncguard.cli.doctor import examine
from celery_syncguard.core.config import Settings
from celery_syncguard.postgres.migrate import migrate
from tests.fixtures.servers import PostgresServer


@pytest.fixture(scope="module")
def dsn() -> Iterator[str]:
    """A database on a server whose queue is full."""
    with PostgresServer(settings={"max_notify_queue_pages": 64}) as server:
        migrate(server.dsn())
        with psycopg.connect(server.dsn()) as stands_still, psycopg.connect(server.dsn(), autocommit=True) as session:
            stands_still.execute("listen anything")
            stands_still.commit()
            stands_still.execute("select 1")
            with pytest.raises(psycopg.errors.ProgramLimitExceeded):
                for number in range(2000):
                    session.execute("select pg_notify('anything', %s)", (f"{number:04d}" + "x" * 7000,))
            yield server.dsn()


@pytest.fixture
def guard(dsn: str) -> Iterator[SyncGuard]:
    with SyncGuard(dsn) as guard:
        yield guard


def completions(guard: SyncGuard) -> list[Any]:
    store: Any = guard.store
    rows: list[Any] = store.run(lambda conn: conn.execute("select run_key from syncguard_completions").fetchall())
    return rows


def test_a_release_that_cannot_wake_its_waiter_releases_and_remembers_what_it_completed(guard: SyncGuard) -> None:
    for key in ("waited for", "quiet"):
        lease = guard.try_acquire(key, ttl=60)
        assert lease is not None
        if key == "waited for":
            guard.store.wait(key, 0.01)
        assert guard.release_lease(lease, run_key=f"run:{key}", run_ttl=60.0) is True
        assert guard.inspect(key) is None
    assert sorted(completions(guard)) == [("run:quiet",), ("run:waited for",)]


def test_a_dead_process_is_buried_although_its_waiters_cannot_be_woken(guard: SyncGuard) -> None:
    lease = guard.try_acquire("k", ttl=60)
    assert lease is not None
    guard.store.wait("k", 0.01)
    request = guard._request("k", 60, None)
    assert request.process is not None
    assert guard.store.release_process(request.process).freed == 1
    assert guard.inspect("k") is None


def test_a_notification_in_spite_of_that_fails_the_whole_release(guard: SyncGuard) -> None:
    """The negative control, and what is made of that error by whoever meets it in between: it is repeated, and succeeds."""
    lease = guard.try_acquire("k", ttl=60)
    assert lease is not None
    store: Any = guard.store
    calls = []

    def release_and_notify(conn: Any) -> Any:
        calls.append(1)
        notify = "pg_notify('syncguard_released', 'k')" if len(calls) == 1 else "1"
        return conn.execute(f"select syncguard_release('k', %s), {notify}", (lease.lock_id,)).fetchone()[0]

    assert store.run(release_and_notify) is True
    assert len(calls) == 2, "the first one released nothing"


def test_doctor_tells_that_the_queue_is_full(dsn: str) -> None:
    found = {check.name: check for check in examine(Settings(dsn=dsn))}
    assert found["notifications"].status == "warn"
    assert "full" in found["notifications"].message
