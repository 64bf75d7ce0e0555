"""Confirms claims in the background, many in one statement.

A claim is made with a short life before its message is published, so that a producer which dies in between blocks others
for seconds only. Once the broker has the message, the claim is given its whole life here, off the caller's path. What is
not confirmed in time ends early: then a duplicate may be queued, but nothing is lost.
"""

from __future__ import annotations

import threading

from celery_syncguard import clock
from celery_syncguard.errors import SyncGuardError
from celery_syncguard.events import logger
from celery_syncguard.loop import Loop
from celery_syncguard.process import forget_in_children
from celery_syncguard.store import LockStore

__all__ = ["UNCONFIRMED_TTL", "Confirmer"]

#: Seconds that a claim lives unless it is confirmed.
UNCONFIRMED_TTL = 10.0

#: Seconds in which confirmations are gathered into one statement.
_GATHER = 0.1


class Confirmer:
    """Confirms claims of one process."""

    def __init__(self, store: LockStore) -> None:
        self._store = store
        self.forget()
        forget_in_children(self)

    def forget(self) -> None:
        """After a fork (and at the start): the parent confirms its own."""
        self._mutex = threading.Lock()
        self._pending: dict[tuple[str, str], tuple[float, float]] = {}
        self._loop = Loop("syncguard-confirmer", self._step)
        self._flush_at = 0.0

    def confirm(self, key: str, *, task_id: str, ttl: float) -> None:
        """The broker has accepted the message: its claim shall live for `ttl` seconds from when it was made."""
        now = clock.now()
        with self._mutex:
            first = not self._pending
            self._pending[key, task_id] = (ttl, now + UNCONFIRMED_TTL)
            if first:
                self._flush_at = now + _GATHER
        if first:
            self._loop.start()
            self._loop.wake()

    def flush(self) -> None:
        """Confirm what is pending now, in the calling thread. Errors are logged: the claims just end early."""
        with self._mutex:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        try:
            self._store.confirm([(key, task_id, ttl) for (key, task_id), (ttl, _) in pending.items()])
        except SyncGuardError as exc:
            now = clock.now()
            again = {claim: (ttl, until) for claim, (ttl, until) in pending.items() if until > now}
            logger.warning("could not confirm %d claim(s), %d will be tried again: %s", len(pending), len(again), exc)
            with self._mutex:
                self._pending = {**again, **self._pending}
                self._flush_at = now + 1.0

    def _step(self) -> float | None:
        with self._mutex:
            if not self._pending:
                return None
            wait = self._flush_at - clock.now()
        if wait > 0:
            return wait
        self.flush()
        return 0.001
