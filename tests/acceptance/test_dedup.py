"""A claim lasts as long as its work and no longer, whatever becomes of the message, the task and the worker."""

import os
import signal
import subprocess
import sys

import psycopg
import pytest
from celery import Celery, chain, chord, group
from psycopg.conninfo import conninfo_to_dict

from celery_syncguard import DuplicateTask, StoreUnavailable
from celery_syncguard.dedup import send_task
from celery_syncguard.skipped import SKIPPED
from celery_syncguard.tasks import app_state
from celery_syncguard.tasks import claims as claims_of_tasks
from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.deduplicated"


@pytest.fixture
def setup(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    yield setup
    # Before its database goes: what this process still has to confirm.
    app_state.state_of(setup.app).close()


@pytest.fixture
def claims(pg_dsn):
    """Looks at the claims: claim_key -> task_id, the live ones."""
    with psycopg.connect(pg_dsn, autocommit=True) as connection:

        def look():
            rows = connection.execute(
                "select claim_key, task_id from syncguard_claims where expires_at_ms > syncguard_clock_ms()"
            )
            return dict(rows.fetchall())

        yield look


@pytest.mark.smoke
def test_work_is_queued_once_until_it_is_done(setup, history, claims):
    work = setup.module.work
    setup.start_worker()
    first = work.delay("a", "go")
    history.wait_for("start")
    assert work.delay("a", "go").id == first.id
    assert work.delay("b").get(timeout=30) == "b"
    setup.open_gate("go")
    assert first.get(timeout=30) == "a"
    poll(lambda: claims() == {})
    again = work.delay("a")
    assert again.id != first.id
    assert again.get(timeout=30) == "a"
    assert history.count("start", key="a") == 2


def test_one_runs_and_one_waits_of_ten_that_are_published_during_a_hold(setup, history, claims):
    """`dedup_until="start"` with a lock. The plain task is the negative control."""
    task = setup.module.one_running_one_waiting
    setup.start_worker(concurrency=3)
    task.delay("a", "go")
    history.wait_for("start", key="a")
    results = [task.delay("a", "go") for _ in range(10)]
    assert [result.duplicate for result in results] == [False] + [True] * 9
    assert len({result.id for result in results}) == 1
    for _ in range(10):
        setup.module.plain.delay("plain")
    history.wait_for("end", key="plain", count=10)
    setup.open_gate("go")
    assert results[0].get(timeout=30) == "a"
    assert history.count("start", key="a") == 2
    assert history.count("start", key="plain") == 10
    assert [first for first, _ in history.overlaps() if first.key == "a"] == []
    poll(lambda: claims() == {})


@pytest.mark.parametrize("fails", [False, True])
def test_a_throttle_lets_one_through_per_window_also_after_it_has_ended(setup, history, claims, fails):
    """After a success and after a failure."""
    task = setup.module.throttled
    setup.start_worker()
    first = task.delay("a", fails)
    first.get(timeout=30, propagate=False)
    assert task.delay("a", fails).id == first.id
    assert history.count("start") == 1
    second = poll(lambda: not (result := task.delay("a", fails)).duplicate and result, timeout=15, interval=0.1)
    second.get(timeout=30, propagate=False)
    first_run, second_run = history.events("start")
    assert (second_run.at - first_run.at).total_seconds() > 3


def test_a_body_that_changes_its_arguments_ends_its_claim(setup, history, claims):
    setup.start_worker()
    result = setup.module.mutating.delay({"x": 1})
    assert list(claims()) == ["mutated:1"]
    assert result.get(timeout=30) == "mutated"
    poll(lambda: claims() == {})


# --- revoked, expired, skipped --------------------------------------------------------------------------------------


def test_a_revoked_task_frees_its_claim(setup, history, claims):
    """A countdown, revoked before it starts."""
    work = setup.module.work
    setup.start_worker()
    revoked = work.apply_async(("a",), countdown=3)
    setup.app.control.revoke(revoked.id)
    assert work.delay("a").id == revoked.id
    poll(lambda: claims() == {}, timeout=20)
    assert work.delay("a").get(timeout=30) == "a"
    assert history.count("start") == 1


def test_a_task_that_is_terminated_while_it_runs_frees_its_claim(setup, history, claims):
    work = setup.module.work
    setup.start_worker()
    result = work.delay("a", "never")
    history.wait_for("start")
    setup.app.control.revoke(result.id, terminate=True, signal="SIGKILL")
    poll(lambda: claims() == {}, timeout=20)


@pytest.mark.both_brokers
def test_an_expired_message_frees_its_claim_though_no_worker_has_seen_it(setup, history, claims):
    """All workers are down, so nobody can tell; the claim ends when the message does."""
    work = setup.module.work
    expired = work.apply_async(("a",), expires=2)
    assert work.delay("a").id == expired.id
    poll(lambda: claims() == {}, timeout=10)
    second = work.delay("a")
    assert second.id != expired.id
    setup.start_worker()
    assert second.get(timeout=30) == "a"
    assert [row.task_id for row in history.events("start")] == [second.id]
    poll(lambda: claims() == {})


@pytest.mark.both_brokers
def test_a_worker_that_throws_an_expired_message_away_ends_its_claim(setup, history, claims, pg_dsn):
    work = setup.module.work
    setup.start_worker(concurrency=1)
    work.delay("blocks", "go")
    history.wait_for("start")
    expired = work.apply_async(("a",), expires=1.5)
    # By itself it would now outlive the message.
    app_state.guard_for(setup.app).store.claim("done:a", task_id=expired.id, ttl=3600)
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        age = "select syncguard_clock_ms() - claimed_at_ms from syncguard_claims where task_id = %s"
        poll(lambda: connection.execute(age, (expired.id,)).fetchone()[0] > 2000)
    setup.open_gate("go")
    poll(lambda: claims() == {}, timeout=20)
    assert history.count("start", key="a") == 0


def test_a_skipped_task_frees_its_claim(setup, history, claims):
    setup.start_worker()
    holder = setup.module.locked.apply_async(("a", "go"), lock_ttl=60)
    history.wait_for("start")
    skipped = setup.module.skipping.delay("a")
    poll(lambda: skipped.state == SKIPPED)
    assert list(claims().values()) == [holder.id]
    setup.open_gate("go")
    holder.get(timeout=30)


# --- retries --------------------------------------------------------------------------------------------------------


def test_a_retry_keeps_the_claim_until_the_last_attempt(setup, history, claims):
    """`self.retry`; no row is left."""
    task = setup.module.retrying
    setup.start_worker()
    first = task.delay("a")
    history.wait_for("end", count=1)
    duplicates = {task.delay("a").id}
    history.wait_for("start", count=2)
    duplicates.add(task.delay("a").id)
    assert first.get(timeout=30) == "a"
    assert duplicates == {first.id}
    assert history.count("start") == 3
    poll(lambda: claims() == {})
    assert app_state.guard_for(setup.app).locks() == []


def test_autoretry_keeps_the_claim_and_ends_it_with_the_last_failure(setup, history, claims):
    """`autoretry_for` with backoff and jitter; no row is left."""
    task = setup.module.autoretrying
    setup.start_worker()
    first = task.delay("a")
    history.wait_for("end", count=2)
    with pytest.raises(ValueError, match="a"):
        first.get(timeout=30)
    assert history.count("start") == 4
    assert {row.task_id for row in history.events("start")} == {first.id}
    poll(lambda: claims() == {})
    assert app_state.guard_for(setup.app).locks() == []


def test_a_retry_with_other_arguments_takes_their_claim_and_gives_its_own_back(setup, history, claims):
    setup.start_worker()
    result = setup.module.retrying_with_another_key.delay("first")
    poll(lambda: claims() == {"changed:second": result.id})
    assert not setup.module.retrying_with_another_key.delay("first").duplicate


def test_a_retry_after_its_claim_went_to_another_runs_too(setup, history, claims):
    """A second was queued after the first had started; both run, one after the other."""
    task = setup.module.retrying_after_start
    setup.start_worker(concurrency=2)
    first = task.delay("a", "go")
    history.wait_for("start")
    second = task.delay("a")
    assert not second.duplicate
    setup.open_gate("go")
    for result in (first, second):
        result.get(timeout=30)
    assert sorted(row.attempt for row in history.events("start")) == [0, 0, 1, 1]
    assert history.overlaps() == []
    poll(lambda: claims() == {})


# --- hooks ----------------------------------------------------------------------------------------------------------


def test_the_claim_of_a_task_that_fails_before_its_body_is_freed(setup, history, claims):
    setup.start_worker()
    result = setup.module.refused.delay("a")
    history.wait_for("start")
    assert setup.module.refused.delay("a").id == result.id
    setup.open_gate("refuse")
    with pytest.raises(PermissionError):
        result.get(timeout=30)
    poll(lambda: claims() == {})


# --- deaths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["dying", "overrunning", "exiting"])
def test_the_claim_of_a_killed_child_is_freed(setup, history, claims, task):
    """By SIGKILL, as the system does when memory is short, by the hard time limit, and by `sys.exit` in the body."""
    setup.start_worker()
    task = getattr(setup.module, task)
    first = task.delay("a")
    history.wait_for("start")
    poll(lambda: claims() == {}, timeout=20)
    assert not task.delay("a").duplicate
    assert first.id


def test_the_claim_of_a_killed_child_is_freed_also_when_its_message_was_sent_by_name(setup, history, claims):
    """Its header says nothing of a claim, so only the lease of the dead child does."""
    task = setup.module.locked
    worker = setup.start_worker(concurrency=1)
    first = setup.app.send_task(task.name, ["a", "never"])
    history.wait_for("start")
    assert claims() == {"locked:a": first.id}
    for pid in worker.children():
        os.kill(pid, signal.SIGKILL)
    poll(lambda: claims() == {}, timeout=20)
    second = task.delay("a")
    assert not second.duplicate
    assert second.get(timeout=30) == "a"


@pytest.mark.both_brokers
def test_what_celery_retries_because_its_child_died_keeps_its_claim_until_the_last_attempt(setup, history, claims):
    """`retry_on_worker_lost`, of Celery 5.7. What the main process does about claims, it does in order."""
    setup.start_worker(concurrency=1)
    task, dying = setup.module.dying_and_retried, setup.module.dying
    retried = task.delay("a")
    dying.delay("b")
    poll(lambda: claims() == {"retried:a": retried.id}, timeout=20)
    assert retried.state == "RETRY"
    last = task.apply_async(("b",), retries=1)
    poll(lambda: last.state == "FAILURE", timeout=20)
    poll(lambda: claims() == {"retried:a": retried.id})


@pytest.mark.both_brokers
def test_a_body_that_ends_its_process_and_is_delivered_again_keeps_its_claim(setup, history, claims):
    """`acks_late` and `reject_on_worker_lost`."""
    setup.start_worker()
    task = setup.module.exiting_once
    result = task.delay("a")
    history.wait_for("start", count=2)
    assert task.delay("a").id == result.id
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    poll(lambda: claims() == {})


@pytest.mark.both_brokers
def test_the_claim_of_a_worker_that_is_gone_is_free_at_the_locks_ttl(setup, history, claims):
    """The whole group is killed, and the message was acknowledged: nobody will ever end the claim."""
    task = setup.module.locked
    worker = setup.start_worker()
    first = task.delay("a", "never")
    history.wait_for("start")
    worker.kill()
    second = poll(lambda: not (result := task.delay("a")).duplicate and result, timeout=20, interval=0.1)
    setup.start_worker()
    assert second.get(timeout=30) == "a"
    assert {row.task_id for row in history.events("start")} == {first.id, second.id}


def test_the_claim_of_a_task_without_a_lock_outlives_its_dead_worker(setup, history, claims):
    """The negative control: without a lease nothing says that it died; `dedup_ttl` is what is left."""
    worker = setup.start_worker()
    first = setup.module.work.delay("a", "never")
    history.wait_for("start")
    app_state.guard_for(setup.app).flush()
    worker.kill()
    assert claims() == {"done:a": first.id}
    assert setup.module.work.delay("a").id == first.id


def test_a_worker_confirms_a_claim_whose_producer_died(setup, history, pg_dsn, monkeypatch):
    """The producer ended between publish and confirm; the task runs for longer than an unconfirmed claim lives."""
    monkeypatch.setattr(claims_of_tasks, "confirm", lambda *args, **kwargs: None)
    setup.module.work.delay("a", "go")
    left = "select (expires_at_ms - syncguard_clock_ms()) / 1000.0 from syncguard_claims"
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        assert connection.execute(left).fetchone()[0] <= 10
        setup.start_worker()
        history.wait_for("start")
        poll(lambda: connection.execute(left).fetchone()[0] > 3500)
    setup.open_gate("go")
    history.wait_for("end")


@pytest.mark.parametrize("task", ["work", "locked"])
@pytest.mark.parametrize("fate", ["lost", "another's"])
def test_a_task_whose_claim_is_not_its_own_by_now_runs_and_takes_nothing_from_the_owner(
    setup, history, claims, pg_dsn, task, fate
):
    name, task = task, getattr(setup.module, task)
    first = task.delay("a", "go")
    app_state.guard_for(setup.app).flush()
    (key,) = claims()
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        if fate == "lost":
            connection.execute("delete from syncguard_claims")
        else:
            connection.execute("update syncguard_claims set task_id = 'another'")
    setup.start_worker()
    history.wait_for("start", task_id=first.id)
    # A lost claim is made anew by a run under a lock; without a lock a run asks nobody.
    running = {"another's": {key: "another"}, "lost": {key: first.id} if name == "locked" else {}}[fate]
    assert claims() == running
    if running:
        assert task.delay("a", "go").id == running[key]
    setup.open_gate("go")
    assert first.get(timeout=30) == "a"
    poll(lambda: claims() == ({key: "another"} if fate == "another's" else {}))
    assert history.count("start") == 1


# --- messages that bypass apply_async, and canvases -----------------------------------------------------------------


def test_a_producer_without_the_code_gives_keys_and_the_worker_runs_the_task_under_those(setup, history, claims):
    """An application that has none of these tasks, and keys that the task's own templates would not make."""
    producer = Celery("elsewhere", broker=setup.broker.url, set_as_current=False)
    producer.conf.update(task_default_queue=setup.broker.queue, syncguard_dsn=setup.dsn)
    keys = {"dedup_key": "their claim", "lock_key": "their lock", "run_once": "their run"}
    worker = setup.start_worker()
    try:
        name = setup.module.locked.name
        first = send_task(producer, name, ["a", "go"], **keys)
        history.wait_for("start")
        assert claims() == {"their claim": first.id}
        assert [lock.key for lock in app_state.guard_for(setup.app).locks()] == ["their lock"]
        second = send_task(producer, name, ["a", "go"], **keys)
        assert (second.id, second.duplicate) == (first.id, True)
        with pytest.raises(DuplicateTask):
            send_task(producer, name, ["a", "go"], dedup_on_duplicate="raise", **keys)
        setup.open_gate("go")
        history.wait_for("end")
        poll(lambda: claims() == {})
        third = send_task(producer, name, ["a", "go"], **keys)
        assert third.id != first.id
        worker.wait_for_log(f"{third.id}\\] not run: 'their run' was done by task {first.id}")
        poll(lambda: claims() == {})
        assert history.count("start") == 1
    finally:
        app_state.state_of(producer).close()
        producer.close()


_DJANGO = """
import os, sys
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": sys.argv[5], "HOST": sys.argv[6],
                           "PORT": sys.argv[7], "USER": "postgres"}},
    INSTALLED_APPS=[], USE_TZ=True,
)
import django
django.setup()
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.db import connection, transaction
from celery_syncguard import LockedTask

class Task(LockedTask, DjangoTask):
    abstract = True

app = Celery("shop", broker=sys.argv[1])
app.conf.update(task_default_queue=sys.argv[2], syncguard_dsn=sys.argv[3])

@app.task(base=Task, name=sys.argv[4], dedup_key="done:{key}")
def work(key, gate_name=None): pass

def say(text):
    print(text, flush=True)
    assert input() == "go on"

def order(n):
    with connection.cursor() as cursor:
        cursor.execute("insert into orders values (%s)", [n])

with transaction.atomic():
    order(1)
    work.delay_on_commit("a", "go")
    work.delay_on_commit("a", "go")
    say("not committed")
say("committed")
with transaction.atomic():
    order(2)
    # Duplicates, at once and at the commit; neither breaks the block.
    assert work.delay("a", "go").duplicate
    work.delay_on_commit("a", "go")
    order(3)
try:
    with transaction.atomic():
        order(4)
        work.delay_on_commit("b")
        raise LookupError
except LookupError:
    pass
work.delay("c")
print("done", flush=True)
"""


def test_djangos_delay_on_commit_publishes_after_the_commit_and_duplicates_break_nothing(
    setup, history, claims, pg_dsn
):
    server = conninfo_to_dict(pg_dsn)
    setup.start_worker()
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        connection.execute("create table orders (n int)")
        orders = lambda: [n for (n,) in connection.execute("select n from orders order by n")]  # noqa: E731
        command = [sys.executable, "-c", _DJANGO, setup.broker.url, setup.broker.queue, setup.dsn]
        command += [setup.module.work.name, *(str(server[name]) for name in ("dbname", "host", "port"))]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as django:
            said = lambda: django.stdout.readline().strip()  # noqa: E731
            assert said() == "not committed"
            assert (claims(), orders()) == ({}, [])
            django.stdin.write("go on\n")
            assert said() == "committed"
            (start,) = history.wait_for("start")
            assert (claims(), orders()) == ({"done:a": start.task_id}, [1])
            django.stdin.write("go on\n")
            assert said() == "done"
        assert django.returncode == 0
        assert orders() == [1, 2, 3]
    history.wait_for("end", key="c")
    setup.open_gate("go")
    history.wait_for("end", key="a")
    poll(lambda: claims() == {})
    assert [row.key for row in history.events("start")] == ["a", "c"]


@pytest.mark.both_brokers
def test_a_message_that_was_sent_by_name_is_claimed_while_it_runs(setup, history, claims):
    setup.start_worker()
    result = setup.app.send_task(setup.module.locked.name, ["a", "go"])
    history.wait_for("start")
    assert setup.module.locked.delay("a").id == result.id
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    poll(lambda: claims() == {})


def test_a_duplicate_step_of_a_chain_is_sent_and_its_parent_stays_a_success(setup, history, claims):
    """In the middle: the chain goes on, and nothing waits for ever."""
    module = setup.module
    setup.start_worker(concurrency=3)
    module.work.delay("a", "go")
    history.wait_for("start")
    result = chain(module.plain.si("head"), module.work.si("a"), module.plain.si("tail")).apply_async()
    assert result.get(timeout=30) == "tail"
    assert result.parent.parent.state == "SUCCESS"
    assert history.count("start", key="a") == 2
    setup.open_gate("go")
    poll(lambda: claims() == {})


def test_a_duplicate_callback_or_body_of_a_chord_is_sent_and_what_it_follows_stays_a_success(setup, history, claims):
    module = setup.module
    setup.start_worker(concurrency=3)
    module.work.delay("a", "go")
    history.wait_for("start", key="a")
    parent = module.plain.apply_async(("parent",), link=module.work.si("a"))
    history.wait_for("end", key="a", count=1)
    assert parent.get(timeout=30) == "parent"
    assert chord([module.plain.si("b"), module.plain.si("c")], module.work.si("a")).apply_async().get(timeout=30) == "a"
    assert history.count("end", key="a") == 2
    setup.open_gate("go")
    history.wait_for("end", key="a", count=3)


def test_a_duplicate_member_of_a_group_ends_as_skipped_and_the_group_ends(setup, history, claims):
    """The member that is no duplicate is the control."""
    work = setup.module.work
    setup.start_worker(concurrency=3)
    first = work.delay("a", "go")
    history.wait_for("start", key="a")
    result = group(work.s("a"), work.s("b")).apply_async()
    skipped, done = result.get(timeout=30)
    assert (skipped.task_id, skipped.key) == (first.id, "done:a")
    assert done == "b"
    assert [one.state for one in result.results] == [SKIPPED, "SUCCESS"]
    assert history.count("start", key="a") == 1
    setup.open_gate("go")
    assert first.get(timeout=30) == "a"
    poll(lambda: claims() == {})


def test_a_duplicate_member_of_a_chord_runs_because_the_body_waits_for_it(setup, history, claims):
    work, gather = setup.module.work, setup.module.gather
    setup.start_worker(concurrency=3)
    first = work.delay("a", "go")
    history.wait_for("start", key="a")
    result = chord([work.s("a"), work.s("b")], gather.s()).apply_async()
    assert result.get(timeout=30) == ["a", "b"]
    assert history.count("start", key="a") == 2
    # Without a claim: it ended, and the first one's is still there.
    poll(lambda: claims() == {"done:a": first.id})
    setup.open_gate("go")
    poll(lambda: claims() == {})


def test_a_step_is_sent_without_its_claim_while_the_database_is_away(
    celery_setup, broker, app_proxy, app_dsn, pg_dsn, history
):
    """Its parent has ended well and stays so; a publisher of its own accord gets an error instead."""
    setup = celery_setup(
        MODULE, broker=broker, dsn=app_proxy.dsn(app_dsn), history_dsn=pg_dsn, conf={"syncguard_timeout": 0.5}
    )
    worker = setup.start_worker()
    result = chain(setup.module.plain.si("head", "go"), setup.module.work.si("step")).apply_async()
    history.wait_for("start", key="head")
    app_proxy.refuse()
    setup.open_gate("go")
    history.wait_for("end", key="step")
    assert result.get(timeout=30) == "step"
    assert result.parent.state == "SUCCESS"
    worker.wait_for_log("is sent without its claim")
    with pytest.raises(StoreUnavailable):
        setup.module.work.delay("other")
    app_proxy.accept()


@pytest.mark.parametrize("scheduler", [[], ["-S", "syncguard"]], ids=["celery's beat", "ours"])
def test_what_beat_sends_is_deduplicated(celery_setup, broker, pg_dsn, history, claims, scheduler):
    """The plain entry is the negative control."""
    schedule = {
        name: {"task": f"{MODULE}.{name}", "schedule": 0.3, "args": [name, gate]}
        for name, gate in (("work", "go"), ("plain", None))
    }
    setup = celery_setup(MODULE, conf={"beat_schedule": schedule})
    setup.start_worker()
    beat = setup.start_beat(*scheduler)
    history.wait_for("start", key="work")
    (first,) = claims().values()
    beat.wait_for_log("(?s:(Sending due task work .*){6})")
    history.wait_for("start", key="plain", count=4)
    assert [row.task_id for row in history.events("start", key="work")] == [first]
    setup.open_gate("go")
    history.wait_for("start", key="work", count=2)
    assert [first for first, _ in history.overlaps() if first.key == "work"] == []


def test_the_tail_of_a_refused_chain_is_not_run_and_the_first_ones_is(setup, history, claims):
    """At the head."""
    module = setup.module
    first = chain(module.work.si("a"), module.plain.si("first")).apply_async()
    with pytest.raises(DuplicateTask):
        chain(module.work.si("a"), module.plain.si("second")).apply_async()
    setup.start_worker()
    assert first.get(timeout=30) == "first"
    assert history.count("start", key="second") == 0


@pytest.mark.both_brokers
def test_a_message_with_an_eta_holds_its_claim_but_no_lock(setup, history, claims):
    """One in an hour, and others under its lock."""
    task = setup.module.locked
    setup.start_worker(concurrency=4)
    later = task.apply_async(("a",), countdown=3600)
    assert task.delay("a").id == later.id
    results = [task.apply_async(("a",), dedup_key=f"other:{n}", lock_retry_delay=(0.1, 0.2)) for n in range(12)]
    for result in results:
        assert result.get(timeout=60) == "a"
    assert history.overlaps() == []
    assert list(claims().values()) == [later.id]


@pytest.mark.slow
def test_twelve_that_publish_and_run_the_same_work_leave_no_error_in_the_servers_log(
    celery_setup, broker, second_queue, private_pg, private_dsn, private_app_dsn, pg_dsn, history
):
    """Three workers with four children each, one lock, one claim, and one that waits for its hour."""
    setup = celery_setup(MODULE, dsn=private_app_dsn, history_dsn=pg_dsn)
    module = setup.module
    later = module.hot.apply_async(("a",), dedup_key="in an hour", countdown=3600)
    for _ in range(3):
        # What is published is run at once, not when all have published.
        setup.start_worker("-Q", f"{broker.queue},{second_queue}", concurrency=4)
    by_name = [setup.app.send_task(module.hot.name, ["a"]) for _ in range(50)]
    for _ in range(300):
        module.publishing.delay("a", second_queue)
    history.wait_for("published", count=300, timeout=60)
    new = history.count("published", key="new")
    assert 1 < new < 300
    # Those that were sent by name make their claim when they run.
    history.wait_for("end", key="a", count=new + len(by_name), timeout=90)
    assert history.count("start", key="a") == new + len(by_name)
    assert history.overlaps() == []
    assert len({row.pid for row in history.events("start")}) > 4, "not all of them took part"

    def claims():
        return private_pg.execute("select claim_key, task_id from syncguard_claims", database="syncguard")

    poll(lambda: claims() == [("in an hour", later.id)])
    complaints = lambda: [  # noqa: E731
        line for line in private_pg.log_text().splitlines() if " ERROR:" in line and " syncguard " in line
    ]
    assert complaints() == []
    # The negative control: what a claim by a plain insert would have left there.
    with psycopg.connect(private_dsn) as connection, pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute("insert into syncguard_claims values ('in an hour', 'another', null, 1, 2)")
    poll(lambda: ["violates unique constraint" in line for line in complaints()] == [True])
    app_state.state_of(setup.app).close()


@pytest.mark.both_brokers
def test_shutting_down_ends_no_claim_of_what_is_still_queued(setup, history, claims):
    worker = setup.start_worker(concurrency=1)
    running = setup.module.work.delay("a", "go")
    history.wait_for("start")
    queued = setup.module.work.delay("b")
    app_state.guard_for(setup.app).flush()
    worker.signal(signal.SIGTERM)
    setup.open_gate("go")
    worker.wait_exit()
    assert running.get(timeout=30) == "a"
    if queued.state == "SUCCESS":
        assert claims() == {}
    else:
        assert claims() == {"done:b": queued.id}


@pytest.mark.parametrize("signals", [[signal.SIGQUIT], [signal.SIGTERM, signal.SIGQUIT]], ids=["quit", "term, quit"])
@pytest.mark.parametrize("task", ["locked", "work"])
def test_a_cold_shutdown_frees_the_claims_of_what_it_cut_off(setup, history, claims, signals, task):
    """What was acknowledged early is lost with its worker, so its claim must not stay."""
    worker = setup.start_worker()
    task = getattr(setup.module, task)
    task.delay("a", "never")
    history.wait_for("start")
    for signum in signals:
        worker.signal(signum)
    worker.wait_exit()
    poll(lambda: not task.delay("a").duplicate, timeout=20)
