"""The one kind of thread."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from celery_syncguard.core.loop import Bell, Loop
from tests.fixtures.interrupting import hanging_step
from tests.fixtures.polling import poll


def test_a_loop_calls_its_step_after_the_delay_that_it_asked_for_or_when_woken() -> None:
    calls = threading.Semaphore(0)

    def step() -> None:
        calls.release()

    loop = Loop("test-loop", step)
    loop.start()
    assert calls.acquire(timeout=10)
    assert not calls.acquire(timeout=0.2), "None means: not before it is woken"
    loop.wake()
    assert calls.acquire(timeout=10)
    loop.stop()


def test_start_and_stop_may_be_repeated() -> None:
    loop = Loop("test-loop-repeat", lambda: None)
    for _ in range(20):
        loop.start()
        loop.start()
        assert loop.running
        loop.stop()
        loop.stop()
        assert not loop.running
    assert threads("test-loop-repeat") == 0


def test_a_stop_during_a_start_waits_for_that_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, go_on = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    class SlowToStart(threading.Thread):
        def start(self) -> None:
            if self.name == "test-loop-birth":
                starting.set()
                go_on.wait(30)
            super().start()

    def stop() -> None:
        try:
            loop.stop()
        except BaseException as exc:
            failures.append(exc)

    loop = Loop("test-loop-birth", lambda: None)
    starter, stopper = threading.Thread(target=loop.start), threading.Thread(target=stop)
    monkeypatch.setattr(threading, "Thread", SlowToStart)
    starter.start()
    assert starting.wait(10)
    stopper.start()
    assert not loop._mutex.acquire(timeout=0.2)
    go_on.set()
    starter.join(10)
    stopper.join(10)
    assert failures == []
    assert threads("test-loop-birth") == 0
    assert not loop.running


def test_a_thread_that_cannot_be_started_is_an_error_of_the_start_and_not_of_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = Loop("test-loop-refused", lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            loop.start()
        assert not loop.running
        loop.stop()
    loop.start()
    assert loop.running
    loop.stop()


def test_a_loop_is_one_thread_with_a_name_that_does_not_keep_the_process_alive() -> None:
    loop = Loop("test-loop-name", lambda: None)
    for _ in range(5):
        loop.start()
    (thread,) = [one for one in threading.enumerate() if one.name == "test-loop-name"]
    assert thread.daemon
    loop.stop()


def test_a_stop_that_does_not_wait_leaves_no_thread_behind_after_the_next_start() -> None:
    loop = Loop("test-loop-signal", lambda: None)
    for _ in range(5):
        loop.start()
        loop.stop(wait=False)
    loop.start()
    poll(lambda: threads("test-loop-signal") == 1)
    loop.stop()
    assert threads("test-loop-signal") == 0


def test_a_stop_just_before_the_bell_is_cleared_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[bool] = []

    class StoppedFirst(Bell):
        def clear(self) -> None:
            if not stops:
                stops.append(True)
                loop.stop(wait=False)
            super().clear()

    monkeypatch.setattr("celery_syncguard.core.loop.Bell", StoppedFirst)
    loop = Loop("test-loop-unheard", lambda: None)
    loop.start()
    poll(lambda: stops and threads("test-loop-unheard") == 0)


def test_a_thread_that_goes_on_in_the_middle_of_the_next_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[bool] = []
    entered, leave = threading.Event(), threading.Event()

    class GoesOn(Bell):
        def __init__(self) -> None:
            super().__init__()
            if entered.is_set():  # the bell of the second thread, which does not yet take the place of the first one's
                leave.set()
                poll(lambda: len(steps) > 1)

    def step() -> None:
        steps.append(True)
        entered.set()
        leave.wait(30)

    monkeypatch.setattr("celery_syncguard.core.loop.Bell", GoesOn)
    loop = Loop("test-loop-between", step)
    loop.start()
    assert entered.wait(10)
    (first,) = [one for one in threading.enumerate() if one.name == "test-loop-between"]
    loop.stop(wait=False)
    loop.start()
    poll(lambda: not first.is_alive())
    loop.stop()


def test_a_stop_is_bounded_and_may_come_from_the_loop_itself() -> None:
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        entered.set()
        leave.wait(30)

    loop = Loop("test-loop-stuck", step)
    loop.start()
    assert entered.wait(10)
    loop.stop(timeout=0.1)  # returns although the step does not
    leave.set()
    poll(lambda: threads("test-loop-stuck") == 0)

    itself: list[Loop] = []
    itself.append(Loop("test-loop-itself", lambda: itself[0].stop()))
    itself[0].start()
    poll(lambda: threads("test-loop-itself") == 0)


def test_an_error_is_logged_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls = threading.Semaphore(0)

    def step() -> float:
        calls.release()
        raise ValueError("broken work")

    loop = Loop("test-loop-error", step, backoff=(0.0, 0.01))
    with caplog.at_level(logging.ERROR, logger="celery_syncguard"):
        loop.start()
        for _ in range(5):
            assert calls.acquire(timeout=10)
        loop.stop()
    assert any(record.exc_info and "broken work" in str(record.exc_info[1]) for record in caplog.records)


def test_a_dead_thread_is_replaced_by_the_next_start() -> None:
    class Killed(BaseException):
        """Something that no loop may catch."""

    fail = [True]
    calls = threading.Semaphore(0)

    def step() -> None:
        if fail.pop() if fail else False:
            raise Killed
        calls.release()

    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        loop = Loop("test-loop-dead", step)
        loop.start()
        poll(lambda: not loop.running)
        assert threads("test-loop-dead") == 0
        loop.start()
        assert calls.acquire(timeout=10)
        loop.stop()
    finally:
        threading.excepthook = hook


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def ring_and_wait(event):
    event.set()
    event.wait(0.001)
    event.clear()
    event.wait(0.001)


@pytest.mark.parametrize("kind", [Bell, threading.Event])
def test_a_bell_may_be_rung_and_waited_for_at_any_step_of_whoever_rings_or_waits(kind: type) -> None:
    """A signal handler, which runs in the middle of anything. An event is the negative control."""

    def scene():
        event = kind()
        return lambda: ring_and_wait(event), lambda: ring_and_wait(event), lambda: None

    assert (hanging_step(scene, timeout=10 if kind is Bell else 1) is None) is (kind is Bell)


@pytest.mark.parametrize("kind", [Bell, threading.Event])
def test_an_exception_at_any_step_leaves_a_bell_that_rings(kind: type) -> None:
    """A soft time limit, which is raised by a signal handler. An event is the negative control: its lock stays taken."""

    def scene():
        event = kind()

        def ring_from_elsewhere():
            event.clear()
            threading.Thread(target=event.set, daemon=True).start()
            assert event.wait(10)

        return lambda: ring_and_wait(event), sys.exit, ring_from_elsewhere

    assert (hanging_step(scene, timeout=10 if kind is Bell else 1) is None) is (kind is Bell)


def test_a_bell_rings_for_everybody_who_waits_and_until_it_is_cleared() -> None:
    bell = Bell()
    heard: list[bool] = []
    waiters = [threading.Thread(target=lambda: heard.append(bell.wait(10))) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    bell.set()
    for waiter in waiters:
        waiter.join(10)
    assert heard == [True] * 5
    assert bell.is_set()
    assert bell.wait(0)
    bell.clear()
    assert not bell.wait(0.01)
    assert not bell.wait(0)
