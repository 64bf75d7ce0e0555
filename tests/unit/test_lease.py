"""A lease by itself: deadlines, and an end that is final."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from celery_syncguard import errors
from celery_syncguard.core import clock
from celery_syncguard.core.lease import Lease, margin, seconds, ttl_seconds
from celery_syncguard.testing import FakeClock


class Keeper:
    """Writes down what the lease asks of it."""

    def __init__(self) -> None:
        self.ended: list[Lease] = []

    def lease_ended(self, lease: Lease) -> None:
        self.ended.append(lease)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the lease called {name}, which costs I/O")


def make_lease(*, ttl: float = 30.0, sent_at: float | None = None) -> Lease:
    sent_at = clock.now() if sent_at is None else sent_at
    return Lease(key="k", lock_id="l", fence=7, ttl=ttl, sent_at=sent_at, holder="me", keeper=Keeper())


def test_the_deadline_is_counted_from_the_request_and_lies_before_the_expiry() -> None:
    lease = make_lease(ttl=30, sent_at=100.0)
    assert lease.deadline == 100.0 + 30 - margin(30)
    assert 0 < margin(0.5) <= 0.05
    assert margin(86_400) == 1.0


def test_check_passes_until_the_deadline_and_never_after_it() -> None:
    with FakeClock() as time:
        lease = make_lease(ttl=30)
        time.advance(28)
        lease.check()
        assert not lease.lost
        time.advance(1.5)
        assert lease.lost
        with pytest.raises(errors.LeaseLost, match="deadline") as caught:
            lease.check()
    assert (caught.value.key, caught.value.lock_id, caught.value.fence) == ("k", "l", 7)
    assert "deadline" in caught.value.reason


def test_a_lost_lease_does_not_come_back_with_the_clock() -> None:
    with FakeClock() as time:
        lease = make_lease(ttl=30)
        time.advance(31)
        with pytest.raises(errors.LeaseLost):
            lease.check()
        time.advance(-31)
        assert lease.lost
        with pytest.raises(errors.LeaseLost):
            lease.check()


def test_a_renewal_that_comes_after_the_deadline_revives_nothing() -> None:
    """Whoever looked in between was told that it is lost."""
    with FakeClock() as time:
        lease = make_lease(ttl=30)
        time.advance(20)
        sent_at = clock.now()
        time.advance(9.5)
        assert lease.lost
        assert lease.extend(sent_at) is False
        assert lease.lost


def test_a_renewal_counts_from_when_it_was_sent_and_never_moves_the_deadline_back() -> None:
    with FakeClock() as time:
        lease = make_lease(ttl=30)
        start = clock.now()
        time.advance(10)
        assert lease.extend(start + 8) is True
        assert lease.deadline == pytest.approx(start + 8 + 30 - 1)
        assert lease.extend(start) is True
        assert lease.deadline == pytest.approx(start + 8 + 30 - 1)


def test_a_lease_is_lost_once() -> None:
    lease = make_lease()
    assert lease.lose("taken") is True
    assert lease.lose("again") is False
    assert lease._keeper.ended == [lease]  # type: ignore[attr-defined]
    assert lease.lost_reason == "taken"
    assert lease.remaining == 0.0


def test_a_released_lease_is_not_lost_and_says_so() -> None:
    lease = make_lease()
    assert lease.end() is True
    assert lease.end() is False
    assert lease.lose("late news") is False
    assert not lease.lost
    assert lease.remaining == 0.0
    with pytest.raises(errors.NoLease, match="released"):
        lease.check()


@pytest.mark.parametrize("call", ["renew", "release"])
def test_an_ended_lease_asks_nothing_of_the_database(call: str) -> None:
    lease = make_lease()
    lease.end()
    assert getattr(lease, call)() is False


def test_the_text_of_a_lease_names_key_fence_and_state() -> None:
    lease = make_lease()
    assert "'k'" in repr(lease)
    assert "fence=7" in repr(lease)
    lease.lose("taken")
    assert "taken" in repr(lease)


@pytest.mark.parametrize(
    "ttl",
    [0, -1, 0.49, math.nan, math.inf, -math.inf, 86_401, 10**400, -(10**400), "30", None, True, [], timedelta(0)],
    ids=str,
)
def test_a_ttl_that_cannot_be_meant_is_refused(ttl: object) -> None:
    with pytest.raises(errors.ImproperlyConfigured, match="ttl"):
        ttl_seconds(ttl)


@pytest.mark.parametrize(
    ("ttl", "is_seconds"), [(0.5, 0.5), (30, 30.0), (timedelta(minutes=1), 60.0), (86_400, 86_400.0)]
)
def test_a_ttl_is_a_number_of_seconds_or_a_timedelta(ttl: object, is_seconds: float) -> None:
    assert ttl_seconds(ttl) == is_seconds
    assert type(ttl_seconds(ttl)) is float


def test_without_a_maximum_infinity_is_still_no_number_of_seconds() -> None:
    with pytest.raises(errors.ImproperlyConfigured):
        seconds(math.inf, what="older")
