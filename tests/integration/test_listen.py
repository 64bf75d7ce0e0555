"""Waiting for a lock: woken at once, whatever ends the lease, and cheap for everybody."""

from __future__ import annotations

import select
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_syncguard import LockHeld, SyncGuard
from celery_syncguard.core import clock
from celery_syncguard.core.store import Buried
from celery_syncguard.testing import hold_elsewhere
from tests.fixtures.polling import poll


def wait_for(guard: SyncGuard, key: str, *, wait: float = 30.0) -> float:
    """The local instant at which the lock was ours."""
    with guard.hold(key, wait=wait):
        return clock.now()


def announced(guard: SyncGuard, key: str) -> bool:
    with guard.store.connection() as conn:  # type: ignore[attr-defined]
        row = conn.execute("select waiting_until_ms is not null from syncguard_locks where key = %s", (key,)).fetchone()
    return bool(row and row[0])


def hand_offs(holder: SyncGuard, waiter: SyncGuard, rounds: int) -> list[float]:
    """Seconds from the release in one guard to the lock in the other."""
    times = []
    with ThreadPoolExecutor() as background:
        for number in range(rounds):
            lease = holder.try_acquire(f"k:{number}")
            assert lease is not None
            taken = background.submit(wait_for, waiter, f"k:{number}")
            poll(lambda number=number: announced(holder, f"k:{number}"))  # type: ignore[misc]
            released_at = clock.now()
            lease.release()
            times.append(taken.result(30) - released_at)
    return times


def test_a_release_hands_the_lock_over_at_once(guard: SyncGuard, pg_dsn: str) -> None:
    with SyncGuard(pg_dsn) as waiter:
        times = hand_offs(guard, waiter, 40)
    print(f"median hand-off {statistics.median(times) * 1000:.1f} ms, worst {max(times) * 1000:.1f} ms")
    assert statistics.median(times) < 0.05


def test_without_listening_the_hand_over_takes_longer(guard: SyncGuard, pg_dsn: str) -> None:
    """The negative control: the same by polling alone."""
    with SyncGuard(pg_dsn) as waiter:
        waiter.store._listener._listen = lambda: 0.5  # type: ignore[attr-defined]
        waiter.store._listener.forget()  # type: ignore[attr-defined]
        times = hand_offs(guard, waiter, 10)
    assert statistics.median(times) > 0.05


def test_waiting_costs_a_few_statements_a_second_however_many_wait_in_a_process(
    private_pg: Any, private_dsn: str
) -> None:
    with SyncGuard(private_dsn) as guard, hold_elsewhere(guard, "k"):
        private_pg.reload(log_statement="all")
        poll(lambda: "log_statement" in private_pg.log_text())
        before = len(statements(private_pg))
        threads = [threading.Thread(target=give_up, args=(guard, "k", 4.0)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said = len(statements(private_pg)) - before
    # One of them asks; each of the others looks once more before it gives up.
    assert said <= 4 * 6 + 2 * len(threads)


def give_up(guard: SyncGuard, key: str, wait: float) -> None:
    with pytest.raises(LockHeld), guard.hold(key, wait=wait):
        raise AssertionError("it is held")


def statements(server: Any) -> list[str]:
    return [
        line for line in server.log_text().splitlines() if "syncguard_acquire(" in line or "syncguard_wait(" in line
    ]


def test_whoever_does_not_get_the_lock_in_time_is_told_who_holds_it(guard: SyncGuard) -> None:
    with hold_elsewhere(guard, "k", holder="worker 7", task_id="t"):
        started = clock.now()
        with pytest.raises(LockHeld, match="worker 7") as caught, guard.hold("k", wait=0.5):
            raise AssertionError("it is held")
        assert 0.5 <= clock.now() - started < 5
    assert (caught.value.key, caught.value.holder, caught.value.task_id) == ("k", "worker 7", "t")
    assert caught.value.remaining is not None
    assert caught.value.remaining > 3000


def test_a_dead_holder_is_followed_soon_after_its_ttl(guard: SyncGuard) -> None:
    with hold_elsewhere(guard, "k", ttl=1.0):
        expires_at = clock.now() + 1.0
        late = wait_for(guard, "k") - expires_at
    assert -0.1 < late < 1.0


def test_a_release_by_hand_and_a_dead_process_wake_waiters_too(guard: SyncGuard, pg_dsn: str) -> None:
    with SyncGuard(pg_dsn) as waiter, ThreadPoolExecutor() as background:
        for end in ("by hand", "process"):
            with hold_elsewhere(guard, end) as grant:
                taken = background.submit(wait_for, waiter, end)
                poll(lambda end=end: announced(guard, end))  # type: ignore[misc]
                if end == "by hand":
                    assert guard.release(end, lock_id=grant.lock_id)
                else:
                    assert guard.store.release_process("elsewhere:0") == Buried(1)
                taken.result(10)


def test_many_waiters_in_many_processes_all_get_it_one_at_a_time(pg_dsn: str) -> None:
    guards = [SyncGuard(pg_dsn) for _ in range(4)]
    inside: list[int] = []
    most: list[int] = []

    def work(guard: SyncGuard) -> None:
        for _ in range(5):
            with guard.hold("k", wait=60):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(guard,)) for guard in guards for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for guard in guards:
        guard.close()
    assert most == [1] * 60


def test_waiting_survives_the_loss_of_its_connections(guard: SyncGuard, pg_dsn: str, pg_server: Any) -> None:
    with SyncGuard(pg_dsn) as waiter, ThreadPoolExecutor() as background:
        lease = guard.try_acquire("k")
        assert lease is not None
        taken = background.submit(wait_for, waiter, "k")
        poll(lambda: announced(guard, "k"))
        for _ in range(3):
            pg_server.terminate_backends(pg_dsn.rpartition("/")[2])
        assert not taken.done()
        lease.release()
        taken.result(10)


@pytest.mark.parametrize("between", ["another key's release", "the server's goodbye"])
def test_what_the_server_says_between_two_turns_does_not_make_the_listener_deaf(
    guard: SyncGuard, pg_dsn: str, between: str
) -> None:
    listener = guard.store._listener  # type: ignore[attr-defined]
    heard = threading.Event()
    listener._waiters["k"] = {heard}
    listener._listen()  # a turn of its thread, which is not started here
    conn = listener._kept._conn
    with psycopg.connect(pg_dsn, autocommit=True) as session:
        if between == "another key's release":
            session.execute("select pg_notify('syncguard_released', 'other')")
        else:
            session.execute("select pg_terminate_backend(%s)", (conn.info.backend_pid,))
        poll(lambda: select.select([conn.pgconn.socket], [], [], 0)[0])
        for _ in range(2):  # an error takes a turn
            listener._listen()
        assert not heard.is_set()
        session.execute("select pg_notify('syncguard_released', 'k')")
    listener._listen()
    assert heard.is_set(), "the listener is deaf"
    assert (listener._kept._conn is conn) == (between == "another key's release"), "a release cost the connection"


def test_a_listener_whose_connection_was_opened_anew_listens_on_that(guard: SyncGuard, pg_dsn: str) -> None:
    listener = guard.store._listener  # type: ignore[attr-defined]
    heard = threading.Event()
    listener._waiters["k"] = {heard}
    listener._listen()
    listener._kept._conn.close()
    listener._listen()
    with psycopg.connect(pg_dsn, autocommit=True) as session:
        session.execute("select pg_notify('syncguard_released', 'k')")
    listener._listen()
    assert heard.is_set(), "the listener is deaf"


def test_behind_a_pooler_that_swallows_notifications_waiting_still_works(pgbouncer_dsn: str, guard: SyncGuard) -> None:
    with SyncGuard(pgbouncer_dsn) as waiter, ThreadPoolExecutor() as background:
        for number in range(3):
            lease = guard.try_acquire(f"k:{number}")
            assert lease is not None
            taken = background.submit(wait_for, waiter, f"k:{number}")
            poll(lambda number=number: announced(guard, f"k:{number}"))  # type: ignore[misc]
            released_at = clock.now()
            lease.release()
            assert taken.result(10) - released_at < 3


def test_nobody_listens_while_nobody_waits(guard: SyncGuard, pg_dsn: str) -> None:
    def listening() -> int:
        query = "select count(*) from pg_stat_activity where datname = current_database() and query like 'LISTEN%'"
        with psycopg.connect(pg_dsn) as session:
            row = session.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    for _ in range(3):
        with guard.hold("k", wait=5):
            pass
    assert listening() == 0
    with hold_elsewhere(guard, "k"):
        give_up(guard, "k", 0.5)
    assert listening() == 1, "the control"
