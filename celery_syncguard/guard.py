"""SyncGuard, the entrance: acquire, hold, inspect, close.

One per application and database. It opens no connection before its first operation, and starts empty in a forked child.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from datetime import timedelta
from typing import Any

from celery_syncguard.core import clock
from celery_syncguard.core.config import Settings
from celery_syncguard.core.events import Events, logger
from celery_syncguard.core.key import new_lock_id, normalize_key, public_key
from celery_syncguard.core.leadership import Leadership
from celery_syncguard.core.lease import Lease, seconds, ttl_seconds
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.outbox import Letter, Outbox
from celery_syncguard.core.process import default_holder, forget_in_children, process_id
from celery_syncguard.core.renewer import Renewer
from celery_syncguard.core.store import Acquire, Dead, Done, Grant, Held, LockRow, LockStore, Pruned, Release
from celery_syncguard.core.turns import Turns
from celery_syncguard.errors import (
    ImproperlyConfigured,
    LockHeld,
    NoLease,
    SchemaBehind,
    StoreUnavailable,
    SyncGuardError,
)
from celery_syncguard.postgres import fencing
from celery_syncguard.postgres.store import PostgresStore

__all__ = ["SyncGuard", "flush_all", "lock_held"]


def lock_held(held: Held) -> LockHeld:
    """The error that says who holds."""
    who = held.holder or "an unnamed holder"
    return LockHeld(
        f"{held.key!r} is held by {who}: held for {held.since:.1f} s, expires in {held.remaining:.1f} s unless renewed",
        key=held.key,
        holder=held.holder,
        task_id=held.task_id,
        lock_id=held.lock_id,
        fence=held.fence,
        since=held.since,
        remaining=held.remaining,
    )


class SyncGuard:
    """Locks in one database.

    Arguments:
        dsn: a libpq connection string or URL, or `memory://`; None: the environment's SYNCGUARD_DSN.
        schema: of our tables; None: the first of the search path.
        pool_size: connections per process.
        timeout: seconds for which an operation tries to reach the server.
        settings: all of these together instead, as a Celery application's configuration gives them.
        store: a store of your own.

    Raises:
        ImproperlyConfigured: an invalid value. Connects to nothing.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str | None = None,
        pool_size: int = 2,
        timeout: float | timedelta = 5.0,
        settings: Settings | None = None,
        store: LockStore | None = None,
    ) -> None:
        if settings is None:
            settings = Settings.from_mapping(
                {
                    "syncguard_dsn": dsn,
                    "syncguard_schema": schema,
                    "syncguard_pool_size": pool_size,
                    "syncguard_timeout": timeout,
                }
            )
        self.settings = settings
        self.events = Events()
        #: What happened in this process so far, for metrics: how often a delivery found its lock "held" and what was done
        #: then ("retry", "skip", "raise", "copy"), was "answered", was "dropped" as a copy of an attempt that has ended or has a
        #: later one running, was "dead" (its process died too often), or found the database "unavailable"; how often a
        #: publish was a "duplicate", and a lease was "lost".
        self.counts: Counter[str] = Counter()
        self.store: LockStore = store if store is not None else _make_store(settings)
        #: What the database has not answered yet.
        self.outbox = Outbox("syncguard-outbox")
        self._renewer = Renewer(self.store, self.outbox, idle=getattr(self.store, "idle", lambda: None))
        self._turns = Turns()
        forget_in_children(self)
        _guards.add(self)

    def __repr__(self) -> str:
        return f"<SyncGuard {self.store!r}>"

    def __enter__(self) -> SyncGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """After a fork: this process holds nothing."""
        self.store.forget()
        self._renewer.forget()
        self._turns = Turns()

    def try_acquire(self, key: str, *, ttl: float | timedelta | None = None, holder: str | None = None) -> Lease | None:
        """Acquire the lock, without waiting. The lease is renewed until it is released, lost, or dropped.

        Arguments:
            key: 1 to 512 UTF-8 bytes.
            ttl: seconds; None: the setting `syncguard_lock_ttl` (30). How long a dead holder blocks others.
            holder: who holds, for people; None: program, host and pid.

        Returns:
            The lease, or None if another one is live.

        Raises:
            InvalidKey, ImproperlyConfigured: before any I/O.
            StoreUnavailable, SchemaBehind: the database did not answer, or lacks our schema.
        """
        answer = self.acquire(self._request(public_key(key), ttl, holder))
        return answer if isinstance(answer, Lease) else None

    def hold(
        self,
        key: str,
        *,
        ttl: float | timedelta | None = None,
        wait: float | timedelta = 0.0,
        holder: str | None = None,
    ) -> _Hold:
        """A context manager (and decorator) that acquires the lock, yields the lease, and releases it, also if a signal
        handler raises between two of these steps.

        Arguments:
            wait: seconds to wait for the lock; a release wakes the waiter at once. Others as `try_acquire`.

        Raises:
            LockHeld: on entering, if it was still held after `wait`. Others as `try_acquire`.
        """
        return _Hold(self, key, ttl=ttl, wait=wait, holder=holder)

    def inspect(self, key: str) -> LockRow | None:
        """The live lease on a key, of any holder; None if it is free. Reserved keys are allowed here."""
        rows = self.store.locks(normalize_key(key))
        return rows[0] if rows else None

    def locks(self, *, limit: int | None = None) -> list[LockRow]:
        """All live leases, oldest first."""
        return self.store.locks(limit=limit)

    def release(self, key: str, *, lock_id: str) -> bool:
        """Release a lease of any holder by hand; the holder notices at its next renewal. False: there was none."""
        return self.store.release(Release(key=normalize_key(key), lock_id=lock_id))

    def prune(self, *, older: float | timedelta = 86_400.0, counters: bool = False) -> Pruned:
        """Delete rows that expired more than `older` seconds ago; with `counters` idle fence counters too (see operations)."""
        return self.store.prune(older=seconds(older, what="older"), counters=counters)

    def leadership(
        self,
        key: str,
        *,
        ttl: float | timedelta | None = None,
        holder: str | None = None,
        on_elected: Callable[[Lease], object] | None = None,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> Leadership:
        """Compete for the leadership of `key` with any number of other processes; a context manager (see `leadership`).

        Arguments:
            key: 1 to about 490 UTF-8 bytes.
            ttl: seconds for which a dead leader blocks the others; None: the setting `syncguard_leader_ttl` (15).
            holder: who this is, for people.
            on_elected, on_lost: called with the lease of a term that begins, and of one that has ended.

        Raises:
            InvalidKey, ImproperlyConfigured: before any I/O.
        """
        return Leadership(
            self,
            public_key(key, what="leadership key"),
            ttl=self.settings.leader_ttl if ttl is None else ttl,
            holder=None if holder is None else _holder(holder),
            on_elected=on_elected,
            on_lost=on_lost,
        )

    def flush(self) -> None:
        """Try once more what the database has not answered yet; called when the process ends. What fails is logged."""
        self.outbox.flush()

    def close(self) -> None:
        """Flush, stop renewing and close the connections. Leases that were not released end at their ttl. May be repeated."""
        self.outbox.close()
        self._renewer.stop()
        self.store.close()

    # For the Celery layer and leadership: complete requests, answers as values.

    def _request(self, key: str, ttl: float | timedelta | None, holder: str | None) -> Acquire:
        return Acquire(
            key=key,
            lock_id=new_lock_id(),
            ttl=self.settings.lock_ttl if ttl is None else ttl_seconds(ttl),
            holder=default_holder() if holder is None else _holder(holder),
            process=process_id(),
        )

    def acquire(self, request: Acquire) -> Lease | Held | Done | Dead:
        """One attempt. A lease that it returns is being renewed."""
        asked_at = clock.now()
        try:
            answer = self.store.acquire(request)
            return answer if not isinstance(answer, Grant) else self._lease_for(request, answer, asked_at)
        except BaseException as exc:
            if not isinstance(exc, SyncGuardError) or (isinstance(exc, StoreUnavailable) and exc.sent):
                # No answer, or a soft time limit in the middle of it, or no thread to renew it in.
                self.give_back(request)
            raise

    def give_back(self, request: Acquire) -> None:
        """Release what was perhaps granted and whose answer got lost, so that it does not block others for a whole ttl."""
        self._release_later(Release(key=request.key, lock_id=request.lock_id), until=clock.now() + request.ttl)

    def _release_later(self, release: Release, *, until: float, start: bool = True) -> None:
        def call() -> None:
            self.store.release(release)

        self.outbox.put(Letter(call, lambda: _tell_unreleased(release), until), start=start)

    def _lease_for(self, request: Acquire, answer: Grant, asked_at: float) -> Lease:
        lease = Lease(
            key=request.key,
            lock_id=request.lock_id,
            fence=answer.fence,
            ttl=request.ttl,
            sent_at=asked_at if answer.sent_at is None else answer.sent_at,
            holder=request.holder or "",
            keeper=self,
        )
        lease.task_id = request.task_id
        self._renewer.add(lease)
        return lease

    def acquire_waiting(self, request: Acquire, *, wait: float) -> Lease | Held | Done | Dead:
        """`acquire`, repeated for `wait` seconds while the key is held."""
        give_up_at = clock.now() + wait
        return self._turns.repeat(
            request.key, lambda: self._acquire_by(request, give_up_at), hear=self.store.wait, until=give_up_at
        )

    def _acquire_by(self, request: Acquire, give_up_at: float) -> Lease | Held | Done | Dead:
        """One attempt, repeated until `give_up_at` while another transaction locks the row (each waits for it on the server)."""
        while True:
            try:
                return self.acquire(request)
            except StoreUnavailable as exc:
                # What was perhaps granted is being released, under the same lock_id.
                if exc.sent or not exc.busy or clock.now() >= give_up_at:
                    raise

    def release_lease(self, lease: Lease, **extras: Any) -> bool:
        """Release, with what a task adds to it (`store.Release`). If the database does not answer, the caller goes on and
        the outbox repeats the release until it is answered or changes nothing any more.
        """
        lost = lease.lost_reason is not None
        release = Release(key=lease.key, lock_id=lease.lock_id, task_id=lease.task_id, **extras)
        try:
            if not lease.end():
                return False
            self._renewer.remove(lease)
            released = self.store.release(release)
        except BaseException as exc:
            absent = isinstance(exc, (StoreUnavailable, SchemaBehind))
            if isinstance(exc, SyncGuardError) and not absent:
                raise
            # No answer, or a soft time limit or Ctrl-C in the middle of it.
            logger.warning("could not release %r, trying again in the background: %r", lease.key, exc)
            lasting = release.run_key is not None or release.claim_key is not None or release.attempt_done
            until = math.inf if lasting else max(clock.now(), lease.deadline) + lease.ttl
            self._release_later(release, until=until)
            if absent:
                return False
            raise
        if not released and not lost:
            logger.warning("%r was not ours any more when it was released (fence %d)", lease.key, lease.fence)
        return released

    def renew_lease(self, lease: Lease) -> bool:
        return self._renewer.renew_now(lease)

    def prove_lease(self, lease: Lease, conn: Any) -> None:
        if not isinstance(self.store, MemoryStore):
            fencing.prove(self.store, lease, conn)
        elif not self.store.fenced(conn, key=lease.key, lock_id=lease.lock_id, fence=int(lease.fence)):
            lease.lose("the store says that it expired or was taken over")
            raise lease.loss()

    def fenced_transaction(self, lease: Lease, conn: Any) -> AbstractContextManager[None]:
        lease.check()
        if not isinstance(self.store, MemoryStore):
            return fencing.fenced_transaction(self.store, lease, conn)
        self.prove_lease(lease, conn)
        return nullcontext()

    def complete_lease(self, lease: Lease, conn: Any) -> bool:
        if lease.run_key is None:
            raise NoLease(
                "lease.complete() records that a run_once task is done, and this task has no run_once: set it"
            )
        self.prove_lease(lease, conn)
        return self.store.complete(
            conn, run_key=lease.run_key, task_id=lease.task_id, ttl=lease.run_ttl, fingerprint=lease.fingerprint
        )

    def lease_ended(self, lease: Lease) -> None:
        """A lease was lost. Called once for each, in the thread that noticed."""
        self._renewer.remove(lease)
        on_lost = lease.on_lost  # read once: the end of the body clears it
        if on_lost is None or on_lost(lease) is not True:
            self.tell_lost(lease)

    def tell_lost(self, lease: Lease) -> None:
        """Called by `lease_ended`, or later by the `on_lost` that returned True there, when it knows the reason."""
        self.counts["lost"] += 1
        logger.warning("lost the lease on %r (fence %d): %s", lease.key, lease.fence, lease.lost_reason)
        self.events.emit("lease_lost", lease=lease)


class _Hold(AbstractContextManager["Lease"], ContextDecorator):
    """What `SyncGuard.hold` returns. A class and not a generator: a signal handler that raises while a generator hands the
    lease over would lose it.
    """

    _lease: Lease | None = None

    def __init__(self, guard: SyncGuard, key: str, **how: Any) -> None:
        self._guard = guard
        self._key = key
        self._how = how

    def _recreate_cm(self) -> _Hold:
        # Each call of a decorated function holds by itself.
        return _Hold(self._guard, self._key, **self._how)

    def __enter__(self) -> Lease:
        guard, how = self._guard, self._how
        patience = seconds(how["wait"], what="wait", maximum=86_400.0)
        request = guard._request(public_key(self._key), how["ttl"], how["holder"])  # noqa: SLF001 - its own
        try:
            answer = guard.acquire_waiting(request, wait=patience)
            if isinstance(answer, Lease):
                self._lease = answer
                return answer
        except SyncGuardError:
            raise
        except BaseException:
            # The handler of a signal raised, perhaps after the grant.
            guard.give_back(request)
            raise
        assert isinstance(answer, Held)  # nothing else was asked for
        raise lock_held(answer)

    def __exit__(self, *_: object) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def __del__(self) -> None:
        # A handler raised between `__enter__` and the block, or at the start of `__exit__`.
        lease = self._lease
        if lease is not None and lease.remaining > 0:
            left = Release(key=lease.key, lock_id=lease.lock_id)
            # No lock is taken, as this runs anywhere. The renewer, which has kept this lease, starts the thread.
            self._guard._release_later(left, until=clock.now() + lease.ttl, start=False)  # noqa: SLF001


_guards: weakref.WeakSet[SyncGuard] = weakref.WeakSet()


@atexit.register
def flush_all(**_: Any) -> None:
    """At the end of the process (some children of a worker do not call `atexit`): flush every guard, also the closed ones,
    since a lease may have been released after the close.
    """
    for guard in list(_guards):
        guard.flush()


def _tell_unreleased(release: Release) -> None:
    if release.run_key is not None:
        logger.error(
            "task %s is done but that could not be written (%r): if it is delivered again, it runs again",
            release.task_id,
            release.run_key,
        )
    if release.claim_key is not None:
        logger.error(
            "could not end the claim %r of task %s: the same work counts as queued until dedup_ttl is over",
            release.claim_key,
            release.task_id,
        )
    logger.warning("could not release %r: it is free when its ttl is over", release.key)


def _make_store(settings: Settings) -> LockStore:
    if settings.in_memory:
        return MemoryStore()
    return PostgresStore(settings.dsn, schema=settings.schema, pool_size=settings.pool_size, timeout=settings.timeout)


def _holder(holder: object) -> str:
    if not isinstance(holder, str):
        raise ImproperlyConfigured(f"holder is text, got {type(holder).__name__}")
    # For people only, so what PostgreSQL cannot store becomes a question mark instead of an error.
    return holder.replace("\0", "?").encode("utf-8", "replace").decode()
