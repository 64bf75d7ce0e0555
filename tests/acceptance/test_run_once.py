"""A completed run is remembered: whatever is delivered again is answered, and writes beside a completion happen once."""

import random
import uuid

import psycopg
import pytest
import redis
from celery import chain

from celery_syncguard.tasks import app_state
from tests.fixtures import soak
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.run_once"


#: For Redis; RabbitMQ needs no such thing, and gets no such option.
REDELIVERED = {"broker_transport_options": {"visibility_timeout": 1}}


def _redeliver(setup, dsn):
    """Redis gives back what is unacknowledged for too long, but looks for it only when a worker starts (and then seldom)."""
    if setup.broker.kind == "redis":
        _until_quiet(dsn, seconds=2)
        setup.start_worker(concurrency=2)


def _until_quiet(dsn, *, seconds):
    """Until nothing has happened for so long, by the clock of the history."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        quiet = "select clock_timestamp() - max(at) > make_interval(secs => %s) from history"
        poll(lambda: connection.execute(quiet, (seconds,)).fetchone()[0])


@pytest.fixture
def setup(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    yield setup
    # Before its database goes: what this process still has to confirm.
    app_state.state_of(setup.app).close()


@pytest.mark.both_brokers
@pytest.mark.smoke
def test_a_task_that_is_delivered_again_after_its_end_is_answered(setup, history):
    """With the first run's result, state SUCCESS, and a signal."""
    work = setup.module.work
    worker = setup.start_worker()
    result = work.delay("a")
    assert result.get(timeout=30) == f"a by {result.id}"
    again = work.apply_async(("a",), task_id=result.id)
    history.wait_for("answered", task_id=result.id)
    assert again.get(timeout=30) == f"a by {result.id}"
    assert again.state == "SUCCESS"
    assert history.count("start") == 1
    worker.wait_for_log(f"{result.id}\\] not run: 'task:{result.id}' was done by task {result.id}")


def test_without_run_once_it_runs_again(setup, history):
    """The negative control."""
    setup.start_worker()
    task_id = str(uuid.uuid4())
    for _ in range(2):
        setup.module.plain.apply_async(("a",), task_id=task_id)
    history.wait_for("end", count=2)


@pytest.mark.usefixtures("redelivered")
def test_a_copy_that_arrives_while_the_first_runs_is_answered_when_it_has_ended(setup, history):
    work = setup.module.work
    setup.start_worker(concurrency=3)
    task_id = str(uuid.uuid4())
    for _ in range(3):
        work.apply_async(("a", "go"), task_id=task_id)
    history.wait_for("start")
    worker = setup.worker
    worker.wait_for_log("this copy comes back")
    setup.open_gate("go")
    history.wait_for("answered", count=2)
    assert history.count("start") == 1


def test_a_key_answers_other_tasks_too_with_the_first_result(setup, history):
    daily = setup.module.daily
    setup.start_worker()
    first = daily.delay("monday")
    assert first.get(timeout=30) == f"monday by {first.id}"
    second = daily.delay("monday")
    assert second.id != first.id
    assert second.get(timeout=30) == f"monday by {first.id}"
    third = daily.delay("tuesday")
    assert third.get(timeout=30) == f"tuesday by {third.id}"
    assert history.count("start") == 2


def test_an_answer_does_not_overwrite_the_first_result_that_is_being_stored(setup, history, pg_dsn):
    """The lock is released before Celery stores the result: in between the first result is not to be had yet."""
    task = setup.module.slow_to_store
    worker = setup.start_worker()
    result = task.delay()
    history.wait_for("storing")
    task.apply_async(task_id=result.id)
    history.wait_for("answered")
    # Time enough for a copy that does not wait; the one that does waits for two seconds.
    _until_quiet(pg_dsn, seconds=0.5)
    setup.open_gate("store")
    worker.wait_for_log(f"{result.id}\\] succeeded in .*(?s:.*){result.id}\\] succeeded in ")
    assert result.get(timeout=10) == "the result"
    assert "None" not in [line.rpartition(": ")[2] for line in worker.logs().splitlines() if "succeeded in" in line]


def test_a_failure_is_not_remembered(setup, history):
    daily = setup.module.daily
    setup.start_worker()
    with pytest.raises(LookupError):
        daily.delay("monday", fails=True).get(timeout=30)
    second = daily.delay("monday")
    assert second.get(timeout=30) == f"monday by {second.id}"


def test_a_completion_is_forgotten_after_its_ttl(setup, history, pg_dsn):
    daily = setup.module.daily
    setup.start_worker()
    daily.apply_async(("monday",), run_once_ttl=1).get(timeout=30)
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        live = "select count(*) from syncguard_completions where expires_at_ms > syncguard_clock_ms()"
        poll(lambda: connection.execute(live).fetchone() == (0,))
        second = daily.delay("monday")
        assert second.get(timeout=30) == f"monday by {second.id}"
        assert connection.execute(live).fetchone() == (1,)


def test_what_follows_an_answered_task_is_sent_again_since_it_may_never_have_been(setup, history):
    """At least once: the first run may have died before it could send the next step, which has run_once itself."""
    module = setup.module
    setup.start_worker()
    workflow = chain(module.work.si("head"), module.work.si("tail"))
    result = workflow.apply_async()
    result.get(timeout=30)
    (head,) = history.events("start", key="head")
    tail = module.work.si("tail").set(task_id=result.id)
    module.work.apply_async(("head",), task_id=head.task_id, chain=[tail])
    history.wait_for("answered", count=2)
    assert history.count("start") == 2


@pytest.mark.both_brokers
def test_a_broker_that_restarts_in_mid_task_delivers_again_and_nothing_runs_twice(
    private_broker, celery_setup, pg_dsn, history
):
    """And its negative control: the plain task runs again."""
    setup = celery_setup(MODULE, broker=private_broker, conf=REDELIVERED)
    setup.start_worker(concurrency=4)
    setup.module.work.delay("once", "go")
    setup.module.plain.delay("plain", "go")
    history.wait_for("start", count=2)
    private_broker.server.restart()
    _redeliver(setup, pg_dsn)
    history.wait_for("start", key="plain", count=2, timeout=60)
    setup.open_gate("go")
    history.wait_for("answered", timeout=60)
    assert history.count("start", key="once") == 1
    assert history.count("end", key="once") == 1


# --- exactly once ---------------------------------------------------------------------------------------------------


def _ledger(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table counter (value bigint not null); insert into counter values (0)")
        connection.execute("create table effects (n int not null)")


def _effects(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(
            "select (select value from counter), count(*), count(distinct n) from effects"
        ).fetchone()


def _drained(setup):
    """Nothing is queued any more. What workers have in hand is seen on Redis only."""
    queue = setup.broker.queue
    if setup.broker.kind == "redis":
        with redis.Redis.from_url(setup.broker.url) as client:
            return client.llen(queue) == 0 and client.hlen("unacked") == 0
    with setup.app.connection_for_read() as connection, connection.channel() as channel:
        return channel.queue_declare(queue, passive=True).message_count == 0


def _run_dry(setup):
    """Until every copy has been dealt with: what a worker has in hand is queued again when it stops."""
    for _ in range(20):
        poll(lambda: _drained(setup), timeout=200, interval=0.2)
        for worker in setup.worker_cluster:
            worker.stop()
        if _drained(setup):
            return
        for worker in setup.worker_cluster:
            worker.start(wait=False)
    raise AssertionError("there is always something left")


def _task_id(n):
    return str(uuid.UUID(int=n + 1))


def _deliver(setup, task, *, tasks, seed):
    """Every task two to four times, all mixed."""
    choose = random.Random(seed)
    deliveries = [(n, _task_id(n)) for n in range(tasks) for _ in range(choose.randint(2, 4))]
    choose.shuffle(deliveries)
    with setup.app.producer_or_acquire() as producer:
        for n, task_id in deliveries:
            task.apply_async((n,), task_id=task_id, producer=producer, ignore_result=True)
    return len(deliveries)


def _kill_those_who_linger(setup, history, lingering):
    """Kill a whole worker, as when its host is gone, between a task's commit and its acknowledgement; another one comes."""
    for n in lingering:
        # A worker that was killed between this body's commit and its record leaves nobody who lingers, but an answer.
        poll(
            lambda n=n: history.count("lingers", key=str(n)) or history.count("answered", task_id=_task_id(n)),
            timeout=100,
        )
        pids = {row.pid for row in history.events("lingers", key=str(n))}
        # In none of them if it died together with an earlier one.
        for worker in [worker for worker in setup.worker_cluster if pids.intersection(worker.children())][:1]:
            worker.kill()
            history.record("killed", key=str(n))
            worker.start(wait=False)
        setup.open_gate(f"killed-{n}")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("run_once", [True, False], ids=["run_once", "without run_once"])
def test_tasks_delivered_two_to_four_times_have_one_effect_each(celery_setup, broker, pg_dsn, history, run_once):
    """Children and whole workers die, also between the user's commit and the acknowledgement. Without run_once, which is
    the negative control, the same tasks, deliveries and deaths have more effects."""
    _ledger(pg_dsn)
    tasks = soak.rounds(300 if run_once else 120, soak=1000)
    lingering = (tasks // 10, tasks * 4 // 10, tasks * 7 // 10)
    setup = celery_setup(
        MODULE,
        conf=REDELIVERED,
        environment={"DEATHS": "0.03", "LINGERING": " ".join(map(str, lingering))},
    )
    task = setup.module.increment if run_once else setup.module.increment_plainly
    deliveries = _deliver(setup, task, tasks=tasks, seed=4)
    assert deliveries > 2 * tasks
    for _ in range(2):
        setup.start_worker(concurrency=4)
    _kill_those_who_linger(setup, history, lingering)
    poll(lambda: _effects(pg_dsn)[2] == tasks, timeout=200, interval=0.2)
    _run_dry(setup)
    value, effects, distinct = _effects(pg_dsn)
    assert value == effects
    assert distinct == tasks
    for where in ("before", "inside", "after"):
        assert history.count("death", key=where) > 0
    assert history.count("killed") > 0
    if run_once:
        assert effects == tasks
        # Every other delivery got its answer: none was left when the workers stopped.
        assert history.count("answered") >= deliveries - tasks
    else:
        # One for every delivery, and one more for each that died after its commit.
        assert effects >= deliveries + history.count("death", key="after")


@pytest.mark.slow
def test_without_run_once_deaths_alone_make_more_effects_than_tasks(celery_setup, broker, pg_dsn, history):
    """The other negative control: each task is published once."""
    _ledger(pg_dsn)
    setup = celery_setup(MODULE, environment={"DEATHS": "0.05"})
    with setup.app.producer_or_acquire() as producer:
        for n in range(100):
            setup.module.increment_plainly.apply_async((n,), producer=producer, ignore_result=True)
    setup.start_worker(concurrency=4)
    poll(lambda: _effects(pg_dsn)[2] == 100 and _effects(pg_dsn)[1] > 100, timeout=90, interval=0.2)
