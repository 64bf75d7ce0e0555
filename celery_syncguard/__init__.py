"""Locks, dedup, a single leader and ordered writes for Celery, on the PostgreSQL that is there already.

Names are loaded when they are first used, so that `celery_syncguard.hlc` needs neither Celery nor psycopg.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_syncguard.core.key import Fence
    from celery_syncguard.core.lease import Lease
    from celery_syncguard.errors import (
        DuplicateTask,
        ImproperlyConfigured,
        InvalidKey,
        LeaseLost,
        LeaseNotVisible,
        LockHeld,
        NoLease,
        SchemaBehind,
        StoreUnavailable,
        SyncGuardError,
        TooManyDeaths,
    )
    from celery_syncguard.guard import SyncGuard
    from celery_syncguard.postgres.adapters import InSavepoint, NotInTransaction
    from celery_syncguard.skipped import SKIPPED, Skipped
    from celery_syncguard.tasks.app_state import guard_for
    from celery_syncguard.tasks.options import LockOptions
    from celery_syncguard.tasks.task import LockedTask
    from celery_syncguard.tasks.typed import PublishedResult

__version__ = "0.1.0"

_HOMES = {
    "DuplicateTask": "errors",
    "Fence": "core.key",
    "ImproperlyConfigured": "errors",
    "InSavepoint": "postgres.adapters",
    "InvalidKey": "errors",
    "Lease": "core.lease",
    "LeaseLost": "errors",
    "LeaseNotVisible": "errors",
    "LockHeld": "errors",
    "LockOptions": "tasks.options",
    "LockedTask": "tasks.task",
    "NoLease": "errors",
    "NotInTransaction": "postgres.adapters",
    "PublishedResult": "tasks.typed",
    "SKIPPED": "skipped",
    "SchemaBehind": "errors",
    "Skipped": "skipped",
    "StoreUnavailable": "errors",
    "SyncGuard": "guard",
    "SyncGuardError": "errors",
    "TooManyDeaths": "errors",
    "guard_for": "tasks.app_state",
}

__all__ = [
    "SKIPPED",
    "DuplicateTask",
    "Fence",
    "ImproperlyConfigured",
    "InSavepoint",
    "InvalidKey",
    "Lease",
    "LeaseLost",
    "LeaseNotVisible",
    "LockHeld",
    "LockOptions",
    "LockedTask",
    "NoLease",
    "NotInTransaction",
    "PublishedResult",
    "SchemaBehind",
    "Skipped",
    "StoreUnavailable",
    "SyncGuard",
    "SyncGuardError",
    "TooManyDeaths",
    "guard_for",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
