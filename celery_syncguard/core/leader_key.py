"""How an operator ends a term from any machine: by a note under a reserved key, and by releasing the leader's lock."""

from __future__ import annotations

from typing import Protocol

from celery_syncguard.core.key import RESERVED_PREFIX, new_lock_id, normalize_key
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.process import default_holder
from celery_syncguard.core.store import Acquire, Dead, Done, Held, LockRow, LockStore, Release

__all__ = ["Guard", "end_term", "leader_lock_key", "take_note"]

_LEADER_PREFIX = RESERVED_PREFIX + "leader:"
#: As long as the other prefix: a key that fits there fits here.
_NOTE_PREFIX = RESERVED_PREFIX + "resign:"


class Guard(Protocol):
    """What a leadership asks of `SyncGuard`."""

    store: LockStore

    def acquire(self, request: Acquire) -> Lease | Held | Done | Dead: ...
    def inspect(self, key: str) -> LockRow | None: ...
    def release(self, key: str, *, lock_id: str) -> bool: ...
    def tell_lost(self, lease: Lease) -> None: ...


def leader_lock_key(key: str) -> str:
    """The reserved key of the lock behind a leadership.

    Raises:
        InvalidKey: the key is not text, empty, or too long with the prefix.
    """
    return normalize_key(_LEADER_PREFIX + normalize_key(key, what="leadership key"), what="leadership key")


def end_term(guard: Guard, key: str, *, lock_id: str, ttl: float) -> bool:
    """End the term that has that lease, for an operator. The leader logs that, instead of a lost lease.

    Arguments:
        ttl: seconds after which the leader has noticed in any case: what is left of its lease.

    Returns:
        False: that lease does not lead (any more).

    Raises:
        StoreUnavailable, SchemaBehind: the database cannot be asked.
    """
    note = _NOTE_PREFIX + key
    for row in guard.store.locks(note):
        guard.store.release(Release(key=note, lock_id=row.lock_id))
    guard.store.acquire(
        Acquire(key=note, lock_id=new_lock_id(), ttl=max(1.0, ttl), holder=default_holder(), task_id=lock_id)
    )
    return guard.release(leader_lock_key(key), lock_id=lock_id)


def take_note(store: LockStore, key: str, *, lock_id: str) -> bool:
    """Whether an operator ended the term that had that lease (`end_term`)."""
    note = _NOTE_PREFIX + key
    for row in store.locks(note):
        if row.task_id == lock_id:
            store.release(Release(key=note, lock_id=row.lock_id))
            return True
    return False
