"""The signals of this library as an application hears them in a real worker."""

import re

import pytest
from celery import states

from celery_syncguard import LeaseLost
from tests.fixtures import gate
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.signals_heard"


def heard(history, key):
    return [row.event for row in history.events(key=key)]


def test_a_lease_that_is_lost_in_a_worker_is_signalled_once_and_its_release_as_too_late(
    celery_setup, broker, pg_dsn, history, guard
):
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=1)
    result = setup.module.hold.delay("a", "never")
    poll(lambda: gate.is_open("in-a"), timeout=30)
    # As a takeover does: the row is not the holder's any more.
    assert guard.release("a", lock_id=guard.inspect("a").lock_id)
    with pytest.raises(LeaseLost):
        result.get(timeout=30)
    history.wait_for("lock_released", key="a")
    # It is for whoever noticed, beside the body, which is interrupted first.
    history.wait_for("lease_lost", key="a")
    assert heard(history, "a").count("lease_lost") == 1
    in_the_body = [event for event in heard(history, "a") if event != "lease_lost"]
    assert in_the_body == ["lock_acquired", "start", "interrupted", "lock_released"]
    assert heard(history, "a").index("lease_lost") > 1
    (acquired,), (lost,), (released,) = (
        history.events(name) for name in ("lock_acquired", "lease_lost", "lock_released")
    )
    assert (acquired.note, released.note) == (f"{MODULE}.hold lease", f"{MODULE}.hold lease released released=False")
    assert lost.note == f"SyncGuard in {acquired.pid} lease"
    assert {row.task_id for row in (acquired, lost, released)} == {result.id}
    assert len({row.fence for row in (acquired, lost, released)}) == 1


def test_a_held_lock_is_signalled_with_its_holder_and_what_becomes_of_the_task(
    celery_setup, broker, pg_dsn, history, guard
):
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=2)
    holder = setup.module.hold.delay("a", "go")
    poll(lambda: gate.is_open("in-a"), timeout=30)
    skipped = setup.module.skip.delay("a")
    poll(lambda: skipped.state == "SKIPPED", timeout=30)
    assert [row.note for row in history.events("lock_held")] == [
        f"{MODULE}.skip delay held outcome delay=None outcome=skip"
    ]
    assert [row.note for row in history.events("task_skipped")] == [f"{MODULE}.skip skipped"]
    assert heard(history, "a") == ["lock_acquired", "start", "lock_held", "task_skipped"]

    waiting = setup.module.hold.delay("a", "go")
    rows = history.wait_for("lock_held", count=4)[1:]
    for row in rows:
        # The signal names the holder and its fence, not whoever found the lock held.
        assert row.task_id == holder.id
        assert row.fence == guard.inspect("a").fence
        assert row.note.startswith(f"{MODULE}.hold delay held outcome delay=")
        assert row.note.endswith(" outcome=retry")
        assert 0.1 <= float(re.search(r"delay=([\d.]+)", row.note)[1]) <= 0.3
    setup.open_gate("go")
    for result in (holder, waiting):
        result.get(timeout=30)
    released = history.wait_for("lock_released", count=2)
    assert {row.note for row in released} == {f"{MODULE}.hold lease released released=True"}
    assert [row.task_id for row in released] == [holder.id, waiting.id]
    assert history.count("lease_lost") == 0
    assert holder.state == waiting.state == states.SUCCESS
