"""A worker that is gone, or comes back from the dead: what its leases block, and for how long."""

import os
import signal
import time
from datetime import datetime, timedelta, timezone

import psutil
import psycopg
import pytest

from tests.fixtures import gate
from tests.fixtures.polling import poll

APP = "tests.acceptance.apps.holding"
TTL = 2  # of the bodies there
VISIBILITY = 1


def test_a_killed_group_frees_its_lock_at_the_ttl(celery_setup, broker, pg_dsn, history, guard):
    """The whole group: nobody is left to free anything, so the ttl does."""
    setup = celery_setup(APP)
    worker = setup.start_worker(concurrency=1)
    setup.module.hold.delay("a", "never")
    history.wait_for("start", key="a")
    worker.kill()
    killed_at = time.monotonic()
    assert guard.try_acquire("a") is None, "freed before its ttl: another process might still be alive"
    successor = poll(lambda: guard.try_acquire("a"), timeout=10)
    assert time.monotonic() - killed_at < 2 + 3  # the ttl, and what a busy machine needs
    (start,) = history.events("start")
    assert successor.fence > start.fence


def start_and_kill_the_main_process(setup, history, **environment):
    """Leave a locked body and its unlocked twin behind, and start another worker, which gets their messages again."""
    worker = setup.start_worker(concurrency=2, environment=environment)
    result = setup.module.hold.delay("a", "go")
    setup.module.plain_hold.delay("plain", "go")
    history.wait_for("start", key="plain")
    (first,) = history.wait_for("start", key="a")
    children = worker.children()
    assert first.pid in children
    worker.signal(signal.SIGKILL)
    worker.wait_exit()
    history.record("killed the main process")
    # RabbitMQ sees the connection end. Redis waits until a message is overdue, and a worker looks for that when it starts.
    poll(lambda: datetime.now(timezone.utc) - first.at > timedelta(seconds=VISIBILITY + 0.5))
    return result, first, children, setup.start_worker(concurrency=2, wait=False)


REDELIVERED = {"task_acks_late": True, "broker_transport_options": {"visibility_timeout": VISIBILITY}}


def test_when_the_main_process_alone_is_killed_the_key_is_free_at_the_ttl(celery_setup, broker, pg_dsn, history, guard):
    """The main process: Celery's children die with it, and nobody is left who would see them off."""
    setup = celery_setup(APP, conf=REDELIVERED)
    result, first, children, successor = start_and_kill_the_main_process(setup, history)
    poll(lambda: not any(psutil.pid_exists(pid) for pid in children))
    poll(lambda: (row := guard.inspect("a")) is None or row.fence > first.fence)
    (killed,) = history.events("killed the main process")
    assert datetime.now(timezone.utc) - killed.at < timedelta(seconds=TTL + 3)  # and what a busy machine needs
    (_, second) = history.wait_for("start", key="a", count=2)
    assert second.pid in successor.children()
    assert second.fence > first.fence
    # And not sooner than the lease was over. The body recorded its start when it had that already.
    assert second.at - first.at > timedelta(seconds=TTL - 0.5)
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"


@pytest.mark.both_brokers
@pytest.mark.parametrize("end", ["ends", "is killed"])
def test_an_orphan_keeps_its_lock_and_the_message_that_comes_again_waits_for_it(
    celery_setup, broker, pg_dsn, history, guard, end
):
    """The main process alone, where its children outlive it. The plain task beside them is the negative control:
    its orphan and its copy overlap."""
    setup = celery_setup(APP, conf=REDELIVERED)
    result, first, _, successor = start_and_kill_the_main_process(setup, history, SYNCGUARD_TEST_ORPHANS="1")
    history.wait_for("start", key="plain", count=2)
    successor.wait_for_log(f"{result.id}. not run: it runs already")

    # Longer than its ttl: the orphan renews by itself.
    poll(lambda: guard.inspect("a").since > TTL + 1)
    assert guard.inspect("a").fence == first.fence
    assert history.count("start", key="a") == 1

    if end == "ends":
        setup.open_gate("go")
        (ended,) = history.wait_for("end", key="a")
        assert ended.pid == first.pid
        successor.wait_for_log("another delivery of this attempt ended")
        poll(lambda: guard.inspect("a") is None)
        assert history.count("start", key="a") == 1
    else:
        os.kill(first.pid, signal.SIGKILL)
        history.record("killed", key="a", note=str(first.pid))
        (killed,) = history.events("killed")
        (_, second) = history.wait_for("start", key="a", count=2)
        assert second.pid in successor.children()
        assert second.fence > first.fence
        # The ttl, the longest delay of a message that comes back, and what a busy machine needs.
        assert second.at - killed.at < timedelta(seconds=TTL + 0.3 + 3)
        setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    assert {body.key for pair in history.overlaps() for body in pair} == {"plain"}


def freeze_until_taken_over(setup, worker, history, guard, task):
    task.delay("a", "go")
    (start,) = history.wait_for("start", key="a")
    poll(lambda: gate.is_open("in-a"))
    worker.freeze()
    try:
        # Its sockets stay open, and its lock is free all the same.
        successor = poll(lambda: guard.try_acquire("a"), timeout=10)
        assert successor.fence > start.fence
        history.record("start", key="a")
    finally:
        worker.thaw()
    return successor


@pytest.mark.parametrize(
    ("broker", "pool"),
    [("redis", "prefork"), ("rabbitmq", "solo"), ("redis", "threads"), ("rabbitmq", "gevent")],
    indirect=["broker"],
)
def test_a_thawed_body_is_told_at_once_and_can_do_no_harm(celery_setup, broker, pg_dsn, history, guard, pool):
    """Frozen beyond its ttl, then alive again."""
    setup = celery_setup(APP)
    worker = setup.start_worker(pool=pool)
    successor = freeze_until_taken_over(setup, worker, history, guard, setup.module.hold)
    thawed_at = time.monotonic()
    history.wait_for("lost", key="a", timeout=10)
    assert time.monotonic() - thawed_at < 5
    history.wait_for("refused", key="a")
    assert history.count("written") == 0
    assert history.count("end") == 0
    # It released nothing of its successor's, and the worker lives on.
    assert setup.module.quick.delay("b").get(timeout=30) > 0
    assert guard.inspect("a").lock_id == successor.lock_id
    assert successor.release()
    assert setup.module.quick.delay("a").get(timeout=30) > successor.fence


def test_a_thawed_body_that_is_not_told_writes_beside_its_successor(celery_setup, broker, pg_dsn, history, guard):
    """The negative control."""
    setup = celery_setup(APP)
    worker = setup.start_worker(concurrency=1)
    freeze_until_taken_over(setup, worker, history, guard, setup.module.hold_on)
    setup.open_gate("go")
    history.wait_for("end", key="a")
    assert len(history.overlaps()) == 1


def test_the_row_names_the_killed_worker_that_is_waited_for(celery_setup, broker, pg_dsn, history, guard):
    """Who blocks is known, also when it is dead: its name is in the lock's row until the ttl."""
    setup = celery_setup(APP)
    worker = setup.start_worker(concurrency=1)
    result = setup.module.hold.delay("a", "never")
    (start,) = history.wait_for("start", key="a")
    worker.kill(signal.SIGKILL)
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        (row,) = conn.execute("select holder from syncguard_list(null, null)").fetchall()
    assert result.id in row[0]
    assert f"pid {start.pid}" in row[0]
