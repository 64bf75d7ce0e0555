"""Redelivery: one message delivered more than once is one body at a time, and none gets lost.

A copy is told by task id, call and attempt, never by the broker's redelivered flag. Most tests make copies by publishing
twice with one task id and no call, which is what a consumer sees after a visibility timeout; two let the broker do it itself.
"""

import uuid
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery

from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

pytestmark = pytest.mark.usefixtures("redelivered")

MODULE = "tests.acceptance.apps.working"
ANSWERED = "another delivery of this attempt ended"


def all_logs(setup):
    return "".join(worker.logs() for worker in setup.worker_cluster)


def publish_copies(task, count, *args):
    task_id = str(uuid.uuid4())
    results = [task.apply_async(args, task_id=task_id) for _ in range(count)]
    return results[0]


@pytest.mark.both_brokers
@pytest.mark.smoke
def test_four_workers_that_get_the_same_message_four_times_run_one_body(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    for _ in range(4):
        setup.start_worker(pool="solo", concurrency=1, wait=False)
    for worker in setup.worker_cluster:
        worker.wait_ready()
    result = publish_copies(setup.module.work_late, 4, "a", "go")
    history.wait_for("start")
    poll(lambda: all_logs(setup).count("it runs already") >= 6, timeout=30)
    # Copies come back again and again, and say nothing about the state of what runs.
    assert result.state == "STARTED"
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    poll(lambda: all_logs(setup).count(ANSWERED) == 3, timeout=30)
    assert history.count("start") == history.count("end") == 1
    assert result.state == "SUCCESS"
    poll(lambda: rows_left(pg_dsn) == NOTHING)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_without_a_lock_the_same_message_runs_beside_itself(celery_setup, broker, pg_dsn, history):
    """The negative control of the tests here."""
    setup = celery_setup(MODULE)
    setup.start_worker(pool="threads", concurrency=4)
    publish_copies(setup.module.plain_work, 4, "a", "go")
    history.wait_for("start", count=4)
    assert len(history.overlaps()) == 6
    setup.open_gate("go")
    history.wait_for("end", count=4)


@pytest.mark.both_brokers
def test_a_copy_of_what_failed_does_not_run_it_again_nor_hide_its_failure(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    worker = setup.start_worker()
    result = publish_copies(setup.module.fail, 2, "a", "go")
    worker.wait_for_log("it runs already")
    setup.open_gate("go")
    worker.wait_for_log(ANSWERED)
    with pytest.raises(LookupError):
        result.get(timeout=30)
    assert result.state == "FAILURE"
    assert history.count("start") == 1


@pytest.mark.both_brokers
def test_a_copy_of_an_earlier_attempt_neither_runs_nor_hides_the_later_one(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    worker = setup.start_worker(concurrency=3)
    task_id = str(uuid.uuid4())
    task = setup.module.work
    result = task.apply_async(["a", "go"], task_id=task_id, retries=1)
    history.wait_for("start")
    task.apply_async(["a", "go"], task_id=task_id)
    worker.wait_for_log("a later attempt")
    assert result.state == "STARTED"
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    # Whatever is queued behind the copy was received after it.
    assert task.delay("b").get(timeout=30) == "b"
    assert [row.attempt for row in history.events("start", key="a")] == [1]


@pytest.mark.both_brokers
def test_when_the_first_dies_with_its_worker_the_copy_runs(celery_setup, broker, pg_dsn, history):
    """The message of the first is acknowledged: only the copy is left."""
    setup = celery_setup(MODULE)
    victim = setup.start_worker(concurrency=1)
    result = publish_copies(setup.module.work_briefly_leased, 1, "a", "go")
    (first,) = history.wait_for("start")
    other = setup.start_worker(concurrency=1)
    name = victim.command[victim.command.index("-n") + 1]
    setup.app.control.cancel_consumer(broker.queue, destination=[name], reply=True)
    setup.module.work_briefly_leased.apply_async(["a", "go"], task_id=result.id)
    other.wait_for_log("it runs already")
    victim.kill()
    history.record("killed", note=str(first.pid))
    setup.open_gate("go")
    (_, second) = history.wait_for("start", count=2)
    assert second.pid in other.children()
    assert second.fence > first.fence
    assert result.get(timeout=30) == "a"
    assert history.overlaps() == []


@pytest.mark.both_brokers
def test_what_the_broker_delivers_again_after_a_kill_runs_when_the_dead_lease_is_over(
    celery_setup, broker, pg_dsn, history
):
    setup = celery_setup(MODULE, conf={"broker_transport_options": {"visibility_timeout": 1}})
    victim = setup.start_worker(concurrency=1)
    result = setup.module.work_late_briefly_leased.delay("a", "go")
    (first,) = history.wait_for("start")
    victim.kill()
    history.record("killed", note=str(first.pid))
    setup.open_gate("go")
    poll(lambda: datetime.now(timezone.utc) - first.at > timedelta(seconds=1.5))
    setup.start_worker(concurrency=1)
    assert result.get(timeout=60) == "a"
    (_, second) = history.events("start")
    assert second.fence - first.fence >= 6_000, "milliseconds from one grant to the next: a whole ttl"
    assert second.fence > first.fence
    assert history.overlaps() == []


@pytest.mark.both_brokers
def test_what_is_done_is_answered_with_its_first_result(celery_setup, broker, pg_dsn, history):
    """The copy arrives when everything about the first run is over."""
    setup = celery_setup(MODULE)
    worker = setup.start_worker()
    task = setup.module.work_once
    result = task.delay("a")
    assert result.get(timeout=30) == "a"
    task.apply_async(["a"], task_id=result.id)
    worker.wait_for_log(r"was done by task")
    assert task.delay("a").get(timeout=30) == "a"
    assert result.get(timeout=30) == "a"
    assert [row.task_id for row in history.events("start")].count(result.id) == 1


@pytest.mark.both_brokers
def test_messages_from_producers_without_our_code_are_locked_by_the_worker(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    worker = setup.start_worker()
    producer = Celery("elsewhere", broker=broker.url, backend=broker.result_backend, set_as_current=False)
    producer.conf.task_default_queue = broker.queue
    with producer:
        results = [producer.send_task(f"{MODULE}.work", kwargs={"key": "a", "gate_name": "go"}) for _ in range(2)]
        worker.wait_for_log("not run, comes back")
        setup.open_gate("go")
        assert [result.get(timeout=30) for result in results] == ["a", "a"]
    assert history.overlaps() == []


def start_with_twin(setup, history):
    """Begin a locked body, and an unlocked one as the negative control."""
    locked = setup.module.work_late.delay("locked", "go")
    setup.module.plain_work.delay("plain", "go")
    return locked, history.wait_for("start", count=2)[-1].at


def expect_one_body_and_two_of_the_twin(setup, history, locked):
    history.wait_for("start", key="plain", count=2, timeout=60)
    poll(lambda: "it runs already" in all_logs(setup), timeout=60)
    setup.open_gate("go")
    assert locked.get(timeout=30) == "locked"
    poll(lambda: ANSWERED in all_logs(setup), timeout=30)
    assert history.count("start", key="locked") == 1
    assert {body.key for pair in history.overlaps() for body in pair} == {"plain"}


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_body_longer_than_the_visibility_timeout_runs_once(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE, conf={"broker_transport_options": {"visibility_timeout": 1}})
    setup.start_worker(concurrency=2)
    locked, begun = start_with_twin(setup, history)
    poll(lambda: datetime.now(timezone.utc) - begun > timedelta(seconds=1.5))
    # A worker looks for what is overdue when it starts, and then not for a hundred seconds.
    setup.start_worker(concurrency=2)
    expect_one_body_and_two_of_the_twin(setup, history, locked)


@pytest.mark.both_brokers
@pytest.mark.parametrize("private_broker", ["rabbitmq"], indirect=True)
def test_a_restarted_broker_delivers_again_and_the_body_runs_once(celery_setup, private_broker, pg_dsn, history):
    setup = celery_setup(MODULE, broker=private_broker)
    setup.start_worker(concurrency=4)
    locked, _ = start_with_twin(setup, history)
    private_broker.server.restart()
    expect_one_body_and_two_of_the_twin(setup, history, locked)


@pytest.mark.both_brokers
@pytest.mark.smoke
@pytest.mark.parametrize("private_broker", ["redis", "rabbitmq"], indirect=True)
def test_a_worker_that_cancels_what_runs_when_it_loses_its_broker_runs_it_again(
    celery_setup, private_broker, pg_dsn, history
):
    """The child is ended, its lease with it, and the message runs in the worker that lives on. The ttl is a minute."""
    conf = {
        "worker_cancel_long_running_tasks_on_connection_loss": True,
        "broker_transport_options": {"visibility_timeout": 1},
    }
    setup = celery_setup(MODULE, broker=private_broker, conf=conf)
    worker = setup.start_worker(concurrency=1)
    result = setup.module.work_late.delay("a", "go")
    (first,) = history.wait_for("start")
    private_broker.server.restart()
    (_, second) = history.wait_for("start", count=2, timeout=30)
    assert second.task_id == first.task_id == result.id
    assert second.pid in worker.children()
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    assert [row.pid for row in history.events("end")] == [second.pid]
