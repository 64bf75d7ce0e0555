"""A lease: one time-limited holding of a lock, the object that a task holds.

Invariants:
  * the deadline is anchored at the local instant *before* the request was sent, so it is never later than the end of
    the grant by the database's clock, and it lies a margin before that;
  * `check()` needs no I/O and no help from the renewer: a dead renewer cannot make a lost lease look alive;
  * a lease ends once, as lost or as released, and never comes back. Only the renewer moves the deadline;
  * a lease belongs to the process that acquired it. A fork's copy is lost from the start.

Not here: how a lease is renewed (`renewer`), and what the database does with it (`store`).
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

from celery_syncguard.core import clock
from celery_syncguard.core.key import Fence
from celery_syncguard.core.process import process_id
from celery_syncguard.errors import ImproperlyConfigured, LeaseLost, NoLease

__all__ = ["MAX_TTL", "MIN_TTL", "Lease", "margin", "ttl_seconds"]

_PASSED = "its deadline passed without a renewal"
MIN_TTL = 0.5
MAX_TTL = 86_400.0


def margin(ttl: float) -> float:
    """How many seconds before the end of a grant of `ttl` seconds its holder stops trusting it."""
    return min(1.0, ttl / 10)


def seconds(value: Any, *, what: str, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """`value`, a number of seconds or a timedelta, as a float; `ImproperlyConfigured` if it is none in the range."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ImproperlyConfigured(f"{what} is a number of seconds or a timedelta, got {value!r:.80}")
    # Compared before it becomes a float, which a very large int cannot; NaN compares as false.
    if not minimum <= value <= min(maximum, sys.float_info.max):
        bounds = f"at least {minimum:g}" if math.isinf(maximum) else f"from {minimum:g} to {maximum:g}"
        raise ImproperlyConfigured(f"{what} is {bounds} seconds, got {value!r}")
    return float(value)


def ttl_seconds(value: Any, *, what: str = "ttl") -> float:
    """A ttl as seconds: at least 0.5, so that two renewals fit in, at most a day; else `ImproperlyConfigured`.

    A ttl bounds how long a dead holder blocks others, not how long work may take: a long task needs no long ttl.
    """
    return seconds(value, what=what, minimum=MIN_TTL, maximum=MAX_TTL)


class Keeper(Protocol):
    """What a lease asks of the guard that acquired it."""

    def renew_lease(self, lease: Lease) -> bool: ...
    def release_lease(self, lease: Lease) -> bool: ...
    def prove_lease(self, lease: Lease, conn: Any) -> None: ...
    def fenced_transaction(self, lease: Lease, conn: Any) -> AbstractContextManager[None]: ...
    def complete_lease(self, lease: Lease, conn: Any) -> bool: ...
    def lease_ended(self, lease: Lease) -> None: ...


class Lease:
    """One holding of a lock. Made by `SyncGuard.try_acquire` and `hold`, and given to a task as `self.lease`."""

    __slots__ = (
        "__weakref__",
        "_keeper",
        "_mutex",
        "_process",
        "deadline",
        "fence",
        "fingerprint",
        "holder",
        "key",
        "lock_id",
        "lost_reason",
        "on_lost",
        "pid",
        "released",
        "run_key",
        "run_ttl",
        "task_id",
        "ttl",
    )

    def __init__(
        self, *, key: str, lock_id: str, fence: int, ttl: float, sent_at: float, holder: str, keeper: Keeper
    ) -> None:
        self.key = key
        self.lock_id = lock_id
        self.fence = Fence(fence)
        self.ttl = ttl
        self.holder = holder
        self.pid = os.getpid()
        self.deadline = sent_at + ttl - margin(ttl)
        self.lost_reason: str | None = None
        self.released = False
        self.on_lost: Callable[[Lease], object] | None = None  # returns True if it reports the loss itself
        self.task_id: str | None = None
        self.run_key: str | None = None
        self.run_ttl = 0.0
        #: Of the arguments, for the completion.
        self.fingerprint: str | None = None
        self._process = process_id()
        self._keeper = keeper
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        state = "released" if self.released else f"lost: {self.lost_reason}" if self.lost else f"{self.remaining:.1f}s"
        return f"<Lease {self.key!r} fence={int(self.fence)} {state}>"

    @property
    def remaining(self) -> float:
        """Seconds for which this process may still act on the lease; 0.0 once it is lost or released."""
        if self.released or self.lost_reason is not None or self._process != process_id():
            return 0.0
        return max(0.0, self.deadline - clock.now())

    @property
    def lost(self) -> bool:
        """Whether the lease ended before we released it."""
        return not self.released and self.remaining <= 0.0

    def check(self) -> None:
        """Return while this process may act on the lease. Costs no I/O; call it before every step that matters.

        Raises:
            LeaseLost: the lease is lost, or its deadline has passed.
            NoLease: the lease was released.
        """
        if self.released:
            raise NoLease(f"the lease on {self.key!r} was released: acquire a new one")
        if self.remaining <= 0.0:
            if self._process != process_id():
                raise self.loss(
                    f"it belongs to process {self.pid}, and a fork does not inherit leases: acquire one here"
                )
            self.lose(_PASSED)
            raise self.loss()

    def loss(self, reason: str | None = None) -> LeaseLost:
        """The error that says how this lease was lost."""
        reason = reason or self.lost_reason or _PASSED
        return LeaseLost(
            f"the lease on {self.key!r} (fence {int(self.fence)}) is lost: {reason}. Stop: another process may hold it now",
            key=self.key,
            lock_id=self.lock_id,
            fence=int(self.fence),
            reason=reason,
        )

    def renew(self) -> bool:
        """Renew now, for a full ttl. False: the lease is lost. Rarely needed: the renewer does it by itself.

        Raises:
            StoreUnavailable: the database did not answer; the deadline has not moved.
        """
        if self.released or self.lost:
            return False
        return self._keeper.renew_lease(self)

    def release(self) -> bool:
        """Release the lock. True if it was still ours; false if it was taken over or released before."""
        if self.released or self._process != process_id():
            return False
        return self._keeper.release_lease(self)

    def fenced(self, conn: Any) -> None:
        """Tie the transaction that is open on `conn` to this lease: it commits only while the lease is held.

        Call it first in the transaction, before any savepoint. Until the transaction ends the lock cannot be taken over,
        also not after a rollback to a savepoint; renewals do not wait.

        Arguments:
            conn: a psycopg connection or cursor, a SQLAlchemy connection or session, a Django connection or its alias,
                on the database that holds this library's tables.

        Raises:
            LeaseLost: the lease is no longer held; roll back.
            LeaseNotVisible: the connection leads to another database or schema, or its snapshot is older than the lease.
            NotInTransaction: the connection is in autocommit with no transaction open; see `transaction`.
            InSavepoint: the first proof of the transaction is inside a savepoint, which has to be rolled back.
            StoreUnavailable: another transaction has had the lock's row locked for 2 s; roll back.
        """
        self.check()
        self._keeper.prove_lease(self, conn)

    def transaction(self, conn: Any) -> AbstractContextManager[None]:
        """`with lease.transaction(conn):` opens a transaction and fences it. If one is open, it fences that and opens a
        savepoint.

        Raises on entering, before the block runs:
            LeaseLost, InSavepoint: as `fenced`.
            sqlalchemy.exc.InvalidRequestError: an earlier statement began a transaction that nothing here would commit.
        """
        return self._keeper.fenced_transaction(self, conn)

    def complete(self, conn: Any) -> bool:
        """Fence the transaction open on `conn`, and record in it that this `run_once` task is done.

        The caller's rows and the completion commit together or not at all, so the effect happens exactly once however
        often the message is delivered. False if it was recorded before: roll back.

        Raises:
            NoLease: the lease does not belong to a task with `run_once`.
            LeaseLost, NotInTransaction, InSavepoint: as `fenced`.
        """
        self.check()
        return self._keeper.complete_lease(self, conn)

    # What follows is for the guard and its renewer.

    def extend(self, sent_at: float) -> bool:
        """A renewal that was sent at `sent_at` succeeded. False if that comes too late: after the deadline `check` has
        perhaps said that the lease is lost, and it stays lost.
        """
        with self._mutex:
            if self.lost_reason is not None or self.released or clock.now() >= self.deadline:
                return False
            self.deadline = max(self.deadline, sent_at + self.ttl - margin(self.ttl))
            return True

    def lose(self, reason: str) -> bool:
        """End as lost. True the first time."""
        with self._mutex:
            if self.lost_reason is not None or self.released:
                return False
            self.lost_reason = reason
        self._keeper.lease_ended(self)
        return True

    def end(self) -> bool:
        """End as released. True the first time; a lease that was lost before stays lost."""
        with self._mutex:
            if self.released:
                return False
            self.released = True
        return True
