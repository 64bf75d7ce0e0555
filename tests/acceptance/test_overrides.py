"""Whatever a subclass, a framework or an instrument puts around a body, in a real worker the lock covers the body."""

import pytest

from celery_syncguard import SyncGuard
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.overridden"
SHAPES = (
    "silent",
    "flask",
    "flask_after_ours",
    "django",
    "django_after_ours",
    "patched_run",
    "patched_call",
    "patched_base_call",
)


@pytest.fixture
def setup(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=3, environment={"SYNCGUARD_TEST_PATCHED": "1"})
    assert set(SHAPES) == set(setup.module.SHAPES)
    return setup


def put_around(history, kind):
    """What was put around the bodies so far, by name, to show that it was there."""
    return {row.note.rpartition(".")[2] for row in history.events("traced")} | {
        row.event for row in history.events() if row.event in ("before_start", "context")
    }


def everything_around(kind):
    return {f"{kind}_{shape}" for shape in SHAPES if shape.startswith("patched")} | {"before_start", "context"}


@pytest.mark.slow
def test_the_lock_covers_the_body_whatever_is_around_it(setup, history, pg_dsn):
    with SyncGuard(pg_dsn) as guard:
        for shape in SHAPES:
            task = getattr(setup.module, f"locked_{shape}")
            results = [task.delay(shape) for _ in range(2)]
            (first,) = history.wait_for("start", key=shape)
            blocked = next(result.id for result in results if result.id != first.task_id)
            setup.worker.wait_for_log(rf"{task.name}\[{blocked}\] not run, comes back")
            row = guard.inspect(shape)
            assert (row.task_id, row.fence) == (first.task_id, first.fence), shape
            # A child is free for it all the while.
            assert history.count("start", key=shape) == 1, shape
            setup.open_gate(shape)
            assert [result.get(timeout=30) for result in results] == [shape, shape]
    assert history.overlaps() == []
    assert history.count("end") == 2 * len(SHAPES)
    assert put_around(history, "locked") == everything_around("locked")
    poll(lambda: rows_left(pg_dsn) == NOTHING)


@pytest.mark.slow
def test_without_our_class_bodies_of_the_same_shapes_overlap(setup, history):
    """The negative control."""
    for shape in SHAPES:
        results = [getattr(setup.module, f"plain_{shape}").delay(shape) for _ in range(2)]
        history.wait_for("start", key=shape, count=2)
        setup.open_gate(shape)
        assert [result.get(timeout=30) for result in results] == [shape, shape]
    assert {first.key for first, _ in history.overlaps()} == set(SHAPES)
    assert put_around(history, "plain") == everything_around("plain")


def test_hooks_without_super_leave_no_lock_when_the_body_fails_or_is_retried(setup, history, pg_dsn):
    task = setup.module.locked_silent
    failing = [task.delay("failing", "badly") for _ in range(2)]
    retried = [task.delay("retried", "again") for _ in range(2)]
    for key in ("failing", "retried"):
        history.wait_for("start", key=key)
    for result in (*failing, *retried):
        # One of each is blocked, and all of them get their turn.
        if history.count("start", task_id=result.id) == 0:
            setup.worker.wait_for_log(rf"\[{result.id}\] not run, comes back")
    for key in ("failing", "retried"):
        setup.open_gate(key)
    for result in failing:
        with pytest.raises(ValueError, match="failing"):
            result.get(timeout=30)
    assert [result.get(timeout=30) for result in retried] == ["retried", "retried"]
    assert history.overlaps() == []
    for results, hooks in (
        (failing, {"before_start", "on_failure", "after_return"}),
        (retried, {"before_start", "on_retry", "on_success", "after_return"}),
    ):
        for result in results:
            poll(lambda: hooks <= {row.event for row in history.events(task_id=result.id)})
    assert [row.attempt for row in history.events("start", task_id=retried[0].id)] == [0, 1]
    poll(lambda: rows_left(pg_dsn) == NOTHING)
