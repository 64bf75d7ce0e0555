"""Hears releases: one LISTEN connection per process, only while a thread waits for a key.

A waiter announces itself in the lock's row first (`syncguard_wait`); only then does the holder's release notify. So
holders pay nothing while there is no waiter. A notification is a hint: behind a pooler in transaction mode it never comes, and
the waiter's own timeout decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.loop import Bell, Loop
from celery_syncguard.postgres.connection import Connection
from celery_syncguard.postgres.pool import MAX_IDLE, Kept

__all__ = ["CHANNEL", "Listener"]

CHANNEL = "syncguard_released"

#: Seconds for which the listening thread blocks before it looks whether a waiter is left.
_TURN = 0.5


class Listener:
    """Lets threads wait for the release of a key."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.forget()

    def forget(self) -> None:
        """After a fork (and at the start)."""
        self._mutex = threading.Lock()
        self._waiters: dict[str, set[Bell]] = {}
        self._listening = Bell()
        self._heard_on: Connection | None = None
        self._deaf = False
        self._last_used = clock.now()
        self._loop = Loop("syncguard-listener", self._listen)

    def wait(self, key: str, timeout: float, announce: Callable[[], bool]) -> bool:
        """Wait for a notification about `key`, at most `timeout` seconds.

        `announce` puts the waiter into the lock's row, and returns false if there is no lease to wait for.
        """
        heard = Bell()
        with self._mutex:
            self._waiters.setdefault(key, set()).add(heard)
            self._last_used = clock.now()
        try:
            self._loop.start()
            # Deaf for a moment is no fault: the timeout covers it.
            self._listening.wait(min(timeout, 1.0))
            if not announce():
                return True
            return heard.wait(timeout)
        finally:
            with self._mutex:
                waiting = self._waiters.get(key)
                if waiting is not None:
                    waiting.discard(heard)
                    if not waiting:
                        del self._waiters[key]

    def _listen(self) -> float | None:
        try:
            # Not looked at before: what waits there is a notification, or else the next read says what is wrong.
            with self._kept.use(look=False) as conn:
                if conn is not self._heard_on:
                    self._listening.clear()
                    conn.execute(f"LISTEN {CHANNEL}")
                    self._heard_on = conn
                    self._listening.set()
                    if self._deaf:
                        self._deaf = False
                        logger.info("can listen for releases again")
                for notification in conn.notifies(timeout=_TURN):
                    with self._mutex:
                        for heard in self._waiters.get(notification.payload, ()):
                            heard.set()
        except psycopg.Error as exc:
            self._listening.clear()
            self._heard_on = None
            level = logger.debug if self._deaf else logger.info
            self._deaf = True
            level("cannot listen for releases, waiting tasks poll instead: %s", exc)
        with self._mutex:
            if self._waiters:
                self._last_used = clock.now()
            elif clock.now() - self._last_used > MAX_IDLE:
                self._listening.clear()
                self._heard_on = None
                self._deaf = False
                self._kept.close()
                self._loop.stop(wait=False)
        return _TURN if self._deaf else 0.0

    def close(self) -> None:
        self._loop.stop()
        self._kept.close()
