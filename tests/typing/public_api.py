"""What a user's type checker sees. Checked by mypy, never run.

A line with an ignore comment must be an error: mypy reports an ignore that ignores nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import Celery
from typing_extensions import assert_type

from celery_syncguard import Fence, Lease, LeaseLost, LockedTask, LockHeld, SyncGuard, SyncGuardError
from celery_syncguard.hlc import HybridLogicalClock, Timestamp
from celery_syncguard.revisions import current_revision, next_revision


def locks(guard: SyncGuard) -> None:
    lease = guard.try_acquire("invoice:7", ttl=30)
    assert_type(lease, Lease | None)
    lease.check()  # type: ignore[union-attr]  # somebody else may hold it

    with guard.hold("invoice:7", ttl=timedelta(seconds=30), wait=5.0) as held:
        assert_type(held, Lease)
        assert_type(held.key, str)
        assert_type(held.lock_id, str)
        assert_type(held.fence, Fence)
        assert_type(held.remaining, float)
        assert_type(held.lost, bool)
        assert_type(held.renew(), bool)
        assert_type(held.release(), bool)
        below: bool = held.fence < Fence(1000)
        print(below, str(held.fence))

    guard.try_acquire("invoice:7", 30)  # type: ignore[call-arg]  # a unit has its name


def errors(error: SyncGuardError) -> None:
    if isinstance(error, LockHeld):
        assert_type(error.key, str)
    if isinstance(error, LeaseLost):
        assert_type(error.key, str)


def tasks(app: Celery, connection: Any) -> None:
    class Charge(LockedTask):
        lock_key = "invoice:{invoice}"

        def run(self, invoice: int) -> str:
            assert_type(self.fence, Fence)
            assert_type(self.lease, Lease)
            self.lease.fenced(connection)
            return f"{invoice} {self.fence}"

    app.register_task(Charge())


def order(connection: Any, clock: HybridLogicalClock) -> None:
    assert_type(next_revision(connection, "6ff6c0a4-0000-4000-8000-000000000000"), int)
    assert_type(current_revision(connection, "6ff6c0a4-0000-4000-8000-000000000000"), int | None)
    assert_type(clock.now(), Timestamp)
    assert_type(clock.observe(1001), Timestamp)
