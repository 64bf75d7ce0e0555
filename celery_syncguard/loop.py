"""The only place that makes threads.

A `Loop` calls one function again and again, each time after the number of seconds that the call before answered. Its
thread is named, daemonic and waits on an event, so that it can be woken and stopped at once; start and stop may be
repeated, a stop is bounded, and `stop(wait=False)` is safe inside a signal handler. An error in the function is logged
and backed off with full jitter: a loop never dies of its work.

Under gevent's monkey patching the thread is a greenlet, which is what a gevent program expects.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from celery_syncguard import clock
from celery_syncguard.events import logger

__all__ = ["Loop"]

#: No wait is longer, so that a suspended machine or a lost wake-up costs at most this many seconds.
LONGEST_WAIT = 1.0


class Loop:
    """Runs `step` in a thread of its own until it is stopped.

    Arguments:
        name: of the thread.
        step: does the work that is due and answers in how many seconds it wants to be called again; None: not before
            `wake()`.
        backoff: bounds in seconds of the wait after `step` raised.
    """

    def __init__(
        self, name: str, step: Callable[[], float | None], *, backoff: tuple[float, float] = (0.1, 5.0)
    ) -> None:
        self._name = name
        self._step = step
        self._backoff = backoff
        self._mutex = threading.Lock()
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._mutex:
            if self.running:
                return
            self._stopping = False
            # A thread that was told to stop without being woken may still wait on the old event.
            self._event.set()
            self._event = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._event,), name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Have the step called now."""
        self._event.set()

    def stop(self, *, wait: bool = True, timeout: float = 5.0) -> None:
        """Stop after the step that runs now. Waits for at most `timeout` seconds, and never for itself.

        Without `wait` it takes no lock of any kind, so that a signal handler may call it; the thread notices at its
        next turn.
        """
        self._stopping = True
        if not wait:
            return
        self._event.set()
        if self._thread is threading.current_thread():
            return
        give_up_at = clock.now() + timeout
        # Whoever is starting it finishes that first: a thread that has not begun can be neither told nor waited for.
        if not self._mutex.acquire(timeout=timeout):
            return
        try:
            self._stopping = True
            self._event.set()
            thread = self._thread
        finally:
            self._mutex.release()
        if thread is not None and thread.ident is not None:  # none if it could not be started
            thread.join(max(0.0, give_up_at - clock.now()))

    @property
    def running(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._stopping

    def _run(self, event: threading.Event) -> None:
        failures = 0
        while not self._stopping and event is self._event:
            event.clear()
            try:
                delay = self._step()
                failures = 0
            except Exception:  # noqa: BLE001 - a loop outlives its work
                logger.exception("%s failed and will try again", self._name)
                low, high = self._backoff
                delay = low + random.uniform(0.0, min(high, low * 2.0**failures))
                failures = min(failures + 1, 16)
            if delay is None or delay > 0:
                event.wait(None if delay is None else min(delay, LONGEST_WAIT))
