"""G5: nothing is blocked in silence. Every outcome is counted, so that a metric can show it."""

import re
from pathlib import Path

import pytest
from celery import Celery

import celery_syncguard
from celery_syncguard import LockedTask, LockHeld, TooManyDeaths
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire
from celery_syncguard.tasks import app_state
from celery_syncguard.testing import FakeClock, hold_elsewhere


@pytest.fixture
def app():
    app = Celery("counts", broker="memory://", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_always_eager=True)
    return app


def test_held_skipped_failed_answered_duplicate_and_lost_are_counted(app):
    @app.task(base=LockedTask, lock_key="k", lock_on_held="skip", shared=False)
    def skipping():
        pass

    @app.task(base=LockedTask, lock_key="k", lock_on_held="raise", shared=False)
    def raising():
        pass

    @app.task(base=LockedTask, run_once="r", dedup_key="d", dedup_until="ttl", shared=False)
    def once():
        pass

    guard = app_state.guard_for(app)
    skipping.apply()
    assert not guard.counts
    with hold_elsewhere(guard, "k"):
        skipping.apply()
        with pytest.raises(LockHeld):
            raising.apply().get()
    assert guard.counts == {"held": 2, "skip": 1, "raise": 1}
    once.delay()
    once.apply()
    assert once.delay().duplicate
    lease = guard.try_acquire("k")
    lease.lose("for the test")
    assert guard.counts == {"held": 2, "skip": 1, "raise": 1, "answered": 1, "duplicate": 1, "lost": 1}


def acquire_for(guard, key, **facts):
    """As the process of another delivery does it, which never releases."""
    return guard.store.acquire(Acquire(key=key, lock_id=new_lock_id(), **facts))


def test_a_copy_of_an_attempt_that_has_ended_is_counted_as_dropped(app):
    @app.task(base=LockedTask, run_once="r", shared=False)
    def failing():
        raise ValueError

    guard = app_state.guard_for(app)
    failing.apply(task_id="t")
    assert not guard.counts
    failing.apply(task_id="t")
    assert guard.counts == {"dropped": 1}


def test_a_copy_of_an_attempt_that_a_later_one_follows_is_counted_as_dropped(app):
    @app.task(base=LockedTask, lock_key="k", shared=False)
    def body():
        pass

    guard = app_state.guard_for(app)
    acquire_for(guard, "k", ttl=30.0, task_id="t", attempt=1)
    body.apply(task_id="t")
    assert guard.counts == {"dropped": 1}


def test_a_task_that_is_not_started_any_more_is_counted_as_dead(app):
    @app.task(base=LockedTask, lock_key="k", lock_max_deaths=1, shared=False)
    def body():
        pass

    guard = app_state.guard_for(app)
    with FakeClock() as time:
        acquire_for(guard, "k", ttl=30.0, task_id="t", attempt=0)
        time.advance(31)
        with pytest.raises(TooManyDeaths):
            body.apply(task_id="t").get()
    assert guard.counts == {"dead": 1}


@pytest.mark.parametrize("reaction", ["run", "raise"])
def test_a_database_that_does_not_answer_is_counted_as_unavailable(app, reaction):
    app.conf.update(syncguard_dsn="postgresql://127.0.0.1:1/x", syncguard_timeout=0.1)

    @app.task(base=LockedTask, lock_key="k", lock_on_unavailable=reaction, shared=False)
    def body():
        pass

    guard = app_state.guard_for(app)
    body.apply()
    assert guard.counts == {"unavailable": 1}
    guard.close()


def test_an_eager_call_that_would_wait_for_itself_is_counted_as_held(app):
    @app.task(base=LockedTask, lock_key="k", shared=False)
    def inner():
        pass

    @app.task(base=LockedTask, lock_key="k", shared=False)
    def outer():
        return inner.apply().result

    assert isinstance(outer.apply().get(), LockHeld)
    assert app_state.guard_for(app).counts == {"held": 1, "raise": 1}


def test_the_document_lists_each_count_and_no_other():
    package = Path(celery_syncguard.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    listed = (package.parent / "docs" / "operations.md").read_text().split("\n### Counts\n")[1].split("\n## ")[0]
    counted = set(re.findall(r'counts\["(\w+)"\]', code))
    assert set(re.findall(r"^\| `(\w+)` \|", listed, flags=re.MULTILINE)) == counted | {"held"}
