"""The memory store: returns what PostgreSQL's does, within one process. For tests and eager mode.

It passes the same contract suite. It has no transactions, so `fenced` and `complete` act at once and ignore the
connection.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from celery_syncguard.core import clock
from celery_syncguard.core.store import (
    Acquire,
    Buried,
    Claim,
    Dead,
    Done,
    Grant,
    Held,
    LockRow,
    Pruned,
    Release,
    Renewal,
)

__all__ = ["MemoryStore"]

T = TypeVar("T")

#: How long one attempt of a task is remembered for its copies.
_ATTEMPT_TTL = 3600.0

#: How long after its last death a key is not given to a task, if there were too many.
_DEATHS_OF_KEY = 3600.0


@dataclasses.dataclass(slots=True)
class _Row:
    request: Acquire
    fence: int
    acquired: float
    expires: float
    copies: bool = False


@dataclasses.dataclass(slots=True)
class _Deaths:
    count: int
    last: float
    lock_id: str | None


@dataclasses.dataclass(slots=True)
class _Claim:
    task_id: str
    holder: str | None
    claimed: float
    expires: float
    next_task_id: str | None = None
    fingerprint: str | None = None


@dataclasses.dataclass(slots=True)
class _Completion:
    task_id: str | None
    completed: float
    expires: float
    fingerprint: str | None = None


def _attempt_of(request: Acquire) -> tuple[str | None, int | None, str | None]:
    return (request.task_id, request.attempt, request.call_id)


def _died(row: _Row | None, request: Acquire) -> bool:
    """Whether an expired row tells of a death: not if the process that asks held it, nor if it is this very request's."""
    if row is None or row.request.task_id is None or row.request.lock_id == request.lock_id:
        return False
    return row.request.process is None or row.request.process != request.process


def _subjects(key: str, task_id: str | None) -> tuple[str, ...]:
    return (f"key:{key}",) if task_id is None else (f"key:{key}", f"task:{task_id}")


def _drop(table: dict[str, T], is_over: Callable[[T], bool], *, among: Iterable[str] | None = None) -> int:
    """Delete the rows that are over; how many. `among`: the keys to look at instead of all."""
    keys = [key for key in (table if among is None else among) if is_over(table[key])]
    for key in keys:
        del table[key]
    return len(keys)


class MemoryStore:
    """Locks in this process's memory. Threads share it; processes do not."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._rows: dict[str, _Row] = {}
        self._counters: dict[str, int] = {}
        self._completions: dict[str, _Completion] = {}
        self._claims: dict[str, _Claim] = {}
        self._deaths: dict[str, _Deaths] = {}
        # One offset for all instants, so that their differences are right.
        self._offset = clock.wall_ms() / 1000 - clock.now()

    def __repr__(self) -> str:
        return "<MemoryStore>"

    def _instant(self, local: float) -> datetime:
        return datetime.fromtimestamp(local + self._offset, tz=timezone.utc)

    def acquire(self, request: Acquire) -> Grant | Held | Done | Dead:
        with self._changed:
            now = clock.now()
            row = self._rows.get(request.key)
            if row is not None and row.expires > now:
                if row.request.lock_id == request.lock_id:
                    return self._grant(row)
                if row.request.task_id is not None and _attempt_of(row.request) == _attempt_of(request):
                    row.copies = True
                self._keep_claim(request, now)
                return self._held(row, now)
            for run_key in request.run_keys:
                done = self._completions.get(run_key)
                if done is not None and done.expires > now:
                    return Done(run_key, done.task_id, now - done.completed, done.fingerprint)
            if request.max_deaths is not None and request.task_id is not None:
                dead = self._dead(request, request.max_deaths, row, now)
                if dead is not None:
                    return dead
            if row is not None and _died(row, request):
                self._count_death(row, now)
                if row.request.task_id != request.task_id:
                    self._end_claim_of(row)
            fence = max(self._counters.get(request.key, 0) + 1, int((now + self._offset) * 1000))
            self._counters[request.key] = fence
            row = self._rows[request.key] = _Row(request, fence, acquired=now, expires=now + request.ttl)
            if request.claim_ttl is None:
                self._end_claim(request.claim_key, request.task_id, next_ttl=request.claim_wait)
            elif request.claim_key is not None and request.task_id is not None:
                self._claim(request.claim_key, request.task_id, request.claim_ttl, request.holder, now)
            return self._grant(row)

    def _grant(self, row: _Row) -> Grant:
        request = row.request
        return Grant(request.key, request.lock_id, row.fence, self._instant(row.acquired), self._instant(row.expires))

    def _held(self, row: _Row, now: float) -> Held:
        request = row.request
        return Held(
            key=request.key,
            lock_id=request.lock_id,
            fence=row.fence,
            since=now - row.acquired,
            remaining=row.expires - now,
            holder=request.holder,
            task_id=request.task_id,
            attempt=request.attempt,
            call_id=request.call_id,
        )

    def _keep_claim(self, request: Acquire, now: float) -> None:
        """It lives as long as its message waits."""
        claim = self._claims.get(request.claim_key or "")
        if claim is not None and claim.task_id == request.task_id and request.claim_wait is not None:
            claim.expires = max(claim.expires, now + request.claim_wait)

    def _dead(self, request: Acquire, most: int, row: _Row | None, now: float) -> Dead | None:
        if not self._deaths and row is None:
            return None
        key, task = (self._deaths.get(subject) for subject in _subjects(request.key, request.task_id))
        of_task = task.count if task is not None else 0
        of_key = key.count if key is not None and key.last > now - _DEATHS_OF_KEY else 0
        if row is not None and _died(row, request):
            of_task += row.request.task_id == request.task_id
            of_key += row.expires > now - _DEATHS_OF_KEY
        if of_task >= most:
            return Dead(deaths=of_task)
        return Dead(deaths=of_key, of_task=False) if of_key >= 2 * most else None

    def _count_death(self, row: _Row, now: float) -> None:
        if row.request.task_id is not None:
            for subject in _subjects(row.request.key, row.request.task_id):
                before = self._deaths.get(subject)
                count = 1 if before is None else before.count + 1
                self._deaths[subject] = _Deaths(count, now, row.request.lock_id)

    def renew(self, renewals: Sequence[Renewal]) -> dict[str, bool | None]:
        answer: dict[str, bool | None] = {}
        with self._changed:
            now = clock.now()
            for one in renewals:
                row = self._rows.get(one.key)
                if row is not None and row.request.lock_id == one.lock_id:
                    row.expires = now + one.ttl
                    answer[one.lock_id] = True
        return answer

    def release(self, release: Release) -> bool:
        with self._changed:
            now = clock.now()
            self._end_claim(release.claim_key, release.task_id)
            row = self._rows.get(release.key)
            if row is not None and row.request.lock_id != release.lock_id:
                row = None
            if release.run_key is not None and (row is not None or release.attempt_done):
                self._complete(release.run_key, release.task_id, release.run_ttl or 0.0, now, release.fingerprint)
            for subject in _subjects(release.key, release.task_id) if self._deaths else ():
                deaths = self._deaths.get(subject)
                if release.attempt_done:
                    self._deaths.pop(subject, None)
                elif row is None and deaths is not None and deaths.lock_id == release.lock_id:
                    # It was taken for dead.
                    self._deaths[subject] = _Deaths(deaths.count - 1, deaths.last, None)
            if row is None:
                return False
            if release.min_hold is not None and row.acquired + release.min_hold > now:
                # Reserved: it belongs to no process and no task, and a renewal that is under way does not find its lock_id.
                reserved = dataclasses.replace(row.request, lock_id=release.lock_id[::-1], process=None, task_id=None)
                self._rows[release.key] = _Row(reserved, row.fence, row.acquired, row.acquired + release.min_hold)
            else:
                del self._rows[release.key]
            if release.attempt_done and row.copies:
                call_id = row.request.call_id or release.task_id
                self._complete(f"attempt:{call_id}:{row.request.attempt}", release.task_id, _ATTEMPT_TTL, now)
            self._changed.notify_all()
            return True

    def release_process(self, process: str) -> Buried:
        with self._changed:
            now = clock.now()
            dead = [row for row in self._rows.values() if row.request.process == process]
            for row in dead:
                self._count_death(row, now)
                claim = self._claims.get(row.request.claim_key or "")
                if claim is not None and claim.claimed >= row.acquired:
                    # Made by the lease's own acquire. An older one is its message's, which may come again.
                    self._end_claim_of(row)
                del self._rows[row.request.key]
            self._changed.notify_all()
            return Buried(freed=len(dead))

    def locks(self, key: str | None = None, *, limit: int | None = None) -> list[LockRow]:
        with self._changed:
            now = clock.now()
            rows = [
                LockRow(
                    key=row.request.key,
                    lock_id=row.request.lock_id,
                    fence=row.fence,
                    acquired_at=self._instant(row.acquired),
                    expires_at=self._instant(row.expires),
                    since=now - row.acquired,
                    remaining=row.expires - now,
                    holder=row.request.holder,
                    task_id=row.request.task_id,
                    attempt=row.request.attempt,
                )
                for row in self._rows.values()
                if row.expires > now and key in (None, row.request.key)
            ]
        return sorted(rows, key=lambda row: (row.acquired_at, row.key))[:limit]

    def prune(self, *, older: float, counters: bool = False) -> Pruned:
        with self._changed:
            before = clock.now() - older
            claimed = len(self._claims)
            for row in self._rows.values():
                if row.expires <= before:
                    # The lease is what tells that the claim's holder is dead.
                    self._end_claim_of(row)
            locks = _drop(self._rows, lambda row: row.expires <= before)
            completions = _drop(self._completions, lambda done: done.expires <= before)
            _drop(self._claims, lambda claim: claim.expires <= before)
            deaths = _drop(self._deaths, lambda death: death.last <= before - 7 * 86_400)
            idle = [key for key in self._counters if key not in self._rows] if counters else []
            limit = int((before + self._offset) * 1000)
            passed = _drop(self._counters, lambda fence: fence < limit, among=idle)
            return Pruned(locks, completions, claimed - len(self._claims), deaths, passed)

    def wait(self, key: str, timeout: float) -> bool:
        with self._changed:
            row = self._rows.get(key)
            return self._changed.wait_for(lambda: self._rows.get(key) is not row or row is None, timeout)

    def claim(
        self,
        key: str,
        *,
        task_id: str,
        ttl: float,
        holder: str | None = None,
        again: bool = False,
        fingerprint: str | None = None,
    ) -> Claim:
        with self._changed:
            now = clock.now()
            for row in self._rows.values():
                if row.expires <= now and row.request.claim_key == key:
                    self._end_claim_of(row)
            claim = self._claim(key, task_id, ttl, holder, now)
            if claim.task_id == task_id:
                claim.fingerprint = fingerprint or claim.fingerprint
            elif again:
                claim.next_task_id = task_id
            return Claim(
                key=key,
                task_id=claim.task_id,
                ours=claim.task_id == task_id,
                age=now - claim.claimed,
                remaining=claim.expires - now,
                holder=claim.holder,
                fingerprint=claim.fingerprint,
            )

    def _claim(self, key: str, task_id: str, ttl: float, holder: str | None, now: float) -> _Claim:
        claim = self._claims.get(key)
        if claim is not None and claim.task_id == task_id:
            claim.expires = max(claim.expires, now + ttl)
        elif claim is None or claim.expires <= now:
            claim = self._claims[key] = _Claim(task_id=task_id, holder=holder, claimed=now, expires=now + ttl)
        return claim

    def confirm(self, claims: Sequence[tuple[str, str, float]]) -> int:
        with self._changed:
            count = 0
            for key, task_id, ttl in claims:
                claim = self._claims.get(key)
                if claim is not None and claim.task_id == task_id:
                    claim.expires = max(claim.expires, claim.claimed + ttl)
                    count += 1
            return count

    def unclaim(self, key: str, *, task_id: str) -> bool:
        with self._changed:
            return self._end_claim(key, task_id)

    def _end_claim_of(self, row: _Row) -> None:
        """Its holder is dead, so the work that it claimed is over."""
        if row.request.claim_ttl is not None:
            self._end_claim(row.request.claim_key, row.request.task_id)

    def _end_claim(self, key: str | None, task_id: str | None, *, next_ttl: float | None = None) -> bool:
        """True if the task owned it. `next_ttl`: its work has begun, and the claim goes to the task that waits to run again."""
        claim = self._claims.get(key) if key is not None else None
        if key is None or claim is None or task_id is None:
            return False
        if claim.task_id != task_id:
            if claim.next_task_id == task_id:
                claim.next_task_id = None
            return False
        del self._claims[key]
        if claim.next_task_id is not None and next_ttl is not None:
            self._claim(key, claim.next_task_id, next_ttl, None, clock.now())
        return True

    def fenced(self, conn: Any, *, key: str, lock_id: str, fence: int) -> bool:
        with self._changed:
            row = self._rows.get(key)
            if row is None or row.expires <= clock.now():
                return False
            return (row.request.lock_id, row.fence) == (lock_id, fence)

    def complete(
        self, conn: Any, *, run_key: str, task_id: str | None, ttl: float, fingerprint: str | None = None
    ) -> bool:
        with self._changed:
            return self._complete(run_key, task_id, ttl, clock.now(), fingerprint)

    def _complete(
        self, run_key: str, task_id: str | None, ttl: float, now: float, fingerprint: str | None = None
    ) -> bool:
        done = self._completions.get(run_key)
        if done is not None and done.expires > now:
            return False
        self._completions[run_key] = _Completion(task_id, now, now + ttl, fingerprint)
        return True

    def forget(self) -> None:
        self._reset()

    def close(self) -> None:
        """Nothing to close."""
