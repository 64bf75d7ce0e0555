"""Keeps leases alive: one thread for renewing, one for watching deadlines, however many leases.

Renewing talks to the store and may hang there. So the deadlines are watched by a second thread that does no I/O: a lease
whose renewal hangs is reported lost the moment its deadline passes, not when the network gives up.

  * A lease is due every ttl/3 (with jitter); everything due in the next moment goes into one statement.
  * Three answers. *Renewed* moves the deadline, counted from the instant before the request was sent. *Lost* ends the
    lease. *Unknown* (no answer, row busy) is tried again soon, until the deadline, and never moves it.
  * Leases are held by weak reference: one that its owner dropped without a release is not kept alive for ever.
  * Threads start with the first lease that lives long enough to need them, and sleep while there is none.
  * Whatever was put into the process's outbox without starting its thread is seen here, within a second.
"""

from __future__ import annotations

import math
import random
import threading
import weakref
from collections.abc import Callable

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.loop import Loop
from celery_syncguard.core.outbox import Outbox
from celery_syncguard.core.store import LockStore, Renewal
from celery_syncguard.errors import StoreUnavailable, SyncGuardError

__all__ = ["Renewer"]

_EXPIRED = "its deadline passed without a renewal"

#: Seconds without a lease after which the threads sleep until the next one.
MAX_IDLE = 60.0


class _Entry:
    __slots__ = ("due_at", "failures", "lease")

    def __init__(self, lease: Lease, due_at: float) -> None:
        self.lease = weakref.ref(lease)
        self.due_at = due_at
        self.failures = 0


class Renewer:
    """Renews the leases of one process.

    Arguments:
        store: where they live.
        outbox: whose thread is started here if something was put in without that.
        idle: called now and then; closes what is idle, and returns in how many seconds to be called again, or None.
    """

    def __init__(self, store: LockStore, outbox: Outbox, *, idle: Callable[[], float | None] = lambda: None) -> None:
        self._store = store
        self._outbox = outbox
        self._idle = idle
        self.forget()

    def forget(self) -> None:
        """After a fork (and at the start): this process has no leases and no threads."""
        self._mutex = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._loop = Loop("syncguard-renewer", self._renew_due)
        self._watch = Loop("syncguard-watchdog", self._report_lost)
        self._busy_at = 0.0
        # When each loop looks again by itself. Written and compared under the mutex, so that a lease which comes while
        # a loop is about to sleep is either seen by it or wakes it.
        self._renews_at = -math.inf
        self._watches_at = -math.inf

    def add(self, lease: Lease) -> None:
        """Keep `lease` alive until it is removed, lost, or dropped."""
        now = clock.now()
        due_at = now + lease.ttl / 3 * random.uniform(0.8, 1.0)
        with self._mutex:
            self._entries[lease.lock_id] = _Entry(lease, due_at)
            self._busy_at = now
            wake_renewer = due_at < self._renews_at
            wake_watchdog = lease.deadline < self._watches_at
        # Both are looked at: the start of the second may have failed.
        if not (self._loop.running and self._watch.running):
            self._loop.start()
            self._watch.start()
        # A busy process looks once a second anyway. Most leases are due later than that and end before, so they need no
        # wake-up.
        if wake_renewer:
            self._loop.wake()
        if wake_watchdog:
            self._watch.wake()

    def remove(self, lease: Lease) -> None:
        with self._mutex:
            self._entries.pop(lease.lock_id, None)

    def renew_now(self, lease: Lease) -> bool:
        """Renew one lease in the calling thread. False: lost.

        Raises:
            StoreUnavailable: no answer, or its row is busy.
        """
        sent_at = clock.now()
        answer = self._store.renew([Renewal(key=lease.key, lock_id=lease.lock_id, ttl=lease.ttl)])
        if lease.lock_id not in answer:
            lease.lose("its row is gone: it was taken over, or released by hand")
            return False
        if answer[lease.lock_id] is None:
            raise StoreUnavailable(f"the lock row of {lease.key!r} is locked by another transaction")
        if not lease.extend(sent_at):
            lease.lose(_EXPIRED)
            return False
        return True

    def stop(self, *, wait: bool = True) -> None:
        for loop in (self._loop, self._watch):
            loop.stop(wait=wait)

    @property
    def count(self) -> int:
        """How many leases are being kept."""
        return len(self._entries)

    # The renewing thread

    def _renew_due(self) -> float | None:
        now = clock.now()
        due: list[tuple[_Entry, Lease]] = []
        any_due = False
        overdue: list[Lease] = []
        with self._mutex:
            for lock_id, entry in list(self._entries.items()):
                lease = entry.lease()
                if lease is None or lease.released or lease.lost_reason is not None:
                    del self._entries[lock_id]
                    continue
                if lease.deadline <= now:
                    overdue.append(lease)
                    continue
                if entry.due_at <= now + lease.ttl / 12:
                    due.append((entry, lease))
                    any_due = any_due or entry.due_at <= now
            # When one is due, what is due soon goes along, so that leases which came at odd moments end up in one
            # statement. Until then nothing is: a loop that merely looks must not split them again.
            due = due if any_due else []
            for entry, lease in due:
                # Re-scheduled before the work: whatever happens in it, there is a next time.
                entry.due_at = now + lease.ttl / 3 * random.uniform(0.8, 1.0)
        for lease in overdue:
            lease.lose(_EXPIRED)
        if due:
            self._renew(due)
        return self._next_wait()

    def _renew(self, due: list[tuple[_Entry, Lease]]) -> None:
        sent_at = clock.now()
        try:
            answer = self._store.renew([Renewal(key=one.key, lock_id=one.lock_id, ttl=one.ttl) for _, one in due])
        except SyncGuardError as exc:
            shortest = min(lease.remaining for _, lease in due)
            logger.warning(
                "could not renew %d lease(s), trying again for %.1f s more: %s", len(due), max(0.0, shortest), exc
            )
            for entry, _ in due:
                self._try_again(entry)
            return
        for entry, lease in due:
            if lease.lock_id not in answer:
                lease.lose("its row is gone: it was taken over, or released by hand")
            elif answer[lease.lock_id] is None:
                self._try_again(entry)
            else:
                entry.failures = 0
                lease.extend(sent_at)

    def _try_again(self, entry: _Entry) -> None:
        lease = entry.lease()
        if lease is None:
            return
        entry.failures = min(entry.failures + 1, 8)
        pause = random.uniform(0.5, 1.0) * min(lease.ttl / 10, 0.05 * 2**entry.failures, 2.0)
        entry.due_at = clock.now() + pause

    def _next_wait(self) -> float | None:
        now = clock.now()
        with self._mutex:
            waits = [entry.due_at - now for entry in self._entries.values()]
            wait = self._pause(waits, now)
            self._renews_at = math.inf if wait is None else now + wait
        self._outbox.start()
        if wait is None or not waits:
            idle = self._idle()
            if wait is None and idle is not None:
                wait = idle
        return wait

    def _pause(self, waits: list[float], now: float) -> float | None:
        """How long a loop may sleep: to the nearest of `waits`; for ever once the process has been idle for long."""
        if not waits:
            return 1.0 if now - self._busy_at < MAX_IDLE else None
        return min(1.0, max(0.001, min(waits)))

    # The watching thread

    def _report_lost(self) -> float | None:
        now = clock.now()
        overdue: list[Lease] = []
        waits: list[float] = []
        with self._mutex:
            for entry in self._entries.values():
                lease = entry.lease()
                if lease is None or lease.released or lease.lost_reason is not None:
                    continue
                if lease.deadline <= now:
                    overdue.append(lease)
                else:
                    waits.append(lease.deadline - now)
            wait = self._pause(waits, now)
            self._watches_at = math.inf if wait is None else now + wait
        for lease in overdue:
            lease.lose(_EXPIRED)
        return wait
