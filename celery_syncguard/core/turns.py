"""Turns: the waiters for one key within this process, first come, first served.

The first of them asks the database; the others wait behind it, so many local waiters cost the database no more than one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from celery_syncguard.core.loop import Bell

__all__ = ["Turns"]


class Turns:
    """A queue per key."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queues: dict[str, list[Bell]] = {}

    def waiting(self, key: str) -> bool:
        """Whether a waiter is there, which a newcomer must not overtake."""
        return key in self._queues

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
