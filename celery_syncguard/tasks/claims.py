"""Claims: a piece of work is queued or running, and which task it is.

A claim is made with a short life before its message is published, so that a producer which dies in between blocks others
for seconds only. Once the broker has the message, its publisher gives the claim its whole life; if the database does not
answer, the outbox repeats it. What is not confirmed in time ends early: then a duplicate may be queued, but nothing is
lost. A worker confirms again what it starts, in case the producer died before it could.
"""

from __future__ import annotations

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.outbox import Letter
from celery_syncguard.errors import SyncGuardError
from celery_syncguard.guard import SyncGuard

__all__ = ["STARTED_FOR", "UNCONFIRMED_TTL", "confirm", "confirm_later", "end", "end_later"]

#: Seconds that a claim lives unless it is confirmed.
UNCONFIRMED_TTL = 10.0

#: Seconds before a worker confirms what it starts. Most bodies have ended by then, and it need not.
STARTED_FOR = 0.1


def confirm(guard: SyncGuard, key: str, *, task_id: str, ttl: float) -> None:
    """The broker has the message: the claim shall live for `ttl` seconds from when it was made."""
    try:
        guard.store.confirm([(key, task_id, ttl)])
    except BaseException as exc:
        confirm_later(guard, key, task_id=task_id, ttl=ttl)
        if not isinstance(exc, SyncGuardError):
            raise
        logger.warning("a claim could not be confirmed, trying again in the background: %s", exc)


def confirm_later(guard: SyncGuard, key: str, *, task_id: str, ttl: float, delay: float = 0.0) -> None:
    """As `confirm`, in the background, `delay` seconds from now."""

    def call() -> None:
        guard.store.confirm([(key, task_id, ttl)])

    now = clock.now()
    guard.outbox.put(Letter(call, until=now + UNCONFIRMED_TTL, about=(key, task_id), at=now + delay))


def end(guard: SyncGuard, key: str, *, task_id: str, ttl: float) -> None:
    """End a claim; after `ttl` seconds it has ended by itself."""
    guard.outbox.withdraw((key, task_id))
    try:
        guard.store.unclaim(key, task_id=task_id)
    except SyncGuardError as exc:
        logger.warning("could not end the claim %r, trying again in the background: %s", key, exc)
        end_later(guard, key, task_id=task_id, ttl=ttl)


def end_later(guard: SyncGuard, key: str, *, task_id: str, ttl: float, start: bool = True) -> None:
    """As `end`, in the background. `start=False` takes no lock, for a signal handler."""

    def call() -> None:
        guard.store.unclaim(key, task_id=task_id)

    def loss() -> None:
        logger.error(
            "could not end the claim %r of task %s: the same work counts as queued until dedup_ttl is over",
            key,
            task_id,
        )

    guard.outbox.put(Letter(call, loss, until=clock.now() + ttl, about=(key, task_id)), start=start)
