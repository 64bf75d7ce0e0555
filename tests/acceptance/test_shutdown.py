"""Shutting a worker down: renewal goes on until the last body ended, then everything is released."""

import itertools
import signal
import statistics
import time

import pytest

from tests.fixtures import gate
from tests.fixtures.polling import poll

APP = "tests.acceptance.apps.holding"
LONG_LEASES = "tests.acceptance.apps.working"
WITHOUT_US = "tests.acceptance.apps.without_us"


def with_pools(*pools):
    """Each pool on one of the brokers, by turns; what a pool does at the end depends on neither."""
    cases = list(zip(itertools.cycle(["rabbitmq", "redis"]), pools, strict=False))
    return pytest.mark.parametrize(("broker", "pool"), cases, indirect=["broker"])


#: Seconds that a busy machine may need on top of the second that we are allowed. What is ours of that is measured beside
#: a worker that has nothing of ours, see the last test.
LEEWAY = 9


def start_holding(setup, history, pool):
    worker = setup.start_worker(pool=pool)
    setup.module.hold.delay("a", "go")
    history.wait_for("start", key="a")
    return worker


def outlives_its_ttl(guard, key):
    """Wait until the lease on `key` has been renewed beyond its ttl of 2 s from now on."""
    first = guard.inspect(key)

    def check():
        row = guard.inspect(key)
        assert row is not None, "freed during the shutdown, while its body runs"
        assert row.lock_id == first.lock_id
        assert row.since > first.since + 2.5

    poll(check, timeout=10)


@with_pools("prefork", "solo", "threads", "gevent")
def test_a_warm_shutdown_renews_until_the_last_body_ended_then_releases(
    celery_setup, broker, pg_dsn, history, guard, pool
):
    setup = celery_setup(APP)
    worker = start_holding(setup, history, pool)
    worker.signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown" if pool != "solo" else "ready")
    outlives_its_ttl(guard, "a")
    setup.open_gate("go")
    history.wait_for("end", key="a")
    ended_at = time.monotonic()
    assert worker.wait_exit(timeout=30) == 0
    assert time.monotonic() - ended_at < 1 + LEEWAY
    assert guard.locks() == []
    assert history.count("lost") == 0


@with_pools("prefork", "solo")
def test_a_soft_shutdown_renews_until_its_limit_and_then_frees_what_it_cuts_off(
    celery_setup, broker, pg_dsn, history, guard, pool
):
    setup = celery_setup(APP, conf={"worker_soft_shutdown_timeout": 4})
    worker = start_holding(setup, history, pool)
    worker.signal(signal.SIGQUIT)
    outlives_its_ttl(guard, "a")
    stopping_at = time.monotonic()
    worker.wait_exit(timeout=30)
    assert time.monotonic() - stopping_at < 4 + 1 + LEEWAY
    freed(guard, history)


@with_pools("prefork", "solo", "gevent")
def test_a_cold_shutdown_frees_what_it_cuts_off(celery_setup, broker, pg_dsn, history, guard, pool):
    setup = celery_setup(APP)
    worker = start_holding(setup, history, pool)
    worker.signal(signal.SIGQUIT)
    stopping_at = time.monotonic()
    worker.wait_exit(timeout=30)
    assert time.monotonic() - stopping_at < 1 + LEEWAY
    freed(guard, history, at_ttl=(broker.kind, pool) == ("rabbitmq", "gevent"))


@with_pools("prefork", "threads")  # not solo, where Celery waits in the very thread in which the body would go on
def test_a_body_that_ends_during_a_soft_shutdown_is_covered_to_its_end_and_then_released(
    celery_setup, broker, pg_dsn, history, guard, pool
):
    setup = celery_setup(APP, conf={"worker_soft_shutdown_timeout": 6})
    worker = start_holding(setup, history, pool)
    worker.signal(signal.SIGQUIT)
    outlives_its_ttl(guard, "a")
    setup.open_gate("go")
    history.wait_for("end", key="a")
    worker.wait_exit(timeout=30)
    assert guard.locks() == []
    assert history.count("lost") == 0


@pytest.mark.both_brokers
@pytest.mark.parametrize("seconds", [0, 3])
def test_what_a_shutdown_puts_back_into_the_queue_runs_at_once_in_another_worker(
    celery_setup, broker, pg_dsn, history, guard, seconds
):
    """`acks_late`, cold and soft: the ttl is a minute, so the lock is not free because it expired."""
    setup = celery_setup(LONG_LEASES, conf={"worker_soft_shutdown_timeout": seconds})
    worker = setup.start_worker(concurrency=1)
    result = setup.module.work_late.delay("a", "go")
    (first,) = history.wait_for("start", key="a")
    other = setup.start_worker(concurrency=1)
    worker.signal(signal.SIGQUIT)
    signalled_at = time.monotonic()
    (_, second) = history.wait_for("start", key="a", count=2)
    assert time.monotonic() - signalled_at < seconds + 1 + LEEWAY
    assert (second.task_id, second.attempt) == (first.task_id, first.attempt) == (result.id, 0)
    assert second.fence > first.fence
    assert second.pid in other.children()
    worker.wait_exit(timeout=30)
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    assert [row.pid for row in history.events("end", key="a")] == [second.pid]
    poll(lambda: not guard.locks())


@pytest.mark.parametrize(
    ("broker", "pool", "seconds"),
    # Not gevent on RabbitMQ, see `freed`.
    [
        ("rabbitmq", "threads", 0),
        ("redis", "threads", 3),
        ("redis", "gevent", 1),
    ],
    indirect=["broker"],
)
def test_a_body_that_celery_fails_to_cut_off_keeps_its_lock_until_it_ends(
    celery_setup, broker, pg_dsn, history, guard, pool, seconds
):
    """Celery's threads cannot be killed, and its soft shutdown fails under gevent: the body runs on, so it is covered."""
    setup = celery_setup(APP, conf={"worker_soft_shutdown_timeout": seconds})
    worker = start_holding(setup, history, pool)
    worker.signal(signal.SIGQUIT)
    poll(lambda: "Unrecoverable error" in worker.logs() or not worker.alive)
    if pool == "gevent" and not worker.alive:
        # Its soft shutdown fails only where the signal strikes in the hub. Elsewhere it ends, and its body with it.
        freed(guard, history, at_ttl=True)
        return
    outlives_its_ttl(guard, "a")
    assert history.count("end") == history.count("lost") == 0
    setup.open_gate("go")
    history.wait_for("end", key="a")
    poll(lambda: not guard.locks())


@pytest.mark.parametrize(
    ("broker", "pool"),
    # Not gevent on RabbitMQ, see `freed`: there the worker waits on for its body.
    [("redis", "prefork"), ("rabbitmq", "solo"), ("rabbitmq", "threads"), ("redis", "gevent")],
    indirect=["broker"],
)
def test_a_cold_shutdown_during_a_warm_one_frees_what_it_cuts_off(celery_setup, broker, pg_dsn, history, guard, pool):
    setup = celery_setup(APP)
    worker = start_holding(setup, history, pool)
    worker.signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown" if pool != "solo" else "ready")
    outlives_its_ttl(guard, "a")
    worker.signal(signal.SIGQUIT)
    stopping_at = time.monotonic()
    worker.wait_exit(timeout=30)
    assert time.monotonic() - stopping_at < 1 + LEEWAY
    freed(guard, history, at_ttl=pool == "threads")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("broker", "pool", "signum"),
    [
        ("redis", "prefork", signal.SIGTERM),
        ("redis", "prefork", signal.SIGQUIT),
        ("rabbitmq", "prefork", signal.SIGTERM),
        ("rabbitmq", "threads", signal.SIGTERM),
    ],
    indirect=["broker"],
)
def test_a_worker_ends_not_a_second_later_than_one_that_has_nothing_of_ours(
    celery_setup, broker, second_queue, pg_dsn, history, tmp_path, pool, signum
):
    """By turns, three times each: from the end of the last body, or from the signal that cuts it off, to the exit."""
    ours = celery_setup(APP)
    folder = tmp_path / "without us"
    folder.mkdir()
    without_us = celery_setup(
        WITHOUT_US,
        folder=folder,
        conf={"task_default_queue": second_queue},
        environment={gate.FOLDER_VARIABLE: str(tmp_path)},
    )
    seconds = {ours: [], without_us: []}
    for turn in range(3):
        for setup in (ours, without_us):
            key = f"{turn} {setup.module_name}"
            worker = setup.start_worker(pool=pool, concurrency=1)
            setup.module.hold.delay(key, key)
            history.wait_for("start", key=key)
            worker.signal(signum)
            started_at = time.monotonic()
            if signum == signal.SIGTERM:
                worker.wait_for_log("Warm shutdown")
                setup.open_gate(key)
                history.wait_for("end", key=key)
                started_at = time.monotonic()
            worker.wait_exit(timeout=30)
            seconds[setup].append(time.monotonic() - started_at)
    assert statistics.median(seconds[ours]) - statistics.median(seconds[without_us]) < 1, list(seconds.values())


def freed(guard, history, *, at_ttl=False):
    """Gone at the exit, or at the ttl, where the body dies with its process, not before it: nobody is left to free
    anything then. That is so in threads, and with gevent on RabbitMQ: Celery's handler of the signal waits for the
    broker's answer inside the hub, gets BlockingSwitchOutError, and does not come to cutting off the bodies."""
    if at_ttl:
        poll(lambda: not guard.locks())
    assert guard.locks() == []
    assert history.count("end") == 0
