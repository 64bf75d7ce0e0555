"""Errors are facts, and the facts survive the way through a result backend."""

from __future__ import annotations

import logging
import pickle

import pytest

from celery_syncguard import errors
from celery_syncguard.core.events import logger
from celery_syncguard.core.store import Held
from celery_syncguard.guard import lock_held


def test_facts_survive_pickling() -> None:
    error = errors.LeaseLost("gone", key="k", lock_id="l", fence=7, reason="taken")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.LeaseLost
    assert (str(copy), copy.key, copy.lock_id, copy.fence, copy.reason) == ("gone", "k", "l", 7, "taken")


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name[0].isupper()])
def test_every_error_is_a_syncguard_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.SyncGuardError)


HOSTILE = "tasks.pay[x]\n[2026-11-30 21:00:00,000: CRITICAL/MainProcess] forged\r\x1b[2J\u2028\x9b"


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    held = Held(key=HOSTILE, lock_id="l", fence=7, since=1.0, remaining=2.0, holder=HOSTILE, task_id=HOSTILE, attempt=0)
    text = str(lock_held(held))
    assert text.isprintable()
    assert "\\n[2026" in text, "it can still be read"
    assert lock_held(held).holder == HOSTILE, "the facts are as they were"


def test_a_log_line_is_one_line_whatever_it_quotes(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("could not release %s: %r", HOSTILE, ValueError(HOSTILE))
    logger.warning("nothing hostile in %d", 7)
    assert [record.getMessage().isprintable() for record in caplog.records] == [True, True]
    assert caplog.records[1].args == (7,), "what is harmless is left as it was"


def test_the_hostile_text_would_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """The negative control: the same text by a logger of somebody else."""
    logging.getLogger("somebody.else").warning("could not release %s", HOSTILE)
    assert len(caplog.text.splitlines()) > 1


def test_a_broken_log_call_is_reported_by_logging_and_raises_nothing() -> None:
    logger.debug("%d", "x")
    assert logger.filters[0](logging.LogRecord("n", logging.INFO, "", 0, "%d", ("x",), None))  # type: ignore[operator]


def test_lock_held_says_who_since_when_and_for_how_long() -> None:
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
