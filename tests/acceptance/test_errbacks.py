"""An errback of ours runs under its lock, in whichever way Celery runs it.

What takes one argument or is bound is published. What takes (request, exc, traceback) is called as a function, in the
process where the other task failed.
"""

from types import SimpleNamespace

import pytest

from tests.fixtures.history import overlaps
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.errbacks"


@pytest.fixture
def held(celery_setup, broker, history):
    """A worker, and a task on it that holds the errbacks' key until the gate "release" is opened."""
    setup = celery_setup(MODULE)
    worker = setup.start_worker(concurrency=5)
    setup.module.hold.delay()
    history.wait_for("start")
    return SimpleNamespace(setup=setup, worker=worker, history=history, tasks=setup.module)


def ran(history):
    return sorted(row.task_id for row in history.events("end") if row.task_id in ("inline", "published", "bound"))


def fail_with(held, errbacks):
    for errback in errbacks:
        held.tasks.fail.apply_async(link_error=[errback.s()])


@pytest.mark.smoke
def test_errbacks_wait_for_their_lock(held, pg_dsn):
    fail_with(held, held.tasks.ERRBACKS["retry"])
    for form in ("inline", "published", "bound"):
        held.worker.wait_for_log(rf"{form}_retry\[\S+\] not run, comes back")
    assert ran(held.history) == []
    held.setup.open_gate("release")
    held.history.wait_for("end", count=4)
    assert ran(held.history) == ["bound", "inline", "published"]
    assert overlaps(held.history.events()) == []
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_errbacks_are_skipped_where_their_lock_is_held(held, pg_dsn):
    fail_with(held, held.tasks.ERRBACKS["skip"])
    for form in ("inline", "published", "bound"):
        held.worker.wait_for_log(rf"{form}_skip\[\S+\] skipped: 'the key' is held")
    held.setup.open_gate("release")
    held.history.wait_for("end")
    poll(lambda: rows_left(pg_dsn) == NOTHING)
    assert ran(held.history) == []


def test_errbacks_fail_where_their_lock_is_held(held, pg_dsn):
    fail_with(held, held.tasks.ERRBACKS["raise"])
    for form in ("inline", "published", "bound"):
        held.worker.wait_for_log(rf"{form}_raise\[\S+\] fails: 'the key' is held")
    held.worker.wait_for_log(r"the errback inline_raise of tests\S+fail\[\S+\] was not run: 'the key' is held")
    held.setup.open_gate("release")
    held.history.wait_for("end")
    poll(lambda: rows_left(pg_dsn) == NOTHING)
    assert ran(held.history) == []


@pytest.mark.smoke
def test_an_errback_called_in_the_main_process_does_not_keep_that_waiting(held):
    """A task whose process died is failed by the worker's main process, which has messages and heartbeats to see to."""
    inline = held.tasks.ERRBACKS["retry"][0]
    held.tasks.die.apply_async(link_error=[inline.s()])
    held.worker.wait_for_log(r"the errback inline_retry of tests\S+die\[\S+\] was not run: 'the key' is held")
    held.setup.open_gate("release")
    held.history.wait_for("end")
    # Free again, it runs there.
    held.tasks.die.apply_async(link_error=[inline.s()])
    held.history.wait_for("end", count=2)
    assert ran(held.history) == ["inline"]


def test_an_errback_that_is_deduplicated_when_published_is_called_as_any_other(held):
    held.setup.open_gate("release")
    held.history.wait_for("end")
    held.tasks.fail.apply_async(link_error=[held.tasks.deduplicated.s()])
    held.history.wait_for("end", count=2)


def test_plain_errbacks_run_beside_whoever_holds_the_key(held):
    """The negative control."""
    fail_with(held, held.tasks.PLAIN)
    held.history.wait_for("end", count=3)
    held.setup.open_gate("release")
    held.history.wait_for("end", count=4)
    assert len(overlaps(held.history.events())) >= 3
