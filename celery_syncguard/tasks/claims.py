"""The claim of a task, from the publish to its end: the row that says that this work is queued or running.

`make` gives it a short life before the message is published, so that a producer which dies in between blocks others for
seconds only. `confirm` gives it its whole life when the broker has the message; what is not confirmed in time ends early,
and then a duplicate may be queued, but nothing is lost. `keep` confirms what a worker starts, in case the producer died
first. `renew` is for what is published again. `end` ends it, by what became of the work:

    outcome                                                    dedup_until = "start"   "done"    "ttl"
    BEGUN   the body begins                                    ends                    stays     stays
    ENDED   the body returned or failed, or its work was done  ends                    ends      stays
    VOID    nothing was done: never sent, skipped, refused,    ends                    ends      ends
            revoked, expired; or its process was ended
    AGAIN   the work goes on under this claim: it is retried,  stays                   stays     stays
            replaced, goes back to the queue, another copy runs

Not here, but in SQL: with "start" and a lock the acquire ends the claim (`syncguard_acquire` without `p_claim_ttl_ms`); its
ttl; and an acquire, a claim, a burial or a prune that finds its process dead (`syncguard_end_claim`).
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.lease import MAX_TTL, Lease
from celery_syncguard.core.outbox import Letter
from celery_syncguard.core.store import Claim
from celery_syncguard.errors import SyncGuardError
from celery_syncguard.guard import SyncGuard
from celery_syncguard.tasks.celery_internals import instant

__all__ = ["Outcome", "confirm", "end", "keep", "life", "make", "renew", "seconds_until"]

#: Seconds that a claim lives unless it is confirmed.
_UNCONFIRMED_TTL = 10.0

#: Seconds before a worker confirms what it starts. Most bodies have ended by then, and it need not.
_STARTED_FOR = 0.1

#: The shortest life of a claim in seconds, however soon its message expires.
_SHORTEST = 1.0


class Outcome(enum.Enum):
    """What became of the work. The value: the settings of `dedup_until` with which the claim ends at this outcome."""

    BEGUN = frozenset({"start"})
    ENDED = frozenset({"start", "done"})
    VOID = frozenset({"start", "done", "ttl"})
    AGAIN = frozenset[str]()

    def ends(self, until: str) -> bool:
        """Whether the claim of a task with this `dedup_until` ends with it."""
        return until in self.value


def make(guard: SyncGuard, key: str, *, task_id: str, ttl: float, holder: str, fingerprint: str | None) -> Claim:
    """Claim the work for a task that is about to be published. Raises StoreUnavailable, SchemaBehind."""
    life = min(_UNCONFIRMED_TTL, ttl)
    return _claim(guard, key, task_id=task_id, ttl=life, holder=holder, fingerprint=fingerprint)


def _claim(guard: SyncGuard, key: str, *, task_id: str, **how: Any) -> Claim:
    # What waits to end an earlier claim of this task would end the new one.
    waiting = guard.outbox.withdraw((key, task_id))
    try:
        return guard.store.claim(key, task_id=task_id, **how)
    except BaseException:
        if waiting is not None:
            guard.outbox.put(waiting)
        raise


def confirm(guard: SyncGuard, key: str, *, task_id: str, ttl: float) -> None:
    """The broker has the message: the claim shall live for `ttl` seconds from when it was made."""
    try:
        guard.store.confirm([(key, task_id, ttl)])
    except BaseException as exc:
        keep(guard, key, task_id=task_id, ttl=ttl, delay=0.0)
        if not isinstance(exc, SyncGuardError):
            raise
        logger.warning("a claim could not be confirmed, trying again in the background: %s", exc)


def keep(guard: SyncGuard, key: str, *, task_id: str, ttl: float, delay: float = _STARTED_FOR) -> None:
    """As `confirm`, in the background, `delay` seconds from now unless it has ended by then."""

    def call() -> None:
        guard.store.confirm([(key, task_id, ttl)])

    now = clock.now()
    guard.outbox.put(Letter(call, until=now + _UNCONFIRMED_TTL, about=(key, task_id), at=now + delay))


def renew(guard: SyncGuard, key: str, *, task_id: str, ttl: float, holder: str, until: str) -> None:
    """The task is published again under its claim: `ttl` seconds from now. After "start" it claims anew."""
    try:
        _claim(guard, key, task_id=task_id, ttl=ttl, holder=holder, again=until == "start")
    except SyncGuardError as exc:
        logger.warning("a claim could not be renewed: %s", exc)


def end(
    guard: SyncGuard,
    key: str | None,
    outcome: Outcome,
    *,
    task_id: str,
    until: str = "done",
    ttl: float = MAX_TTL,
    lease: Lease | None = None,
    later: bool = False,
    start: bool = True,
    **release: Any,
) -> bool:
    """This has become of the work: end its claim, if it ends with that (see the module's table).

    In the round trip that releases `lease`, else in a call of its own; in the background if the database does not answer,
    or does not have to be waited for.

    Arguments:
        key: of the claim; None: it has none.
        until: the task's `dedup_until`.
        ttl: seconds after which the claim has ended by itself.
        later: in the background at once; with `start=False` no lock is taken, for a signal handler.
        release: what else the release says.

    Returns:
        Whether `lease` was still ours.
    """
    if not outcome.ends(until):
        key = None
    if key is not None:
        guard.outbox.withdraw((key, task_id))
    if lease is not None:
        return guard.release_lease(lease, claim_key=key, **release)
    if key is None:
        return False
    if not later:
        try:
            guard.store.unclaim(key, task_id=task_id)
        except SyncGuardError as exc:
            logger.warning("could not end the claim %r, trying again in the background: %s", key, exc)
        else:
            return False

    def call() -> None:
        guard.store.unclaim(key, task_id=task_id)

    def loss() -> None:
        logger.error(
            "could not end the claim %r of task %s: the same work counts as queued until dedup_ttl is over",
            key,
            task_id,
        )

    guard.outbox.put(Letter(call, loss, until=clock.now() + ttl, about=(key, task_id)), start=start)
    return False


def life(app: Any, expires: Any, ttl: float) -> float:
    """Seconds that a claim lives: not longer than its message, which is thrown away when it `expires`."""
    left = seconds_until(app, expires, None)
    return ttl if left is None else max(_SHORTEST, min(ttl, left))


def seconds_until(app: Any, moment: Any, countdown: float | None) -> float | None:
    """From now to a moment as Celery takes them: a number of seconds, a datetime or its ISO form."""
    moment = countdown if countdown is not None else moment
    if isinstance(moment, (str, datetime)):
        moment = (instant(app, moment) - app.now()).total_seconds()
    return None if moment is None else float(moment)
