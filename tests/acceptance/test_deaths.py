"""The death of a child: its leases, and only its leases, are free within a second, however it died."""

import statistics
import time

import psutil
import psycopg
import pytest
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from celery_syncguard import SyncGuard, TooManyDeaths
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.dying"

#: How a child dies by itself. `memory limit`: memory is refused to it (RLIMIT_AS) inside C code, which crashes. When a
#: machine or a cgroup runs short of memory, the kernel sends SIGKILL instead, at a moment of its choice: that is
#: `killed`, and `cpu limit`, where the kernel does it too.
MANNERS = ["killed", "segfault", "exit", "memory limit", "cpu limit"]


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def watch(guard, holders, *, timeout=30):
    """Seconds from the death of each holder to the end of its lease; `holders`: key -> pid.

    Fails if a lease ends before its holder is dead.
    """
    died, freed = {}, {}

    def all_are_free():
        live = {row.key for row in guard.locks()}
        for key, pid in holders.items():
            # In this order: what is dead now may have been freed meanwhile, but not the other way round.
            if key not in live and key not in freed:
                freed[key] = time.monotonic()
                assert gone(pid), f"{key!r} was freed before its holder was dead"
            if key not in died and gone(pid):
                died[key] = time.monotonic()
        return len(freed) == len(holders)

    poll(lambda: all_are_free(), timeout=timeout, interval=0.01)
    return {key: max(0.0, freed[key] - died.get(key, freed[key])) for key in holders}


@pytest.mark.smoke
def test_the_leases_of_dead_children_and_no_others_are_freed_at_once(
    celery_setup, broker, second_queue, pg_dsn, history
):
    """The ttl is a minute, so nothing here is free because it expired."""
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=len(MANNERS) + 3)
    other = setup.start_worker("-Q", second_queue, concurrency=1)
    work, die = setup.module.work, setup.module.die
    work.apply_async(["on the other worker", "go"], queue=second_queue)
    survivor = work.delay("on the same worker", "go")
    results = {"killed from outside": work.delay("killed from outside", "go")}
    history.wait_for("start", count=3)
    results |= {manner: die.delay(manner, manner, "die") for manner in MANNERS}
    results["hard limit"] = die.apply_async(["hard limit", "hard limit", "die"], time_limit=3)
    starts = {row.key: row for row in history.wait_for("start", count=3 + len(MANNERS) + 1)}
    with SyncGuard(pg_dsn) as guard:
        fences = {row.key: row.fence for row in guard.locks()}
        assert set(fences) == set(starts)
        psutil.Process(starts["killed from outside"].pid).kill()
        setup.open_gate("die")
        times = watch(guard, {key: starts[key].pid for key in results})
        # Within a second, as a rule; a machine that is busy starting new children may take longer over one of the seven.
        assert statistics.median(times.values()) < 1, times
        assert max(times.values()) < 5, times
        left = {row.key: row.fence for row in guard.locks()}
        assert left == {key: fences[key] for key in ("on the same worker", "on the other worker")}
        for key, result in results.items():
            with pytest.raises(TimeLimitExceeded if key == "hard limit" else WorkerLostError):
                result.get(timeout=30)

        # A whole worker that is restarted takes along what it held itself, and only when its ttl ends.
        other.kill()
        setup.start_worker("-Q", second_queue, concurrency=1)
        assert {row.key: row.fence for row in guard.locks()} == left
        # The freed keys can be had at once.
        again = [work.delay(key) for key in results]
        assert [result.get(timeout=30) for result in again] == list(results)
        setup.open_gate("go")
        assert survivor.get(timeout=30) == "on the same worker"
    report = ", ".join(f"{key} {value:.2f} s" for key, value in times.items())
    print(f"from death to freedom: median {statistics.median(times.values()):.2f} s; {report}")


def test_without_the_undertaker_the_lease_of_a_dead_child_stays(celery_setup, broker, pg_dsn, history):
    """The negative control of the test before."""
    setup = celery_setup(MODULE, environment={"WITHOUT_UNDERTAKER": "1"})
    setup.start_worker(concurrency=2)
    result = setup.module.die.delay("a", "killed")
    with pytest.raises(WorkerLostError):
        result.get(timeout=30)
    assert setup.module.work.delay("b").get(timeout=30) == "b"
    with SyncGuard(pg_dsn) as guard:
        assert guard.inspect("a").task_id == result.id
        with pytest.raises(AssertionError):
            poll(lambda: guard.inspect("a") is None, timeout=3)


@pytest.mark.both_brokers
def test_a_body_that_kills_its_process_again_and_again_ends_as_a_failure_that_says_so(
    celery_setup, broker, pg_dsn, history
):
    """The plain task is the negative control: Celery lets it go on killing."""
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=2)
    setup.module.plain_die_again.delay("plain", "killed")
    result = setup.module.die_again.delay("a", "killed")
    with pytest.raises(TooManyDeaths, match="died 2 times in a row while it held 'a'"):
        result.get(timeout=60)
    assert history.count("start", key="a") == 2
    assert result.state == "FAILURE"
    history.wait_for("start", key="plain", count=3, timeout=60)
    # The key is free for others, and the count was this task's alone.
    assert setup.module.work.delay("a").get(timeout=30) == "a"
    assert {**rows_left(pg_dsn), "deaths": 0} == NOTHING
    with psycopg.connect(pg_dsn) as connection:
        deaths = connection.execute("select subject, deaths from syncguard_deaths").fetchall()
        # What ran on the key since then ended well.
        assert deaths == [(f"task:{result.id}", 2)]
