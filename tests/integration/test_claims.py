"""Claims under contention, and what they cost: one winner per key, told to every loser, in one round trip."""

import json
import multiprocessing
import os
import select
import uuid

import psycopg
import pytest
from celery import Celery
from celery.app.task import Context

from celery_syncguard import LockedTask
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.store import Acquire, Claim, Held, Release
from celery_syncguard.postgres.store import PostgresStore
from celery_syncguard.tasks import app_state
from celery_syncguard.tasks.delivery import Delivery
from celery_syncguard.tasks.header import Header
from tests.fixtures import soak
from tests.fixtures.polling import poll
from tests.fixtures.proxy import Proxy


def body(n):
    """Nothing runs it."""


def make_producer(dsn, broker, queue, *, store=None):
    app = Celery(queue, broker=broker, set_as_current=False)
    app.conf.update(task_default_queue=queue, syncguard_dsn=dsn)
    task = app.task(base=LockedTask, shared=False, name="work", dedup_key="race:{n}")(body)
    if store is not None:
        app_state.guard_for(app).store = store
    return app, task


class ReadThenWrite(PostgresStore):
    """What many do: look whether the work is queued, then say that it is."""

    def claim(self, key, *, task_id, ttl, holder=None, **_):
        def work(conn):
            row = conn.execute("select task_id from syncguard_claims where claim_key = %s", (key,)).fetchone()
            if row is None:
                conn.execute(
                    "insert into syncguard_claims values (%s, %s, null, 1, 9e15) on conflict (claim_key)"
                    " do update set task_id = excluded.task_id",
                    (key, task_id),
                )
            return Claim(key=key, task_id=row[0] if row else task_id, ours=row is None, age=0, remaining=1, holder="")

        return self.run(work)


class Barrier:
    """Lets `processes` forks go at the same moment, round after round: each leaves a byte when it has come, and the parent
    answers with one for each of them. multiprocessing's own needs several turns per process, which 50 of them feel.
    """

    def __init__(self, processes):
        self.processes = processes
        self.came = os.pipe()
        # Two doors in turn, so that a quick one cannot take somebody else's byte of the round before.
        self.doors = os.pipe(), os.pipe()

    def wait(self, number):
        os.write(self.came[1], b"x")
        os.read(self.doors[number % 2][0], 1)

    def lead(self, rounds):
        for number in range(rounds):
            waiting = 0
            while waiting < self.processes:
                assert select.select([self.came[0]], [], [], 60)[0], "a process is missing"
                waiting += len(os.read(self.came[0], self.processes - waiting))
            os.write(self.doors[number % 2][1], b"x" * self.processes)


def _publish_in_process(make, barrier, rounds, pipe):
    app, task = make()
    task.delay(-1)  # connections are open from here on
    answers = []
    for n in range(rounds):
        barrier.wait(n)
        result = task.delay(n)
        answers.append((result.id, result.duplicate))
    app_state.guard_for(app).flush()
    pipe.send_bytes(json.dumps(answers).encode())


def race(make, *, processes, rounds):
    """For each round what every process got: (id, duplicate)."""
    context = multiprocessing.get_context("fork")
    barrier = Barrier(processes)
    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    children = [
        context.Process(target=_publish_in_process, args=(make, barrier, rounds, sender)) for _, sender in pipes
    ]
    for child in children:
        child.start()
    barrier.lead(rounds)
    answers = []
    for (receiver, _), child in zip(pipes, children, strict=True):
        assert receiver.poll(60), "a process did not finish"
        answers.append(json.loads(receiver.recv_bytes()))
        child.join()
    for end in (*barrier.came, *barrier.doors[0], *barrier.doors[1]):
        os.close(end)
    return [list(one) for one in zip(*answers, strict=True)]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_fifty_processes_that_publish_at_once_one_publishes_and_all_learn_its_id(pg_dsn, broker):
    """Each round is a barrier; the queue holds one message per round."""
    rounds = soak.rounds(100, soak=1000)
    answers = race(lambda: make_producer(pg_dsn, broker.url, broker.queue), processes=50, rounds=rounds)
    for one in answers:
        assert [duplicate for _, duplicate in one].count(False) == 1
        assert len({task_id for task_id, _ in one}) == 1
    app, _ = make_producer(pg_dsn, broker.url, broker.queue)
    with app.connection_for_read() as connection, connection.channel() as channel:
        assert channel.queue_declare(broker.queue, passive=True).message_count == rounds + 1
        channel.queue_delete(broker.queue)
    with psycopg.connect(pg_dsn) as connection:
        row = connection.execute("select count(*), min(expires_at_ms - claimed_at_ms) from syncguard_claims").fetchone()
    assert row == (rounds + 1, 3_600_000), "not every claim was confirmed"


@pytest.mark.slow
def test_processes_that_look_before_they_claim_publish_more_than_once(pg_dsn):
    """The negative control."""
    answers = race(
        lambda: make_producer(pg_dsn, "memory://", f"q-{uuid.uuid4().hex}", store=ReadThenWrite(pg_dsn)),
        processes=8,
        rounds=200,
    )
    assert max([duplicate for _, duplicate in one].count(False) for one in answers) > 1


def test_a_claim_is_over_for_the_others_when_its_expiry_has_passed_and_one_of_them_gets_it(pg_dsn):
    store = PostgresStore(pg_dsn)
    store.claim("c", task_id="gone", ttl=0.05)
    poll(lambda: store.claim("c", task_id="next", ttl=60).ours)
    assert not store.claim("c", task_id="gone", ttl=60).ours
    assert store.confirm([("c", "gone", 9999.0)]) == 0
    store.close()


@pytest.fixture(params=["memory", "postgres"])
def store(request):
    store = MemoryStore() if request.param == "memory" else PostgresStore(request.getfixturevalue("pg_dsn"))
    yield store
    store.close()


def _run(store, key, task_id, *, ttl=60.0, claim_ttl=3600.0, claim_key="c"):
    lock_id = uuid.uuid4().hex[:22]
    request = Acquire(
        key=key, lock_id=lock_id, ttl=ttl, task_id=task_id, attempt=0, claim_key=claim_key, claim_ttl=claim_ttl
    )
    return lock_id, store.acquire(request)


def _wait_until_free(store, key):
    poll(lambda: not store.locks(key))


def test_the_claim_of_a_task_that_died_with_its_lock_is_over(store):
    store.claim("c", task_id="t", ttl=3600)
    _run(store, "k", "t", ttl=0.2)
    assert not store.claim("c", task_id="other", ttl=60).ours, "it runs"
    _wait_until_free(store, "k")
    assert store.claim("c", task_id="other", ttl=60).ours


@pytest.mark.parametrize(
    "options",
    [{"lock_key": "k"}, {"run_once": "once"}, {"run_once": True}, {"run_once": True, "lock_key": "k"}],
    ids=str,
)
def test_whatever_a_task_is_locked_by_the_claim_of_a_dead_host_ends_with_that_lock(pg_dsn, options):
    """And not at dedup_ttl, which is an hour. The control is a lease that lives."""
    app = Celery("host", broker="memory://", set_as_current=False)
    app.conf.update(syncguard_dsn=pg_dsn, task_default_queue=f"q-{uuid.uuid4().hex}")
    task = app.task(base=LockedTask, shared=False, name="work", dedup_key="c", **options)(body)
    first = task.delay(1)
    app_state.guard_for(app).flush()
    with app.connection() as connection:
        message = app.amqp.queues[app.conf.task_default_queue](connection.channel()).get(no_ack=True)
    request = Context(message.headers, delivery_info={}, called_directly=False)
    run = Delivery(task, request)
    run.header = Header.of(request.headers)
    run.complete((1,), {})
    store = app_state.guard_for(app).store
    host = run.request_for(run.lock_key)
    assert not isinstance(store.acquire(host._replace(ttl=0.3)), Held)
    assert task.delay(1).id == first.id, "it runs"
    _wait_until_free(store, run.lock_key)
    assert task.delay(1).id != first.id
    app_state.state_of(app).close()


def test_the_claim_of_a_task_whose_lock_was_taken_over_is_over(store):
    store.claim("c", task_id="t", ttl=3600)
    _run(store, "k", "t", ttl=0.2)
    _wait_until_free(store, "k")
    _run(store, "k", "other", claim_key=None, claim_ttl=None)
    assert store.claim("c", task_id="third", ttl=60).ours


def test_the_next_delivery_of_a_dead_task_keeps_its_claim(store):
    store.claim("c", task_id="t", ttl=3600)
    _run(store, "k", "t", ttl=0.2)
    _wait_until_free(store, "k")
    _run(store, "k", "t")
    assert not store.claim("c", task_id="other", ttl=60).ours


def test_a_task_that_waits_for_its_next_attempt_keeps_its_claim(store):
    """Between two attempts it holds no lock, and others may."""
    store.claim("c", task_id="t", ttl=3600)
    lock_id, _ = _run(store, "k", "t")
    store.release(Release(key="k", lock_id=lock_id, task_id="t"))
    assert not store.claim("c", task_id="other", ttl=60).ours
    _, answer = _run(store, "k", "other", claim_key=None, claim_ttl=None)
    assert not isinstance(answer, Held)
    assert not store.claim("c", task_id="other", ttl=60).ours


# --- costs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(pg_server, pg_dsn):
    with Proxy(pg_server.port) as proxy:
        queue = f"q-{uuid.uuid4().hex}"
        app = Celery(queue, broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.update(task_default_queue=queue, syncguard_dsn=proxy.dsn(pg_dsn))

        def cost(work):
            for _ in range(3):
                work()  # connects, and prepares its statements
            app_state.guard_for(app).flush()
            before = proxy.requests
            work()
            return proxy.requests - before

        yield app, cost
        app_state.state_of(app).close()


def test_a_publish_costs_two_round_trips_with_dedup_and_none_without(counted):
    """And no broadcast to workers, of which there are none here."""
    app, cost = counted
    numbers = iter(range(100))
    deduplicated = app.task(base=LockedTask, shared=False, name="a", dedup_key="{n}")(body)
    locked = app.task(base=LockedTask, shared=False, name="b", lock_key="{n}", run_once=True)(body)
    assert cost(lambda: deduplicated.delay(next(numbers))) == 2
    assert cost(lambda: deduplicated.delay(0)) == 1
    assert cost(lambda: locked.delay(next(numbers))) == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lock_key": "{n}"}, 2),
        ({"lock_key": "{n}", "run_once": True}, 2),
        ({"lock_key": "{n}", "run_once": True, "dedup_key": "{n}"}, 2),
        ({"run_once": "{n}"}, 2),
        ({"lock_key": "{n}", "dedup_key": "{n}", "dedup_until": "start"}, 2),
        ({"lock_key": "{n}", "dedup_key": "{n}", "dedup_until": "ttl"}, 2),
        ({"dedup_key": "{n}"}, 1),
        ({"dedup_key": "{n}", "dedup_until": "start"}, 1),
        ({"dedup_key": "{n}", "dedup_until": "ttl"}, 0),
        ({"lock_key": None}, 0),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_a_run_costs_two_round_trips_with_a_lock_whatever_else_it_does(counted, options, expected):
    app, cost = counted
    numbers = iter(range(100))
    task = app.task(base=LockedTask, shared=False, name="c", **options)(body)
    assert cost(lambda: task.apply((next(numbers),)).get()) == expected


def test_a_run_that_is_answered_costs_one(counted):
    app, cost = counted
    task = app.task(base=LockedTask, shared=False, name="d", run_once="{n}")(body)
    task.apply((1,)).get()
    assert cost(lambda: task.apply((1,)).get()) == 1


def test_exact_fencing_costs_one_more_and_a_completion_two(counted, pg_dsn):
    app, cost = counted
    numbers = iter(range(100))
    dsn = app.conf.syncguard_dsn
    with psycopg.connect(dsn, prepare_threshold=None) as connection:

        def work(self, n, how):
            with connection.transaction():
                connection.execute("select 1")
                if how == "fenced":
                    self.lease.fenced(connection)
                elif how == "complete":
                    self.lease.complete(connection)

        task = app.task(base=LockedTask, shared=False, bind=True, name="e", run_once="{n}")(work)
        plain, fenced, complete = (
            cost(lambda how=how: task.apply((next(numbers), how)).get()) for how in ("plain", "fenced", "complete")
        )
    assert (fenced - plain, complete - plain) == (1, 2)
