"""Promises that somebody who did not build them found broken: each test failed before its fix."""

import json
import signal
import subprocess
import sys
import threading

import psycopg
import pytest
from celery import Celery, chain, chord, group
from celery.app.trace import build_tracer
from celery.worker.request import Request

from celery_syncguard import LockedTask, SyncGuard
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire
from celery_syncguard.dedup import send_task
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey, StoreUnavailable
from celery_syncguard.postgres import migrate
from celery_syncguard.tasks import app_state
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.worker import GuardedRequest
from tests.fixtures.polling import poll


@pytest.fixture
def app():
    app = Celery("broken", broker="memory://", set_as_current=False)
    # A queue of its own: the memory broker is the process's.
    app.conf.update(syncguard_dsn="memory://", task_always_eager=True, task_default_queue=new_lock_id())
    return app


@pytest.fixture
def locked(app):
    """The keys that are locked now."""
    return lambda: sorted(row.key for row in app_state.guard_for(app).locks())


def key_of(task, *args):
    header, _ = task.task_keys().complete(task, Header(), args, {}, {})
    return header.lock_key


@pytest.fixture
def keyed(app):
    @app.task(base=LockedTask, lock_key="k:{value}", shared=False)
    def keyed(value):
        """Nothing runs it."""

    return keyed


# --- keys: equal work has one key, in every process ----------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_a_key_is_never_made_from_an_address_in_memory(keyed, nested):
    """Such a key is another in each process, so it would lock nothing."""

    class Invoice:
        pass

    for value in (Invoice(), lambda: None):
        with pytest.raises(InvalidKey, match="address in memory"):
            key_of(keyed, [value] if nested else value)

    class Named(Invoice):
        def __str__(self):
            return "invoice 7"

    assert key_of(keyed, Named()) == "k:invoice 7"


def test_equal_dicts_make_one_key_whatever_their_order_and_before_and_after_json(keyed):
    one, other = {"a": {"x": 1, "y": 2}, "b": 2, 3: None}, {3: None, "b": 2, "a": {"y": 2, "x": 1}}
    assert key_of(keyed, one) == key_of(keyed, other) == key_of(keyed, json.loads(json.dumps(one)))
    assert key_of(keyed, {"a": 1}) != key_of(keyed, {"a": 2})
    assert key_of(keyed, {True: 1}) == key_of(keyed, json.loads(json.dumps({True: 1})))


def test_a_set_makes_the_same_key_in_every_process():
    program = (
        "from celery_syncguard.tasks.arguments import Parameters, Template; import inspect\n"
        "template = Template('k:{value}', Parameters(inspect.signature(lambda value: 0)), what='lock_key')\n"
        "print(template.render(({'alpha', 'beta', 'gamma', 'delta'},), {}))"
    )
    plain = "print({'alpha', 'beta', 'gamma', 'delta'})"

    def answers(source):
        return {
            subprocess.run(
                [sys.executable, "-c", source],
                env={"PYTHONHASHSEED": str(seed)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in range(1, 5)
        }

    assert len(answers(program)) == 1
    assert len(answers(plain)) > 1  # the control


# --- a retry and a message that comes back are the same call ---------------------------------------------------------


def test_a_retry_with_other_arguments_keeps_the_keys_that_were_given_for_the_call(app, locked):
    seen = []

    @app.task(base=LockedTask, bind=True, lock_key=None, shared=False)
    def unlocked(self, n):
        seen.append((n, locked()))
        if n == 1:
            raise self.retry(args=(2,), countdown=0)

    @app.task(base=LockedTask, bind=True, lock_key="class:{n}", shared=False)
    def templated(self, n):
        seen.append((n, locked()))
        if n == 1:
            raise self.retry(args=(2,), countdown=0)

    unlocked.apply_async((1,), lock_key="own")
    assert seen == [(1, ["own"]), (2, ["own"])]
    seen.clear()
    templated.apply_async((1,), lock_key="own:{n}")
    assert seen == [(1, ["own:1"]), (2, ["own:1"])]
    seen.clear()
    templated.apply_async((1,))  # the control: nothing was given, so the key is that of the arguments
    assert seen == [(1, ["class:1"]), (2, ["class:2"])]


def test_a_literal_key_of_a_producer_without_the_code_survives_a_retry_with_other_arguments(app):
    @app.task(base=LockedTask, bind=True, lock_key=None, shared=False)
    def f(self, n):
        """Nothing runs it."""

    app.conf.task_always_eager = False
    send_task(app, f.name, (1,), lock_key="own")
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get(app.conf.task_default_queue, no_ack=True)
    f.push_request(id="x", args=(1,), kwargs={}, headers={"syncguard": message.headers["syncguard"]})
    try:
        again = f.signature_from_request(args=(2,))
    finally:
        f.pop_request()
    assert again.options["headers"]["syncguard"]["key"] == "own"


def test_a_message_goes_again_in_the_serializer_of_its_call(app):
    """JSON would make another dict of it: {1: 'a'} came back as {'1': 'a'}."""
    app.conf.task_always_eager = False

    @app.task(base=LockedTask, bind=True, lock_key="k", shared=False)
    def f(self, value):
        """Nothing runs it."""

    def sent():
        with app.connection_for_read() as connection:
            return connection.default_channel.basic_get(app.conf.task_default_queue, no_ack=True)

    f.apply_async(({1: "a"},), serializer="pickle")
    first = sent()
    f.push_request(id="x", args=({1: "a"},), kwargs={}, headers={"syncguard": first.headers["syncguard"]}, retries=0)
    try:
        f.signature_from_request(countdown=0).apply_async()
    finally:
        f.pop_request()
    again = sent()
    assert first.content_type == again.content_type == "application/x-python-serialize"
    f.apply_async((1,))
    assert sent().content_type == "application/json"  # the control: it is not made the default


# --- nothing with a key runs as a plain call --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "canvas",
    [lambda f: f.map([1]), lambda f: f.starmap([(1,)]), lambda f: f.chunks([(1,)], 1)],
    ids=["map", "starmap", "chunks"],
)
def test_a_task_with_a_key_is_not_mapped_over_without_its_lock(app, locked, canvas):
    seen = []

    @app.task(base=LockedTask, lock_key="f:{n}", shared=False)
    def f(n):
        seen.append(locked())

    @app.task(base=LockedTask, lock_key=None, shared=False)
    def free(n):
        seen.append(locked())

    with pytest.raises(ImproperlyConfigured, match="use a group"):
        canvas(f)
    # Made without the task, as its sender may not have it.
    for name, items in (("celery.map", [1]), ("celery.starmap", [(1,)])):
        by_name = app.signature(name, kwargs={"task": f.s(), "it": items})
        assert "use a group" in str(by_name.apply().result)
    assert seen == []
    canvas(free).apply()
    assert all(keys == [] for keys in seen)  # the control: Celery's items are plain calls


def test_a_request_class_of_ones_own_cannot_leave_a_dead_childs_leases_to_their_ttl(app):
    class Own(Request):
        pass

    class OwnOverOurs(GuardedRequest):
        pass

    class Task(LockedTask):
        abstract = True
        lock_key = "f"
        Request = Own

    def body():
        """Nothing runs it."""

    with pytest.raises(ImproperlyConfigured, match="GuardedRequest"):
        app.task(base=Task, shared=False, lazy=False, name="with-own")(body)
    Task.Request = OwnOverOurs
    app.task(base=Task, shared=False, lazy=False, name="with-both")(body)


# --- what cannot be stored fails, and does not come back for ever ------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        {"key": 5},
        {"key": ["a"]},
        {"key": ""},
        {"key": "x" * 5000},
        {"key": "__syncguard_leader:beat"},
        {"key": "a\0"},
        {"run": 7},
        {"claim": {}},
    ],
    ids=str,
)
def test_a_key_from_elsewhere_is_checked_before_it_is_used(app, header):
    ran = []

    @app.task(base=LockedTask, lock_key="f:{n}", shared=False)
    def f(n):
        ran.append(n)

    result = f.apply((1,), headers={"syncguard": header})
    assert (result.state, type(result.result)) == ("FAILURE", InvalidKey)
    assert ran == []


def test_a_null_key_from_elsewhere_does_not_switch_the_lock_off(app, locked):
    @app.task(base=LockedTask, lock_key="f:{n}", shared=False)
    def f(n):
        return locked()

    assert f.apply((1,), headers={"syncguard": {"key": None}}).get() == ["f:1"]


def test_what_the_database_cannot_store_is_an_error_and_not_an_outage(pg_dsn, pg_server):
    name = "latin1_" + new_lock_id()[:8].lower().replace("-", "_")
    pg_server.execute(f"create database {name} encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0")
    try:
        migrate.migrate(pg_server.dsn(name))
        with SyncGuard(pg_server.dsn(name)) as guard:
            with guard.hold("ä"), pytest.raises(InvalidKey, match="cannot store"):
                guard.try_acquire("日本")
    finally:
        pg_server.execute(f"drop database {name} with (force)")
    with SyncGuard(pg_dsn) as guard, pytest.raises(InvalidKey, match="NUL"):
        guard.acquire(Acquire(key="k", lock_id=new_lock_id(), ttl=5.0, holder="h", process="p", task_id="a\0b"))


def test_a_database_without_an_encoding_is_as_good_as_any(pg_server):
    name = "ascii_" + new_lock_id()[:8].lower().replace("-", "_")
    pg_server.execute(f"create database {name} encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0")
    try:
        assert migrate.migrate(pg_server.dsn(name))
        with SyncGuard(pg_server.dsn(name)) as guard, guard.hold("日本"):
            assert guard.try_acquire("日本") is None
            assert guard.inspect("日本").key == "日本"
    finally:
        pg_server.execute(f"drop database {name} with (force)")


# --- no wait without a bound, no lock left behind -----------------------------------------------------------------------


def test_fenced_does_not_wait_for_ever_for_somebody_who_looks_at_the_row(pg_dsn):
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn) as somebody, psycopg.connect(pg_dsn) as ours:
        lease = guard.try_acquire("k", ttl=60)
        somebody.execute("select * from syncguard_locks for update")
        # Ends the wait if nothing else does; the proof then succeeds.
        gone = threading.Timer(20, somebody.close)
        gone.start()
        with pytest.raises(StoreUnavailable, match="locked by another transaction"):
            lease.fenced(ours)
        gone.cancel()
        ours.rollback()
        somebody.rollback()
        lease.fenced(ours)  # it was not lost by that
        ours.rollback()


class Limit(Exception):
    """As a soft time limit: raised by a signal handler, wherever the main thread is."""


def test_a_soft_time_limit_in_the_middle_of_a_release_does_not_leave_the_lock_to_its_ttl(pg_dsn, pg_proxy):
    def strike(*_):
        raise Limit

    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=20) as guard, SyncGuard(pg_dsn) as other:
        lease = guard.try_acquire("k", ttl=600)
        before = signal.signal(signal.SIGALRM, strike)
        try:
            pg_proxy.stall()
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(Limit):
                lease.release()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert other.inspect("k") is not None  # the statement was stalled, so only a repetition can free it
        pg_proxy.cut()
        pg_proxy.resume()
        poll(lambda: other.inspect("k") is None, timeout=30)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_chord_ends_though_the_step_before_a_group_in_its_header_was_skipped(celery_setup, broker, pg_dsn, history):
    """The group was counted as a part of its own, so one part came too many and the body never ran."""
    setup = celery_setup("tests.acceptance.apps.canvas_steps")
    setup.start_worker(pool="threads", concurrency=4)
    step, plain, collect = setup.module.step, setup.module.plain, setup.module.collect

    def parts(key):
        header = [
            chain(
                plain.s(tag="a"),
                step.s(key=key, tag="b").set(lock_on_held="skip"),
                group(plain.s(tag="c"), chain(plain.s(tag="d"), plain.s(tag="e"))),
            ),
            plain.s(tag="f"),
        ]
        return chord(header, collect.s(tag="body")).apply_async().get(timeout=20)

    with SyncGuard(pg_dsn) as guard, guard.hold("held", ttl=60):
        skipped, run = parts("held"), parts("free")
    assert len(skipped) == len(run)
    assert "held" in str(skipped)
    assert "held" not in str(run)


def test_a_group_with_a_duplicate_member_comes_to_its_end(redis_db, pg_dsn):
    """Celery reads the results of a group with a copy of the ready states that it made before ours was among them."""
    app = Celery("broken", broker="memory://", backend=redis_db, set_as_current=False)
    app.conf.update(syncguard_dsn=pg_dsn, task_default_queue=new_lock_id())

    @app.task(base=LockedTask, dedup_key="{key}", shared=False)
    def f(key):
        """Nothing runs it."""

    with SyncGuard(pg_dsn) as guard:
        guard.store.claim("taken", task_id="other", ttl=60)
        result = group(f.s("taken"), group([f.s("taken")])).apply_async()
    try:
        assert [one.task_id for one in result.get(timeout=10)] == ["other", "other"]
    finally:
        app.backend.result_consumer.stop()
        app_state.state_of(app).close()


def test_a_process_that_only_asks_for_results_knows_that_skipped_is_an_end():
    program = (
        "from celery import Celery\n"
        "from celery_syncguard import LockedTask\n"
        "app = Celery('x', broker='memory://', backend='cache+memory://')\n"
        "app.task(base=LockedTask, lock_key='k')(len)\n"
        "app.backend.store_result('id', 'marker', 'SKIPPED')\n"
        "print(app.AsyncResult('id').ready())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"


def test_a_claim_stays_with_what_a_body_puts_in_its_own_place(pg_dsn):
    app = Celery("broken", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(syncguard_dsn=pg_dsn, task_default_queue=new_lock_id())

    @app.task(base=LockedTask, bind=True, dedup_key="{key}", shared=False)
    def f(self, key, again):
        if again:
            raise self.replace(f.si(key, again=False))

    def work_off_one():
        with app.connection_for_read() as connection:
            message = connection.default_channel.basic_get(app.conf.task_default_queue, no_ack=True)
        request = {**message.headers, "is_eager": False, "delivery_info": {}}
        args, kwargs, _ = message.decode()
        build_tracer(f.name, f, app=app)(message.headers["id"], args, kwargs, request)

    first = f.delay("k", again=True)
    work_off_one()
    while_it_is_queued = f.delay("k", again=False)
    assert (while_it_is_queued.id, while_it_is_queued.duplicate) == (first.id, True)
    work_off_one()
    assert not f.delay("k", again=False).duplicate  # the control: the end of the replacement ends the claim
    app_state.state_of(app).close()
