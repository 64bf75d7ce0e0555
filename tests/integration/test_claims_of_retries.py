"""Whether a claim stays when an attempt fails: as long as Celery's autoretry goes on, and no longer.

Eagerly, on both stores: what autoretry decides is the same in a worker.
"""

import pytest
from celery import Celery
from celery.exceptions import Reject

from celery_syncguard import LockedTask, LockHeld, StoreUnavailable
from celery_syncguard.postgres.store import PostgresStore
from celery_syncguard.tasks import app_state
from celery_syncguard.testing import hold_elsewhere
from tests.fixtures.claimed import CLAIM, claimed_store, is_free


@pytest.fixture
def app(eager_app):
    return eager_app


@pytest.fixture
def store(app):
    return claimed_store(app)


class Watched(LockedTask):
    """Notes, where an attempt has failed and the next one is to come, whether its claim is free meanwhile."""

    abstract = True
    dedup_key = CLAIM
    lock_key = "k"
    autoretry_for = (Exception,)
    max_retries = 1
    default_retry_delay = 0

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        self.free_between.append(is_free(self.seen))


def watched(app, store, body, **options):
    task = app.task(base=Watched, bind=True, shared=False, **options)(body)
    task.seen, task.free_between = store, []
    return task


def test_what_fails_because_its_lock_is_held_keeps_its_claim_while_it_is_retried(app, store):
    def f(self):
        """Does not run."""

    task = watched(app, store, f, lock_on_held="raise")
    with hold_elsewhere(app_state.guard_for(app), "k"):
        assert isinstance(task.apply(task_id="t").result, LockHeld)
    assert task.free_between == [False]
    assert is_free(store)


def test_what_fails_because_the_database_is_away_keeps_its_claim_while_it_is_retried(pg_proxy, pg_dsn):
    app = Celery("away", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.update(syncguard_dsn=pg_proxy.dsn(pg_dsn), syncguard_timeout=0.5, task_always_eager=True)
    store = PostgresStore(pg_dsn)
    assert store.claim(CLAIM, task_id="t", ttl=600).ours

    def f(self):
        return "ran"

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        assert isinstance(exc, StoreUnavailable)
        pg_proxy.accept()
        # What was to be done in the background about the claim is done by then.
        app_state.guard_for(app).flush()
        self.free_between.append(is_free(store))

    task = watched(app, store, f, lock_on_unavailable="raise", on_retry=on_retry)
    pg_proxy.refuse()
    assert task.apply(task_id="t").result == "ran"
    assert task.free_between == [False]
    assert is_free(store)
    store.close()
    app_state.state_of(app).close()


@pytest.mark.parametrize("failure", [LookupError(), Reject(requeue=False)], ids=["error", "reject"])
@pytest.mark.parametrize("given", [{}, {"max_retries": None}, {"max_retries": 1}], ids=["none", "None", "1"])
def test_a_claim_stays_through_autoretry_and_ends_with_the_last_failure(app, store, failure, given):
    """`None` in `retry_kwargs` is the task's own limit, and Celery retries what rejects its message too."""
    attempts = []

    def f(self):
        attempts.append(self.request.retries)
        raise failure

    task = watched(app, store, f, retry_kwargs=given)
    task.apply(task_id="t")
    assert attempts == [0, 1]
    assert task.free_between == [False]
    assert is_free(store)
