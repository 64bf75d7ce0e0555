"""Exact fencing: tie a caller's transaction to a lease.

The row of the lease is locked `FOR KEY SHARE` until the transaction ends. A takeover changes lock_id, which has a unique
index, so it needs a stronger lock and finds the row taken; a renewal changes only expires_at_ms and passes. Hence a
transaction that was proved here commits while its lease is still the only one.

Two forms: `prove` inside a transaction that the caller has open, and `fenced_transaction`, which opens one. One name for
both would have to guess, in autocommit, whether its answer is about to be used as a context manager, and a wrong guess
would leave writes unfenced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_syncguard.core.lease import Lease
from celery_syncguard.core.store import LockStore
from celery_syncguard.postgres.adapters import adapter_for

__all__ = ["fenced_transaction", "prove"]


def prove(store: LockStore, lease: Lease, conn: Any) -> None:
    """In the transaction open on `conn`: return if the lease is held, and keep it from being taken until the end.

    Raises:
        LeaseLost: it is not; the transaction must be rolled back.
        LeaseNotVisible: it is, but in another database or schema, or its grant is newer than the snapshot.
        NotInTransaction: there is no transaction.
        InSavepoint: there is a savepoint, and nothing was proved before it. It must be rolled back.
    """
    adapter_for(conn).require_transaction("lease.fenced()")
    if not store.fenced(conn, key=lease.key, lock_id=lease.lock_id, fence=int(lease.fence)):
        lease.lose("the database says that it expired or was taken over")
        raise lease.loss()


@contextmanager
def fenced_transaction(store: LockStore, lease: Lease, conn: Any) -> Iterator[None]:
    """A transaction on `conn` that begins with `prove`. Where one is open, prove in that, then open a savepoint.

    Raises:
        LeaseLost: the lease is not held; the block is not entered.
        InSavepoint: as `prove`.
        sqlalchemy.exc.InvalidRequestError: a transaction is open that an earlier statement has begun.
    """
    session = adapter_for(conn)
    nested = session.nests()
    if nested:
        # First: a proof goes with the savepoint in which it was made.
        prove(store, lease, conn)
    with session.transaction():
        if not nested:
            prove(store, lease, conn)
        yield
