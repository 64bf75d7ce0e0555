"""Leases live as long as their holder does, through whatever happens to the connection, and are lost in time otherwise."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_syncguard import Lease, SyncGuard, errors
from celery_syncguard.core import clock
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire, Grant
from celery_syncguard.testing import FakeClock
from tests.fixtures.polling import poll
from tests.fixtures.proxy import Proxy


def acquire(guard: SyncGuard, key: str = "k", *, ttl: float = 30.0) -> Lease:
    lease = guard.try_acquire(key, ttl=ttl)
    assert lease is not None
    return lease


def renewals(lease: Lease) -> Callable[[], int]:
    """How often the deadline of a lease has moved since this was called."""
    seen = [lease.deadline]

    def count() -> int:
        if lease.deadline != seen[-1]:
            seen.append(lease.deadline)
        return len(seen) - 1

    return count


def losses(guard: SyncGuard) -> list[tuple[Lease, float]]:
    """The leases that are reported lost, each with the local instant of the report."""
    lost: list[tuple[Lease, float]] = []
    guard.events.subscribe("lease_lost", lambda lease: lost.append((lease, clock.now())))
    return lost


def rival(guard: SyncGuard, key: str = "k") -> Any:
    return guard.store.acquire(Acquire(key=key, lock_id=new_lock_id(), ttl=60.0))


# It lives


def test_a_lease_outlives_its_ttl_by_far(guard: SyncGuard) -> None:
    lease = acquire(guard, ttl=2.0)
    renewed = renewals(lease)
    poll(lambda: renewed() >= 5)
    lease.check()
    assert not isinstance(rival(guard), Grant)


def test_without_the_renewer_the_same_lease_is_taken_over(guard: SyncGuard) -> None:
    """The negative control."""
    lease = acquire(guard, ttl=2.0)
    guard._renewer.remove(lease)
    grant = poll(lambda: answer if isinstance(answer := rival(guard), Grant) else None)
    assert grant.fence > lease.fence
    assert lease.lost, "the holder noticed first"


def test_renewing_survives_a_backend_that_is_terminated_five_times_a_second(
    pg_dsn: str, pg_server: Any, guard: SyncGuard
) -> None:
    lost = losses(guard)
    lease = acquire(guard, ttl=3.0)
    renewed = renewals(lease)
    stop = threading.Event()
    ended: list[int] = []

    def terminate() -> None:
        while not stop.wait(0.2):
            ended.append(pg_server.terminate_backends(pg_dsn.rpartition("/")[2]))

    thread = threading.Thread(target=terminate)
    thread.start()
    poll(lambda: renewed() >= 4 and sum(ended) >= 5, timeout=30)
    stop.set()
    thread.join()
    lease.check()
    assert lost == []


def test_a_renewal_finds_another_connection_when_the_idle_one_broke(pg_dsn: str, pg_server: Any) -> None:
    """At the first try: whoever breaks idle connections would break the pool's next one before the next renewal."""
    name = pg_dsn.rpartition("/")[2]
    backends = f"select from pg_stat_activity where datname = '{name}' and backend_type = 'client backend'"
    with SyncGuard(pg_dsn) as guard:
        lease = acquire(guard)
        for _ in range(5):
            assert guard.inspect("k") is not None  # so that there is one to break
            pg_server.terminate_backends(name)
            poll(lambda: pg_server.execute(backends) == [])
            assert lease.renew() is True


def test_a_lease_survives_a_restarted_server(private_pg: Any, private_dsn: str) -> None:
    with SyncGuard(private_dsn) as guard:
        lost = losses(guard)
        lease = acquire(guard, ttl=30)
        for mode in ("fast", "immediate"):
            private_pg.restart(mode=mode)
            poll(lambda: quietly(lease.renew))
        lease.check()
        assert lost == []
        row = guard.inspect("k")
        assert row is not None
        assert row.lock_id == lease.lock_id
        assert lease.release() is True


def quietly(call: Callable[[], bool]) -> bool:
    try:
        return call()
    except errors.StoreUnavailable:
        return False


def test_a_lease_survives_an_outage_of_five_seconds(pg_dsn: str, pg_proxy: Proxy) -> None:
    """Nobody can connect, from before a renewal is due until long after."""
    with SyncGuard(pg_proxy.dsn(pg_dsn)) as guard:
        lost = losses(guard)
        lease = acquire(guard, ttl=9.0)
        renewed = renewals(lease)
        back_at = clock.now() + 5
        pg_proxy.refuse()
        poll(lambda: clock.now() > back_at)
        assert renewed() == 0
        pg_proxy.accept()
        poll(lambda: renewed() >= 1)
        lease.check()
        assert lost == []


def test_a_renewal_that_was_not_answered_never_moves_the_deadline(pg_dsn: str, pg_proxy: Proxy) -> None:
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.3) as guard:
        lease = acquire(guard, ttl=30)
        deadline = lease.deadline
        swallowed = pg_proxy.swallow_next_reply(after=b"syncguard_renew")
        with pytest.raises(errors.StoreUnavailable):
            lease.renew()
        assert swallowed.is_set()
        assert lease.deadline == deadline
        lease.check()
        assert lease.renew() is True
        assert lease.deadline > deadline


# It is lost


def test_a_loss_is_reported_when_the_deadline_passes_although_the_renewal_hangs(pg_dsn: str, pg_proxy: Proxy) -> None:
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=60) as guard:
        lost = losses(guard)
        lease = acquire(guard, ttl=1.5)
        pg_proxy.stall()
        poll(lambda: lost)
        assert [one for one, _ in lost] == [lease]
        late = lost[0][1] - lease.deadline
        assert 0 <= late < 1.0
        with pytest.raises(errors.LeaseLost):
            lease.check()
        pg_proxy.resume()


def test_without_the_watchdog_a_hanging_renewal_would_hide_the_loss(pg_dsn: str, pg_proxy: Proxy) -> None:
    """The negative control; check() knows by itself all the same."""
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=60) as guard:
        lost = losses(guard)
        lease = acquire(guard, ttl=1.5)
        guard._renewer._watch.stop()
        pg_proxy.stall()
        poll(lambda: clock.now() > lease.deadline + 1.0)
        assert lost == []
        assert lease.lost
        with pytest.raises(errors.LeaseLost):
            lease.check()
        pg_proxy.resume()


def test_the_holder_is_told_before_another_can_begin_when_the_server_is_gone_for_long(
    private_pg: Any, private_dsn: str
) -> None:
    with SyncGuard(private_dsn) as guard:
        lost = losses(guard)
        lease = acquire(guard, ttl=2.0)
        private_pg.stop()
        poll(lambda: lost)
        private_pg.start()
        grant = poll(lambda: answer if isinstance(answer := rival(guard), Grant) else None)
        assert grant.fence > lease.fence
        assert lost[0][0] is lease


@pytest.mark.parametrize("how", ["released by hand", "taken over"])
def test_a_lease_that_is_gone_from_the_database_is_lost_at_the_next_renewal(how: str, guard: SyncGuard) -> None:
    lost = losses(guard)
    lease = acquire(guard, ttl=1.0)
    guard.release("k", lock_id=lease.lock_id)
    if how == "taken over":
        assert isinstance(rival(guard), Grant)
    poll(lambda: lost)
    assert "gone" in str(lease.lost_reason)
    with pytest.raises(errors.LeaseLost, match="gone"):
        lease.check()
    assert lease.renew() is False
    assert lease.release() is False
    assert len(lost) == 1


def test_a_dead_renewer_cannot_make_a_lost_lease_look_alive() -> None:
    with SyncGuard("memory://") as guard, FakeClock() as time:
        lease = acquire(guard, ttl=30)
        guard._renewer.stop()
        lease.check()
        time.advance(29.5)
        assert lease.lost
        assert lease.remaining == 0
        with pytest.raises(errors.LeaseLost):
            lease.check()
        assert lease.renew() is False


def test_a_frozen_process_knows_that_its_lease_is_lost_as_soon_as_it_wakes(pg_dsn: str, guard: SyncGuard) -> None:
    """SIGSTOP, while it would renew, past its ttl; SIGCONT. Its first look at the lease says lost."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER, pg_dsn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        process.stdin.write("look\n")
        process.stdin.flush()
        assert process.stdout.readline() == "alive\n"
        os.kill(process.pid, signal.SIGSTOP)
        process.stdin.write("look\n")  # waits for it: the very first thing that it reads
        process.stdin.flush()
        grant = poll(lambda: answer if isinstance(answer := rival(guard), Grant) else None)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "lost\n"
        assert int(process.stdout.readline()) < grant.fence
    finally:
        process.kill()
        process.communicate()


def test_a_killed_process_blocks_others_for_its_ttl_and_no_longer(pg_dsn: str, guard: SyncGuard) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER, pg_dsn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        assert not isinstance(rival(guard), Grant)
    finally:
        process.kill()
        process.communicate()
    killed_at = clock.now()
    poll(lambda: isinstance(rival(guard), Grant))
    assert clock.now() - killed_at < 3.0


_SLEEPER = """
import sys
from celery_syncguard import SyncGuard, LeaseLost
lease = SyncGuard(sys.argv[1]).try_acquire("k", ttl=1.0)
print("held", flush=True)
for line in sys.stdin:
    try:
        lease.check()
        print("alive", flush=True)
    except LeaseLost as error:
        print("lost", flush=True)
        print(error.fence, flush=True)
"""


# What it costs


def test_a_forgotten_lease_is_not_kept_alive(guard: SyncGuard) -> None:
    kept, dropped = acquire(guard, "kept", ttl=2.0), acquire(guard, "dropped", ttl=2.0)
    lock_id = dropped.lock_id
    del dropped
    gc.collect()
    poll(lambda: guard.inspect("dropped") is None)
    assert lock_id not in guard._renewer._entries
    kept.check()
    assert guard.inspect("kept") is not None, "the control: the renewer is at work"


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("syncguard"))


def test_there_are_no_threads_without_a_lease_and_two_with_however_many(guard: SyncGuard, pg_dsn: str) -> None:
    before = names()
    assert guard.locks() == []
    with SyncGuard(pg_dsn) as other:
        assert other.inspect("k") is None
        assert our_threads(before) == []
        leases = [acquire(other, f"k:{number}") for number in range(50)]
        assert our_threads(before) == ["syncguard-renewer", "syncguard-watchdog"]
        del leases
    assert our_threads(before) == []


def our_threads(before: list[str]) -> list[str]:
    # psycopg's pool has a worker and a scheduler of its own.
    now = [name for name in names() if name in ("syncguard-renewer", "syncguard-watchdog", "syncguard-listener")]
    for name in before:
        if name in now:
            now.remove(name)
    return now


def test_a_process_ends_although_it_holds_leases(pg_dsn: str) -> None:
    program = "import sys; from celery_syncguard import SyncGuard; l = SyncGuard(sys.argv[1]).try_acquire('k', ttl=30)"
    done = subprocess.run([sys.executable, "-c", program, pg_dsn], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_renewing_takes_the_tasks_connection_while_that_is_idle_and_another_while_it_is_busy(pg_dsn: str) -> None:
    """So a process that runs one task at a time has one connection, and renewals never queue behind a busy one."""
    with SyncGuard(pg_dsn, timeout=0.2) as guard:
        store: Any = guard.store
        lease = acquire(guard)
        assert lease.renew() is True
        assert store._connections.reserved._conn is None
        with store.connection():
            assert lease.renew() is True
            assert store._connections.reserved._conn is not None
            with pytest.raises(errors.StoreUnavailable, match="in use"):
                guard.inspect("k")  # the control: this one queues
        assert store._connections.reserved.close_if_idle(0.0) is None
        assert lease.renew() is True
        assert store._connections.reserved._conn is None


def test_a_renewal_that_finds_the_tasks_connection_taken_after_all_takes_another(guard: SyncGuard) -> None:
    """A task may be quicker between the look and the request: the renewal must not queue behind its statement."""
    store: Any = guard.store
    lease = acquire(guard)
    with store.connection():
        store._connections.lent.clear()  # as it looked a moment ago
        assert lease.renew() is True
        assert store._connections.reserved._conn is not None


@pytest.mark.parametrize("connections", [0, 1])
def test_idle_connections_go_away(connections: int, guard: SyncGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standing connection is closed when there has been nothing to renew for a while."""
    lease = acquire(guard, ttl=30)
    with guard.store.connection():  # type: ignore[attr-defined] - the other one is busy
        lease.renew()
    assert guard.store._connections.reserved._conn is not None  # type: ignore[attr-defined]
    if connections == 0:
        assert guard.store._connections.reserved.close_if_idle(0.0) is None  # type: ignore[attr-defined]
        assert guard.store._connections.reserved._conn is None  # type: ignore[attr-defined]
    else:
        assert guard.store._connections.reserved.close_if_idle() > 0  # type: ignore[attr-defined]
    assert lease.renew() is True


# Releases that were not answered


def test_a_release_during_an_outage_is_made_up_for(pg_dsn: str, pg_proxy: Proxy, guard: SyncGuard) -> None:
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.2) as away:
        lease = acquire(away, ttl=60)
        pg_proxy.refuse()
        assert lease.release() is False
        assert guard.inspect("k") is not None
        pg_proxy.accept()
        poll(lambda: guard.inspect("k") is None)


def test_an_acquire_that_was_granted_without_anybody_hearing_does_not_block_for_a_ttl(
    pg_dsn: str, pg_proxy: Proxy, guard: SyncGuard
) -> None:
    with (
        SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.2) as away,
        ThreadPoolExecutor() as background,
        psycopg.connect(pg_dsn) as session,
    ):
        session.execute("select pg_advisory_xact_lock(hashtext('k'))")
        answer = background.submit(away.try_acquire, "k", ttl=300)
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        poll(lambda: session.execute(waiting).fetchone() == (1,))
        pg_proxy.refuse()  # the server does not notice: it goes on with the acquire
        with pytest.raises(errors.StoreUnavailable) as caught:
            answer.result(30)
        assert caught.value.sent
        session.rollback()
        poll(lambda: guard.inspect("k") is not None)
        pg_proxy.accept()
        poll(lambda: guard.inspect("k") is None)


def test_late_releases_do_not_hold_up_renewals(pg_dsn: str, pg_proxy: Proxy, guard: SyncGuard) -> None:
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.5) as away:
        lost = losses(away)
        kept = acquire(away, "kept", ttl=6)
        leases = [acquire(away, f"k:{number}", ttl=30) for number in range(20)]
        pg_proxy.refuse()
        threads = [threading.Thread(target=lease.release) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pg_proxy.accept()
        poll(lambda: [row.key for row in guard.locks()] == ["kept"], timeout=20)
        kept.check()
        assert lost == []
