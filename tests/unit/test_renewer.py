"""The renewer by itself, on the memory store: three answers, and when it asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from celery_syncguard import Lease, SyncGuard
from celery_syncguard import guard as guard_module
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.store import Release, Renewal
from celery_syncguard.errors import StoreUnavailable
from celery_syncguard.testing import FakeClock
from tests.fixtures.polling import poll


class Moody(MemoryStore):
    """Renews as the test says: `renewed`, `busy` or `unreachable`."""

    def __init__(self) -> None:
        super().__init__()
        self.mood = "renewed"
        self.asked: list[list[Renewal]] = []
        self.stuck: threading.Event | None = None

    def renew(self, renewals: Sequence[Renewal]) -> dict[str, bool | None]:
        self.asked.append(list(renewals))
        if self.mood == "unreachable":
            raise StoreUnavailable("no answer")
        if self.mood == "busy":
            return dict.fromkeys((one.lock_id for one in renewals), None)
        return super().renew(renewals)

    def release(self, release: Release) -> Any:
        if self.stuck is not None and not self.stuck.wait(30):
            raise StoreUnavailable("stuck")
        if self.mood == "unreachable":
            raise StoreUnavailable("no answer")
        return super().release(release)


@pytest.fixture
def store() -> Moody:
    return Moody()


@pytest.fixture
def guard(store: Moody) -> Iterator[SyncGuard]:
    with SyncGuard("memory://", store=store) as guard:
        yield guard


def acquire(guard: SyncGuard, key: str = "k", *, ttl: float) -> Lease:
    lease = guard.try_acquire(key, ttl=ttl)
    assert lease is not None
    return lease


@pytest.mark.parametrize("mood", ["busy", "unreachable"])
def test_without_an_answer_it_asks_again_and_the_deadline_stays(mood: str, guard: SyncGuard, store: Moody) -> None:
    """One failed attempt loses nothing, and no number of them prolongs anything."""
    store.mood = mood
    lease = acquire(guard, ttl=1.5)
    deadline = lease.deadline
    poll(lambda: len(store.asked) >= 3)
    assert lease.deadline == deadline
    lease.check()
    store.mood = "renewed"
    poll(lambda: lease.deadline > deadline)
    lease.check()


@pytest.mark.parametrize("mood", ["busy", "unreachable"])
def test_without_an_answer_until_the_deadline_the_lease_is_lost_once(mood: str, guard: SyncGuard, store: Moody) -> None:
    store.mood = mood
    lost: list[Lease] = []
    guard.events.subscribe("lease_lost", lambda lease: lost.append(lease))
    lease = acquire(guard, ttl=0.5)
    poll(lambda: lost)
    assert lost == [lease]
    asked = len(store.asked)
    assert asked < 30, "it asked in a loop"
    store.mood = "renewed"
    assert lease.lost
    assert guard._renewer.count == 0


def test_a_renewal_is_due_before_a_third_of_the_ttl_has_passed_and_not_long_before(
    guard: SyncGuard, store: Moody
) -> None:
    with FakeClock() as time:
        leases = [acquire(guard, f"k:{number}", ttl=30) for number in range(50)]
        time.advance(5.3)  # the earliest is due at 8, and takes along what is due 2.5 s later
        guard._renewer._renew_due()
        assert store.asked == []
        time.advance(4.8)
        guard._renewer._renew_due()
        assert sum(map(len, store.asked)) == len(leases)
        assert len(store.asked) <= 2


def test_a_listener_that_fails_does_not_hide_the_loss_from_the_others(guard: SyncGuard, store: Moody) -> None:
    store.mood = "unreachable"
    heard = threading.Event()

    def fail(**_: Any) -> None:
        raise ValueError("listener")

    guard.events.subscribe("lease_lost", fail)
    guard.events.subscribe("lease_lost", lambda lease: heard.set())
    first, second = acquire(guard, "a", ttl=0.5), acquire(guard, "b", ttl=0.5)
    assert heard.wait(10)
    poll(lambda: first.lost_reason and second.lost_reason)


def test_a_forked_renewer_knows_no_leases(guard: SyncGuard) -> None:
    lease = acquire(guard, ttl=30)
    assert guard._renewer.count == 1
    guard._renewer.stop()
    guard._renewer.forget()
    assert guard._renewer.count == 0
    assert lease.lock_id not in guard._renewer._entries


def test_a_late_release_that_takes_its_time_does_not_hold_up_renewals(guard: SyncGuard, store: Moody) -> None:
    kept, late = acquire(guard, "kept", ttl=1.0), acquire(guard, "late", ttl=60)
    store.mood = "unreachable"
    late.release()
    store.stuck, store.mood = threading.Event(), "renewed"
    asked = len(store.asked)
    poll(lambda: len(store.asked) > asked + 5)
    kept.check()
    store.stuck.set()
    poll(lambda: [row.key for row in guard.locks()] == ["kept"])


def test_what_could_not_be_released_is_released_before_the_process_ends(guard: SyncGuard, store: Moody) -> None:
    """With its completion and its claim, which nobody else would know of."""
    leases = [acquire(guard, f"k{number}", ttl=60) for number in range(3)]
    store.mood = "unreachable"
    for lease in leases:
        lease.release()
    guard.outbox._loop.stop()
    store.mood = "renewed"
    guard_module.flush_all()  # at the end of a worker, of its children, and of any other process
    assert guard.locks() == []


def test_a_thread_that_could_not_be_started_is_started_for_the_next_lease(
    guard: SyncGuard, store: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may have no thread left for a moment. Who has no lease leaves no lock behind, and the next one is kept."""
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "syncguard-watchdog" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        acquire(guard, ttl=60)
    poll(lambda: guard.locks() == [])
    store.mood = "unreachable"
    lease = acquire(guard, ttl=0.5)
    told = threading.Event()
    lease.on_lost = lambda _: told.set()
    assert told.wait(10)
    assert guard._renewer._watch.running


def test_a_completion_is_repeated_until_it_is_written_however_long_that_takes(guard: SyncGuard, store: Moody) -> None:
    """The control is a release that says nothing but that the key is free: at the end of its ttl it is that anyway."""
    with FakeClock() as time:
        done, plain = acquire(guard, "done", ttl=0.5), acquire(guard, "plain", ttl=0.5)
        done.task_id = "t"
        store.mood = "unreachable"
        guard.release_lease(done, run_key="run", run_ttl=60.0, attempt_done=True)
        guard.release_lease(plain)
        guard.outbox._loop.stop()
        time.advance(3600)
        with pytest.raises(StoreUnavailable):
            guard.outbox.deliver()
        store.mood = "renewed"
        guard.outbox.deliver()
        assert guard.store.locks() == []
        assert list(store._completions) == ["run"]
        assert "plain" in store._rows


def test_what_could_not_be_written_until_the_process_ends_is_told(
    guard: SyncGuard, store: Moody, caplog: pytest.LogCaptureFixture
) -> None:
    lease = acquire(guard, "k", ttl=60)
    lease.task_id = "t"
    store.mood = "unreachable"
    guard.release_lease(lease, run_key="run", run_ttl=60.0, claim_key="c", attempt_done=True)
    for _ in range(2):
        guard.close()
        guard.flush()
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == [
        "task t is done but that could not be written ('run'): if it is delivered again, it runs again",
        "could not end the claim 'c' of task t: the same work counts as queued until dedup_ttl is over",
    ]


def test_what_is_released_after_the_close_is_told_at_the_end_of_the_process(
    guard: SyncGuard, store: Moody, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a body that a worker's end has not waited for."""
    lease = acquire(guard, "k", ttl=60)
    lease.task_id = "t"
    guard.close()
    store.mood = "unreachable"
    guard.release_lease(lease, run_key="run", run_ttl=60.0, attempt_done=True)
    guard_module.flush_all()
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["task t is done but that could not be written ('run'): if it is delivered again, it runs again"]
