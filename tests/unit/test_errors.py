"""Errors are facts, and the facts survive the way through a result backend."""

from __future__ import annotations

import pickle

import pytest

from celery_syncguard import errors
from celery_syncguard.guard import lock_held
from celery_syncguard.store import Held


def test_facts_survive_pickling() -> None:
    error = errors.LeaseLost("gone", key="k", lock_id="l", fence=7, reason="taken")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.LeaseLost
    assert (str(copy), copy.key, copy.lock_id, copy.fence, copy.reason) == ("gone", "k", "l", 7, "taken")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_syncguard_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.SyncGuardError)


def test_lock_held_says_who_since_when_and_for_how_long() -> None:
    """case 43"""
    held = Held(
        key="k", lock_id="l", fence=7, since=3.25, remaining=26.5, holder="worker on host", task_id="t", attempt=0
    )
    error = lock_held(held)
    assert (error.key, error.holder, error.task_id, error.lock_id) == ("k", "worker on host", "t", "l")
    assert error.fence == 7
    assert (error.since, error.remaining) == (3.25, 26.5)
    assert "worker on host" in str(error)
    assert "3.2 s" in str(error)
    assert "26.5 s" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.task_id, copy.holder, copy.since, copy.fence) == ("t", "worker on host", 3.25, 7)
