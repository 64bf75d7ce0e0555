"""Turns: the waiters for one key within this process, first come, first served.

The first of them asks the database; the others wait behind it, so many local waiters cost the database no more than one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from celery_syncguard.core import clock
from celery_syncguard.core.loop import Bell
from celery_syncguard.core.store import Held

__all__ = ["Turns"]

T = TypeVar("T")

#: Bounds in seconds of the pause between two attempts of a waiter that is not woken.
_POLL = (0.25, 1.0)


class Turns:
    """A queue per key."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queues: dict[str, list[Bell]] = {}

    def repeat(
        self, key: str, attempt: Callable[[], T | Held], *, hear: Callable[[str, float], bool], until: float
    ) -> T | Held:
        """The first answer of `attempt` other than `Held`, or its last one before `until` on the local clock.

        Arguments:
            hear: waits for a release of the key, at most so many seconds; false: none was heard.
        """
        left = until - clock.now()
        if left <= 0 or key not in self._queues:  # a newcomer does not overtake those who wait
            answer = attempt()
            if left <= 0 or not isinstance(answer, Held):
                return answer
        with self.turn(key, until - clock.now()) as ours:
            answer = attempt()
            quiet = 0
            while ours and isinstance(answer, Held):
                left = until - clock.now()
                if left <= 0:
                    break
                low, high = _POLL
                pause = min(high, low * 2 ** min(quiet, 4)) * random.uniform(0.75, 1.25)
                pause = min(pause, answer.remaining + random.uniform(0.0, 0.02) if answer.remaining > 0 else 0.05)
                quiet = 0 if hear(key, max(0.001, min(left, pause))) else quiet + 1
                answer = attempt()
        return answer

    @contextmanager
    def turn(self, key: str, timeout: float) -> Iterator[bool]:
        """True inside if it is our turn, false if it did not come within `timeout` seconds."""
        ours = Bell()
        try:
            with self._mutex:
                queue = self._queues.setdefault(key, [])
                queue.append(ours)
                if len(queue) == 1:
                    ours.set()
            yield ours.wait(max(0.0, timeout))
        finally:
            # However far it came: a soft time limit comes between any two steps.
            with self._mutex:
                queue = self._queues.get(key, [])
                if ours in queue:
                    queue.remove(ours)
                if queue:
                    queue[0].set()
                else:
                    self._queues.pop(key, None)
