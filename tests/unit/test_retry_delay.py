"""How long a task whose lock was held stays away: within its bounds, longer each time, and never all at once."""

from __future__ import annotations

import random
import statistics

import pytest

from celery_syncguard.tasks import not_run
from celery_syncguard.tasks.delivered import Delivered
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.options import DEFAULTS


@pytest.fixture(autouse=True)
def _same_luck_every_time() -> None:
    random.seed(7)


def delays(bounds: object, *, held: int) -> list[float]:
    """What a message draws that found the lock held `held` times before."""
    options = DEFAULTS.replace({"lock_retry_delay": bounds})
    run = Delivered(None, None, Header(held=held), options)
    return [not_run._delay(run) for _ in range(500)]


@pytest.mark.parametrize("bounds", [(1, 60), (0.2, 1), (0.01, 86_400), (5, 5.5)], ids=str)
@pytest.mark.parametrize("held", [0, 1, 2, 5, 40, 5000])
def test_no_delay_is_ever_outside_of_the_bounds(bounds: tuple[float, float], held: int) -> None:
    low, high = bounds
    assert low <= min(delays(bounds, held=held)) <= max(delays(bounds, held=held)) <= high


def test_delays_double_until_they_reach_the_upper_bound() -> None:
    drawn = {held: delays((1, 60), held=held) for held in range(8)}
    for held, ceiling in enumerate([2, 4, 8, 16, 32, 60, 60, 60]):
        assert max(drawn[held]) <= ceiling
        # The whole range is used: with 500 draws the largest is close to its end.
        assert max(drawn[held]) > 0.95 * ceiling
        assert min(drawn[held]) < 1 + 0.05 * ceiling
    means = [statistics.mean(drawn[held]) for held in range(6)]
    assert means == sorted(means)
    assert means[5] > 10 * means[0]


@pytest.mark.parametrize("held", [0, 3, 100])
def test_those_that_met_the_same_holder_do_not_come_back_together(held: int) -> None:
    assert len({round(delay, 2) for delay in delays((1, 60), held=held)}) > 50


def test_one_number_is_the_lower_bound_and_equal_bounds_are_a_fixed_delay() -> None:
    assert 3 <= min(delays(3, held=0)) <= max(delays(3, held=0)) <= 6
    assert max(delays(3, held=50)) > 50
    assert set(delays((4, 4), held=9)) == {4.0}
