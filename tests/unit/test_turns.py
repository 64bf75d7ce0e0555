"""Waiters of one process stand in line."""

from __future__ import annotations

import threading

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_syncguard import SyncGuard
from celery_syncguard.core.loop import Bell
from celery_syncguard.core.turns import Turns
from celery_syncguard.testing import hold_elsewhere
from tests.fixtures.polling import poll


def test_waiters_of_one_process_get_the_lock_in_the_order_in_which_they_came() -> None:
    order: list[int] = []
    with SyncGuard("memory://") as guard:

        def wait(number: int) -> None:
            with guard.hold("k", wait=30):
                order.append(number)

        with hold_elsewhere(guard, "k"):
            waiters = [threading.Thread(target=wait, args=(number,)) for number in range(20)]
            for number, waiter in enumerate(waiters):
                waiter.start()
                poll(lambda number=number: len(guard._turns._queues.get("k", ())) == number + 1)
        for waiter in waiters:
            waiter.join(30)
        assert order == list(range(20))
        assert not guard._turns._queues


def test_a_waiter_that_is_interrupted_while_it_takes_its_place_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft time limit may come between any two steps."""

    class Interrupted(Bell):
        def set(self) -> None:
            raise SoftTimeLimitExceeded

    turns = Turns()
    with monkeypatch.context() as patched:
        patched.setattr("celery_syncguard.core.turns.Bell", Interrupted)
        with pytest.raises(SoftTimeLimitExceeded), turns.turn("k", 0):
            pass
    assert not turns._queues
    with turns.turn("k", 0) as ours:
        assert ours


def test_a_waiter_that_gives_up_leaves_the_line() -> None:
    turns = Turns()
    with turns.turn("k", 0) as first:
        assert first
        with turns.turn("k", 0) as second:
            assert not second
        with turns.turn("other", 0) as other:
            assert other
    with turns.turn("k", 0) as third:
        assert third
    assert not turns._queues
