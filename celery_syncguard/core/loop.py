"""The threads of this library (the demo has one of its own), and what they wait for.

A `Loop` calls one function again and again, each time after the number of seconds that the last call returned. Its thread
is named, daemonic and waits for a bell, so it can be woken and stopped at once; start and stop may be repeated, a stop is
bounded, and `wake()` and `stop(wait=False)` are safe inside a signal handler. An error in the function is logged and the
next call waits with full jitter: a loop outlives the errors of its work.

A `Bell` is a `threading.Event` for code that a signal handler may interrupt. An event takes a lock of its own, in Python
code: a handler that finds it taken by the code that it interrupted waits for ever, and a handler that raises in the wrong
place (a soft time limit) leaves it taken for ever.

Under gevent's monkey patching the thread is a greenlet, which is what a gevent program expects.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger

__all__ = ["Bell", "Loop"]

#: No wait is longer, so a suspended machine or a lost wake-up costs at most this many seconds.
LONGEST_WAIT = 1.0


class Bell:
    """An event that may be set, cleared and waited for anywhere, also by a signal handler that interrupted one of these
    calls. An exception at any step of them leaves it usable.
    """

    __slots__ = ("_gate", "_set")

    def __init__(self) -> None:
        self._set = False
        # Open while set. The flag decides; the gate is only for waiting, and taking or opening it is one call into C.
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._open()

    def clear(self) -> None:
        self._set = False
        self._gate.acquire(blocking=False)
        if self.is_set():  # by another thread in between, which must be heard
            self._open()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: without a bound) until it is set, and return whether it is."""
        until = None if timeout is None else clock.now() + timeout
        while not self._set:
            left = -1.0 if until is None else until - clock.now()
            if (until is not None and left <= 0) or not self._gate.acquire(timeout=left):
                return self.is_set()
            if self.is_set():
                self._open()  # for others who wait
        return True

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open
            self._gate.release()


class Loop:
    """Runs `step` in a thread of its own until it is stopped.

    Arguments:
        name: of the thread.
        step: does the work that is due and returns the seconds until its next call; None: not before `wake()`.
        backoff: bounds in seconds of the wait after `step` raised.
    """

    def __init__(
        self, name: str, step: Callable[[], float | None], *, backoff: tuple[float, float] = (0.1, 5.0)
    ) -> None:
        self._name = name
        self._step = step
        self._backoff = backoff
        self._mutex = threading.Lock()
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._mutex:
            if self.running:
                return
            self._stopping = False
            # A thread that was told to stop may still be in its last step: it ends when it sees that the bell is not its own.
            bell, self._bell = self._bell, Bell()
            bell.set()
            self._thread = threading.Thread(target=self._run, args=(self._bell,), name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Have the step called now. Takes no lock, so a signal handler may call it."""
        self._bell.set()

    def stop(self, *, wait: bool = True, timeout: float = 5.0) -> None:
        """Stop after the step that runs now. Waits for at most `timeout` seconds, and never for itself.

        Without `wait` it takes no lock of any kind, so that a signal handler may call it.
        """
        self._stopping = True
        self._bell.set()
        if not wait or self._thread is threading.current_thread():
            return
        give_up_at = clock.now() + timeout
        # A start() under way in another thread ends first: a thread that has not begun can be neither told nor joined.
        if not self._mutex.acquire(timeout=timeout):
            return
        try:
            self._stopping = True
            self._bell.set()
            thread = self._thread
        finally:
            self._mutex.release()
        if thread is not None and thread.ident is not None:  # none if it could not be started
            thread.join(max(0.0, give_up_at - clock.now()))

    @property
    def running(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._stopping

    def _run(self, bell: Bell) -> None:
        failures = 0
        while True:
            bell.clear()  # before looking why it rang, or a stop that comes in between is not heard
            if self._stopping or bell is not self._bell:
                return
            try:
                delay = self._step()
                failures = 0
            except Exception:  # noqa: BLE001 - a loop outlives its work
                logger.exception("%s failed and will try again", self._name)
                low, high = self._backoff
                delay = low + random.uniform(0.0, min(high, low * 2.0**failures))
                failures = min(failures + 1, 16)
            if delay is None or delay > 0:
                bell.wait(None if delay is None else min(delay, LONGEST_WAIT))
