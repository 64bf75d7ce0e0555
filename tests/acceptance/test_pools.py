"""What a process costs, in every pool: connections, threads, memory; and forks of a process that was connected."""

import json
import re
import subprocess
import sys
import threading

import psutil
import psycopg
import pytest

from celery_syncguard import SyncGuard
from tests.fixtures import soak
from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll

APP = "tests.acceptance.apps.holding"

OURS = "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s"


class Watch:
    """Looks, as often as it can, how many connections of ours are open."""

    def __init__(self, dsn):
        self.dsn = dsn
        self.most = 0
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._conn = psycopg.connect(self.dsn, autocommit=True, application_name="watch")
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self._conn.close()

    def now(self):
        with psycopg.connect(self.dsn, autocommit=True, application_name="watch") as conn:
            return conn.execute(OURS, ("celery-syncguard",)).fetchone()[0]

    def _look(self):
        while not self._over.wait(0.01):
            self.most = max(self.most, self._conn.execute(OURS, ("celery-syncguard",)).fetchone()[0])
            self.looks += 1


@pytest.mark.direct  # a pooler's connections are its own affair
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("broker", "pool", "concurrency", "count", "processes"),
    [
        ("redis", "gevent", 500, 2000, 1),
        ("rabbitmq", "prefork", 2, 300, 2),
        ("redis", "threads", 20, 500, 1),
        ("rabbitmq", "solo", 1, 200, 1),
    ],
    indirect=["broker"],
)
def test_connections_are_two_per_process_at_most_and_none_when_idle(
    celery_setup, broker, pg_dsn, pool, concurrency, count, processes
):
    """And threads: no lease has one of its own."""
    conf = {"worker_prefetch_multiplier": 4, "redis_max_connections": 1200}
    if (broker.kind, pool) == ("rabbitmq", "gevent"):
        # With heartbeats, after each message Celery's loop for greenlets waits a tenth of a second for the connection of
        # its events: ten messages a second, of plain tasks too.
        conf["broker_heartbeat"] = 0
    setup = celery_setup(APP, conf=conf, environment={"SYNCGUARD_TEST_MAX_IDLE": "1"})
    setup.start_worker(pool=pool, concurrency=concurrency)
    with Watch(pg_dsn) as watch:
        results = [setup.module.quick.delay(f"k{number}", fail=number % 2 == 1) for number in range(count)]
        for number, result in enumerate(results):
            result.get(timeout=90, propagate=False)
            assert result.state == ("FAILURE" if number % 2 else "SUCCESS"), result.result
        assert watch.looks > 10
        assert 1 <= watch.most <= 2 * processes
        facts = setup.module.facts.delay().get(timeout=30)
        # The threads of the pool, where it has them, and a handful.
        assert facts["threads"] < 10 + (concurrency if pool == "threads" else 0)
        # The standing loop looks once a second, and the pool's own worker about as often.
        poll(lambda: watch.now() == 0, timeout=30)
    # And it is there again when it is needed.
    assert setup.module.quick.delay("again").get(timeout=30) > 0


def test_eight_children_of_a_connected_parent_have_sessions_of_their_own(
    celery_setup, broker, pg_dsn, app_dsn, app_tls_proxy, history
):
    """Over TLS: the parent took a lock and opened a connection before it forked."""
    dsn = app_tls_proxy.dsn(app_dsn) + "?sslmode=require"
    environment = {"SYNCGUARD_TEST_PARENT_DSN": dsn, "SYNCGUARD_TEST_NODE": "worker"}
    setup = celery_setup(APP, dsn=dsn, environment={"SYNCGUARD_TEST_NODE": "test"})
    worker = setup.start_worker(concurrency=8, environment=environment)
    with SyncGuard(pg_dsn) as guard:
        before = guard.inspect("parent")
        assert f"pid {worker.pid}" in before.holder
        results = [setup.module.quick.apply_async((f"k{one}",), {"seconds": 0.1}) for one in range(80)]
        for result in results:
            assert result.get(timeout=60) > 0
        assert len({event.pid for event in history.events("start")}) == 8
        # The parent's lease lives on, renewed by the parent alone.
        poll(lambda: guard.inspect("parent").since > before.since + 3.5)
        assert guard.inspect("parent").lock_id == before.lock_id
    assert "bad record mac" not in worker.logs().lower()
    assert "SSL error" not in worker.logs()
    assert "lost the lease" not in worker.logs()


def test_leases_held_at_once_in_a_pool_of_threads_have_no_threads_of_their_own(celery_setup, broker, pg_dsn, history):
    """Twenty bodies without a lock are the control. With one each there are four threads more, such as the renewer."""
    bodies = 20
    setup = celery_setup(APP)
    worker = setup.start_worker(pool="threads", concurrency=bodies)
    process = psutil.Process(worker.pid)
    for _ in range(bodies):
        setup.module.plain.delay("plain")
    history.wait_for("start", key="plain", count=bodies)
    without_leases = process.num_threads()
    setup.open_gate("plain")
    history.wait_for("end", key="plain", count=bodies)
    for number in range(bodies):
        setup.module.hold.delay(f"k{number}", "go")
    with SyncGuard(pg_dsn) as guard:
        poll(lambda: history.count("start") == 2 * bodies and len(guard.locks()) == bodies, timeout=30)
        # Beyond the first round of renewals, which is when a thread for each would be there at the latest.
        poll(lambda: min(row.since for row in guard.locks()) > 2.5)
        assert process.num_threads() - without_leases < bodies / 2
    setup.open_gate("go")
    history.wait_for("end", count=2 * bodies)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_and_threads_stay_flat_over_very_many_tasks_half_of_which_fail():
    """Nothing keeps a request, an exception or a lease. A program of its own, since memory is a process's."""
    count = soak.rounds(20_000, soak=100_000)
    command = [sys.executable, "-m", "tests.acceptance.apps.many_tasks", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["succeeded"] == seen["failed"] == count / 2
    assert seen["leases"] == seen["requests"] == seen["locks"] == 0
    assert len(set(seen["threads"])) == 1, seen["threads"]
    assert seen["threads"][0] < 5
    first, last = seen["memory"][0], seen["memory"][-1]  # KiB, after a tenth of the tasks and after all
    # A kept traceback would cost some KiB for each of the thousands of failures in between.
    assert last - first < 12 * 1024, seen["memory"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("broker", "pool", "concurrency", "batch"),
    [
        ("rabbitmq", "prefork", 1, 600),
        ("redis", "threads", 8, 300),
        ("rabbitmq", "gevent", 50, 300),
    ],
    indirect=["broker"],
)
def test_a_workers_processes_stay_flat_over_thousands_of_tasks_half_of_which_fail(
    celery_setup, broker, pg_dsn, pool, concurrency, batch
):
    """In a real worker: its main process and its child."""
    conf = {"worker_prefetch_multiplier": 50 if pool == "prefork" else 4}
    if (broker.kind, pool) == ("rabbitmq", "gevent"):
        conf["broker_heartbeat"] = 0  # see above
    setup = celery_setup(APP, conf=conf)
    worker = setup.start_worker(pool=pool, concurrency=concurrency)
    main = psutil.Process(worker.pid)

    def ended(how):
        return len(re.findall(rf"quick\[\S+\] {how}", worker.logs()))

    seen = []
    for turn in range(1, 6):
        with setup.app.producer_or_acquire() as producer:
            for number in range(batch):
                setup.module.quick.apply_async((f"k{number}", number % 2 == 1), producer=producer, ignore_result=True)
        poll(lambda: ended("(succeeded|raised unexpected)") == turn * batch, timeout=100, interval=0.2)
        child = setup.module.facts.delay().get(timeout=100)
        seen.append(
            (child["kept"], child["threads"], main.num_threads(), child["memory"], main.memory_info().rss // 1024)
        )
    assert ended("raised unexpected: ValueError") == 5 * batch // 2
    assert child["pid"] in (worker.children() if pool == "prefork" else [worker.pid])
    # Failing tasks, plain ones too, make Celery's child grow by a hundred MiB at first: after 1,800 it has them.
    first, last = seen[2], seen[-1]
    assert last[:3] == first[:3], seen
    for before, after in zip(first[3:], last[3:], strict=True):
        assert after - before < 16 * 1024, seen
    with SyncGuard(pg_dsn) as guard:
        assert guard.locks() == []


def test_a_thousand_waiters_for_one_key_cost_the_database_no_more_than_one(app_dsn, app_proxy):
    with SyncGuard(app_proxy.dsn(app_dsn)) as guard:
        with guard.hold("a"):
            threads = [threading.Thread(target=wait_for, args=(guard, "a")) for _ in range(1000)]
            queue = guard._turns._queues
            threads[0].start()
            poll(lambda: len(queue.get("a", ())) == 1)
            before = app_proxy.requests
            for thread in threads[1:]:
                thread.start()
            poll(lambda: len(queue.get("a", ())) == 1000, timeout=30)
            # The first looks a few times a second, and none of the others does.
            assert app_proxy.requests - before < 100
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert guard.locks() == []


def wait_for(guard, key):
    with guard.hold(key, wait=120):
        pass
