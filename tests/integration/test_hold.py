"""`hold` and a signal's handler that raises: wherever it strikes, no lock is left behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_syncguard import Lease, LockedTask, SyncGuard
from celery_syncguard import guard as guard_module
from celery_syncguard.core import lease
from celery_syncguard.errors import LockHeld
from celery_syncguard.tasks import app_state, claims, delivered, delivery
from tests.fixtures.polling import poll

#: Where a handler is tried at every single instruction, and in the function that holds. The rest are the standard library,
#: the store and threads.
FILES = {guard_module.__file__, lease.__file__, __file__}

#: Where a soft time limit is tried at every line.
RUN_FILES = {delivery.__file__, delivered.__file__, claims.__file__}


#: What a run does while it has its lock.
LOCKED = {
    "_attempt",
    "_run_body",
    "_start",
    "_keep_claim",
    "_report_start",
    "_disarm",
    "_leave",
    "_end",
    "_release",
    "give_up_lease",
    "end_claim",
    "end",
}


class Terminated(BaseException):
    """What a SIGTERM handler raises."""


def strike(work: Callable[[], None], at: int) -> bool:
    """Run `work`, and raise in it at its instruction number `at`, as the handler of a signal would. False: it has fewer."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        # What is raised in a destructor is printed and swallowed by Python.
        if seen > at or frame.f_code.co_filename not in FILES or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen > at:
                sys.settrace(None)
                raise Terminated
        return trace

    try:
        sys.settrace(trace)
        work()
    except Terminated:
        return True
    finally:
        sys.settrace(None)
    return seen > at


@contextmanager
def plain_hold(guard: SyncGuard, key: str) -> Iterator[Lease]:
    """The control: what a generator makes of it."""
    answer = guard.acquire(guard._request(key, 60.0, None))
    assert isinstance(answer, Lease)
    try:
        yield answer
    finally:
        answer.release()


def locks_left(guard: SyncGuard, hold: Callable[[str], Any]) -> list[int]:
    """The instructions at which a handler leaves a lock that nobody releases."""

    def work() -> None:
        with hold(key):
            pass

    left = []
    number = 0
    while True:
        key = f"k{number}"
        struck = strike(work, number)
        guard.flush()  # as at the exit
        if guard.inspect(key) is not None:
            left.append(number)
        if not struck:
            assert number > 100
            return left
        number += 1


def test_whenever_a_signals_handler_raises_what_is_held_is_released() -> None:
    with SyncGuard("memory://") as guard:
        assert locks_left(guard, lambda key: guard.hold(key, ttl=60)) == []


def test_a_generator_leaves_locks_behind() -> None:
    """The control of the test before."""
    gc.collect()
    with SyncGuard("memory://") as guard:
        assert locks_left(guard, lambda key: plain_hold(guard, key))


#: How a body ends, and whether it has a lock or only a claim.
ENDS = [("returns", True), ("returns", False), ("fails", True), ("fails", False), ("is replaced", True)]


def runs_left(how: str, locked: bool) -> list[int]:
    """The lines of a run between its grant and its end at which a soft time limit leaves the lock, the claim or the run."""
    app = Celery("limited", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_always_eager=True, broker_url="memory://")
    app.conf.update(result_backend="cache+memory://")

    @app.task(shared=False)
    def other() -> None:
        """Takes the place of a body."""

    options = {"lock_key": "{key}", "run_once": True} if locked else {}

    @app.task(base=LockedTask, bind=True, shared=False, dedup_key="{key}", **options)
    def work(self: LockedTask, key: str) -> None:
        if how == "fails":
            raise LookupError
        if how == "is replaced":
            self.replace(other.si())

    guard = app_state.guard_for(app)
    work.apply(("before",))
    left = []
    number = 0
    while True:
        seen = 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal seen
            if frame.f_code.co_filename not in RUN_FILES or frame.f_code.co_name not in LOCKED:
                return None
            if event == "line":
                seen += 1
                if seen > number:
                    sys.settrace(None)
                    raise SoftTimeLimitExceeded
            return trace

        guard.store.claim(f"k{number}", task_id=f"t{number}", ttl=600)
        sys.settrace(trace)
        try:
            work.apply((f"k{number}",), task_id=f"t{number}")
        finally:
            sys.settrace(None)
        guard.flush()
        is_claimed = not guard.store.claim(f"k{number}", task_id="a duplicate", ttl=600).ours
        if guard.inspect(f"k{number}") is not None or is_claimed or delivery._running:
            left.append(number)
            delivery._running.clear()
        if seen <= number:
            assert number > 20
            app_state.state_of(app).close()
            return left
        number += 1


@pytest.mark.parametrize(("how", "locked"), ENDS)
def test_whenever_a_soft_time_limit_strikes_a_run_nothing_of_it_is_left(
    how: str, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs_left(how, locked) == []
    # The control: without the end that follows it.
    end = delivery.Delivery._end
    limited = SoftTimeLimitExceeded
    monkeypatch.setattr(delivery.Delivery, "_end", lambda run, exc: isinstance(exc, limited) or end(run, exc))
    assert len(runs_left(how, locked)) > 10


def test_in_a_program_that_goes_on_it_is_released_within_a_second_or_so() -> None:
    with SyncGuard("memory://") as guard:
        guard.hold("k", ttl=60).__enter__()
        poll(lambda: guard.inspect("k") is None, timeout=5)


def test_hold_decorates_and_each_call_holds_by_itself() -> None:
    with SyncGuard("memory://") as guard:

        @guard.hold("k")
        def work(deep: bool) -> None:
            assert guard.inspect("k") is not None
            if deep:
                with pytest.raises(LockHeld):
                    work(deep=False)

        work(deep=True)
        work(deep=False)
        assert guard.locks() == []
