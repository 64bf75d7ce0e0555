"""Any scheduler class inside the leader, with the same promises."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import psycopg
import pytest

from tests.acceptance.apps.beat_entries import SCHEDULE_VARIABLE
from tests.acceptance.inbox import Inbox
from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll

TTL = 3.0
#: Seconds within which django-celery-beat's edits are to be seen, and what a busy machine may add.
INTERVAL, SLACK = 1.0, 4.0
MODULE = "tests.acceptance.apps.beat_entries"
DJANGO = "tests.acceptance.apps.beat_django"


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


def test_celerys_persistent_scheduler_keeps_its_slots_over_leaders(celery_setup, broker, pg_dsn):
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


def test_a_scheduler_of_ones_own_decides_and_sends_as_it_likes(celery_setup, broker, pg_dsn):
    """It adds an entry, refuses another, and has its own `apply_entry`."""
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
def django_setup(celery_setup, broker, pg_dsn):
    return set_up_django(celery_setup, broker)


def set_up_django(celery_setup, broker, **options):
    setup = celery_setup(
        DJANGO,
        broker=broker,
        conf={"syncguard_leader_ttl": TTL, "syncguard_catch_up": "all", "beat_max_loop_interval": INTERVAL},
        **options,
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


def insert(conn, name, *, every=None, period="seconds", crontab=None, one_off=False, headers=None):
    """A row as an administrator's SQL writes it: nothing tells django-celery-beat. The id of its schedule."""
    if crontab is None:
        column = "interval_id"
        (schedule,) = conn.execute(
            "insert into django_celery_beat_intervalschedule (every, period) values (%s, %s) returning id",
            (every, period),
        ).fetchone()
    else:
        column = "crontab_id"
        (schedule,) = conn.execute(
            "insert into django_celery_beat_crontabschedule "
            "(minute, hour, day_of_week, day_of_month, month_of_year, timezone) "
            "values (%s, %s, %s, %s, %s, 'UTC') returning id",
            crontab.split(),
        ).fetchone()
    conn.execute(
        "insert into django_celery_beat_periodictask (name, task, args, kwargs, enabled, total_run_count, date_changed,"
        f" description, one_off, headers, {column}) "
        "values (%s, %s, %s, '{}', true, 0, now(), '', %s, %s, %s)",
        (name, f"{DJANGO}.note", json.dumps([name]), one_off, json.dumps(headers or {}), schedule),
    )
    return schedule


class Editor:
    """A process with Django in it, which edits the schedule as a program of the user's does; a context manager."""

    def __init__(self):
        program = f"""
import sys, {DJANGO}
from django_celery_beat.models import PeriodicTask
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        self.run("pass")
        return self

    def __exit__(self, *_):
        self._process.communicate(timeout=20)

    def run(self, line):
        """Returns when it is done."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@pytest.mark.slow
def test_edits_are_seen_within_the_interval_however_they_are_made(django_setup, broker, pg_dsn):
    """An entry is added, an interval is shortened, an entry is switched off, by psql, by `save`, by
    `QuerySet.update`, and an entry is deleted. What is due each second shows up a second after it is seen.
    """
    soon = INTERVAL + 1 + SLACK
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox, Editor() as editor:
        every_second = insert(conn, "busy", every=1)
        hourly = insert(conn, "by psql", every=1, period="hours")
        for name in ("by save", "by update"):
            insert(conn, name, every=1, period="hours")
        node = django_setup.start_beat("-S", "syncguard")
        node.wait_for_log("elected: this process")
        inbox.wait_for(2, entry="busy")

        def shows(name):
            inbox.wait_for(1, entry=name, timeout=soon)

        def ends(name):
            """It is sent no more, soon, while another one is."""
            limit = inbox.of("busy")[-1].due_at + timedelta(seconds=INTERVAL + SLACK)
            poll(lambda: inbox.of("busy")[-1].due_at > limit + timedelta(seconds=2), timeout=30)
            assert inbox.of(name)[-1].due_at <= limit

        insert(conn, "added", every=1)
        shows("added")
        conn.execute(
            "update django_celery_beat_intervalschedule set every = 1, period = 'seconds' where id = %s", (hourly,)
        )
        shows("by psql")
        editor.run(f"row = PeriodicTask.objects.get(name='by save'); row.interval_id = {every_second}; row.save()")
        shows("by save")
        editor.run(f"PeriodicTask.objects.filter(name='by update').update(interval={every_second})")
        shows("by update")
        conn.execute("update django_celery_beat_periodictask set enabled = false where name = 'added'")
        ends("added")
        editor.run("PeriodicTask.objects.get(name='by save').delete()")
        ends("by save")
        editor.run("PeriodicTask.objects.filter(name='by update').delete()")
        ends("by update")
        assert node.alive
    assert inbox.copies() == []
    assert seconds_between(inbox.of("busy")) == {1.0}
    assert "Traceback" not in django_setup.logs()


def test_each_row_is_caught_up_by_the_rule_in_its_headers(django_setup, broker, pg_dsn):
    """And the rule does not reach the message."""
    rules = ("one", "skip", "all")
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox:
        insert(conn, "busy", every=1)
        for rule in rules:
            insert(conn, rule, every=1, period="hours", headers={"syncguard_catch_up": rule, "of": "mine"})
        node = django_setup.start_beat("-S", "syncguard")
        inbox.wait_for(1, entry="busy")
        node.stop()
        conn.execute(
            "update syncguard_beat_entries set last_due_at = last_due_at - interval '5.5 hours', "
            "since_at = since_at - interval '6 hours' where entry = any(%s)",
            (list(rules),),
        )
        node.start()
        poll(lambda: len(inbox.of("all")) >= 5, timeout=20)
        inbox.wait_for(2, entry="busy")
    assert {rule: len(inbox.of(rule)) for rule in rules} == {"one": 1, "skip": 0, "all": 5}
    assert inbox.of("one")[0].due_at == inbox.of("all")[-1].due_at
    assert inbox.copies() == []
    for message in (*inbox.of("one"), *inbox.of("all")):
        assert message.headers["of"] == "mine"
        assert "syncguard_catch_up" not in message.headers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_crontab_row_is_sent_once_each_minute_whoever_leads(django_setup, broker, pg_dsn):
    """Real minutes, and another leader for the second one."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox:
        insert(conn, "minutely", crontab="* * * * *")
        first = django_setup.start_beat("-S", "syncguard")
        first.wait_for_log("elected: this process")
        second = django_setup.start_beat("-S", "syncguard")
        second.wait_for_log("standby for 'beat'")
        first_one = inbox.wait_until(lambda _: True, timeout=75)
        inbox.wait_settled()
        first.kill()
        second.wait_for_log("elected: this process", timeout=TTL + 1 + SLACK)
        inbox.wait_until(lambda one: one.term > first_one.term, timeout=75)
        inbox.drain()
    assert inbox.copies() == []
    assert seconds_between(inbox.messages) == {60.0}
    assert {(one.due_at.second, one.due_at.microsecond) for one in inbox.messages} == {(0, 0)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_database_trouble_costs_django_celery_beat_no_slot(celery_setup, broker, private_pg, private_dsn):
    """Backends terminated again and again, and a restarted server. A one-off row is sent once, and says so."""
    setup = set_up_django(celery_setup, broker, dsn=private_dsn)
    singles = ["single 3", "single 6", "single 9"]
    with Inbox(setup) as inbox:
        with psycopg.connect(private_dsn, autocommit=True) as conn:
            insert(conn, "busy", every=1)
        nodes = [setup.start_beat("-S", "syncguard") for _ in range(2)]
        inbox.wait_for(2)
        for number in range(12):
            if f"single {number}" in singles:
                with psycopg.connect(private_dsn, autocommit=True) as conn:
                    insert(conn, f"single {number}", every=2, one_off=True)
            if number == 6:
                private_pg.restart(mode="fast")
            else:
                private_pg.terminate_backends("syncguard")
            inbox.wait_for(2, entry="busy")
        for name in singles:
            poll(lambda name=name: inbox.of(name), timeout=20)
        with psycopg.connect(private_dsn, autocommit=True) as conn:
            enabled = "select count(*) from django_celery_beat_periodictask where enabled and one_off"
            poll(lambda: conn.execute(enabled).fetchone() == (0,), timeout=20)
        inbox.wait_for(3, entry="busy")
        assert all(node.alive for node in nodes)
    assert {name: len(inbox.of(name)) for name in singles} == dict.fromkeys(singles, 1)
    assert inbox.copies() == []
    assert seconds_between(inbox.of("busy")) == {1.0}
    assert "Traceback" not in setup.logs()


def test_a_one_off_row_is_sent_once_although_its_leader_died_before_it_said_so(django_setup, broker, pg_dsn):
    """And switched on again by somebody, it is sent once more."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn, Inbox(django_setup) as inbox:
        # Whoever counts a run in the row waits for a lock that the test holds.
        conn.execute(
            "create function hold() returns trigger language plpgsql as $$ begin "
            "if new.total_run_count <> old.total_run_count then perform pg_advisory_xact_lock(42); end if; "
            "return new; end $$"
        )
        conn.execute(
            "create trigger hold before update on django_celery_beat_periodictask for each row execute function hold()"
        )
        first = django_setup.start_beat("-S", "syncguard")
        first.wait_for_log("elected: this process")
        second = django_setup.start_beat("-S", "syncguard")
        second.wait_for_log("standby for 'beat'")
        with psycopg.connect(pg_dsn) as holding:
            holding.execute("select pg_advisory_xact_lock(42)")
            insert(conn, "single", every=2, one_off=True)
            blocked = "select pid from pg_stat_activity where wait_event = 'advisory' and datname = current_database()"
            poll(lambda: conn.execute(blocked).fetchall(), timeout=20)
            first.kill()
            # Its server process does not know yet, and would still write the row.
            conn.execute(f"select pg_terminate_backend(pid) from ({blocked}) as backends")
            poll(lambda: not conn.execute(blocked).fetchall())
        row = "select enabled, total_run_count from django_celery_beat_periodictask where name = 'single'"
        assert conn.execute(row).fetchone() == (True, 0)
        assert len(inbox.of("single")) == 1
        insert(conn, "busy", every=1)
        second.wait_for_log("elected: this process", timeout=TTL + 1 + SLACK)
        poll(lambda: conn.execute(row).fetchone() == (False, 0), timeout=20)
        inbox.wait_for(3, entry="busy")
        assert len(inbox.of("single")) == 1
        conn.execute(
            "update django_celery_beat_periodictask set enabled = true, date_changed = now() where name = 'single'"
        )
        inbox.wait_for(1, entry="single")
        poll(lambda: conn.execute(row).fetchone() == (False, 0), timeout=20)
        inbox.wait_for(3, entry="busy")
    assert len(inbox.of("single")) == 2
    assert inbox.copies() == []
    assert "Traceback" not in django_setup.logs()


def test_edits_in_the_very_tick_that_sends_never_send_a_slot_twice(django_setup, broker, pg_dsn):
    """A refresh brings back the old last_run_at from the table; what was sent is not read from there.

    At whatever moment of a tick an edit comes; `integration/test_beat_ticks` puts them where they hurt.
    """
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


def test_django_celery_beat_keeps_its_slots_over_leaders_and_a_one_off_runs_once(django_setup, broker, pg_dsn):
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


def test_a_schedule_row_that_is_deleted_under_an_entry_is_loud_and_stops_nothing_else(django_setup, broker, pg_dsn):
    """The foreign key is taken away first, as it is in a database without them."""
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
