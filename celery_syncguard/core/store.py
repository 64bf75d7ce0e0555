"""What a lock store can do, and the values that it returns. `postgres` and `memory` implement it.

Every method is one round trip at most, may be called from any thread, and returns or raises `StoreUnavailable` (nothing is
known) or `SchemaBehind`. Seconds are floats. An instant of the store's clock never leaves the store except as a difference,
or as a `datetime` for people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

__all__ = [
    "Acquire",
    "Buried",
    "Claim",
    "Dead",
    "Done",
    "Grant",
    "Held",
    "LockRow",
    "LockStore",
    "Pruned",
    "Release",
    "Renewal",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Acquire:
    """A request for a lock. Only `key`, `lock_id` and `ttl` are needed; the rest comes from a task.

    `run_keys`: return `Done` instead if one of these is completed. `max_deaths`: return `Dead` if the task lost that many
    leases in a row by the death of its process, or the key twice as many, the last within an hour. `claim_key`: the task's
    claim. Granted: extended to `claim_ttl` seconds from now, or ended if that is None. Held: extended to `claim_wait`.
    `call_id`: which publish of the task id this is.
    """

    key: str
    lock_id: str
    ttl: float
    holder: str | None = None
    process: str | None = None
    task_id: str | None = None
    attempt: int | None = None
    run_keys: tuple[str, ...] = ()
    max_deaths: int | None = None
    claim_key: str | None = None
    claim_ttl: float | None = None
    call_id: str | None = None
    claim_wait: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """The lock is ours: the fence, and when the grant ends on the store's clock.

    `sent_at`: the local instant before the request was first sent, if the store knows one later than its call.
    """

    key: str
    lock_id: str
    fence: int
    acquired_at: datetime
    expires_at: datetime
    sent_at: float | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Another lease is live on the key. None: its holder left that out, or wrote a fence that is not a number."""

    key: str
    lock_id: str
    fence: int | None
    since: float
    remaining: float
    holder: str | None = None
    task_id: str | None = None
    attempt: int | None = None
    call_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The work was done by `task_id`, `age` seconds ago, with arguments of this fingerprint."""

    run_key: str
    task_id: str | None
    age: float
    fingerprint: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Dead:
    """Processes died too often in a row: the task's own, or (`of_task` false) those that held the key."""

    deaths: int
    of_task: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Renewal:
    """A lease to renew."""

    key: str
    lock_id: str
    ttl: float


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """An end of a lease. `min_hold` reserves the key until so many seconds after the acquire; `run_key` records a completion
    for `run_ttl`; `claim_key` ends the task's claim; `attempt_done`: the attempt ended by itself, under its lease, so a
    completion of it is recorded even when the lease is gone by now, and the deaths before it are forgotten.
    """

    key: str
    lock_id: str
    min_hold: float | None = None
    task_id: str | None = None
    run_key: str | None = None
    run_ttl: float | None = None
    claim_key: str | None = None
    attempt_done: bool = False
    fingerprint: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LockRow:
    """A live lease. A `fence` that another client wrote, and that is not a number, is its text."""

    key: str
    lock_id: str
    fence: int | str
    acquired_at: datetime
    expires_at: datetime
    since: float
    remaining: float
    holder: str | None
    task_id: str | None
    attempt: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """Who owns a claim: `ours` tells whether that is the asking task. `age` and `remaining` in seconds."""

    key: str
    task_id: str
    ours: bool
    age: float
    remaining: float
    holder: str | None = None
    fingerprint: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Buried:
    """How many leases of a dead process were freed, and how many are left because their rows are locked."""

    freed: int
    busy: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows of each kind were deleted."""

    locks: int
    completions: int
    claims: int
    deaths: int
    counters: int


class LockStore(Protocol):
    """A place where locks live."""

    def acquire(self, request: Acquire) -> Grant | Held | Done | Dead:
        """Take the lock, or say why not. Repeating a request with the same lock_id returns the same grant."""

    def renew(self, renewals: Sequence[Renewal]) -> dict[str, bool | None]:
        """Renew all of them: lock_id -> True (renewed) or None (busy, try again). A lost lease is missing."""

    def release(self, release: Release) -> bool:
        """End a lease early. False: it was not ours any more."""

    def release_process(self, process: str) -> Buried:
        """Free every lease of a process that is dead, counting the deaths. Waits for no locked row."""

    def locks(self, key: str | None = None, *, limit: int | None = None) -> list[LockRow]:
        """The live leases, oldest first; with `key` only that one's."""

    def prune(self, *, older: float, counters: bool = False) -> Pruned:
        """Delete what has been over for `older` seconds; `counters`: idle fence counters too."""

    def wait(self, key: str, timeout: float) -> bool:
        """Wait until the lease on `key` may be gone, at most `timeout` seconds. A hint; False: nothing was heard."""

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
        """Claim a piece of work for a task, unless another task has a live claim. A claim is over when a lease that its
        task held for it has expired. `again`: the task has begun and is to run again; if another one has the claim, it
        gets it when that one starts. `fingerprint`: of the arguments. A crash may forget it until it is confirmed.
        """

    def confirm(self, claims: Sequence[tuple[str, str, float]]) -> int:
        """(key, task_id, ttl): make these claims last for their ttl since they were made. How many still were theirs."""

    def unclaim(self, key: str, *, task_id: str) -> bool:
        """End a task's claim. False: it was not its own."""

    def fenced(self, conn: Any, *, key: str, lock_id: str, fence: int) -> bool:
        """In the transaction open on `conn`: hold the lease fast until that ends. False: the lease is not live."""

    def complete(
        self, conn: Any, *, run_key: str, task_id: str | None, ttl: float, fingerprint: str | None = None
    ) -> bool:
        """In the transaction open on `conn`: record a completion. False: there is one already."""

    def forget(self) -> None:
        """After a fork: drop what belongs to the parent process without closing it."""

    def close(self) -> None:
        """Close connections and threads. May be repeated."""
