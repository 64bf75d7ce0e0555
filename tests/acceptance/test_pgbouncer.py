"""Behind pgbouncer in transaction mode with two server connections, everything is as it is without."""

import time

import psycopg
import pytest

from celery_syncguard import SyncGuard
from tests.fixtures.polling import poll

APP = "tests.acceptance.apps.holding"


@pytest.fixture
def setup(celery_setup, broker, pg_dsn, pgbouncer_dsn):
    return celery_setup(APP, broker=broker, dsn=pgbouncer_dsn, history_dsn=pg_dsn)


def test_contended_keys_stay_exclusive_and_everyday_answers_are_the_same(setup, broker, history, guard):
    module = setup.module
    for _ in range(2):
        setup.start_worker(concurrency=4)
    results = [
        module.quick.apply_async((f"k{one % 4}",), {"seconds": 0.05}, lock_wait=20 if one % 2 else 0)
        for one in range(60)
    ]
    held = module.hold.delay("a", "go")
    first = module.deduplicated.delay("d", "go")
    history.wait_for("start", key="a")
    history.wait_for("start", key="d")
    assert module.skipping.delay("a").get(timeout=60).key == "a"
    with pytest.raises(Exception, match="is held by"):
        module.raising.delay("a").get(timeout=60)
    assert module.deduplicated.delay("d", "go").duplicate
    # Renewal too goes through: the body outlives its ttl.
    poll(lambda: (row := guard.inspect("a")) is not None and row.since > 4, timeout=20)
    setup.open_gate("go")
    assert held.get(timeout=60) == "a"
    assert first.get(timeout=60) == "d"
    fences = [result.get(timeout=90) for result in results]
    for key in range(4):
        assert len(set(fences[key::4])) == 15
    assert history.overlaps() == []
    assert history.count("lost") == 0
    poll(lambda: not guard.locks())


def test_the_holders_sudden_death_leaves_nothing_on_a_pooled_backend(
    setup, broker, pg_dsn, pgbouncer_dsn, history, guard
):
    worker = setup.start_worker(concurrency=1)
    setup.module.hold.delay("a", "never")
    history.wait_for("start", key="a")
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        assert conn.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)
    worker.kill()
    killed_at = time.monotonic()
    with SyncGuard(pgbouncer_dsn) as other:
        successor = poll(lambda: other.try_acquire("a"), timeout=10)
        assert time.monotonic() - killed_at < 2 + 4
        with psycopg.connect(pgbouncer_dsn) as conn:
            successor.fenced(conn)  # its proof, too, is a matter of one transaction
        assert successor.release()
    assert guard.locks() == []


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_session_lock_behind_the_pooler_outlives_its_holder(pgbouncer_dsn, pg_dsn, broker):
    """The negative control: what we do not build on. A backend keeps the lock of a client that is gone."""
    holder = psycopg.connect(pgbouncer_dsn, autocommit=True)
    assert holder.execute("select pg_try_advisory_lock(1)").fetchone() == (True,)
    holder.close()
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        assert conn.execute("select pg_try_advisory_lock(1)").fetchone() == (False,)
