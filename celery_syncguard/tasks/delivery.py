"""One delivery of a task: keys, acquire, body, end.

    acquire ──granted──> body ──> end                2 round trips, with run_once and dedup too
            ──held─────> come back later, skip, or raise
            ──held by this very task──> come back later, always: it must not run beside itself, and must not be thrown
                                        away while the other copy might still die
            ──done─────> answered, not run
            ──dead─────> its process died too often: fails
            ──no answer> come back later, raise, or run unlocked

The end releases the lease, and with it ends the claim and records the completion. It lies outside of Celery's autoretry,
the rest inside. So it sees what autoretry made of a failure, and a next attempt is published before the lock is released, as
it is by a body's own `self.retry()`.

Not here: what becomes of a delivery that does not run (`not_run`), and which call is a delivery's (`gate`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from celery.states import RETRY, STARTED

from celery_syncguard import signals, skipped
from celery_syncguard.core.events import logger
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.process import default_holder, process_id
from celery_syncguard.core.store import Acquire, Dead, Done, Held
from celery_syncguard.errors import LeaseLost, LockHeld, SchemaBehind, StoreUnavailable, SyncGuardError
from celery_syncguard.tasks import claims, not_run
from celery_syncguard.tasks.celery_internals import get_ident
from celery_syncguard.tasks.claims import Outcome
from celery_syncguard.tasks.delivered import Delivered
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.interrupt import Interrupt, interrupt_for

__all__ = ["DELIVERY", "Delivery", "check_outer", "end_without_body"]

#: Where a request keeps its delivery, from the start of its body to its end.
DELIVERY = "_syncguard_delivery"

#: Seconds for which the end of an attempt is remembered.
_ATTEMPT_TTL = 3600.0

_ABSENT = (StoreUnavailable, SchemaBehind)

#: The deliveries whose bodies run in each thread or greenlet, innermost last: an eager call may run inside another one.
_running: dict[Any, list[Delivery]] = {}


def _deliveries_here() -> Sequence[Delivery]:
    return _running.get(get_ident(), ())


def check_outer() -> None:
    """After an eager call inside a body: Celery's tracer took an interrupt that was meant for that body for a failure of
    the inner task.

    Raises:
        LeaseLost: the lease of a body around this call is lost.
    """
    for one in _deliveries_here():
        if one.interrupt is not None and one.lease is not None and one.lease.lost_reason is not None:
            raise one.lease.loss()


def end_without_body(task: Any, request: Any, state: str | None, returned: Any) -> None:
    """After a delivery whose body was never reached, as `before_start` or a `__call__` raised: its claim ends here."""
    if Header.claim_in(request.headers) is None:
        return
    delivery = Delivery(task, request)
    try:
        delivery.options = delivery.options.replace(Header.of(request.headers).options)
    except SyncGuardError:
        pass  # that is what the task failed with
    # Without a state the process is being ended, and the main process knows what becomes of the message.
    again = state in (None, RETRY) or (isinstance(returned, Reject) and returned.requeue)
    delivery.end_claim(Outcome.AGAIN if again else Outcome.ENDED)


class Delivery(Delivered):
    """One delivery of one task, for the message that `request` describes."""

    __slots__ = ("_ended", "_releasing", "claim_passed_on", "interrupt", "key_passed_on", "lease")

    def __init__(self, task: Any, request: Any) -> None:
        # The rest of the header is read when it may fail.
        super().__init__(task, request, Header(claim_key=Header.claim_in(request.headers)), task.task_keys().options)
        self.lease: Lease | None = None
        self.interrupt: Interrupt | None = None
        #: The claim that whatever replaces this task goes on under.
        self.claim_passed_on: str | None = None
        #: Whether a message under this task's id waits for this lock.
        self.key_passed_on = False
        self._ended = False
        self._releasing = False

    def run(self, body: Callable[[], Any], args: Any, kwargs: Any, autoretry: Callable[..., Any] | None) -> Any:
        """Run the body, if it may run; its result, or that of the first run. Raises what Celery's tracer understands.

        Arguments:
            args, kwargs: of the task, for the keys that its message lacks.
            autoretry: Celery's, around everything but the end.
        """

        def attempt() -> Any:
            self.complete(args, kwargs)
            return self._attempt(body)

        failure: BaseException | None = None
        try:
            try:
                # Outside of autoretry: the next attempt could not read it either.
                self.header = Header.of(self.request.headers)
                result = attempt() if autoretry is None else autoretry(attempt)
            except BaseException as exc:
                failure = exc
                self._end(exc)
                raise
            self._end(None)
        except BaseException as exc:
            # Again: a soft time limit may have struck in the end itself. A retry that was published goes on all the same.
            self._end(exc if failure is None else failure)
            raise
        finally:
            failure = None
        return result

    # Keys

    def complete(self, args: Any, kwargs: Any) -> None:
        """Compute the keys that the message lacks. Raises InvalidKey, ImproperlyConfigured, TypeError."""
        self.header, self.options = self.task.task_keys().complete(self.task, self.header, args, kwargs, {})

    # Acquire

    def request_for(self, key: str) -> Acquire:
        """What the store is asked. It keeps the claim as the body needs it, or ends it, in the same round trip."""
        options, until = self.options, self.options.dedup_until
        run_key, task_id = self.run_key, self.request.id
        return Acquire(
            key=key,
            lock_id=new_lock_id(),
            ttl=options.lock_ttl,
            holder=f"{self.who} {default_holder()}",
            process=process_id(),
            task_id=task_id,
            attempt=self.attempt,
            run_keys=(self.attempt_key,) if run_key is None else (run_key, self.attempt_key),
            max_deaths=options.lock_max_deaths,
            claim_key=self.header.claim_key if until != "ttl" else None,
            claim_ttl=options.dedup_ttl if until == "done" else None,
            call_id=self.call_id,
            claim_wait=claims.life(self.task.app, self.request.expires, options.dedup_ttl),
        )

    def _attempt(self, body: Callable[[], Any]) -> Any:
        key = self.lock_key
        if key is None:
            self.end_claim(Outcome.BEGUN)
            return self._run_body(body)
        self._refuse_nesting(key)
        while True:
            request = self.request_for(key)
            try:
                answer = self.guard.acquire_waiting(request, wait=max(self.options.lock_wait, self.patience))
                if isinstance(answer, Held) and self._is_own_predecessor(answer):
                    # A retry is published before the attempt that asked for it has ended.
                    answer = self.guard.acquire_waiting(request, wait=not_run.HANDOVER)
                if isinstance(answer, Lease):
                    self.lease = answer
            except _ABSENT as exc:
                if not_run.without_store(self, exc):
                    return self._run_body(body)
                continue
            except BaseException as exc:
                if not isinstance(exc, SyncGuardError):
                    # A soft time limit or Ctrl-C, perhaps just after the grant.
                    self.guard.give_back(request)
                raise
            if isinstance(answer, Lease):
                return self._run_body(body)
            if isinstance(answer, Done):
                return not_run.answer(self, answer)
            if isinstance(answer, Dead):
                raise not_run.too_many_deaths(self, answer, key)
            not_run.blocked(self, answer)

    def _is_own_predecessor(self, held: Held) -> bool:
        return self.is_ours(held) and held.attempt is not None and held.attempt < self.attempt

    def _refuse_nesting(self, key: str) -> None:
        """An eager call that waits for a lock which its own caller holds would wait for ever."""
        for outer in _deliveries_here():
            if outer.lease is not None and outer.lease.key == key:
                self.guard.counts.update(("held", "raise"))
                raise LockHeld(
                    f"{self.who} would wait for itself: {key!r} is held by {outer.who}, which is calling it; give the inner "
                    f"task another key, or publish it instead",
                    key=key,
                    holder=outer.lease.holder,
                    task_id=outer.request.id,
                    lock_id=outer.lease.lock_id,
                    fence=int(outer.lease.fence),
                )

    # Body

    def _run_body(self, body: Callable[[], Any]) -> Any:
        self.outcome = Outcome.ENDED
        setattr(self.request, DELIVERY, self)
        runs = _running.setdefault(get_ident(), [])
        try:
            try:
                runs.append(self)
                self._keep_claim()
                if self.lease is not None:
                    self._start(self.lease)
                self._report_start()
                return body()
            finally:
                self._disarm()
        except BaseException as exc:
            # Again: the interrupt may have come on the way to the first.
            self._disarm()
            if (loss := self._loss(exc)) is not None:
                # The facts are ours, the place is the body's: where it was interrupted, or called check().
                raise loss.with_traceback(exc.__traceback__) from None
            raise
        finally:
            self._leave()

    def _keep_claim(self) -> None:
        """A lease's acquire has kept the claim already, unless it lasts to its ttl."""
        claim_key, until = self.header.claim_key, self.options.dedup_until
        if claim_key is not None and (until == "ttl" or (until == "done" and self.lease is None)):
            claims.keep(self.guard, claim_key, task_id=self.request.id, ttl=self.options.dedup_ttl)

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
                # Lost before the interrupt was there to be told.
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
        interrupted = (one for one in reversed(_deliveries_here()) if one.interrupt is not None and one.interrupt.fired)
        return next((one.lease.loss() for one in interrupted if one.lease is not None), self.lease.loss())

    def _leave(self) -> None:
        runs = _running.get(get_ident(), [])
        if self in runs:
            runs.remove(self)
        if not runs:
            _running.pop(get_ident(), None)

    # End

    def give_up_lease(self) -> None:
        """What an eager body puts in its own place runs inside of it, and may need the same lock. In a worker it comes after the
        end of the body.
        """
        self._disarm()
        self.key_passed_on = True
        if self.lease is not None:
            self._release(self.lease, Ignore("replaced"), again=False)
            self.lease = None  # only now: a soft time limit leaves it to the end

    def _end(self, failure: BaseException | None) -> None:
        """With everything that the end of this attempt means. Does nothing the second time."""
        self._leave()
        if hasattr(self.request, DELIVERY):
            delattr(self.request, DELIVERY)
        if self._ended:
            return
        again = isinstance(failure, Retry) or (isinstance(failure, Reject) and failure.requeue)
        # A process that is being ended: whether the message comes again is for the main process to know.
        again = again or (failure is not None and not isinstance(failure, Exception))
        if self.header.claim_key == self.claim_passed_on or (
            again and self._header_after(failure).claim_key == self.header.claim_key
        ):
            self.outcome = Outcome.AGAIN
        lease = self.lease
        if lease is not None and not lease.released:
            self._release(lease, failure, again=again)
        elif lease is None or not self._releasing:
            self.end_claim(self.outcome, later=isinstance(failure, _ABSENT))
            if lease is not None:  # the body has released it
                signals.lock_released.send(sender=self.task, lease=lease, released=False)
        self._ended = True

    def _release(self, lease: Lease, failure: BaseException | None, *, again: bool) -> None:
        """Release, end the claim and record the completion, in one round trip."""
        self._releasing = True
        lease.on_lost = None
        # Without a key, as it was sent by name, the next attempt may need the same lock.
        key_passed_on = self.key_passed_on or (
            again and self._header_after(failure).lock_key in (None, self.header.lock_key)
        )
        # Not so: a lost lease, a message that goes back to the queue, a process that is being ended.
        by_itself = failure is None or (isinstance(failure, Exception) and not isinstance(failure, (LeaseLost, Reject)))
        by_itself = by_itself and not lease.lost
        run_key, run_ttl = None, None
        if self.run_key is not None:
            if failure is None:
                run_key, run_ttl = self.run_key, self.options.run_once_ttl
            elif by_itself:
                # One run per attempt, also for copies that come after this release.
                run_key, run_ttl = self.attempt_key, _ATTEMPT_TTL
        try:
            released = claims.end(
                self.guard,
                self.header.claim_key,
                self.outcome,
                task_id=self.request.id,
                until=self.options.dedup_until,
                lease=lease,
                # The next attempt has to find its key free: a key that stays taken after this release would block it.
                min_hold=None if key_passed_on else self.options.lock_min_hold or None,
                run_key=run_key,
                run_ttl=run_ttl,
                attempt_done=by_itself,
                fingerprint=self.header.fingerprint,
            )
        except SyncGuardError as exc:
            logger.error("could not release %r, it ends at its ttl: %s", lease.key, exc)
            released = False
        signals.lock_released.send(sender=self.task, lease=lease, released=released)

    def _header_after(self, failure: BaseException | None) -> Header:
        """The header of the next attempt, which may have other arguments. Raises nothing: a release must follow."""
        signature = failure.sig if isinstance(failure, Retry) else None
        try:
            return self.header if signature is None else Header.of(signature.options.get("headers"))
        except SyncGuardError:
            return Header()
