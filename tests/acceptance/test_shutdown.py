"""Shutting a worker down: renewal goes on until the last body ended, then everything is released (case 93)."""

import signal
import time

import pytest

from celery_syncguard import SyncGuard
from tests.fixtures.polling import poll

APP = "tests.acceptance.apps.pools_bodies"


def with_pools(*pools):
    cases = [(broker, pool) for broker in ("redis", "rabbitmq") for pool in pools]
    return pytest.mark.parametrize(("broker", "pool"), cases, indirect=["broker"])


#: Seconds that a busy machine may need on top of the second that we are allowed.
LEEWAY = 9


@pytest.fixture
def guard(pg_dsn):
    with SyncGuard(pg_dsn) as one:
        yield one


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


@pytest.mark.parametrize(
    ("broker", "pool", "seconds"),
    # Not gevent on RabbitMQ, see `freed`: there the worker ends or stays, depending on where the signal strikes.
    [("redis", "threads", 0), ("rabbitmq", "threads", 0), ("redis", "gevent", 1)],
    indirect=["broker"],
)
def test_a_body_that_celery_fails_to_cut_off_keeps_its_lock_until_it_ends(
    celery_setup, broker, pg_dsn, history, guard, pool, seconds
):
    """Celery's threads cannot be killed, and its soft shutdown fails under gevent: the body runs on, so it is covered."""
    setup = celery_setup(APP, conf={"worker_soft_shutdown_timeout": seconds})
    worker = start_holding(setup, history, pool)
    worker.signal(signal.SIGQUIT)
    worker.wait_for_log("Unrecoverable error")
    outlives_its_ttl(guard, "a")
    assert history.count("end") == history.count("lost") == 0
    setup.open_gate("go")
    history.wait_for("end", key="a")
    poll(lambda: not guard.locks())


@pytest.mark.parametrize(
    ("broker", "pool"),
    # Not gevent on RabbitMQ, see `freed`: there the worker waits on for its body.
    [(broker, pool) for broker in ("redis", "rabbitmq") for pool in ("prefork", "solo", "threads")]
    + [("redis", "gevent")],
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


def freed(guard, history, *, at_ttl=False):
    """Gone at the exit, or at the ttl, where the body dies with its process, not before it: nobody is left to free
    anything then. That is so in threads, and with gevent on RabbitMQ: Celery's handler of the signal waits for the
    broker's answer inside the hub, gets BlockingSwitchOutError, and does not come to cutting off the bodies."""
    if at_ttl:
        poll(lambda: not guard.locks())
    assert guard.locks() == []
    assert history.count("end") == 0
