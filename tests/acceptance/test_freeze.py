"""A worker that is gone, or comes back from the dead: what its leases block, and for how long."""

import signal
import time

import psycopg
import pytest

from celery_syncguard import SyncGuard
from tests.fixtures import gate
from tests.fixtures.polling import poll

APP = "tests.acceptance.apps.pools_bodies"
BOTH = pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)


@pytest.fixture
def guard(pg_dsn):
    with SyncGuard(pg_dsn) as one:
        yield one


def test_a_killed_group_frees_its_lock_at_the_ttl(celery_setup, broker, pg_dsn, history, guard):
    """case 1, the whole group: nobody is left to free anything, so the ttl does."""
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


def freeze_until_taken_over(setup, worker, history, guard, task):
    task.delay("a", "go")
    (start,) = history.wait_for("start", key="a")
    poll(lambda: gate.is_open("in-a"))
    worker.freeze()
    try:
        # Its sockets stay open, and its lock is free all the same (case 89).
        successor = poll(lambda: guard.try_acquire("a"), timeout=10)
        assert successor.fence > start.fence
        history.record("start", key="a")
    finally:
        worker.thaw()
    return successor


@pytest.mark.parametrize(
    ("broker", "pool"),
    [(broker, pool) for broker in ("redis", "rabbitmq") for pool in ("prefork", "solo", "threads", "gevent")],
    indirect=["broker"],
)
def test_a_thawed_body_is_told_at_once_and_can_do_no_harm(celery_setup, broker, pg_dsn, history, guard, pool):
    """case 89, case 11: frozen beyond its ttl, then alive again."""
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


@BOTH
def test_a_thawed_body_that_is_not_told_writes_beside_its_successor(celery_setup, broker, pg_dsn, history, guard):
    """The negative control."""
    setup = celery_setup(APP)
    worker = setup.start_worker(concurrency=1)
    freeze_until_taken_over(setup, worker, history, guard, setup.module.hold_on)
    setup.open_gate("go")
    history.wait_for("end", key="a")
    assert len(history.overlaps()) == 1


@BOTH
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
