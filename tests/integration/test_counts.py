"""G5: nothing is blocked in silence. Every outcome is counted, so that a metric can show it."""

import pytest
from celery import Celery

from celery_syncguard import LockedTask, LockHeld
from celery_syncguard.tasks import app_state
from celery_syncguard.testing import hold_elsewhere


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
