"""Any scheduler class inside the leader, with the same promises."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import psycopg
import pytest

from tests.acceptance.inbox import Inbox
from tests.acceptance.tasks_of_beat import SCHEDULE_VARIABLE
from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll

TTL = 3.0
MODULE = "tests.acceptance.tasks_of_beat"
DJANGO = "tests.acceptance.tasks_of_django_beat"

on_both = pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)


def seconds_between(messages):
    instants = sorted({one.due_at for one in messages})
    return {round((after - before).total_seconds(), 1) for before, after in zip(instants, instants[1:], strict=False)}


def take_turns(setup, inbox, count=2):
    """Two beats; the leader is killed and later stopped."""
    first = setup.start_beat("-S", "syncguard")
    first.wait_for_log("elected: this process")
    second = setup.start_beat("-S", "syncguard")
    second.wait_for_log("standby for 'beat'")
    inbox.wait_for(count)
    inbox.wait_settled()
    first.kill()
    second.wait_for_log("elected: this process", timeout=TTL + 5)
    inbox.wait_for(count)
    first.start()
    first.wait_for_log("standby for 'beat'")
    second.stop()
    inbox.wait_for(count)
    return first, second


@on_both
def test_celerys_persistent_scheduler_keeps_its_slots_over_leaders(celery_setup, broker, pg_dsn):
    """case 56"""
    setup = celery_setup(
        MODULE,
        conf={
            "syncguard_leader_ttl": TTL,
            "syncguard_catch_up": "all",
            "syncguard_beat_scheduler": "celery.beat:PersistentScheduler",
        },
        environment={SCHEDULE_VARIABLE: json.dumps({"fast": 1.0})},
    )
    with Inbox(setup) as inbox:
        take_turns(setup, inbox)
    assert inbox.copies() == []
    assert seconds_between(inbox.messages) == {1.0}
    assert len({one.term for one in inbox.messages}) == 3
    assert "Traceback" not in setup.logs()


@on_both
def test_a_scheduler_of_ones_own_decides_and_sends_as_it_likes(celery_setup, broker, pg_dsn):
    """case 56: it adds an entry, refuses another, and has its own `apply_entry`."""
    setup = celery_setup(
        MODULE,
        conf={
            "syncguard_leader_ttl": TTL,
            "syncguard_catch_up": "all",
            "syncguard_beat_scheduler": f"{MODULE}:OwnScheduler",
        },
        environment={SCHEDULE_VARIABLE: json.dumps({"fast": 1.0})},
    )
    with Inbox(setup) as inbox:
        take_turns(setup, inbox)
    assert {one.entry for one in inbox.messages} == {"own"}
    assert inbox.copies() == []
    assert seconds_between(inbox.messages) == {1.0}
    assert "own way of sending own" in setup.logs()


@pytest.fixture
def django_setup(celery_setup, broker, pg_dsn, tmp_path):
    setup = celery_setup(
        DJANGO,
        broker=broker,
        conf={"syncguard_leader_ttl": TTL, "syncguard_catch_up": "all", "beat_max_loop_interval": 1},
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import {DJANGO}; from django.core.management import call_command; call_command('migrate')",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    return setup


def insert(conn, name, *, every, period="seconds", one_off=False):
    """A row as an administrator's SQL writes it: nothing tells django-celery-beat."""
    (interval,) = conn.execute(
        "insert into django_celery_beat_intervalschedule (every, period) values (%s, %s) returning id", (every, period)
    ).fetchone()
    conn.execute(
        "insert into django_celery_beat_periodictask (name, task, args, kwargs, enabled, total_run_count, date_changed,"
        " description, one_off, headers, interval_id) "
        "values (%s, %s, %s, '{}', true, 0, now(), '', %s, '{}', %s)",
        (name, f"{DJANGO}.note", json.dumps([name]), one_off, interval),
    )
    return interval


@on_both
def test_edits_by_sql_are_seen_within_the_interval(django_setup, broker, pg_dsn):
    """case 58, case 59: an interval is shortened by psql, an entry is added, one is switched off."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox:
        hourly = insert(conn, "hourly", every=1, period="hours")
        node = django_setup.start_beat("-S", "syncguard")
        node.wait_for_log("elected: this process")
        insert(conn, "added", every=1)
        inbox.wait_for(2, entry="added", timeout=15)
        assert inbox.of("hourly") == []
        conn.execute(
            "update django_celery_beat_intervalschedule set every = 1, period = 'seconds' where id = %s", (hourly,)
        )
        inbox.wait_for(2, entry="hourly", timeout=15)
        conn.execute("update django_celery_beat_periodictask set enabled = false where name = 'added'")
        # The other entry shows that time goes by.
        poll(lambda: inbox.of("hourly")[-1].due_at - inbox.of("added")[-1].due_at >= timedelta(seconds=4), timeout=30)
        assert inbox.copies() == []
        assert seconds_between(inbox.of("hourly")) == {1.0}


@on_both
def test_edits_in_the_very_tick_that_sends_never_send_a_slot_twice(django_setup, broker, pg_dsn):
    """case 60: a refresh brings back the old last_run_at from the table; what was sent is not read from there."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox:
        insert(conn, "busy", every=1)
        django_setup.start_beat("-S", "syncguard")
        inbox.wait_for(1)
        edits = 0
        while edits < 1000 or len(inbox.messages) < 9:
            edits += 1
            conn.execute("update django_celery_beat_periodictask set description = %s", (str(edits),))
            conn.execute("update django_celery_beat_periodictasks set last_update = now()")
        inbox.wait_for(2)
        assert inbox.copies() == []
        assert seconds_between(inbox.messages) == {1.0}


@on_both
def test_django_celery_beat_keeps_its_slots_over_leaders_and_a_one_off_runs_once(django_setup, broker, pg_dsn):
    """case 56, case 62"""
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox:
        insert(conn, "busy", every=1)
        insert(conn, "single", every=2, one_off=True)
        take_turns(django_setup, inbox, count=4)
        assert conn.execute("select enabled from django_celery_beat_periodictask where name = 'single'").fetchone() == (
            False,
        )
    assert len(inbox.of("single")) == 1
    assert inbox.copies() == []
    assert seconds_between(inbox.of("busy")) == {1.0}


@on_both
def test_a_schedule_row_that_is_deleted_under_an_entry_is_loud_and_stops_nothing_else(django_setup, broker, pg_dsn):
    """case 68: the foreign key is taken away first, as it is in a database without them."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox:
        insert(conn, "busy", every=1)
        gone = insert(conn, "orphan", every=1)
        node = django_setup.start_beat("-S", "syncguard")
        inbox.wait_for(2)
        names = conn.execute(
            "select conname from pg_constraint where conrelid = 'django_celery_beat_periodictask'::regclass and contype = 'f'"
        ).fetchall()
        for (name,) in names:
            conn.execute(f'alter table django_celery_beat_periodictask drop constraint "{name}"')
        conn.execute("delete from django_celery_beat_intervalschedule where id = %s", (gone,))
        node.wait_for_log("ERROR.*'orphan' is not in the schedule", timeout=20)
        insert(conn, "later", every=1)
        inbox.wait_for(1, entry="later", timeout=20)
        inbox.wait_for(3, entry="busy", timeout=20)
        assert node.alive
