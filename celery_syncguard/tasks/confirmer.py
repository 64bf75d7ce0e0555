"""Confirms and ends claims in the background, where that could not be done at once.

A claim is made with a short life before its message is published, so that a producer which dies in between blocks others
for seconds only. Once the broker has the message, its publisher gives the claim its whole life (`dedup`); if the database
does not answer, it is done here. What is not confirmed in time ends early: then a duplicate may be queued, but nothing is
lost. A worker confirms again what it starts, in case the producer died before it could.
"""

from __future__ import annotations

import threading

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.loop import Loop
from celery_syncguard.core.process import forget_in_children
from celery_syncguard.core.store import LockStore
from celery_syncguard.errors import SyncGuardError

__all__ = ["UNCONFIRMED_TTL", "Confirmer"]

#: Seconds that a claim lives unless it is confirmed.
UNCONFIRMED_TTL = 10.0

#: Seconds in which confirmations are gathered into one statement.
_GATHER = 0.1

#: Seconds between two attempts while the database does not answer.
_AGAIN = 1.0


class Confirmer:
    """Confirms claims of one process."""

    def __init__(self, store: LockStore) -> None:
        self._store = store
        self.forget()
        forget_in_children(self)

    def forget(self) -> None:
        """After a fork (and at the start): the parent confirms its own."""
        self._mutex = threading.Lock()
        self._settling = threading.Lock()
        #: (key, task_id) -> the whole life in seconds, or None to end it; and until when to try.
        self._pending: dict[tuple[str, str], tuple[float | None, float]] = {}
        self._loop = Loop("syncguard-confirmer", self._step)
        self._flush_at = 0.0

    def confirm(self, key: str, *, task_id: str, ttl: float) -> None:
        """The broker has accepted the message: its claim shall live for `ttl` seconds from when it was made."""
        self._add(key, task_id, ttl, UNCONFIRMED_TTL)

    def end(self, key: str, *, task_id: str, ttl: float) -> None:
        """End a claim as soon as the database answers; after `ttl` seconds it has ended by itself."""
        self._add(key, task_id, None, ttl)

    def withdraw(self, key: str, *, task_id: str) -> None:
        """The claim has ended: if it waits for its confirmation, that is not needed any more."""
        with self._mutex:
            self._pending.pop((key, task_id), None)

    def _add(self, key: str, task_id: str, ttl: float | None, patience: float) -> None:
        now = clock.now()
        with self._mutex:
            first = not self._pending
            self._pending[key, task_id] = (ttl, now + patience)
            if first:
                self._flush_at = now + _GATHER
        # Also where an earlier start failed: the system may have had no thread left.
        if first or not self._loop.running:
            self._loop.start()
            self._loop.wake()

    def flush(self) -> None:
        """Do what is pending now, in the calling thread. Errors are logged: what is left is tried again, or ends early."""
        # One after the other: a process that flushes before it ends must not cut off what its thread has begun.
        with self._settling:
            self._settle()

    def _settle(self) -> None:
        with self._mutex:
            pending, self._pending = self._pending, {}
        todo = dict(pending)
        try:
            confirmed = [(key, task_id, ttl) for (key, task_id), (ttl, _) in pending.items() if ttl is not None]
            if confirmed:
                self._store.confirm(confirmed)
                todo = {claim: (ttl, until) for claim, (ttl, until) in todo.items() if ttl is None}
            for key, task_id in list(todo):
                self._store.unclaim(key, task_id=task_id)
                del todo[key, task_id]
        except SyncGuardError as exc:
            now = clock.now()
            again = {claim: (ttl, until) for claim, (ttl, until) in todo.items() if until > now}
            logger.warning("could not settle %d claim(s), %d will be tried again: %s", len(todo), len(again), exc)
            with self._mutex:
                self._pending = {**again, **self._pending}
                self._flush_at = now + _AGAIN
            # Whoever called: the thread may have seen nothing to do and gone to sleep.
            self._loop.wake()

    def close(self) -> None:
        """Flush, and end the thread. May be repeated."""
        self.flush()
        self._loop.stop(wait=False)
        self._loop.wake()

    def _step(self) -> float | None:
        with self._mutex:
            if not self._pending:
                return None
            wait = self._flush_at - clock.now()
        if wait > 0:
            return wait
        self.flush()
        return 0.0
