"""Exact fencing: a holder that was frozen past its ttl commits nothing, whatever the moment at which it stopped."""

import contextlib
import random
import re
import threading

import psycopg
import pytest

from celery_syncguard.tasks import app_state
from tests.fixtures import soak
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.fenced_counter"

pytestmark = pytest.mark.slow


@pytest.fixture
def look(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        connection.execute("create table counter (value bigint not null); insert into counter values (0)")
        connection.execute("create table steps (seen bigint not null, fence bigint not null, pid int not null)")
        connection.execute("create table refused (fence bigint not null)")
        yield lambda query: connection.execute(query).fetchone()[0]


@contextlib.contextmanager
def holders_frozen(setup, *, seed):
    """Every now and then stop the worker whose child holds the lock, for longer than the ttl, at a random moment."""
    choose = random.Random(seed)
    over = threading.Event()
    freezes = []
    guard = app_state.guard_for(setup.app)

    def freeze():
        while not over.wait(choose.uniform(0.3, 1.2)):
            row = guard.inspect("counter")
            pid = row and row.holder and int(re.search(r"pid (\d+)", row.holder)[1])
            for worker in setup.worker_cluster:
                if pid in worker.children():
                    worker.freeze()
                    freezes.append(pid)
                    over.wait(choose.uniform(0.6, 1.2))
                    worker.thaw()

    thread = threading.Thread(target=freeze)
    thread.start()
    try:
        yield freezes
    finally:
        over.set()
        thread.join()


def _start(setup, task, *, tasks, times):
    for _ in range(tasks):
        task.delay(times)
    for _ in range(4):
        setup.start_worker(concurrency=2, wait=False)
    for worker in setup.worker_cluster:
        worker.wait_ready()


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_fenced_increments_of_frozen_and_thawed_holders_lose_none(celery_setup, broker, pg_dsn, look):
    setup = celery_setup(MODULE)
    least = soak.rounds(1500, soak=5000)
    _start(setup, setup.module.fenced, tasks=400, times=25)
    with holders_frozen(setup, seed=17) as freezes:
        poll(lambda: look("select count(*) from steps") >= least and len(freezes) >= 3, timeout=200, interval=0.2)
    for worker in setup.worker_cluster:
        worker.kill()
    # What a killed worker had open is rolled back a moment later.
    poll(lambda: look("select count(*) from pg_stat_activity where application_name = 'user'") == 0)
    steps = look("select count(*) from steps")
    assert look("select value from counter") == steps >= least
    assert look("select count(distinct seen) from steps") == steps
    assert look("select count(distinct pid) from steps") > 1
    assert look("select count(*) from refused") > 0, "no holder was ever late: this proves nothing"
    backwards = "select count(*) from (select fence < lag(fence) over (order by seen) as back from steps) s where back"
    assert look(backwards) == 0


def test_with_the_lock_alone_updates_are_lost(celery_setup, broker, pg_dsn, look):
    """The negative control."""
    setup = celery_setup(MODULE)
    _start(setup, setup.module.only_locked, tasks=400, times=25)
    with holders_frozen(setup, seed=17):
        poll(lambda: look("select count(*) - count(distinct seen) from steps") > 0, timeout=60, interval=0.1)
    assert look("select value from counter") < look("select count(*) from steps")
