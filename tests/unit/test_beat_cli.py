"""What the health check calls healthy."""

import dataclasses
from datetime import datetime, timedelta, timezone

import pytest

from celery_syncguard.beat_cli import _status
from celery_syncguard.slots import TermRow
from celery_syncguard.store import LockRow

NOW = datetime(2025, 1, 1, 12, tzinfo=timezone.utc)
LOCK = LockRow(
    key="__syncguard_leader:beat",
    lock_id="x" * 22,
    fence=7,
    acquired_at=NOW - timedelta(hours=1),
    expires_at=NOW + timedelta(seconds=12),
    since=3600.0,
    remaining=12.0,
    holder="celery beat",
    task_id=None,
    attempt=None,
)
TERM = TermRow(
    term=7,
    holder="celery beat",
    ttl=15.0,
    elected_at=NOW - timedelta(hours=1),
    seen_at=NOW - timedelta(seconds=2),
    ended_at=None,
    last_sent_at=NOW - timedelta(seconds=2),
    failing_since=None,
    failure=None,
    now=NOW,
)


def test_a_leader_that_renews_and_sends_is_healthy_and_so_are_its_standbys():
    assert _status(LOCK, TERM)["problem"] is None


def test_a_leader_that_claims_to_lead_but_could_not_renew_is_not():
    problem = _status(dataclasses.replace(LOCK, remaining=7.0), TERM)["problem"]
    assert "could not renew" in problem


def test_nobody_leading_is_not():
    facts = _status(None, TERM)
    assert facts["problem"] == "nobody leads"
    assert facts["last"]["term"] == 7
    assert _status(None, None)["problem"] == "nobody leads"


def test_a_leader_that_cannot_send_is_not_after_some_seconds():
    """case 63"""
    term = dataclasses.replace(TERM, failing_since=NOW - timedelta(seconds=40), failure="ConnectionError: refused")
    assert _status(LOCK, term)["problem"] == "the leader cannot send, since 40.0 s: ConnectionError: refused"
    term = dataclasses.replace(term, failing_since=NOW - timedelta(seconds=4))
    assert _status(LOCK, term)["problem"] is None


def test_a_leader_whose_schedule_hangs_is_not():
    term = dataclasses.replace(TERM, seen_at=NOW - timedelta(minutes=5))
    assert "has not moved" in _status(LOCK, term)["problem"]


@pytest.mark.parametrize("since,healthy", [(2.0, True), (60.0, False)])
def test_a_new_leader_has_a_moment_to_open_its_schedule(since, healthy):
    lock = dataclasses.replace(LOCK, fence=8, since=since)
    assert (_status(lock, TERM)["problem"] is None) == healthy
