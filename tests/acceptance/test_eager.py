"""Eager and direct calls, inside the bodies of a real worker and beside one."""

import threading

import pytest

from celery_syncguard import SKIPPED, LockHeld, NoLease, SyncGuard
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.nested"


@pytest.fixture
def setup(celery_setup, broker, pg_dsn, history):
    return celery_setup(MODULE)


def test_a_nested_call_with_the_same_key_is_an_error_that_names_the_outer_task_and_no_deadlock(setup, history, pg_dsn):
    setup.start_worker(concurrency=1)
    result = setup.module.outer.delay("a", "a")
    state, error, blocked_by, took = result.get(timeout=30)
    assert state == "FAILURE"
    assert blocked_by == result.id
    assert "would wait for itself: 'a' is held by " in error
    assert f"{MODULE}.outer[{result.id}]" in error
    assert took < 10, "it waited (its lock_wait is a minute)"
    # The outer body went on, and the only child with it.
    assert [row.event for row in history.events(key="a")] == ["start", "end"]
    assert setup.module.inner.delay("a").get(timeout=30) == "inner a"
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_a_wait_for_the_lock_of_ones_own_body_ends_with_its_patience_only(setup):
    """The negative control: what a nested call would do, had nobody looked who is around it."""
    setup.start_worker(concurrency=1)
    assert setup.module.outer_that_waits.delay("a").get(timeout=30) >= 2


def test_a_nested_call_with_another_key_runs_under_its_own_lock(setup, history, pg_dsn):
    setup.start_worker(concurrency=2)
    holder = setup.module.inner.delay("b", "go")
    history.wait_for("start", key="b", task_id=holder.id)
    result = setup.module.outer.delay("a", "b")
    history.wait_for("start", key="a")
    with SyncGuard(pg_dsn) as guard:
        # It waits for the body that another process runs, and its caller's lock stays.
        poll(lambda: sorted(row.key for row in guard.locks()) == ["a", "b"])
        assert guard.inspect("b").task_id == holder.id
        assert guard.inspect("a").task_id == result.id
    assert not result.ready()
    setup.open_gate("go")
    assert result.get(timeout=30)[:2] == ["SUCCESS", "inner b"]
    (first, second), (around,) = history.events("start", key="b"), history.events("start", key="a")
    assert first.fence < second.fence
    assert around.fence is not None
    # Within the outer body, and not beside the other process's.
    assert [row.event for row in history.events() if row.task_id != holder.id] == ["start", "start", "end", "end"]
    assert history.overlaps() == []
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_a_direct_call_inside_a_body_takes_no_lock_and_needs_none(setup, history, pg_dsn):
    setup.start_worker(concurrency=1)
    answer, fence = setup.module.outer_that_calls.delay("a").get(timeout=30)
    assert answer == "inner a"
    # As a plain function it has no lease of its own, neither here nor there.
    assert [row.fence for row in history.events("start", key="a")] == [None]
    assert fence > 0
    with SyncGuard(pg_dsn) as guard, guard.hold("a"):
        assert setup.module.inner("a") == "inner a"
    with pytest.raises(NoLease):
        setup.module.inner.fence
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_an_eager_process_and_a_worker_exclude_each_other(setup, history, pg_dsn):
    """task_always_eager, on the database that the workers use."""
    worker = setup.start_worker(concurrency=1)
    module = setup.module
    held = module.inner.delay("a", "go")
    history.wait_for("start", key="a")
    setup.app.conf.task_always_eager = True
    skipped = module.inner.apply_async(("a",), lock_on_held="skip", lock_wait=0)
    assert (skipped.state, skipped.get().task_id) == (SKIPPED, held.id)
    with pytest.raises(LockHeld, match=rf"inner\[{held.id}\]"):
        module.inner.apply_async(("a",), lock_on_held="raise", lock_wait=0).get()
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(module.inner.delay("a").get()))
    thread.start()
    setup.open_gate("go")
    thread.join(30)
    assert waiting == ["inner a"]

    # And the other way round.
    thread = threading.Thread(target=lambda: waiting.append(module.inner.delay("b", "go b").get()))
    thread.start()
    (eager,) = history.wait_for("start", key="b")
    setup.app.conf.task_always_eager = False
    published = module.inner.apply_async(("b",), lock_wait=0)
    worker.wait_for_log(rf"\[{published.id}\] not run, comes back .*inner\[{eager.task_id}\]")
    setup.open_gate("go b")
    # Before the other result: while a body runs in this process, Celery lets nobody in it wait for one.
    thread.join(30)
    assert waiting == ["inner a", "inner b"]
    assert published.get(timeout=30) == "inner b"
    assert history.overlaps() == []
    assert len({row.fence for row in history.events("start")}) == history.count("start") == 4
    poll(lambda: rows_left(pg_dsn) == NOTHING)


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_memory_needs_no_postgresql(celery_setup, broker, pool):
    """Eagerly, and in a worker that is one process; the plain task is the negative control."""
    nowhere = {"PGHOST": "127.0.0.1", "PGPORT": "1"}
    setup = celery_setup(MODULE, dsn="memory://", environment=nowhere)
    assert setup.module.timed.apply(("a", 0)).get()[2] < setup.module.timed.apply(("a", 0)).get()[2]

    worker = setup.start_worker(pool=pool, concurrency=3)
    bodies = sorted(one.get(timeout=30) for one in [setup.module.timed.delay("a", 0.2) for _ in range(4)])
    for (_, ended, fence), (began, _, next_fence) in zip(bodies, bodies[1:], strict=False):
        assert ended <= began
        assert fence < next_fence
    worker.wait_for_log("locks are seen by this process only")
    if pool == "threads":
        plain = sorted(one.get(timeout=30) for one in [setup.module.plain_timed.delay("a", 1) for _ in range(3)])
        assert plain[1][0] < plain[0][1]
