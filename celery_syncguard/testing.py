"""For tests of programs that use this library: hold a key as another process would, and move the local clock.

Not here: the suite that a lock store has to pass (`tests/contract` of this project).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

from celery_syncguard.core import clock
from celery_syncguard.core.key import new_lock_id, normalize_key
from celery_syncguard.core.lease import ttl_seconds
from celery_syncguard.core.store import Acquire, Grant, Held, Release
from celery_syncguard.guard import SyncGuard, lock_held

__all__ = ["FakeClock", "hold_elsewhere"]


@contextmanager
def hold_elsewhere(
    guard: SyncGuard,
    key: str,
    *,
    ttl: float | timedelta = 3600.0,
    holder: str = "somebody else",
    task_id: str | None = None,
) -> Iterator[Grant]:
    """Hold `key` as another process would: nothing here renews it, and `guard` finds it held.

    Arguments:
        ttl: seconds; a short one is a holder that died.
        holder: what the others are told.
        task_id: of the task that holds, if it is to look like one.

    Raises:
        LockHeld: it is held already.
    """
    request = Acquire(
        key=normalize_key(key),
        lock_id=new_lock_id(),
        ttl=ttl_seconds(ttl),
        holder=holder,
        process="elsewhere:0",
        task_id=task_id,
    )
    answer = guard.store.acquire(request)
    if isinstance(answer, Held):
        raise lock_held(answer)
    assert isinstance(answer, Grant)  # nothing else was asked for
    try:
        yield answer
    finally:
        guard.store.release(Release(key=request.key, lock_id=request.lock_id))


class FakeClock:
    """Moves the local clock, which deadlines and the memory store go by. The database's clock stays as it is.

    `with FakeClock() as time: ...; time.advance(31)`. Threads of the library notice within a second.
    """

    def __init__(self) -> None:
        self.offset = 0.0
        self._real = clock.now

    def __enter__(self) -> FakeClock:
        self._real = clock.now
        clock.now = self._now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        clock.now = self._real

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once."""
        self.offset += seconds

    def _now(self) -> float:
        return self._real() + self.offset
