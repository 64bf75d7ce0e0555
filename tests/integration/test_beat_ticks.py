"""Thousands of ticks of one beat, and of edits in the middle of them."""

import json
import os
import subprocess
import sys

import pytest

from tests.fixtures import soak
from tests.fixtures.cluster import ROOT

#: The first one sends plain entries; a tick of django-celery-beat's asks its tables and takes four times as long.
TICKS = {"plain": soak.rounds(16_000, soak=100_000), "django": soak.rounds(5_000, soak=25_000)}


def ticks(*arguments, **environment):
    command = [sys.executable, "-m", "tests.integration.beat_ticks", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("inside", TICKS)
def test_memory_stays_flat_over_many_ticks_with_changes_of_the_schedule(inside):
    """Less than one object for five ticks; in a soak, for thirty."""
    seen, log = ticks("memory", inside, TICKS[inside])
    print(seen)
    assert "Traceback" not in log
    assert seen["changes"] >= TICKS[inside] / 100
    # It did send: an entry is due every other tick.
    assert seen["runs"]["a"] > 0.45 * TICKS[inside]
    assert min(seen["runs"]["b"], seen["runs"]["c"]) > TICKS[inside] / 100
    before, half, after = seen["objects"]
    assert max(half, after) < before * 1.02 + 500
    before, half, after = seen["megabytes"]
    assert max(half, after) < before + 5


def test_a_host_whose_clock_is_behind_sends_the_entries_of_django_celery_beat_in_time():
    """Their own class judges by the host's clock, which falls behind the database's by half a second a tick."""
    seen, _ = ticks("memory", "django", 400)
    assert seen["runs"]["a"] > 0.45 * 400


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_edit_in_the_very_tick_that_sends_is_never_lost_nor_is_a_slot_sent_twice(pg_dsn):
    """Many rounds, in each of them an edit between claim and mark, and another while the row is written."""
    rounds = soak.rounds(200, soak=1000)
    seen, log = ticks("edits", rounds, "locked", SYNCGUARD_DSN=pg_dsn)
    assert seen["lost"] == {"args": 0, "description": 0}
    assert seen["messages"] >= rounds
    assert seen["messages"] == seen["tasks"]
    assert seen["slots"][0] == seen["slots"][1]
    assert "Traceback" not in log


def test_without_the_lock_of_its_row_an_edit_is_lost_while_the_row_is_written(pg_dsn):
    """The negative control: django-celery-beat writes the whole row as it has just read it."""
    seen, _ = ticks("edits", 20, "unlocked", SYNCGUARD_DSN=pg_dsn)
    assert seen["lost"]["description"] == 20


def test_what_the_database_did_not_take_is_written_the_next_time(pg_dsn):
    """A one-off entry whose row never says that it ran would run again."""
    seen, log = ticks("cuts", 10, "kept", SYNCGUARD_DSN=pg_dsn)
    assert seen == {"cuts": 10, "not written": 0}
    assert "could not write back its schedule" in log
    assert "Traceback" not in log


def test_without_our_way_of_writing_it_is_forgotten(pg_dsn):
    """The negative control."""
    seen, _ = ticks("cuts", 10, "forgotten", SYNCGUARD_DSN=pg_dsn)
    assert seen == {"cuts": 10, "not written": 10}


def test_an_edit_that_was_seen_and_could_not_be_read_is_read_the_next_time(pg_dsn):
    """Within the interval, though the connection ends in the middle of the read."""
    seen, log = ticks("reads", 5, "kept", SYNCGUARD_DSN=pg_dsn)
    assert seen == {"cuts": 5, "never seen": 0}
    assert "Traceback" not in log


def test_without_looking_again_it_is_not_read_until_the_schedule_is_read_anyway(pg_dsn):
    """The negative control: that is every five minutes."""
    seen, _ = ticks("reads", 1, "forgotten", SYNCGUARD_DSN=pg_dsn)
    assert seen == {"cuts": 1, "never seen": 1}


def test_a_stop_while_a_row_is_written_hands_over_and_ends(pg_dsn):
    """The handler runs inside the statement, which holds the lock of Django's connection."""
    seen, log = ticks("stops", 10, "apart", SYNCGUARD_DSN=pg_dsn)
    assert seen == {"hands over": True, "ends": True}
    assert "Traceback" not in log


def test_a_handler_that_writes_as_well_waits_for_itself_and_leads_on(pg_dsn):
    """The negative control."""
    seen, _ = ticks("stops", 3, "entered", SYNCGUARD_DSN=pg_dsn)
    assert seen == {"hands over": False, "ends": False}


@pytest.mark.parametrize("where", ["connect", "claim", "publish", "refused"])
def test_a_row_counts_no_run_that_was_not_sent_and_a_one_off_row_is_sent_after_a_failure(where):
    """An interval one-off row and a clocked one, whose first attempts fail; written back meanwhile as a stop would do."""
    seen, _ = ticks("failures", where)
    assert seen == {
        "while it fails": True,
        "single": [False, 0, False],
        "clocked": [False, 0, False],
        "published": {"single": 1, "clocked": 1},
        "counted too often": 0,
    }


@pytest.mark.parametrize("zone", ["Europe/Paris", "America/New_York"])
def test_a_crontab_row_in_the_missing_hour_of_spring_is_sent_an_hour_later_by_the_wall(zone):
    """Also with a deadline for crontabs; but a row that has not started yet is not sent for that."""
    seen, log = ticks("spring", zone)
    assert seen == {"due": ["03:30:00"], "published": {"night": 1}}
    assert "Traceback" not in log


@pytest.mark.parametrize("way", ["again", "switched", "moved", "raced", "earlier"])
def test_a_clocked_row_is_switched_off_when_it_was_sent_and_is_sent_again_at_another_time(way):
    """Made anew under its name, also for an earlier time; switched on again by `save`; moved by a bulk edit, after which
    its `date_changed` is old; and moved at the very moment at which it is switched off.
    """
    seen, log = ticks("clocked", way)
    assert seen == {"once sent": [1, way == "raced", 0], "afterwards": [2, False, 0]}
    assert "Traceback" not in log


@pytest.mark.parametrize("way", ["same", "dead", "late"])
def test_a_clocked_row_is_never_sent_twice_for_one_time(way):
    """Made anew with the same name and time; or its leader died before the row said that it was sent, also when its time
    had passed before anybody saw it.
    """
    seen, log = ticks("clocked", way)
    assert seen == {"once sent": [1, False, 0], "afterwards": [1, False, 0]}
    assert "was sent before" in log
    assert "Traceback" not in log


def test_the_table_of_django_celery_beat_is_led_if_celery_is_configured_for_it_and_told_of_if_it_is_left_out():
    """Where nothing is configured, a table full of rows is the negative control: nobody sends them."""
    seen, _ = ticks("inside")
    assert seen.pop("names of both") == ["is_due"], "of the two classes that are put before a scheduler's"
    left_out, empty = ["django_celery_beat is installed"], ["leading an empty schedule"]
    told = {name: [line.partition(",")[0] for line in lines] for name, (lines, _) in seen.items()}
    assert told == {
        "none, nothing": left_out,
        "none, some": left_out,
        "beat_schedule is meant, nothing": empty,
        "beat_schedule is meant, some": [],
        "Celery's own, nothing": empty,
        "Celery's own, some": [],
    }
    names = {name: set(there) - {"celery.backend_cleanup"} for name, (_, there) in seen.items()}
    assert names["none, some"] == names["beat_schedule is meant, some"] == {"entry"}
    assert names["Celery's own, some"] == {"entry", "row"}


def test_an_edit_of_a_table_costs_what_it_changes_and_no_slot_waits_for_it():
    """A hundred rows, sent every 20 s, one of which is saved 20 times a second; others come, go and change meanwhile."""
    seen, log = ticks("saves", 584, "row")  # 29 s
    print(seen)
    assert seen.pop("late") < 2
    assert seen.pop("lag") < 5.5
    assert seen.pop("read") < 60, "not a hundred for each"
    assert seen.pop("sent") >= 94
    assert seen == {
        "new": [f"new {number}" for number in (135, 225, 315, 405, 45, 495)],
        "changed": "<freq: 495.00 days>",
        "gone": [],
        "removed": 6,
        "heap": 0,
    }
    assert "Traceback" not in log


def test_an_edit_that_nothing_tells_of_is_seen_within_five_seconds_whenever_slots_are_due():
    seen, _ = ticks("untold", 40)
    assert seen["edits"] >= 8
    assert seen["lag"] < 5.2


def test_a_table_that_is_read_as_a_whole_is_read_for_each_edit():
    """The negative control."""
    seen, _ = ticks("saves", 405, "table")
    assert seen["read"] > 1000
