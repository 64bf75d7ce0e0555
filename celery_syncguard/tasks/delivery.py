"""One delivery of a task: acquire, run the body, release; or why it does not run.

    acquire ──granted──> body ──> release            2 round trips, with run_once and dedup too
            ──held─────> come back later, skip, or raise
            ──held by this very task──> come back later, always: it must not run beside itself, and must not be thrown
                                        away while the other copy might still die
            ──done─────> answered, not run
            ──dead─────> its process died too often: fails
            ──no answer> come back later, raise, or run unlocked

"Come back later" publishes the same message again, with the same task id, retries, chord, chain and limits, and with a
count of its own. If it cannot be published, the delivery waits right here instead: work is never lost for want of a broker.
So does one from a Broadcast queue, where a message goes to every worker.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

from celery.exceptions import Ignore, Reject, Retry
from celery.states import READY_STATES, RETRY, STARTED, SUCCESS

from celery_syncguard import signals, skipped
from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.key import RESERVED_PREFIX, new_lock_id, shortened
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.process import default_holder, process_id
from celery_syncguard.core.store import Acquire, Dead, Done, Held
from celery_syncguard.errors import LeaseLost, LockHeld, SchemaBehind, StoreUnavailable, SyncGuardError, TooManyDeaths
from celery_syncguard.guard import lock_held
from celery_syncguard.skipped import Skipped
from celery_syncguard.tasks import app_state
from celery_syncguard.tasks.celery_internals import get_ident, instant
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.interrupt import Interrupt, interrupt_for
from celery_syncguard.tasks.options import TaskOptions
from celery_syncguard.tasks.queues import is_broadcast

__all__ = ["DELIVERY", "Answered", "Delivery", "check_outer", "life", "seconds_until"]

#: Where a request keeps its run.
DELIVERY = "_syncguard_delivery"

#: Where a request says that its delivery has come as far as here.
_REACHED = "_syncguard_reached"

#: Seconds that a retry waits in place for the end of the attempt which published it, and an answer for the first result.
_HANDOVER = 2.0

#: The shortest life of a claim in seconds, however soon its message expires.
_SHORTEST = 1.0

#: Seconds for which the end of an attempt is remembered.
_ATTEMPT_TTL = 3600.0

#: Seconds for which an eager call, which cannot come back later, waits for a held lock.
_EAGER_PATIENCE = 60.0

_ABSENT = (StoreUnavailable, SchemaBehind)

#: The runs of each thread or greenlet, innermost last: an eager call may run inside another one.
_running: dict[Any, list[Delivery]] = {}


class Answered(Ignore):  # type: ignore[misc]
    """Tells Celery's tracer that the outcome has been seen to. Carries the marker of a skipped task."""

    def __init__(self, message: str, marker: Skipped | None = None) -> None:
        super().__init__(message)
        self.skipped = marker


def _runs_here() -> Sequence[Delivery]:
    return _running.get(get_ident(), ())


def check_outer() -> None:
    """After an eager call inside a body: Celery's tracer took an interrupt that was meant for that body for a failure of
    the inner task.

    Raises:
        LeaseLost: the lease of a body around this call is lost.
    """
    for run in _runs_here():
        if run.interrupt is not None and run.lease is not None and run.lease.lost_reason is not None:
            raise run.lease.loss()


class Delivery:
    """One delivery of one task."""

    __slots__ = (
        "_guard_found",
        "_patience",
        "_waited",
        "claim_passed_on",
        "header",
        "interrupt",
        "key_passed_on",
        "lease",
        "options",
        "request",
        "task",
    )

    def __init__(self, task: Any, request: Any, header: Header, options: TaskOptions) -> None:
        self.task = task
        self.request = request
        self.header = header
        self.options = options
        self.lease: Lease | None = None
        self.interrupt: Interrupt | None = None
        #: The claim that whatever replaces this task goes on under.
        self.claim_passed_on: str | None = None
        #: Whether a message under this task's id waits for this lock.
        self.key_passed_on = False
        #: Seconds that it waits in place for its lock, where it cannot come back.
        self._patience = 0.0
        #: Seconds that an eager call has waited for its lock.
        self._waited = 0.0
        self._guard_found: Any = None

    @classmethod
    def of(cls, task: Any, request: Any, args: Any, kwargs: Any) -> Delivery:
        """For the delivery that `request` describes. Computes the keys that its message lacks."""
        header = Header.of(request.headers)
        header, options = task.plan().complete(task, header, args, kwargs, {})
        return cls(task, request, header, options)

    @classmethod
    def never_came(cls, task: Any, request: Any, state: str | None, outcome: Any) -> None:
        """At the end of a delivery: if its task was over before we had our turn, as `before_start` or `__call__` raised or
        the keys could not be made, nobody has ended its claim.
        """
        if hasattr(request, _REACHED) or (claim_key := Header.claim_in(request.headers)) is None:
            return
        # Without a state the process is being ended, and the main process knows what becomes of the message.
        if state in (None, RETRY) or (isinstance(outcome, Reject) and outcome.requeue):
            return
        options = task.plan().options
        try:
            options = options.replace(Header.of(request.headers).options)
        except SyncGuardError:
            pass  # that is what the task failed with
        if options.dedup_until != "ttl":
            cls(task, request, Header(), options)._end_claim(claim_key)  # noqa: SLF001 - our own class

    # Keys

    @property
    def run_key(self) -> str | None:
        """What a completed run is remembered by."""
        return f"task:{self.request.id}" if self.options.run_once is True else self.header.run_key

    @property
    def lock_key(self) -> str | None:
        """The lock's key. A task with run_once alone is locked by that key: it must not run beside itself."""
        key = self.header.lock_key
        if key is None and self.run_key is not None:
            key = shortened(RESERVED_PREFIX + "run:" + self.run_key)
        return key

    @property
    def attempt(self) -> int:
        """Which of the task's attempts this is. What a body put in its own place (`self.replace`) keeps the task's id,
        and comes after all attempts of that.
        """
        replaced = getattr(self.request, "replaced_task_nesting", 0) or 0
        return int(replaced) * 1_000_000 + (self.request.retries or 0)

    @property
    def for_everybody(self) -> bool:
        """Whether each worker got a message of its own (a Broadcast queue): sent again, it would go to all of them."""
        return not self.request.is_eager and is_broadcast(self.task.app, self.request.delivery_info)

    @property
    def call_id(self) -> str:
        """Which publish of the task id this is: a new one is new work, and no copy of what an old one left behind. Where
        each worker has a message of its own, each of those is a call of its own.
        """
        call: str = self.header.call_id or self.request.id
        return f"{call}@{self.request.hostname}" if self.for_everybody else call

    @property
    def attempt_key(self) -> str:
        """What the end of this attempt is remembered by, for its copies."""
        return f"attempt:{self.call_id}:{self.attempt}"

    def _acquire(self, key: str) -> Acquire:
        claim_key = self.header.claim_key
        until = self.options.dedup_until
        run_key = self.run_key
        attempt, task_id = self.attempt, self.request.id
        return Acquire(
            key=key,
            lock_id=new_lock_id(),
            ttl=self.options.lock_ttl,
            holder=f"{self.task.name}[{task_id}] {default_holder()}",
            process=process_id(),
            task_id=task_id,
            attempt=attempt,
            run_keys=(self.attempt_key,) if run_key is None else (run_key, self.attempt_key),
            max_deaths=self.options.lock_max_deaths,
            claim_key=claim_key if until != "ttl" else None,
            claim_ttl=self.options.dedup_ttl if until == "done" else None,
            call_id=self.call_id,
            claim_wait=life(self.task.app, self.request.expires, self.options.dedup_ttl),
        )

    # The stages

    def execute(self, body: Callable[[], Any]) -> Any:
        """Run the body, if it may run; its result, or that of the first run. Raises what Celery's tracer understands."""
        setattr(self.request, _REACHED, True)
        key = self.lock_key
        if key is None:
            if self.header.claim_key is None:
                self._report_start()
                return body()
            return self._run_claimed(body)
        self._refuse_nesting(key)
        while True:
            request = self._acquire(key)
            try:
                answer = self._guard.acquire_waiting(request, wait=max(self.options.lock_wait, self._patience))
                if isinstance(answer, Held) and self._is_own_predecessor(answer):
                    # Celery publishes a retry before the attempt that asked for it has ended.
                    answer = self._guard.acquire_waiting(request, wait=_HANDOVER)
            except _ABSENT as exc:
                if self._without_store(exc):
                    return self._run_body(body, None)
                continue
            except Exception as exc:
                self._stop_asking(request, exc)
                raise
            if isinstance(answer, Lease):
                return self._run_locked(body, answer)
            if isinstance(answer, Done):
                return self._answer(answer)
            if isinstance(answer, Dead):
                self._fail(self._too_many(answer, key))
            self._blocked(answer)

    def _stop_asking(self, request: Acquire, exc: Exception) -> None:
        """The wait and the task are over. By a soft time limit, perhaps just after the grant."""
        if not isinstance(exc, SyncGuardError):
            self._guard.give_back(request)
        if not self._will_autoretry(exc):
            self._end_claim(self.header.claim_key)

    def _too_many(self, dead: Dead, key: str) -> TooManyDeaths:
        why = (
            f" again: its process died {dead.deaths} times in a row while it held {key!r} (lock_max_deaths)"
            if dead.of_task
            else f": the last {dead.deaths} processes that held {key!r} for a task died (lock_max_deaths); the next one is "
            f"started an hour after the last death"
        )
        who = f"{self.task.name}[{self.request.id}]"
        return TooManyDeaths(f"{who} is not started{why}", task_id=self.request.id, key=key, deaths=dead.deaths)

    def _is_own_predecessor(self, held: Held) -> bool:
        return self._is_ours(held) and held.attempt is not None and held.attempt < self.attempt

    def _is_ours(self, held: Held) -> bool:
        """Whether a delivery of this very call holds the lock."""
        return held.task_id == self.request.id and self.call_id == (held.call_id or held.task_id)

    @property
    def _guard(self) -> Any:
        if self._guard_found is None:
            self._guard_found = app_state.guard_for(self.task.app)
        return self._guard_found

    # The body

    def _run_locked(self, body: Callable[[], Any], lease: Lease) -> Any:
        try:
            return self._run_body(body, lease)
        except BaseException as exc:
            if not lease.released:
                # A soft time limit struck between two steps of ours, before the body or at its end.
                self._leave(_running.get(get_ident(), []))
                self._end(lease, exc)
            raise

    def _run_body(self, body: Callable[[], Any], lease: Lease | None) -> Any:
        self.lease = lease
        setattr(self.request, DELIVERY, self)
        runs = _running.setdefault(get_ident(), [])
        failure: BaseException | None = None
        try:
            try:
                runs.append(self)
                self._keep_claim()
                if lease is not None:
                    self._start(lease)
                self._report_start()
                return body()
            finally:
                self._disarm()
        except BaseException as exc:
            # Again: the interrupt may have come on the way to the first.
            self._disarm()
            failure = self._loss(exc) or exc
            if failure is not exc:
                # The facts are ours, the place is the body's: where it was interrupted, or called check().
                raise failure.with_traceback(exc.__traceback__) from None
            raise
        finally:
            self._leave(runs)
            self._end(self.lease, failure)
            failure = None

    def _leave(self, runs: list[Delivery]) -> None:
        if self in runs:
            runs.remove(self)
        if not runs:
            _running.pop(get_ident(), None)
        if hasattr(self.request, DELIVERY):
            delattr(self.request, DELIVERY)

    def give_up_lease(self) -> None:
        """What an eager body puts in its own place runs inside of it, and may need the same lock. In a worker it comes after the
        end of the body.
        """
        self._disarm()
        lease, self.lease = self.lease, None
        self.key_passed_on = True
        self._end(lease, Ignore("replaced"))

    def _start(self, lease: Lease) -> None:
        lease.run_key = self.run_key
        lease.run_ttl = self.options.run_once_ttl
        lease.fingerprint = self.header.fingerprint
        signals.lock_acquired.send(sender=self.task, lease=lease)
        if self.options.lock_on_lost == "interrupt":
            self.interrupt = interrupt_for()
            if self.interrupt is not None:
                lease.on_lost = self.interrupt.fire
            if lease.lost_reason is not None:
                # Lost before anybody could have been told.
                raise lease.loss()

    def _report_start(self) -> None:
        """Store STARTED, in Celery's stead: it does so for every delivery, and a copy that is not run would hide the
        outcome of the run that it is a copy of.
        """
        request = self.request
        if self.task.reports_start and not request.is_eager and skipped.wants_result(self.task, request):
            facts = {"pid": os.getpid(), "hostname": request.hostname}
            self.task.backend.store_result(request.id, facts, STARTED, request=request)

    def _disarm(self) -> None:
        if self.interrupt is not None:
            self.interrupt.disarm()

    def _loss(self, exc: BaseException) -> LeaseLost | None:
        """The error with its facts, if `exc` says that this lease is lost. Between two bytecodes it knows no facts."""
        if not isinstance(exc, LeaseLost) or self.lease is None:
            return None
        if exc.lock_id == self.lease.lock_id:
            return self.lease.loss()
        if exc.lock_id:
            return None
        interrupted = (run for run in reversed(_runs_here()) if run.interrupt is not None and run.interrupt.fired)
        return next((run.lease.loss() for run in interrupted if run.lease is not None), self.lease.loss())

    def _end(self, lease: Lease | None, failure: BaseException | None) -> None:
        """Release, with everything that the end of this attempt means, in one round trip."""
        again = isinstance(failure, Retry) or (isinstance(failure, Reject) and failure.requeue)
        # A process that is being ended: whether the message comes again is for the main process to know.
        again = again or self._will_autoretry(failure) or (failure is not None and not isinstance(failure, Exception))
        claim_key = None
        following = self._header_after(failure)
        if self.options.dedup_until != "ttl" and not (again and following.claim_key == self.header.claim_key):
            claim_key = self.header.claim_key
        if claim_key == self.claim_passed_on:
            claim_key = None
        if lease is None:
            self._end_claim(claim_key)
            return
        lease.on_lost = None
        # Without a key, as it was sent by name, the next attempt may need the same lock.
        key_passed_on = self.key_passed_on or (again and following.lock_key in (None, self.header.lock_key))
        by_itself = _ended_by_itself(failure) and not lease.lost
        run_key, run_ttl = None, None
        if self.run_key is not None:
            if failure is None:
                run_key, run_ttl = self.run_key, self.options.run_once_ttl
            elif by_itself:
                # One run per attempt, also for copies that nobody has seen by now.
                run_key, run_ttl = self.attempt_key, _ATTEMPT_TTL
        try:
            released = self._guard.release_lease(
                lease,
                # What comes again finds its key free: held on for nobody, it would turn its own next attempt away.
                min_hold=None if key_passed_on else self.options.lock_min_hold or None,
                run_key=run_key,
                run_ttl=run_ttl,
                claim_key=claim_key,
                attempt_done=by_itself,
                fingerprint=self.header.fingerprint,
            )
        except SyncGuardError as exc:
            logger.error("could not release %r, it ends at its ttl: %s", lease.key, exc)
            released = False
        signals.lock_released.send(sender=self.task, lease=lease, released=released)

    def _will_autoretry(self, failure: BaseException | None) -> bool:
        """Whether Celery's autoretry, which lies outside of us, will publish another attempt."""
        if failure is None:
            return False
        task = self.task
        retried = tuple(getattr(task, "autoretry_for", ()) or ())
        if not retried or not isinstance(failure, retried) or isinstance(failure, Ignore):
            return False
        if isinstance(failure, tuple(getattr(task, "dont_autoretry_for", ()) or ())):
            return False
        limit = (getattr(task, "retry_kwargs", None) or {}).get("max_retries")
        limit = getattr(task, "override_max_retries", limit)
        if limit is None:
            # As `Task.retry` takes it: the task's own, and only None there is no limit.
            limit = task.max_retries
        return limit is None or (self.request.retries or 0) < limit

    def _run_claimed(self, body: Callable[[], Any]) -> Any:
        """A task with a dedup key and no lock."""
        if self.options.dedup_until == "start":
            self._end_claim(self.header.claim_key)
            self.header = self.header._replace(claim_key=None)
        return self._run_body(body, None)

    def _keep_claim(self) -> None:
        """Its publisher may have died before it could confirm the claim. A lease's acquire has seen to it already."""
        claim_key = self.header.claim_key
        until = self.options.dedup_until
        if claim_key is not None and (until == "ttl" or (until == "done" and self.lease is None)):
            self._confirmer.confirm(claim_key, task_id=self.request.id, ttl=self.options.dedup_ttl)

    def _header_after(self, failure: BaseException | None) -> Header:
        """The header of the next attempt, which may have other arguments. Raises nothing: a release must follow."""
        signature = failure.sig if isinstance(failure, Retry) else None
        try:
            return self.header if signature is None else Header.of(signature.options.get("headers"))
        except SyncGuardError:
            return Header()

    def _end_claim(self, claim_key: str | None) -> None:
        if claim_key is None:
            return
        self._confirmer.withdraw(claim_key, task_id=self.request.id)
        try:
            self._guard.store.unclaim(claim_key, task_id=self.request.id)
        except SyncGuardError as exc:
            logger.warning("could not end the claim %r, trying again in the background: %s", claim_key, exc)
            self._end_claim_later(claim_key)

    def _end_claim_later(self, claim_key: str | None) -> None:
        if claim_key is not None:
            self._confirmer.end(claim_key, task_id=self.request.id, ttl=self.options.dedup_ttl)

    @property
    def _confirmer(self) -> Any:
        return app_state.state_of(self.task.app).confirmer

    # Not running

    def _fail(self, exc: BaseException) -> NoReturn:
        """Raise what this delivery fails with. The claim ends with it, unless the next attempt goes on under that."""
        if not self._will_autoretry(exc):
            self._end_claim(self.header.claim_key)
        raise exc

    def _answer(self, done: Done) -> Any:
        """The work was done before."""
        who = f"{self.task.name}[{self.request.id}]"
        if done.run_key != self.run_key:
            logger.info("%s not run: another delivery of this attempt ended %.1f s ago", who, done.age)
            raise Answered("another delivery of this attempt has ended")
        logger.info("%s not run: %r was done by task %s %.1f s ago", who, done.run_key, done.task_id, done.age)
        if self.header.differs(done.fingerprint):
            logger.warning("%s: task %s did %r with other arguments than these", who, done.task_id, done.run_key)
        self._guard.counts["answered"] += 1
        signals.run_answered.send(sender=self.task, done=done)
        if self.options.dedup_until != "ttl":
            self._end_claim(self.header.claim_key)
        return self._first_result(done)

    def _first_result(self, done: Done) -> Any:
        """What the first run returned, if a result backend knows; else None."""
        ignored = self.task.ignore_result if self.request.ignore_result is None else self.request.ignore_result
        if done.task_id is None or ignored or (self.request.is_eager and not self.task.store_eager_result):
            return None
        # The lock is released before Celery stores the result. Answering in between would store None over it.
        give_up_at = clock.now() + (_HANDOVER if done.age < 2 * _HANDOVER else 0.0)
        while True:
            try:
                meta = self.task.backend.get_task_meta(done.task_id)
            except Exception as exc:  # noqa: BLE001 - any backend, any fault: the work is done all the same
                logger.info("the first run's result cannot be had: %r", exc)
                return None
            if meta.get("status") == SUCCESS:
                return meta.get("result")
            if meta.get("status") in READY_STATES or clock.now() >= give_up_at:
                return None
            _pause(0.05)

    def _without_store(self, exc: SyncGuardError) -> bool:
        """The database cannot be asked. True: run unlocked. Returns False to try again; else raises."""
        mode = self.options.lock_on_unavailable
        if mode == "run":
            logger.warning("%s[%s] runs without its lock: %s", self.task.name, self.request.id, exc)
            return True
        if mode == "raise" or self.request.is_eager:
            if not self._will_autoretry(exc):
                self._end_claim_later(self.header.claim_key)
            raise exc
        logger.warning("%s[%s] not run, will come back: %s", self.task.name, self.request.id, exc)
        self._come_back(exc, hidden=False)
        return False

    def _refuse_nesting(self, key: str) -> None:
        """An eager call that waits for a lock which its own caller holds would wait for ever."""
        for outer in _runs_here():
            if outer.lease is not None and outer.lease.key == key:
                self._fail(
                    LockHeld(
                        f"{self.task.name}[{self.request.id}] would wait for itself: {key!r} is held by "
                        f"{outer.task.name}[{outer.request.id}], which is calling it; give the inner task another key, or "
                        f"publish it instead",
                        key=key,
                        holder=outer.lease.holder,
                        task_id=outer.request.id,
                        lock_id=outer.lease.lock_id,
                        fence=int(outer.lease.fence),
                    )
                )

    def _blocked(self, held: Held) -> None:
        """The lock is held. Returns to try again at once; else raises."""
        who = f"{self.task.name}[{self.request.id}]"
        error = lock_held(held)
        own = self._is_ours(held)
        if own and held.attempt is not None and held.attempt > self.attempt:
            # The attempt that runs was published by this one, which is delivered once more.
            logger.info("%s not run: a later attempt of it runs already", who)
            raise Answered("a later attempt runs already")
        outcome = "copy" if own else self.options.lock_on_held
        delay = self._delay()
        self._guard.counts.update(("held", outcome))
        signals.lock_held.send(
            sender=self.task, held=held, outcome=outcome, delay=delay if outcome in ("copy", "retry") else None
        )
        if own:
            logger.info(
                "%s not run: it runs already, for %.1f s; this copy comes back in %.1f s", who, held.since, delay
            )
            self._come_back(error, hidden=held.attempt == self.attempt, delay=delay)
        elif outcome == "raise":
            logger.info("%s fails: %s", who, error)
            self._fail(error)
        elif outcome == "skip":
            self._skip(held, error)
        elif self.for_everybody:
            logger.info("%s waits here, as it was sent to every worker: %s", who, error)
            self._come_back(error, hidden=False, delay=delay)
        else:
            logger.info("%s not run, comes back in %.1f s: %s", who, delay, error)
            self._come_back(error, hidden=False, delay=delay)

    def _skip(self, held: Held, error: LockHeld) -> None:
        marker = Skipped(key=held.key, holder=held.holder, task_id=held.task_id, since=round(held.since, 3))
        logger.info("%s[%s] skipped: %s", self.task.name, self.request.id, error)
        self._end_claim(self.header.claim_key)
        signals.task_skipped.send(sender=self.task, skipped=marker)
        # Under one task id there is one result: that of the body which runs.
        if held.task_id != self.request.id:
            if not self.request.is_eager:
                skipped.settle(self.task, self.request, marker)
            elif self.task.store_eager_result and skipped.wants_result(self.task, self.request):
                stored = skipped.marker_for(self.task.backend, marker)
                self.task.backend.store_result(self.request.id, stored, skipped.SKIPPED, request=self.request)
        raise Answered(f"skipped: {error}", marker)

    def _delay(self) -> float:
        """Seconds until this message comes back: anywhere between the lower bound and a ceiling, which begins at twice that
        and doubles each time up to the upper one. So those that met the same holder do not come back together.
        """
        low, high = self.options.lock_retry_delay
        ceiling = min(high, low * 2.0 ** min(self.header.held + 1, 32))
        return random.uniform(low, ceiling)

    def _come_back(self, reason: SyncGuardError, *, hidden: bool, delay: float | None = None) -> None:
        """Publish this message again and leave. Returns if that is not possible: the caller tries again in place.

        `hidden`: another copy of this attempt is running, so its state must not be overwritten by ours.
        """
        delay = self._delay() if delay is None else delay
        if self.request.is_eager:
            self._wait_eagerly(reason)
            return
        if self.for_everybody:
            self.header = self.header._replace(held=self.header.held + 1)
            if isinstance(reason, LockHeld):
                self._patience = delay
            else:
                _pause(delay)
            return
        if delay < 1.0 and _has_quorum_queues(self.task.app):
            delay = 1.0  # Celery's native delayed delivery refuses what is shorter
        header = self.header._replace(
            held=self.header.held + 1,
            claimed=self.header.claimed or self.header.claim_key is not None,
        )
        signature = self.task.signature_from_request(
            self.request,
            headers=header.into(self.request.headers),
            countdown=delay,
            retries=self.request.retries,
            ignore_result=not skipped.wants_result(self.task, self.request),
            # What logs may show of the arguments was for the publisher to say.
            argsrepr=getattr(self.request, "argsrepr", None),
            kwargsrepr=getattr(self.request, "kwargsrepr", None),
            add_to_parent=False,
        )
        try:
            signature.apply_async()
        except Exception as exc:  # noqa: BLE001 - whatever a broker's client raises
            logger.warning("%s[%s] cannot be sent again (%r), so it waits here", self.task.name, self.request.id, exc)
            _pause(delay)
            return
        if hidden:
            raise Answered(str(reason))
        raise Retry(exc=reason, when=delay, sig=signature)

    def _wait_eagerly(self, reason: SyncGuardError) -> None:
        self.header = self.header._replace(held=self.header.held + 1)
        if self._waited >= _EAGER_PATIENCE:
            raise reason
        delay = min(self._delay(), 1.0)
        self._waited += delay
        _pause(delay)


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


def _ended_by_itself(failure: BaseException | None) -> bool:
    """Not so: a lost lease, a message that goes back to the queue, a process that is being ended."""
    return failure is None or (isinstance(failure, Exception) and not isinstance(failure, (LeaseLost, Reject)))


def _has_quorum_queues(app: Any) -> bool:
    return any((queue.queue_arguments or {}).get("x-queue-type") == "quorum" for queue in app.amqp.queues.values())


def _pause(seconds: float) -> None:
    """Wait in place. An event and not a sleep, so that gevent's patching applies and an interrupt gets through."""
    import threading

    threading.Event().wait(seconds)
