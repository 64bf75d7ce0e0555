"""Time limits, revoke, terminate, expires and purge: the lock and the claim end with the work, whatever ended it."""

import psycopg
import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from celery_syncguard import SyncGuard
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.working"


def test_what_ends_a_task_from_outside_ends_its_lock_and_its_claim(celery_setup, broker, pg_dsn, history):
    """The ttls are a minute and an hour, so nothing here is free because it expired."""
    setup = celery_setup(MODULE)
    work = setup.module.work_deduplicated
    expired = work.apply_async(["expired"], expires=1)
    poll(lambda: not work.apply_async(["expired"], expires=600).duplicate, interval=0.2)
    worker = setup.start_worker(concurrency=4)
    history.wait_for("end", key="expired")
    if broker.kind == "redis":
        # RabbitMQ throws such a message away by itself, and nobody hears of it.
        poll(lambda: expired.state == "REVOKED", timeout=30)

    def publish(key, **options):
        result = work.apply_async([key, f"{key} may go"], **options)
        assert not result.duplicate
        return result

    running = {
        "soft limit": publish("soft limit", soft_time_limit=4),
        "hard limit": publish("hard limit", time_limit=4),
        "terminated": publish("terminated"),
    }
    scheduled = publish("revoked", countdown=6)
    history.wait_for("start", count=3 + 1)
    # Meanwhile each of them is a duplicate of itself.
    assert [work.delay(key).id for key in running] == [result.id for result in running.values()]
    assert work.delay("revoked").id == scheduled.id

    running["terminated"].revoke(terminate=True)
    scheduled.revoke()
    with pytest.raises(SoftTimeLimitExceeded):
        running["soft limit"].get(timeout=30)
    with pytest.raises(TimeLimitExceeded):
        running["hard limit"].get(timeout=30)
    with pytest.raises(TaskRevokedError):
        running["terminated"].get(timeout=30)
    poll(lambda: scheduled.state == "REVOKED", timeout=30)

    def everything_is_free():
        assert rows_left(pg_dsn)["locks"] == rows_left(pg_dsn)["claims"] == 0

    poll(everything_is_free)
    for key in [*running, "revoked"]:
        setup.open_gate(f"{key} may go")
    again = [publish(key) for key in [*running, "revoked"]]
    assert [result.get(timeout=30) for result in again] == [*running, "revoked"]
    assert history.count("start", task_id=scheduled.id) == history.count("start", task_id=expired.id) == 0
    assert worker.alive
    poll(everything_is_free)


def test_after_an_exception_nothing_is_left_in_pg_locks(celery_setup, broker, pg_dsn, history):
    """The plain task, with a lock of its connection, is the negative control."""
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=1)
    with psycopg.connect(pg_dsn, autocommit=True) as connection:

        def left():
            """Locks in this database of anybody else, sorted by kind."""
            query = (
                "select locktype from pg_locks join pg_stat_activity using (pid) where pid <> pg_backend_pid()"
                " and backend_type = 'client backend' and datname = current_database() and locktype <> 'virtualxid'"
            )
            return sorted(row[0] for row in connection.execute(query).fetchall())

        results = [setup.module.fail.delay(key) for key in ("a", "a", "b")]
        for result in results:
            with pytest.raises(LookupError):
                result.get(timeout=30)
        poll(lambda: left() == [])
        assert rows_left(pg_dsn) == NOTHING
        with pytest.raises(LookupError):
            setup.module.fail_with_a_session_lock.delay("a").get(timeout=30)
        assert left() == ["advisory"]


def test_a_hard_limit_frees_the_lock_although_no_hook_runs_in_the_process_that_held_it(
    celery_setup, broker, pg_dsn, history
):
    """The soft limit is the control: there the hooks run in the child."""
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=2)
    hard = setup.module.work_with_hooks.apply_async(["hard", "never"], time_limit=2)
    (body,) = history.wait_for("start", key="hard")
    with pytest.raises(TimeLimitExceeded):
        hard.get(timeout=30)
    poll(lambda: rows_left(pg_dsn)["locks"] == 0)  # its ttl is a minute
    assert setup.module.work.delay("hard").get(timeout=30) == "hard"
    hooks = {"on_failure", "after_return"}
    assert hooks.isdisjoint(row.event for row in history.events(task_id=hard.id) if row.pid == body.pid)
    soft = setup.module.work_with_hooks.apply_async(["soft", "never"], soft_time_limit=1)
    with pytest.raises(SoftTimeLimitExceeded):
        soft.get(timeout=30)
    (body,) = history.wait_for("start", key="soft")
    history.wait_for("after_return", task_id=soft.id)
    assert hooks <= {row.event for row in history.events(task_id=soft.id) if row.pid == body.pid}


def test_a_soft_limit_also_ends_the_wait_for_a_lock(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=1)
    with SyncGuard(pg_dsn) as guard, guard.hold("a"):
        waiting = setup.module.work_in_wait.apply_async(["a", "name"], soft_time_limit=1)
        with pytest.raises(SoftTimeLimitExceeded):
            waiting.get(timeout=30)
    assert setup.module.work.delay("a").get(timeout=30) == "a"
    assert history.count("start", task_id=waiting.id) == 0
    poll(lambda: rows_left(pg_dsn) == NOTHING)


@pytest.mark.both_brokers
def test_what_was_purged_or_revoked_while_no_worker_ran_blocks_nobody_for_longer_than_its_claim(
    celery_setup, broker, pg_dsn, history
):
    """With all workers down."""
    setup = celery_setup(MODULE)
    work = setup.module.work_deduplicated_briefly
    purged = work.delay("purged")
    assert work.delay("purged").duplicate
    with setup.app.connection_for_write() as connection:
        connection.default_channel.queue_purge(broker.queue)
    revoked = work.delay("revoked")
    assert work.delay("revoked").duplicate
    revoked.revoke()
    assert rows_left(pg_dsn)["locks"] == 0
    again = poll(lambda: (result := work.delay("purged")) and not result.duplicate and result, interval=0.1)
    poll(lambda: not work.delay("revoked").duplicate, interval=0.1)
    setup.start_worker()
    assert again.get(timeout=30) == "purged"
    assert history.count("start", task_id=purged.id) == 0


@pytest.mark.parametrize(
    ("broker", "pool"),
    [("redis", "threads"), ("rabbitmq", "solo"), ("redis", "gevent")],
    indirect=["broker"],
)
def test_what_was_revoked_or_expired_before_its_start_leaves_nothing_in_a_pool_without_processes(
    celery_setup, broker, pg_dsn, history, pool
):
    """Both are scheduled, so that a worker has them when they end, and RabbitMQ does not drop one."""
    setup = celery_setup(MODULE)
    setup.start_worker(pool=pool, concurrency=2)
    work = setup.module.work_deduplicated
    revoked = work.apply_async(["revoked"], countdown=4)
    expired = work.apply_async(["expired"], countdown=2, expires=1)
    assert [work.delay(key).id for key in ("revoked", "expired")] == [revoked.id, expired.id]
    assert rows_left(pg_dsn)["claims"] == 2  # for an hour
    revoked.revoke()
    poll(lambda: revoked.state == expired.state == "REVOKED", timeout=30)
    poll(lambda: rows_left(pg_dsn) == NOTHING)
    again = [work.delay(key) for key in ("revoked", "expired")]
    assert not any(result.duplicate for result in again)
    assert [result.get(timeout=30) for result in again] == ["revoked", "expired"]
    assert {row.task_id for row in history.events("start")} == {result.id for result in again}
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_a_greenlet_that_is_terminated_or_reaches_its_hard_limit_leaves_neither_lock_nor_claim(
    celery_setup, broker, pg_dsn, history
):
    setup = celery_setup(MODULE)
    setup.start_worker(pool="gevent", concurrency=4)
    work = setup.module.work_deduplicated
    terminated = work.delay("terminated", "never")
    limited = work.apply_async(["limited", "never"], time_limit=2)
    history.wait_for("start", count=2)
    terminated.revoke(terminate=True)
    poll(lambda: terminated.state == "REVOKED", timeout=30)
    with pytest.raises(TimeLimitExceeded):
        limited.get(timeout=30)
    poll(lambda: rows_left(pg_dsn)["locks"] == rows_left(pg_dsn)["claims"] == 0)
    assert [work.delay(key).get(timeout=30) for key in ("terminated", "limited")] == ["terminated", "limited"]


@pytest.mark.parametrize(
    ("broker", "pool"),
    [("redis", "threads"), ("rabbitmq", "solo")],
    indirect=["broker"],
)
def test_a_body_that_celery_can_neither_limit_nor_terminate_keeps_its_lock_until_it_ends(
    celery_setup, broker, pg_dsn, history, pool
):
    """Threads cannot be killed: Celery ignores the limits and refuses to terminate. The body runs on, so it is covered."""
    setup = celery_setup(MODULE)
    worker = setup.start_worker(pool=pool, concurrency=2)
    work = setup.module.work_deduplicated
    result = work.apply_async(["a", "go"], time_limit=2, soft_time_limit=1)
    (body,) = history.wait_for("start")
    result.revoke(terminate=True)
    if pool == "threads":
        worker.wait_for_log("does not implement kill_job")
    with SyncGuard(pg_dsn) as guard:
        poll(lambda: guard.inspect("a").since > 3)
        assert guard.inspect("a").fence == body.fence
    assert work.delay("a").id == result.id
    setup.open_gate("go")
    history.wait_for("end", task_id=result.id)
    poll(lambda: rows_left(pg_dsn)["locks"] == rows_left(pg_dsn)["claims"] == 0)
    assert worker.alive
