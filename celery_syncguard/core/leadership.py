"""Leadership: of many processes that could do something, one does. For beat, and for any program.

                 acquired                     released by us
       standby ------------> leading ------------------------> standby or stopped
          ^                     |
          +---------------------+
             lost: deadline passed, or the row is gone

Leadership is a lease on a reserved key, and nothing else. Its fence is the number of the *term*, higher than every earlier
term. `leading` looks at its deadline, so a process that was frozen knows that it lost its term before it does anything else.
The renewer keeps it, whatever the program is busy with.

  * A standby hears of a release at once; otherwise it looks again when the lease that it was told of ends, and at least
    once a second, with jitter. It writes nothing except that it waits.
  * A term ends once. What comes after it is another term with a higher number.
  * A process that lost its term, or stepped down, lets the others go first: until one of them leads, two seconds at most.
  * Nothing that happens here ends the process or logs a traceback.

Not here: what a leader does, the lease (`lease`, `renewer`), and how an operator ends a term (`leader_key`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.key import Fence, new_lock_id
from celery_syncguard.core.leader_key import Guard, leader_lock_key, take_note
from celery_syncguard.core.lease import Lease, ttl_seconds
from celery_syncguard.core.loop import Bell, Loop
from celery_syncguard.core.process import default_holder, process_id
from celery_syncguard.core.store import Acquire, Dead, Done, Held, Release
from celery_syncguard.errors import SyncGuardError

__all__ = ["Leader", "Leadership"]

#: Seconds after which a standby looks again although it heard nothing: a pooler may keep notifications from it.
_LOOK = 0.8
#: Seconds for which the others may go first, at most, and between two looks at whether one of them did.
_ASIDE, _GLANCE = 2.0, 0.2
#: Seconds without an answer after which a standby is not healthy.
_SILENCE = 3.0
#: Bounds in seconds of the pause while the database cannot be asked.
_AGAIN = (0.3, 2.0)
#: Seconds between two log lines about a database that cannot be asked.
_REMIND = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, as this process last heard. `since` and `remaining` in seconds, from now."""

    term: Fence | None
    holder: str | None
    since: float
    remaining: float
    ours: bool


class Leadership:
    """One process's part in the leadership of `key`. Made by `SyncGuard.leadership`; a context manager that starts and
    stops it.

    Arguments:
        guard: its database decides.
        key: processes with the same key share one leader.
        ttl: seconds for which a dead leader keeps the others waiting.
        holder: who this process is, for people.
        alive: asked in the leadership's thread, at least once a second; while it returns False, this process does not lead.
            So a program that hangs is replaced although its lease could be renewed for ever.
        on_elected: called with the lease of a new term; `on_lost`: called with it when the term has ended in any way. Both
            run in the leadership's thread, and must be quick.
    """

    def __init__(
        self,
        guard: Guard,
        key: str,
        *,
        ttl: float | timedelta,
        holder: str | None = None,
        alive: Callable[[], bool] = lambda: True,
        on_elected: Callable[[Lease], object] | None = None,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> None:
        self.key = key
        self.lock_key = leader_lock_key(key)
        self.ttl = ttl_seconds(ttl)
        self._guard = guard
        self._holder = holder
        self._alive = alive
        self._on_elected = on_elected
        self._on_lost = on_lost
        self._lease: Lease | None = None
        self._heard: tuple[Held, float] | None = None
        self._answered_at: float | None = None
        self._reminded_at: float | None = None
        self._not_before = 0.0
        self._ours: str | None = None  # lock_id of the latest term of this process
        self._asked_down = False
        self._busy = False  # a term may be on its way here, or is being given up
        self._stopping = False
        self._stopped = Bell()
        self._waiting: list[Bell] = []  # those of `elect` and `lost`; no lock, as a signal handler may interrupt these
        self._loop = Loop(f"syncguard-leader-{key}"[:60], self._step)

    def __repr__(self) -> str:
        return f"<Leadership {self.key!r} {f'term {int(self.term)}' if self.term is not None else 'standby'}>"

    def __enter__(self) -> Leadership:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Where we stand

    @property
    def lease(self) -> Lease | None:
        """The lease of the present term; None on standby. Costs no I/O, and a term whose deadline passed is over."""
        lease = self._lease
        return lease if lease is not None and lease.remaining > 0 else None

    @property
    def leading(self) -> bool:
        return self.lease is not None

    @property
    def term(self) -> Fence | None:
        """The number of the present term: higher than that of every earlier term of any process. None on standby."""
        lease = self.lease
        return None if lease is None else lease.fence

    @property
    def leader(self) -> Leader | None:
        """Who leads, as far as this process knows."""
        lease = self.lease
        if lease is not None:
            return Leader(term=lease.fence, holder=lease.holder, since=0.0, remaining=lease.remaining, ours=True)
        if self._heard is None:
            return None
        held, heard_at = self._heard
        age = clock.now() - heard_at
        if age > held.remaining:
            return None
        term = None if held.fence is None else Fence(held.fence)
        return Leader(term=term, holder=held.holder, since=held.since + age, remaining=held.remaining - age, ours=False)

    @property
    def healthy(self) -> bool:
        """Whether the database has answered recently: to the last renewal of a leader, to a standby within 3 s."""
        lease = self.lease
        if lease is not None:
            return lease.remaining > self.ttl / 3
        return self._answered_at is not None and clock.now() - self._answered_at < _SILENCE

    def elect(self, *, timeout: float | None = None) -> Lease | None:
        """Wait to be elected, at most `timeout` seconds (None: without end). Returns the lease of the term, or None.

        `lease.fence` is the term; `lease.check()` raises once the term is over.
        """
        self.start()
        self._wait(lambda: self.leading or self._stopping, timeout)
        return self.lease

    def lost(self, *, timeout: float = 0.0) -> bool:
        """Whether this process does not lead (any more); waits up to `timeout` seconds for that to become true."""
        return self._wait(lambda: not self.leading, timeout)

    def _wait(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        until = None if timeout is None else clock.now() + timeout
        told = Bell()
        self._waiting.append(told)
        try:
            while not holds():
                left = None if until is None else until - clock.now()
                if left is not None and left <= 0:
                    return False
                # A deadline that passes rings no bell.
                told.wait(0.25 if left is None else min(left, 0.25))
                told.clear()
        finally:
            self._waiting.remove(told)
        return True

    def _tell(self) -> None:
        for told in tuple(self._waiting):
            told.set()

    # What a program asks for

    def start(self) -> None:
        """Stand for election, from now on, in a thread. May be repeated."""
        if not self._stopping:
            self._loop.start()

    def step_down(self) -> None:
        """End the term, and let another process lead first. Does not wait. On standby it does nothing."""
        self._asked_down = True
        self._loop.wake()

    def stop(self, *, timeout: float = 5.0) -> bool:
        """End the term and stand no more. False: after `timeout` seconds the release, or the answer to an election, is not
        there yet.

        It takes no lock, so a signal handler may call it, also one that interrupts another: the leadership's thread does
        the release. If the interrupted code holds what that thread needs (the pool's lock, say), it returns False, and a
        second call, once that code is unwound, waits for the rest.
        """
        self._stopping = True
        self._loop.wake()
        # In this order: a term that has arrived was seen on its way, or is seen now; one that has ended since that look is
        # seen ending, or its release is done.
        idle = not self._busy and self._lease is None and not self._busy
        if idle or not self._loop.running:
            return True
        return self._stopped.wait(timeout)

    # The leadership's thread

    def _step(self) -> float | None:
        if self._stopping:
            self._end_term("stopped")
            self._loop.stop(wait=False)
            self._stopped.set()
            return None
        lease = self._lease
        if lease is not None:
            if self._asked_down:
                self._asked_down = False
                self._end_term("stepped down")
            elif lease.remaining > 0:
                if self._alive():
                    return 0.5
                self._end_term("it makes no progress: stepped down")
            else:
                lease.lose("its deadline passed without a renewal")
                self._end_term(lease.lost_reason or "it was released")
            self._not_before = clock.now() + min(_ASIDE, self.ttl / 5)
        self._asked_down = False
        if not self._alive():
            return 1.0
        early = self._not_before - clock.now()
        if early > 0 and not self._another_leads():
            return min(early, _GLANCE)
        self._not_before = 0.0
        return self._stand()

    def _another_leads(self) -> bool:
        # Once another one leads, this process is a standby like any, and must not miss that one's release.
        try:
            row = self._guard.inspect(self.lock_key)
        except SyncGuardError:
            return False
        self._answered_at = clock.now()
        return row is not None and row.lock_id != self._ours

    def _stand(self) -> float:
        try:
            answer = self._ask()
            if self._stopping or answer is None:
                return 0.0
            if isinstance(answer, Lease):
                return 0.5
            assert isinstance(answer, Held)  # nothing else was asked for
            self._hear(answer)
            pause = _LOOK * random.uniform(0.8, 1.0)
            # At the end of the lease all standbys ask at once; a little jitter lets one of them be first.
            self._guard.store.wait(self.lock_key, min(pause, max(0.05, answer.remaining + random.uniform(0.0, 0.2))))
        except SyncGuardError as exc:
            now = clock.now()
            if self._stopping:
                return 0.0
            if self._reminded_at is None or now - self._reminded_at > _REMIND:
                self._reminded_at = now
                logger.warning("cannot ask who leads %r, so this process does not: %s", self.key, exc)
            return random.uniform(*_AGAIN)
        if self._reminded_at is not None:
            self._reminded_at = None
            logger.info("can ask again who leads %r", self.key)
        return 0.0

    def _ask(self) -> Lease | Held | Done | Dead | None:
        """The answer to an acquire. None: stopped, and so not asked."""
        holder = self._holder or default_holder()
        request = Acquire(key=self.lock_key, lock_id=new_lock_id(), ttl=self.ttl, holder=holder, process=process_id())
        self._busy = True  # before the look at whether it may: a stop looks the other way round
        try:
            if self._stopping:
                return None
            answer = self._guard.acquire(request)
            self._answered_at = clock.now()
            if isinstance(answer, Lease):
                self._begin_term(answer)
            return answer
        finally:
            self._busy = False

    def _hear(self, held: Held) -> None:
        before, self._heard = self._heard, (held, clock.now())
        if before is None or before[0].lock_id != held.lock_id:
            holder = held.holder or "an unnamed holder"
            logger.info("standby for %r: %s leads, term %s, for %.1f s", self.key, holder, held.fence, held.since)

    def _begin_term(self, lease: Lease) -> None:
        self._reminded_at = None
        self._heard = None
        self._ours = lease.lock_id
        lease.on_lost = self._noticed
        self._lease = lease
        self._tell()
        logger.info("elected: this process (%s) leads %r, term %d", lease.holder, self.key, lease.fence)
        self._call(self._on_elected, lease)

    def _end_term(self, reason: str) -> None:
        lease = self._lease
        if lease is None:
            return
        self._busy = True  # before the lease is gone from sight: a stop has to wait until the release is done
        try:
            self._lease = None
            self._tell()
            # Before it is logged: a signal handler that waits for this may have interrupted code that logs.
            if lease.lost and self._was_asked(lease):
                logger.info("an operator ended term %d: this process leads %r no more", lease.fence, self.key)
            elif lease.lost:
                # Its row may still be there, and would keep all others waiting until it expires.
                with contextlib.suppress(SyncGuardError):
                    self._guard.store.release(Release(key=lease.key, lock_id=lease.lock_id))
                self._guard.tell_lost(lease)
                logger.warning(
                    "standby: this process no longer leads %r, term %d is lost: %s", self.key, lease.fence, reason
                )
            else:
                lease.release()
                logger.info("%s: this process leads %r no more, term %d is over", reason, self.key, lease.fence)
            self._call(self._on_lost, lease)
        finally:
            self._busy = False

    def _noticed(self, _lease: Lease) -> bool:
        self._loop.wake()
        return True  # logged by `_end_term`

    def _was_asked(self, lease: Lease) -> bool:
        """Whether an operator ended the term (`end_term`)."""
        if clock.now() >= lease.deadline:
            return False  # the database did not answer in time, and another question would only take time
        with contextlib.suppress(SyncGuardError):
            return take_note(self._guard.store, self.key, lock_id=lease.lock_id)
        return False

    def _call(self, listener: Callable[[Lease], Any] | None, lease: Lease) -> None:
        if listener is None:
            return
        try:
            listener(lease)
        except Exception:  # an error in a program's own callback must not end its term  # noqa: BLE001
            logger.exception("a listener of the leadership %r failed", self.key)
