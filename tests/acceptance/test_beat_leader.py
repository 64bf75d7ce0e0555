"""Many beats, one leader: real `celery beat` processes on real brokers, stopped, killed, frozen and cut off.

Cases that have no broker in them are elsewhere: which instants are due in the nights on which clocks change
(`unit/test_timetable`), and that memory stays flat over many ticks (`integration/test_beat_ticks`, on Celery's
memory transport: what could grow is the schedule, which is the same on every broker).
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from signal import SIGKILL, SIGTERM
from urllib.parse import urlsplit

import kombu
import psutil
import psycopg
import pytest

from celery_syncguard import SyncGuard
from tests.acceptance.apps.beat_entries import SCHEDULE_VARIABLE
from tests.acceptance.inbox import Inbox
from tests.fixtures import gate
from tests.fixtures.cluster import CONF_VARIABLE
from tests.fixtures.polling import poll
from tests.fixtures.proxy import Proxy

MODULE = "tests.acceptance.apps.beat_entries"
TTL = 3.0
#: What a busy machine may add.
SLACK = 4.0


@pytest.fixture
def beats(celery_setup, broker, pg_dsn):
    """A setup with a short ttl; `beats(schedule=…)`, other options as `celery_setup`."""

    def make(schedule=None, *, environment=None, conf=None, **options):
        variables = {} if schedule is None else {SCHEDULE_VARIABLE: json.dumps(schedule)}
        return celery_setup(
            MODULE,
            conf={"syncguard_leader_ttl": TTL, **(conf or {})},
            environment={**variables, **(environment or {})},
            **options,
        )

    return make


def start(setup, *arguments, **options):
    return setup.start_beat("-S", "syncguard", *arguments, **options)


def start_two(setup, **options):
    """The leader, and a beat that stands by."""
    first = start(setup)
    first.wait_for_log("elected: this process")
    return first, stand_by(setup, **options)


def stand_by(setup, **options):
    """A beat that stands by."""
    second = start(setup, **options)
    second.wait_for_log("standby for 'beat'")
    return second


def run(setup, *arguments):
    """`celery syncguard` with these arguments, ended."""
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", MODULE, "syncguard", *arguments],
        capture_output=True,
        text=True,
        cwd=setup.folder,
        env=setup.beat.environment,
        timeout=60,
    )


def command(setup, *arguments, code=0):
    """What it says, stdout and stderr; its exit status is as expected."""
    done = run(setup, *arguments)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def healthy(setup):
    """The complaint of the health check, empty if there is none."""
    done = run(setup, "leader", "--healthy")
    assert done.returncode in (0, 1), done.stderr
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr


def pid_of_leader(dsn):
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "select holder from syncguard_locks where key = '__syncguard_leader:beat' "
            "and expires_at_ms > extract(epoch from clock_timestamp()) * 1000"
        ).fetchone()
    return int(re.search(r"pid (\d+)", row[0])[1]) if row else None


def ask(dsn, query):
    """The one value that the database answers."""
    with psycopg.connect(dsn) as conn:
        return conn.execute(query).fetchone()[0]


def seconds_left(dsn):
    """Of the leader's lease by the database's clock; negative when it is over."""
    return ask(dsn, "select expires_at_ms / 1000.0 - extract(epoch from clock_timestamp()) from syncguard_locks")


def slots(dsn):
    with psycopg.connect(dsn) as conn:
        return conn.execute(
            "select entry, due_at, term, sent_at is not null, task_id from syncguard_beat_slots order by due_at"
        ).fetchall()


def two_ids(inbox):
    """Slots that were sent as two tasks."""
    ids = {}
    for one in inbox.messages:
        ids.setdefault(one.slot, set()).add(one.task_id)
    return [slot for slot, found in ids.items() if len(found) > 1]


def gaps_of(messages):
    """Seconds between the slots that were sent, rounded."""
    instants = sorted({one.due_at for one in messages})
    return {round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)}


# One leads


@pytest.mark.smoke
def test_two_beats_send_each_slot_once_and_the_task_can_see_which(beats, broker, history):
    setup = beats()
    setup.start_worker(concurrency=1, pool="solo")
    start_two(setup)
    runs = history.wait_for("run", count=5)
    due = [row.note for row in runs]
    assert len(due) == len(set(due))
    assert len({row.fence for row in runs}) == 1
    sent = {(row[1].isoformat(), row[2], row[4]) for row in slots(setup.dsn)}
    assert {(row.note, row.fence, row.task_id) for row in runs} <= sent
    assert list(setup.folder.glob("*schedule*")) == [], "a local file"


def test_the_dotted_name_of_the_scheduler_is_the_same_scheduler(beats, broker):
    setup = beats()
    start(setup).wait_for_log("elected: this process")
    other = setup.start_beat("-S", "celery_syncguard.beat:LeaderScheduler")
    other.wait_for_log("standby for 'beat'")


def test_two_beats_without_us_send_everything_twice(beats, broker):
    """The negative control."""
    setup = beats()
    with Inbox(setup) as inbox:
        for _ in range(2):
            setup.start_beat()
        began = time.monotonic()
        messages = inbox.wait_for(8)
        assert len(messages) > 1.5 * (time.monotonic() - began)


def median(times):
    return sorted(times)[len(times) // 2]


def seconds_until_it_leads(setup, node, *, within):
    """From now until that beat leads, at most so many."""
    began = time.monotonic()
    poll(lambda: pid_of_leader(setup.dsn) == node.pid, timeout=within)
    return time.monotonic() - began


def test_a_clean_stop_hands_over_within_a_second(beats, broker, pg_dsn):
    """Also in the middle of a tick, and nothing is sent twice."""
    setup = beats({"fast": 0.1}, conf={"syncguard_leader_ttl": 60, "syncguard_catch_up": "all"})
    times = []
    with Inbox(setup) as inbox:
        first, second = start_two(setup)
        inbox.wait_for(3)
        for _ in range(5):
            first.signal(SIGTERM)
            times.append(seconds_until_it_leads(setup, second, within=1.0 + SLACK))
            assert first.wait_exit(timeout=10) == 0
            inbox.wait_for(3)
            first.start()
            first.wait_for_log("standby for 'beat'")
            first, second = second, first
    print(times)
    assert median(times) < 1.0
    assert inbox.copies() == []
    assert all(row[3] for row in slots(pg_dsn)[:-1])
    assert "Traceback" not in setup.logs()


def test_behind_a_pooler_that_swallows_notifications_a_stop_hands_over_within_a_second(
    beats, broker, pg_dsn, pgbouncer_dsn
):
    setup = beats(dsn=pgbouncer_dsn, conf={"syncguard_leader_ttl": 60})
    with Inbox(setup) as inbox:
        first, second = start_two(setup)
        inbox.wait_for(1)
        first.signal(SIGTERM)
        began = time.monotonic()
        poll(lambda: pid_of_leader(pg_dsn) == second.pid, timeout=5)
        assert time.monotonic() - began < 1.0 + SLACK / 2
        inbox.wait_for(2)
    assert inbox.copies() == []


def test_a_killed_leader_is_replaced_when_its_lease_ends(beats, broker, pg_dsn):
    """Seconds, not 25 minutes, also to the next send; and the standby said whom it waits for."""
    setup = beats()
    times = []
    with Inbox(setup) as inbox:
        first, second = start_two(setup)
        for _ in range(3):
            assert f"pid {first.pid} leads" in second.logs()
            (message,) = inbox.wait_for(1)[:1]
            first.kill()
            began = time.monotonic()
            times.append(seconds_until_it_leads(setup, second, within=TTL + 1 + SLACK))
            inbox.wait_until(lambda one: one.term > message.term)
            assert time.monotonic() - began < TTL + 1 + SLACK
            first.start()
            first.wait_for_log("standby for 'beat'")
            first, second = second, first
    print(times)
    assert median(times) < TTL + 1


def test_a_frozen_leader_is_replaced_when_its_lease_ends(beats, broker, pg_dsn):
    """Its connections stay open. Thawed, it stands by."""
    setup = beats()
    times = []
    first, second = start_two(setup)
    for _ in range(3):
        first.freeze()
        times.append(seconds_until_it_leads(setup, second, within=TTL + 1 + SLACK))
        first.thaw()
        first.wait_for_log(f"standby for 'beat': .* pid {second.pid} leads")
        first, second = second, first
    print(times)
    assert median(times) < TTL + 1
    assert first.alive
    assert second.alive
    assert "Traceback" not in setup.logs()


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_slot_due_while_the_leader_dies_is_sent_once(beats, broker, pg_dsn, side):
    """Killed 0.1 s before a slot, and as soon as one is sent."""
    setup = beats({"slow": 2.0}, conf={"syncguard_catch_up": "all"})
    with Inbox(setup) as inbox:
        first, _ = start_two(setup)
        (message,) = inbox.wait_for(1)
        inbox.wait_settled()
        if side == "before":
            freeze_before_a_slot(setup, first, message.due_at, every=timedelta(seconds=2))
        first.kill()
        inbox.wait_for(3)
    instants = sorted(message.due_at for message in inbox.messages)
    assert inbox.copies() == []
    assert {round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)} == {
        2
    }


def freeze_before_a_slot(setup, node, due_at, *, every):
    """Freeze the leader 0.1 s before a slot by the database's clock; if this machine was too late, before a later one."""
    for _ in range(10):
        due_at += every
        poll(lambda due_at=due_at: ask(setup.dsn, "select clock_timestamp()") > due_at - timedelta(seconds=0.1))
        node.freeze()
        if due_at not in {row[1] for row in slots(setup.dsn)}:
            return
        node.thaw()
    raise AssertionError("always too late")


# A leader that cannot know that it is one no more


def frozen_between_claim_and_send(setup, inbox):
    """Freeze the leader right before it publishes, let the other take over and send, and thaw it again."""
    first, second = start_two(setup)
    inbox.wait_for(2)
    gate.open_gate("trap")
    poll(lambda: gate.is_open("trapped"), timeout=20)
    first.freeze()
    second.wait_for_log("elected: this process", timeout=TTL + SLACK)
    inbox.wait_for(3)
    gate.open_gate("free")
    first.thaw()
    first.wait_for_log("no longer leads 'beat'|lost the lease")
    inbox.wait_for(2)
    return first, second


def test_a_frozen_leader_sends_nothing_when_it_wakes_up(beats, broker, pg_dsn):
    """Frozen in the one place where it hurts, between its claim and its send."""
    setup = beats(conf={"syncguard_catch_up": "all"})
    with Inbox(setup) as inbox:
        first, _ = frozen_between_claim_and_send(setup, inbox)
    assert inbox.copies() == []
    assert first.alive
    assert "Traceback" not in setup.logs()


def test_without_the_last_look_a_frozen_leader_sends_a_second_time(beats, broker, pg_dsn):
    """The negative control."""
    setup = beats(conf={"syncguard_catch_up": "all"}, environment={"SYNCGUARD_TEST_WITHOUT_CHECK": "1"})
    with Inbox(setup) as inbox:
        frozen_between_claim_and_send(setup, inbox)
        poll(inbox.copies, timeout=10)


def test_a_suspended_machine_owns_again_before_it_sends(beats, broker, pg_dsn):
    """Until its lease has been over for twice the ttl, alone."""
    setup = beats()
    with Inbox(setup) as inbox:
        only = start(setup)
        (message,) = inbox.wait_for(1)
        only.freeze()
        poll(lambda: seconds_left(pg_dsn) < -2 * TTL, timeout=60)
        only.thaw()
        poll(lambda: inbox.messages[-1].term > message.term, timeout=20)
        only.wait_for_log("standby: this process no longer leads")
    before = [one for one in inbox.messages if one.term == message.term]
    after = [one for one in inbox.messages if one.term > message.term]
    assert inbox.messages == before + after
    assert (after[0].due_at - before[-1].due_at).total_seconds() > 2 * TTL - 1, "one missed slot, not all of them"
    assert only.alive


def test_a_deleted_lease_row_ends_the_term_and_not_the_process(beats, broker, pg_dsn):
    setup = beats()
    with Inbox(setup) as inbox:
        only = start(setup)
        (message,) = inbox.wait_for(1)
        with psycopg.connect(pg_dsn, autocommit=True) as conn:
            conn.execute("delete from syncguard_locks")
        inbox.wait_until(lambda one: one.term > message.term)
        assert only.alive
    assert inbox.copies() == []
    assert "Traceback" not in setup.logs()


def test_a_leader_that_hardly_gets_to_run_sends_nothing_twice(beats, broker, pg_dsn):
    """A tenth of the time, as under a CPU limit; with a ttl of 3 s it may keep or lose the leadership."""
    setup = beats({"fast": 0.2})
    with Inbox(setup) as inbox:
        nodes = start_two(setup)
        until = time.monotonic() + 2 * TTL
        while time.monotonic() < until:
            # These two are the limit on its time that this is about.
            nodes[0].freeze()
            time.sleep(0.27)
            nodes[0].thaw()
            time.sleep(0.03)
        inbox.wait_for(5)
        assert all(node.alive for node in nodes)
    assert inbox.copies() == []
    assert "Traceback" not in setup.logs()


# Between claim and mark


def test_a_leader_that_dies_before_it_sends_leaves_the_slot_to_the_next_one(beats, broker, pg_dsn):
    """Claimed, and killed before publishing."""
    # Under "one" a busy machine, which takes over only when the next slot is due, would send that one instead.
    setup = beats({"slow": 4.0}, conf={"syncguard_catch_up": "all"})
    with Inbox(setup) as inbox:
        start_two(setup)
        gate.open_gate("kill")
        poll(lambda: not gate.is_open("kill"), timeout=20)
        (message,) = inbox.wait_for(1)
    first_slot = slots(pg_dsn)[0]
    assert (message.due_at, message.task_id, message.term) == (first_slot[1], first_slot[4], first_slot[2])
    assert first_slot[3], "and marked by the one that sent it"


def test_a_leader_that_dies_before_it_marks_leaves_a_copy_that_run_once_answers(beats, broker, pg_dsn, history):
    """Published, and killed before the mark. The copy is the same task, so it runs once."""
    setup = beats({"slow": {"every": 4.0, "task": "once", "syncguard_catch_up": "all"}})
    with psycopg.connect(pg_dsn, autocommit=True) as conn, psycopg.connect(pg_dsn) as holding:
        # The mark waits for a lock that the test holds.
        conn.execute(
            "create function hold() returns trigger language plpgsql as $$ begin "
            "if new.sent_at is not null then perform pg_advisory_xact_lock(42); end if; return new; end $$"
        )
        conn.execute("create trigger hold before update on syncguard_beat_slots for each row execute function hold()")
        holding.execute("select pg_advisory_xact_lock(42)")
        with Inbox(setup) as inbox:
            first, _ = start_two(setup)
            (message,) = inbox.wait_for(1)
            first.kill()
            # Its server process does not know yet, and would still write the mark.
            conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'advisory'")
            holding.rollback()
            copy = inbox.wait_until(lambda one: one is not message and one.due_at == message.due_at)
        assert copy.task_id == message.task_id
        assert copy.term > message.term
    for one in (message, copy):
        setup.module.once.apply_async(("slow",), task_id=one.task_id)
    setup.start_worker(concurrency=1, pool="solo")
    history.wait_for("run", task_id=message.task_id)
    setup.worker.wait_for_log(
        f"{message.task_id}.*(answered|done|succeeded)[^$]*{message.task_id}.*(answered|done|succeeded)"
    )
    assert history.count("run", task_id=message.task_id) == 1


# The database


def test_without_a_database_nothing_is_sent_until_it_is_there(beats, broker, pg_dsn, pg_proxy):
    setup = beats(dsn=pg_proxy.dsn(pg_dsn))
    pg_proxy.refuse()
    with Inbox(setup) as inbox:
        nodes = [start(setup) for _ in range(2)]
        for node in nodes:
            node.wait_for_log("cannot ask who leads")
        refused = pg_proxy.refused
        poll(lambda: pg_proxy.refused >= refused + 10, timeout=30)  # both have tried again for some intervals
        inbox.drain()
        assert inbox.messages == []
        pg_proxy.accept()
        inbox.wait_for(2)
        assert all(node.alive for node in nodes)
    assert inbox.copies() == []
    assert "Traceback" not in setup.logs()


def test_a_leader_that_loses_the_database_steps_down_at_its_deadline_and_comes_back(beats, broker, pg_dsn, pg_proxy):
    setup = beats(dsn=pg_proxy.dsn(pg_dsn), conf={"syncguard_catch_up": "all", "syncguard_timeout": 1.0})
    with Inbox(setup) as inbox:
        only = start(setup)
        (message,) = inbox.wait_for(1)
        pg_proxy.stall()
        only.wait_for_log("no longer leads 'beat'", timeout=TTL + SLACK)
        inbox.drain()
        count = len(inbox.messages)
        only.wait_for_log("cannot ask who leads", timeout=60)
        inbox.drain()
        assert len(inbox.messages) == count
        pg_proxy.resume()
        pg_proxy.cut()
        inbox.wait_until(lambda one: one.term > message.term)
        inbox.wait_for(2)
        assert only.alive
    assert inbox.copies() == []
    instants = sorted(one.due_at for one in inbox.messages)
    assert {round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)} == {
        1
    }
    assert "Traceback" not in setup.logs()


def test_a_leader_that_was_cut_off_finds_another_term_and_stands_by(beats, broker, pg_dsn, pg_proxy):
    """Its renewal and its claim arrive late, when the other one leads, and do nothing."""
    setup = beats(conf={"syncguard_catch_up": "all"})
    conf = {**json.loads(setup.environment[CONF_VARIABLE]), "syncguard_dsn": pg_proxy.dsn(pg_dsn)}
    with Inbox(setup) as inbox:
        first = start(setup, environment={CONF_VARIABLE: json.dumps(conf)})
        first.wait_for_log("elected: this process")
        second = stand_by(setup)
        (message,) = inbox.wait_for(1)
        inbox.wait_settled()  # a mark that the database does not hear leaves a copy, which is no promise
        pg_proxy.stall()
        second.wait_for_log("elected: this process", timeout=TTL + SLACK)
        inbox.wait_until(lambda one: one.term > message.term)
        pg_proxy.resume()
        first.wait_for_log(rf"standby for 'beat': .* pid {second.pid} leads")
        inbox.wait_for(2)
        assert pid_of_leader(pg_dsn) == second.pid
    terms = [one.term for one in inbox.messages]
    assert terms == sorted(terms)
    assert inbox.copies() == []
    assert "Traceback" not in setup.logs()


def test_terminated_backends_cost_no_slot(beats, broker, pg_dsn, pg_server):
    """Again and again, each time as soon as something was sent; `scripts/beat-chaos` does it for minutes."""
    setup = beats(conf={"syncguard_catch_up": "all"})
    with Inbox(setup) as inbox:
        nodes = [start(setup) for _ in range(2)]
        inbox.wait_for(1)
        for _ in range(8):
            pg_server.terminate_backends(pg_dsn.rpartition("/")[2])
            inbox.wait_for(1)
        assert all(node.alive for node in nodes)
    instants = sorted(one.due_at for one in inbox.messages)
    assert inbox.copies() == []
    assert {round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)} == {
        1
    }
    assert "Traceback" not in setup.logs()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_backends_terminated_every_five_seconds_for_minutes_cost_no_slot(beats, broker, pg_dsn, pg_server):
    """Two minutes of it."""
    setup = beats(conf={"syncguard_catch_up": "all"})
    with Inbox(setup) as inbox:
        nodes = start_two(setup)
        inbox.wait_for(1)
        terminated = []
        next_at = time.monotonic()
        for _ in range(24):
            terminated.append(pg_server.terminate_backends(pg_dsn.rpartition("/")[2]))
            next_at += 5
            poll(lambda next_at=next_at: time.monotonic() >= next_at)  # that it is every five seconds is the misdeed
        inbox.wait_for(2)
        assert all(node.alive for node in nodes)
    assert min(terminated) > 0
    assert two_ids(inbox) == []
    assert inbox.copies() == []
    assert gaps_of(inbox.messages) == {1}
    assert len(inbox.messages) > 110
    instants = [one.at for one in inbox.messages]
    longest = max(after - before for before, after in zip(instants, instants[1:], strict=False))
    print(f"longest time without a send: {longest:.1f} s")
    assert longest < TTL + 1 + SLACK
    assert "Traceback" not in setup.logs()


def test_a_database_without_our_tables_is_said_with_the_command_that_helps(beats, broker, empty_dsn):
    setup = beats(dsn=empty_dsn)
    node = start(setup)
    node.wait_for_log("celery syncguard migrate")
    assert node.alive


# The broker


@pytest.mark.both_brokers
@pytest.mark.slow
@pytest.mark.parametrize("private_broker", ["redis", "rabbitmq"], indirect=True)
@pytest.mark.timeout(300)
def test_after_a_broker_outage_of_a_minute_sends_resume_and_missed_slots_follow_the_rule(
    celery_setup, private_broker, redis_db, pg_dsn
):
    """The health check says what is wrong meanwhile, and somebody leads all the time."""
    # Less than the 64 slots that are made up for.
    schedule = {"fast": {"every": 2.0, "syncguard_catch_up": "all"}, "lazy": 2.0}
    setup = celery_setup(
        MODULE,
        broker=private_broker,
        conf={"syncguard_leader_ttl": TTL},
        environment={SCHEDULE_VARIABLE: json.dumps(schedule)},
    )
    with Inbox(setup) as inbox:
        nodes = start_two(setup)
        inbox.wait_for(2)
        private_broker.server.stop()
        failing = (
            "select coalesce(max(extract(epoch from clock_timestamp() - failing_since)), 0) from syncguard_beat_terms"
        )
        poll(lambda: ask(pg_dsn, failing) > 60, timeout=120, interval=0.5)
        poll(lambda: "not been able to send" in healthy(setup), interval=0.5)
        private_broker.server.start()
        poll(lambda: healthy(setup) == "", timeout=40, interval=0.5)
        inbox.wait_for(2, entry="lazy")
        inbox.wait_for(2, entry="fast")
        assert all(node.alive for node in nodes)
    instants = sorted({one.due_at for one in inbox.of("fast")})
    gaps = {round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)}
    assert gaps == {2}, "all of them were sent in the end"
    instants = sorted({one.due_at for one in inbox.of("lazy")})
    gaps = [round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)]
    assert max(gaps) > 30, "one of them was sent, the others were missed"
    assert len({(one.slot, one.task_id) for one in inbox.messages}) == len({one.slot for one in inbox.messages})


@pytest.fixture
def broker_proxy(broker):
    """A TCP proxy in front of the broker; requested before `beats`, since a setup cleans up through it."""
    with Proxy(urlsplit(broker.url).port) as proxy:
        yield proxy


@pytest.mark.both_brokers
def test_a_broker_slower_than_the_lease_costs_neither_leadership_nor_slots(broker_proxy, beats, broker, pg_dsn):
    """Renewal does not depend on ticks. One send takes longer than the whole lease."""
    ttl = 5.0
    slow = replace(broker, url=broker.url.replace(f":{broker_proxy.upstream[1]}", f":{broker_proxy.port}"))
    setup = beats(broker=slow, conf={"syncguard_catch_up": "all", "syncguard_leader_ttl": ttl})
    setup.app.conf.broker_url = broker.url  # the reader's own way is not slow
    with Inbox(setup) as inbox:
        first, _second = start_two(setup)
        (message,) = inbox.wait_for(1)
        broker_proxy.stall()
        ends = "select expires_at_ms from syncguard_locks"
        end = ask(pg_dsn, ends)
        poll(lambda: ask(pg_dsn, ends) > end + ttl * 1000, timeout=60)
        stalled_for = ask(pg_dsn, "select clock_timestamp()") - inbox.messages[-1].due_at
        broker_proxy.resume()
        inbox.wait_for(int(stalled_for.total_seconds()) + 2)
    assert stalled_for > timedelta(seconds=3), "it did send meanwhile"
    assert {one.term for one in inbox.messages} == {message.term}
    instants = sorted({one.due_at for one in inbox.messages})
    gaps = {round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)}
    assert gaps == {1}
    # A broker that is silent for ten seconds counts as down, and the message is sent again: the same task.
    assert len({one.task_id for one in inbox.messages}) == len(instants)
    assert "no longer leads" not in first.logs()


@pytest.mark.both_brokers
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_broker_that_is_always_slower_than_the_lease_ends_no_process(broker_proxy, beats, broker, pg_dsn):
    """For a minute, each send takes longer than the whole lease."""
    slow = replace(broker, url=broker.url.replace(f":{broker_proxy.upstream[1]}", f":{broker_proxy.port}"))
    setup = beats({"fast": 2.0}, broker=slow, conf={"syncguard_catch_up": "all"})
    setup.app.conf.broker_url = broker.url  # the reader's own way is not slow
    with Inbox(setup) as inbox:
        nodes = start_two(setup)
        inbox.wait_for(1)
        # From now on, since a whole handshake at this pace would be too slow for RabbitMQ.
        broker_proxy.delay = TTL + 0.3
        began = ask(pg_dsn, "select clock_timestamp()")
        slow_sends = (
            f"select count(*) from syncguard_beat_slots where sent_at - claimed_at > make_interval(secs => {TTL})"
        )
        poll(lambda: ask(pg_dsn, slow_sends) >= 15, timeout=120, interval=0.2)
        assert ask(pg_dsn, "select clock_timestamp()") - began > timedelta(seconds=45)
        broker_proxy.delay = 0.0
        now = ask(pg_dsn, "select clock_timestamp()")
        inbox.wait_until(lambda one: one.due_at > now, timeout=60)
        assert all(node.alive for node in nodes)
    terms = [one.term for one in inbox.messages]
    assert terms == sorted(terms), "kept, or handed over"
    assert two_ids(inbox) == []
    assert inbox.copies() == []
    assert gaps_of(inbox.messages) == {2}
    assert "Traceback" not in setup.logs()


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_message_that_the_broker_refuses_keeps_nobody_else_waiting(beats, broker, pg_dsn):
    """A queue that exists with other properties: RabbitMQ answers 406 and closes the channel."""
    setup = beats({"refused": {"every": 1.0, "queue": f"{broker.queue}-other"}, "fast": 1.0})
    with setup.app.connection_for_write() as connection:
        kombu.Queue(f"{broker.queue}-other", durable=False, auto_delete=True).bind(connection.default_channel).declare()
    with Inbox(setup) as inbox:
        node = start(setup)
        node.wait_for_log("the broker refuses 'refused'")
        inbox.wait_for(3, entry="fast")
        assert node.alive


# Configuration and clocks


def test_a_newer_schedule_changes_nothing_until_its_beat_leads(beats, broker, pg_dsn):
    """A rolling deploy. And no entry is lost."""
    setup = beats({"kept": 1.0, "old": 1.0})
    newer = {SCHEDULE_VARIABLE: json.dumps({"kept": 1.0, "new": 1.0})}
    with Inbox(setup) as inbox:
        first, second = start_two(setup, environment=newer)
        inbox.wait_for(6)
        assert {one.entry for one in inbox.messages} == {"kept", "old"}
        with psycopg.connect(pg_dsn) as conn:
            before = conn.execute("select entry, removed_at from syncguard_beat_entries order by entry").fetchall()
        assert before == [("kept", None), ("old", None)]
        first.stop()
        later = inbox.wait_for(8)
        assert {one.entry for one in later[2:]} == {"kept", "new"}
    kept = sorted(one.due_at for one in inbox.of("kept"))
    assert {round((after - before).total_seconds()) for before, after in zip(kept, kept[1:], strict=False)} <= {1, 2}
    assert inbox.copies() == []
    second.stop()


def test_hosts_whose_clocks_are_hours_apart_send_at_the_databases_time(beats, broker, pg_dsn):
    """With leaders that disagree on the time no slot comes early, late, or twice."""
    setup = beats(conf={"syncguard_catch_up": "all"})
    with Inbox(setup) as inbox:
        first = start(setup, environment={"SYNCGUARD_TEST_CLOCK_SHIFT": "3600"})
        first.wait_for_log("elected: this process")
        second = start(setup, environment={"SYNCGUARD_TEST_CLOCK_SHIFT": "-3600"})
        second.wait_for_log("standby for 'beat'")
        inbox.wait_for(2)
        first.stop()
        inbox.wait_for(3)
    instants = sorted(one.due_at for one in inbox.messages)
    assert inbox.copies() == []
    assert {round((after - before).total_seconds()) for before, after in zip(instants, instants[1:], strict=False)} == {
        1
    }
    with psycopg.connect(pg_dsn) as conn:
        (late,) = conn.execute(
            "select max(abs(extract(epoch from sent_at - due_at))) from syncguard_beat_slots where sent_at is not null"
        ).fetchone()
    assert late < 30


def test_slots_missed_while_nobody_led_follow_the_rule_of_their_entry(beats, broker, pg_dsn):
    hourly = {rule: {"every": 3600.0, "syncguard_catch_up": rule} for rule in ("one", "skip", "all")}
    setup = beats({**hourly, "fast": 1.0})
    with Inbox(setup) as inbox:
        node = start(setup)
        inbox.wait_for(1)
        node.stop()
        with psycopg.connect(pg_dsn, autocommit=True) as conn:
            conn.execute(
                "update syncguard_beat_entries set last_due_at = last_due_at - interval '5.5 hours', "
                "since_at = since_at - interval '6 hours' where entry <> 'fast'"
            )
        node.start()
        poll(lambda: len(inbox.of("all")) >= 5, timeout=20)
        inbox.wait_for(2, entry="fast")
    assert {rule: len(inbox.of(rule)) for rule in hourly} == {"one": 1, "skip": 0, "all": 5}
    assert inbox.of("one")[0].due_at - inbox.of("all")[-1].due_at == timedelta(0)
    assert inbox.copies() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_crontab_is_sent_once_each_minute_whoever_leads(beats, broker, pg_dsn):
    """Real minutes, and another leader for the second one."""
    setup = beats({"minutely": "* *"}, conf={"syncguard_catch_up": "all"})
    with Inbox(setup) as inbox:
        first, second = start_two(setup)
        first_one = inbox.wait_until(lambda _: True, timeout=75)
        inbox.wait_settled()
        first.kill()
        second.wait_for_log("elected: this process", timeout=TTL + 1 + SLACK)
        inbox.wait_until(lambda one: one.term > first_one.term, timeout=75)
        inbox.drain()
    assert inbox.copies() == []
    assert gaps_of(inbox.messages) == {60}
    assert {(one.due_at.second, one.due_at.microsecond) for one in inbox.messages} == {(0, 0)}


def test_a_duplicate_or_held_periodic_task_is_an_info_and_not_an_error(beats, broker, pg_dsn):
    setup = beats({"alone": {"every": 1.0, "task": "alone"}, "locked": {"every": 1.0, "task": "locked"}})
    with SyncGuard(pg_dsn) as guard, guard.hold("locked", ttl=60):
        start(setup).wait_for_log(r"INFO.*'alone' is a duplicate")
        setup.start_worker(concurrency=1, pool="solo").wait_for_log(r"INFO.*skipped: 'locked' is held")
    assert "ERROR" not in setup.logs()
    assert "Traceback" not in setup.logs()


# Files, and beat inside a worker


def test_no_local_file_is_needed_for_a_start(beats, broker, pg_dsn, tmp_path):
    """Corrupt schedule files, a folder that does not exist, and a file system that takes no files.

    Of the latter kind every machine has one, which refuses root too: /sys, or where there is none, a folder that is missing.
    """
    setup = beats(conf={"syncguard_beat_scheduler": "celery.beat:PersistentScheduler"})
    corrupt = tmp_path / "corrupt"
    for suffix in ("", ".db", ".dat", ".dir"):
        corrupt.with_name(f"corrupt{suffix}").write_bytes(b"\0garbage" * 100)
    with Inbox(setup) as inbox:
        for place in (corrupt, tmp_path / "no such folder" / "schedule", Path("/sys/schedule")):
            node = start(setup, "-s", str(place))
            node.wait_for_log("elected: this process")
            inbox.wait_for(1)
            inbox.wait_settled()
            node.kill()
            poll(lambda: pid_of_leader(pg_dsn) is None)
        assert inbox.copies() == []


def test_a_killed_beat_starts_again_with_its_stale_pidfile(beats, broker, pg_dsn, tmp_path):
    """The file names a process that is gone. (Without --pidfile there is none, which containers should use.)"""
    pidfile = tmp_path / "beat.pid"
    setup = beats()
    with Inbox(setup) as inbox:
        node = start(setup, "--pidfile", str(pidfile))
        inbox.wait_for(1)
        node.kill()
        assert pidfile.exists()
        node.start()
        inbox.wait_for(1)


def test_a_pidfile_that_names_another_process_keeps_beat_from_starting_and_an_empty_one_does_not(
    beats, broker, pg_dsn, tmp_path
):
    """The pid of a beat that was killed is somebody else's by now. Celery cannot tell; so there should be no file."""
    pidfile = tmp_path / "beat.pid"
    pidfile.write_text(f"{os.getpid()}\n")
    setup = beats()
    refused = start(setup, "--pidfile", str(pidfile), wait=False)
    assert refused.wait_exit(timeout=30) != 0
    assert "Pidfile" in refused.logs()
    assert "already exists" in refused.logs()
    start(setup, "--pidfile=").wait_for_log("elected: this process")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_beat_that_is_killed_while_it_writes_its_schedule_file_starts_again(beats, broker, pg_dsn, tmp_path):
    """The file is written with every slot, and the kill comes at any moment, ten times."""
    setup = beats(
        {"fast": 0.05},
        conf={"syncguard_beat_scheduler": "celery.beat:PersistentScheduler", "beat_sync_every": 1},
    )
    chance = random.Random(broker.kind)
    file = tmp_path / "schedule"
    node = start(setup, "-s", str(file))
    with Inbox(setup) as inbox:
        for _ in range(10):
            node.wait_for_log("elected: this process")
            inbox.wait_for(1)
            assert list(tmp_path.glob("schedule*")), "there is a file to be written"
            time.sleep(chance.uniform(0.0, 0.3))  # so that it is any moment
            node.kill()
            with psycopg.connect(pg_dsn, autocommit=True) as conn:
                conn.execute("delete from syncguard_locks")  # instead of waiting for the end of the lease
            node.start()
        inbox.wait_for(3)
        assert node.alive
    assert two_ids(inbox) == []


def test_two_beats_with_the_same_host_name_and_pid_are_not_taken_for_one(beats, broker, pg_dsn):
    """Pid 1 in two containers, of which one is killed and comes back as pid 1 while its old lease lives."""
    setup = beats(conf={"syncguard_catch_up": "all"}, environment={"SYNCGUARD_TEST_SAME_IDENTITY": "1"})
    with Inbox(setup) as inbox:
        first, second = start_two(setup)
        assert "celery beat on web pid 1 leads" in second.logs()
        (message,) = inbox.wait_for(1)
        inbox.wait_settled()
        first.kill()
        first.start()
        first.wait_for_log("standby for 'beat'|elected: this process")
        inbox.wait_until(lambda one: one.term > message.term)
        inbox.wait_for(2)
    instants = [one.due_at for one in inbox.messages]
    assert instants == sorted(set(instants))
    assert {(after - before).total_seconds() for before, after in zip(instants, instants[1:], strict=False)} == {1.0}
    assert len({one.term for one in inbox.messages}) == 2


@pytest.mark.both_brokers
def test_beat_inside_a_worker_leads_and_hands_over_when_the_worker_stops(beats, broker, pg_dsn, history):
    setup = beats(conf={"syncguard_leader_ttl": 60})
    worker = setup.start_worker("-B", "--scheduler", "syncguard")
    history.wait_for("run", count=1)
    leader = pid_of_leader(pg_dsn)
    assert leader in worker.children()
    standby = start(setup)
    standby.wait_for_log("standby for 'beat'")
    worker.signal(SIGTERM)
    poll(lambda: pid_of_leader(pg_dsn) == standby.pid, timeout=10)
    assert worker.wait_exit(timeout=30) == 0


@pytest.mark.parametrize("broker", ["redis"], indirect=True)  # it has no part in it
def test_beat_inside_a_worker_that_is_killed_ends_and_hands_over(beats, broker, pg_dsn, history):
    """A worker that is stopped tells its beat once, and waits for nothing; one that is killed tells it nothing."""
    setup = beats(conf={"syncguard_leader_ttl": 300})
    worker = setup.start_worker("-B", "--scheduler", "syncguard", pool="solo")
    history.wait_for("run", count=1)
    leader = psutil.Process(pid_of_leader(pg_dsn))
    standby = start(setup)
    standby.wait_for_log("standby for 'beat'")
    worker.signal(SIGKILL)  # itself only
    poll(lambda: pid_of_leader(pg_dsn) == standby.pid, timeout=10)
    poll(lambda: not leader.is_running() or leader.status() == psutil.STATUS_ZOMBIE, timeout=10)
    worker.wait_for_log("the worker that this beat belongs to")


# Seeing it


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_show_the_leader_its_slots_and_end_its_term(beats, broker, pg_dsn):
    setup = beats({"fast": 0.5}, conf={"syncguard_leader_ttl": 60})
    first, second = start_two(setup)
    poll(lambda: sum(row[3] for row in slots(pg_dsn)) > 2)
    shown = command(setup, "leader")
    assert f"pid {first.pid}" in shown
    assert "term" in shown
    facts = json.loads(command(setup, "leader", "--json", "--healthy"))
    assert facts["leading"]
    assert facts["problem"] is None
    rows = json.loads(command(setup, "slots", "--json", "--limit", "2"))
    assert [row["entry"] for row in rows] == ["fast", "fast"]
    assert "TERM" in command(setup, "slots")
    (entry,) = json.loads(command(setup, "entries", "--json"))
    assert entry["entry"] == "fast"
    assert entry["runs"] > 2
    due, following = (datetime.fromisoformat(entry[name]) for name in ("last_due_at", "next_due_at"))
    assert following - due == timedelta(seconds=0.5)
    assert due in {row[1] for row in slots(pg_dsn)}
    assert "NEXT DUE" in command(setup, "entries")
    assert f"pid {first.pid}" in command(setup, "step-down", "--yes")
    poll(lambda: pid_of_leader(pg_dsn) == second.pid)
    first.wait_for_log("an operator ended term")
    second.stop()
    # The first one leads and sends again, however late it hears of it.
    poll(lambda: pid_of_leader(pg_dsn) == first.pid)
    count = sum(row[3] for row in slots(pg_dsn))
    poll(lambda: sum(row[3] for row in slots(pg_dsn)) > count, timeout=30)
    first.stop()
    assert "nobody leads" in command(setup, "leader")
    poll(lambda: "nobody leads" in healthy(setup), timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_standby_is_healthy_all_through_the_takeover_from_a_killed_leader(beats, broker, pg_dsn):
    setup = beats(conf={"syncguard_leader_ttl": 6})
    with Inbox(setup) as inbox:
        first, second = start_two(setup)
        (message,) = inbox.wait_for(1)
        poll(lambda: healthy(setup) == "", timeout=30)
        first.kill()
        complaints = []
        while inbox.messages[-1].term == message.term:
            complaints.append(healthy(setup))
        complaints.append(healthy(setup))
    print(len(complaints))
    assert set(complaints) == {""}
    assert pid_of_leader(pg_dsn) == second.pid


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nobody_leading_is_healthy_for_a_moment_and_not_for_long(beats, broker, pg_dsn):
    """Each moment of a takeover held still: the standby is frozen, and the clock of the lease is set on."""
    setup = beats(conf={"syncguard_leader_ttl": 600})  # a command may take its time
    first, second = start_two(setup)
    poll(lambda: healthy(setup) == "", timeout=60)
    second.freeze()
    first.kill()
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("update syncguard_locks set expires_at_ms = expires_at_ms - 350000")
        assert healthy(setup) == "", "a lease that nobody renews, of a process that is gone"
        conn.execute("update syncguard_locks set expires_at_ms = expires_at_ms - 350000")
        assert not json.loads(command(setup, "leader", "--json"))["leading"]
        assert healthy(setup) == "", "nobody leads"
        conn.execute("update syncguard_beat_terms set seen_at = seen_at - interval '900 seconds'")
        assert "nobody leads" in healthy(setup)
    second.thaw()
    poll(lambda: healthy(setup) == "", timeout=30)
    assert pid_of_leader(pg_dsn) == second.pid


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_leader_that_claims_to_lead_but_could_not_renew_is_not_healthy(beats, broker, pg_dsn):
    setup = beats(conf={"syncguard_leader_ttl": 600})  # a command may take its time
    only = start(setup)
    only.wait_for_log("elected: this process")
    poll(lambda: healthy(setup) == "", timeout=60)
    only.freeze()
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        # As if six minutes had passed, which a renewal would not have let come.
        conn.execute("update syncguard_locks set expires_at_ms = expires_at_ms - 350000")
    assert "could not renew" in healthy(setup)
    only.thaw()
