"""What the health check calls healthy."""

import dataclasses
import os
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

from celery_syncguard.beat.slots import TermRow
from celery_syncguard.cli.beat import _runs_here, _status
from celery_syncguard.core.store import LockRow

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


def problem(lock, term, *, here=True):
    return _status(lock, term, here=here)["problem"]


def test_a_leader_that_renews_and_sends_is_healthy_and_so_are_its_standbys():
    for here in (True, False):
        facts = _status(LOCK, TERM, here=here)
        assert facts["problem"] is None
        assert not facts["takeover"]


def test_a_leader_that_claims_to_lead_but_could_not_renew_is_not_where_it_runs():
    late = dataclasses.replace(LOCK, remaining=7.0)
    assert "could not renew" in problem(late, TERM)
    # Anywhere else it may be dead, for all that the database knows: its standbys only have to wait.
    facts = _status(late, TERM, here=False)
    assert facts["problem"] is None
    assert facts["takeover"]


def test_a_process_is_looked_for_on_this_machine_alone():
    host, pid = socket.gethostname(), os.getpid()
    child = subprocess.Popen([sys.executable, "-c", ""])
    assert child.wait() == 0
    assert _runs_here(f"celery beat on {host} pid {pid}")
    assert not _runs_here(f"celery beat on {host} pid {child.pid}")
    assert not _runs_here(f"celery beat on another-{host} pid {pid}")
    assert not _runs_here(f"celery beat on {host} pid {10**30}")
    assert not _runs_here("a relay of one's own")
    assert not _runs_here(None)


def test_nobody_leading_is_healthy_while_a_takeover_may_be_under_way_and_no_longer():
    # Killed right after a sign of life: renewed once more a third of the ttl later, and held to its end.
    for silent, healthy in ((2, True), (20 + 9, True), (20 + 11, False)):
        term = dataclasses.replace(TERM, seen_at=NOW - timedelta(seconds=silent))
        facts = _status(None, term, here=False)
        assert facts["problem"] == (None if healthy else "nobody leads")
        assert facts["takeover"] == healthy
        assert facts["last"]["term"] == 7
    # Stopped in peace: its lease ended when it said so.
    for silent, healthy in ((9, True), (11, False)):
        term = dataclasses.replace(TERM, ended_at=NOW - timedelta(seconds=silent))
        assert (problem(None, term) is None) == healthy


def test_nobody_having_ever_led_is_not():
    """The first beat that reaches the database leads at once, so there is none."""
    assert problem(None, None) == "nobody leads"


def test_a_leader_that_cannot_send_is_not_after_some_seconds():
    term = dataclasses.replace(TERM, failing_since=NOW - timedelta(seconds=40), failure="ConnectionError: refused")
    assert problem(LOCK, term) == "the leader has not been able to send for 40.0 s: ConnectionError: refused"
    term = dataclasses.replace(term, failing_since=NOW - timedelta(seconds=4))
    assert problem(LOCK, term) is None


def test_a_leader_whose_schedule_hangs_is_not():
    term = dataclasses.replace(TERM, seen_at=NOW - timedelta(minutes=5))
    assert "has not moved" in problem(LOCK, term)


@pytest.mark.parametrize("since,healthy", [(2.0, True), (60.0, False)])
def test_a_new_leader_has_a_moment_to_open_its_schedule(since, healthy):
    lock = dataclasses.replace(LOCK, fence=8, since=since)
    assert (problem(lock, TERM) is None) == healthy
