"""What becomes of a delivery that does not run its body.

"Come back later" publishes the same message again, with the same task id, retries, chord, chain and limits, and with a
count of its own. If it cannot be published, the delivery waits right here instead: work is never lost because there is no
broker. So does one from a Broadcast queue, where a message goes to every worker.
"""

from __future__ import annotations

import random
import threading
from typing import Any

from celery.exceptions import Ignore, Retry
from celery.states import READY_STATES, SUCCESS

from celery_syncguard import signals, skipped
from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.store import Dead, Done, Held
from celery_syncguard.errors import LockHeld, SyncGuardError, TooManyDeaths
from celery_syncguard.guard import lock_held
from celery_syncguard.skipped import Skipped
from celery_syncguard.tasks.claims import Outcome
from celery_syncguard.tasks.delivered import Delivered

__all__ = ["HANDOVER", "NotRun", "answer", "blocked", "too_many_deaths", "without_store"]

#: Seconds that a retry waits in place for the end of the attempt which published it, and an answer for the first result.
HANDOVER = 2.0

#: Seconds for which an eager call, which cannot come back later, waits for a held lock.
_EAGER_PATIENCE = 60.0


class NotRun(Ignore):  # type: ignore[misc]
    """Raised through Celery's tracer for a body that does not run, so that the tracer stores nothing. `skipped` is the marker
    of a skipped task; None: another delivery stores the result.
    """

    def __init__(self, message: str, marker: Skipped | None = None) -> None:
        super().__init__(message)
        self.skipped = marker


def answer(message: Delivered, done: Done) -> Any:
    """The work was done before: its result, or None."""
    who = message.who
    if done.run_key != message.run_key:
        message.guard.counts["dropped"] += 1
        logger.info("%s not run: another delivery of this attempt ended %.1f s ago", who, done.age)
        raise _copy(message, "another delivery of this attempt has ended")
    logger.info("%s not run: %r was done by task %s %.1f s ago", who, done.run_key, done.task_id, done.age)
    if message.header.differs(done.fingerprint):
        logger.warning("%s: task %s did %r with other arguments than these", who, done.task_id, done.run_key)
    message.guard.counts["answered"] += 1
    signals.run_answered.send(sender=message.task, done=done)
    message.outcome = Outcome.ENDED
    message.end_claim(Outcome.ENDED)
    return _first_result(message, done)


def _copy(message: Delivered, why: str) -> NotRun:
    """The claim is that of the other delivery."""
    message.outcome = Outcome.AGAIN
    return NotRun(why)


def _first_result(message: Delivered, done: Done) -> Any:
    """What the first run returned, if a result backend knows; else None."""
    task, request = message.task, message.request
    ignored = task.ignore_result if request.ignore_result is None else request.ignore_result
    if done.task_id is None or ignored or (request.is_eager and not task.store_eager_result):
        return None
    # The lock is released before Celery stores the result. Answering in between would store None over it.
    give_up_at = clock.now() + (HANDOVER if done.age < 2 * HANDOVER else 0.0)
    while True:
        try:
            meta = task.backend.get_task_meta(done.task_id)
        except Exception as exc:  # noqa: BLE001 - any backend, any fault: the work is done all the same
            logger.info("the first run's result cannot be had: %r", exc)
            return None
        if meta.get("status") == SUCCESS:
            return meta.get("result")
        if meta.get("status") in READY_STATES or clock.now() >= give_up_at:
            return None
        _pause(0.05)


def too_many_deaths(message: Delivered, dead: Dead, key: str) -> TooManyDeaths:
    """The error of a task that is not started any more. Celery logs it as the failure of the task."""
    message.guard.counts["dead"] += 1
    why = (
        f" again: its process died {dead.deaths} times in a row while it held {key!r} (lock_max_deaths)"
        if dead.of_task
        else f": the last {dead.deaths} processes that held {key!r} for a task died (lock_max_deaths); the next one is "
        f"started an hour after the last death"
    )
    return TooManyDeaths(f"{message.who} is not started{why}", task_id=message.request.id, key=key, deaths=dead.deaths)


def without_store(message: Delivered, exc: SyncGuardError) -> bool:
    """The database does not answer. Returns True to run unlocked, False to try again; else raises."""
    mode = message.options.lock_on_unavailable
    message.guard.counts["unavailable"] += 1
    if mode == "run":
        logger.warning("%s runs without its lock: %s", message.who, exc)
        return True
    if mode == "raise" or message.request.is_eager:
        raise exc
    logger.warning("%s not run, will come back: %s", message.who, exc)
    _come_back(message, exc, delay=_delay(message))
    return False


def blocked(message: Delivered, held: Held) -> None:
    """The lock is held. Returns to try again at once; else raises."""
    who = message.who
    error = lock_held(held)
    own = message.is_ours(held)
    if own and held.attempt is not None and held.attempt > message.attempt:
        # The attempt that runs was published by this one, which is delivered once more.
        message.guard.counts["dropped"] += 1
        logger.info("%s not run: a later attempt of it runs already", who)
        raise _copy(message, "a later attempt runs already")
    reaction = "copy" if own else message.options.lock_on_held
    delay = _delay(message)
    message.guard.counts.update(("held", reaction))
    signals.lock_held.send(
        sender=message.task, held=held, outcome=reaction, delay=delay if reaction in ("copy", "retry") else None
    )
    if own:
        logger.info("%s not run: it runs already, for %.1f s; this copy comes back in %.1f s", who, held.since, delay)
        _come_back(message, error, delay=delay, hidden=held.attempt == message.attempt)
    elif reaction == "raise":
        logger.info("%s fails: %s", who, error)
        raise error
    elif reaction == "skip":
        raise _skip(message, held, error)
    elif message.for_everybody:
        logger.info("%s waits here, as it was sent to every worker: %s", who, error)
        _come_back(message, error, delay=delay)
    else:
        logger.info("%s not run, comes back in %.1f s: %s", who, delay, error)
        _come_back(message, error, delay=delay)


def _skip(message: Delivered, held: Held, error: LockHeld) -> NotRun:
    task, request = message.task, message.request
    marker = Skipped(key=held.key, holder=held.holder, task_id=held.task_id, since=round(held.since, 3))
    logger.info("%s skipped: %s", message.who, error)
    # Before others learn of it, who may publish the same work.
    message.end_claim(Outcome.VOID)
    signals.task_skipped.send(sender=task, skipped=marker)
    # Under one task id there is one result: that of the body which runs.
    if held.task_id != request.id:
        if not request.is_eager:
            skipped.settle(task, request, marker)
        elif task.store_eager_result and skipped.wants_result(task, request):
            stored = skipped.marker_for(task.backend, marker)
            task.backend.store_result(request.id, stored, skipped.SKIPPED, request=request)
    return NotRun(f"skipped: {error}", marker)


def _delay(message: Delivered) -> float:
    """Seconds until this message comes back: anywhere between the lower bound and a ceiling, which begins at twice that
    and doubles each time up to the upper one. So those that met the same holder do not come back together.
    """
    low, high = message.options.lock_retry_delay
    ceiling = min(high, low * 2.0 ** min(message.header.held + 1, 32))
    return random.uniform(low, ceiling)


def _come_back(message: Delivered, reason: SyncGuardError, *, delay: float, hidden: bool = False) -> None:
    """Publish this message again and leave. Returns if that is not possible: the caller tries again in place.

    `hidden`: another copy of this attempt is running, so its state must not be overwritten by ours.
    """
    task, request = message.task, message.request
    header = message.header._replace(held=message.header.held + 1)
    if request.is_eager:
        message.header = header
        _wait_eagerly(message, reason)
        return
    if message.for_everybody:
        message.header = header
        if isinstance(reason, LockHeld):
            message.patience = delay
        else:
            _pause(delay)
        return
    if delay < 1.0 and _has_quorum_queues(task.app):
        delay = 1.0  # Celery's native delayed delivery refuses what is shorter
    signature = task.signature_from_request(
        request,
        headers=header._replace(claimed=header.claimed or header.claim_key is not None).into(request.headers),
        countdown=delay,
        retries=request.retries,
        ignore_result=not skipped.wants_result(task, request),
        # What logs may show of the arguments was for the publisher to say.
        argsrepr=getattr(request, "argsrepr", None),
        kwargsrepr=getattr(request, "kwargsrepr", None),
        add_to_parent=False,
    )
    try:
        signature.apply_async()
    except Exception as exc:  # noqa: BLE001 - whatever a broker's client raises
        logger.warning("%s cannot be sent again (%r), so it waits here", message.who, exc)
        _pause(delay)
        return
    if hidden:
        raise _copy(message, str(reason))
    raise Retry(exc=reason, when=delay, sig=signature)


def _wait_eagerly(message: Delivered, reason: SyncGuardError) -> None:
    if message.waited >= _EAGER_PATIENCE:
        raise reason
    delay = min(_delay(message), 1.0)
    message.waited += delay
    _pause(delay)


def _has_quorum_queues(app: Any) -> bool:
    return any((queue.queue_arguments or {}).get("x-queue-type") == "quorum" for queue in app.amqp.queues.values())


def _pause(seconds: float) -> None:
    """Wait in place. An event and not a sleep, so that gevent's patching applies and an interrupt gets through."""
    threading.Event().wait(seconds)
