"""The local clock of deadlines."""

from __future__ import annotations

import time

import pytest

from celery_syncguard.core import clock
from celery_syncguard.guard import SyncGuard
from celery_syncguard.testing import FakeClock


def test_now_is_the_clock_that_counts_suspended_time() -> None:
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert abs(clock.now() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    before = clock.now()
    assert clock.now() >= before


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_deadlines_do_not_depend_on_the_wall_clock(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour wrong, either way, in the middle of a lease."""
    with SyncGuard("memory://") as guard:
        lease = guard.try_acquire("k", ttl=30)
        assert lease is not None
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() + int(skew * 1e9))
        monkeypatch.setattr(time, "time", lambda: real() / 1e9 + skew)
        assert 25 < lease.remaining <= 29
        assert lease.renew()
        lease.check()
        assert guard.try_acquire("k") is None


def test_the_fake_clock_moves_deadlines_and_puts_the_real_one_back() -> None:
    real = clock.now
    with SyncGuard("memory://") as guard, FakeClock() as fake:
        lease = guard.try_acquire("k", ttl=30)
        assert lease is not None
        fake.advance(31)
        assert lease.lost
        assert guard.try_acquire("k") is not None
    assert clock.now is real
