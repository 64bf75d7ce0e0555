"""What a task puts around its body may end it before our code has its turn: the claim ends all the same.

Published and run eagerly, on both stores.
"""

import pytest
from celery.exceptions import Ignore, Reject

from celery_syncguard import LockedTask
from celery_syncguard.tasks import app_state

CLAIM = "the work"


@pytest.fixture
def app(eager_app):
    return eager_app


@pytest.fixture
def is_free(app):
    """Whether a duplicate would get in; if so, it is in by then."""
    return lambda: app_state.guard_for(app).store.claim(CLAIM, task_id="a duplicate", ttl=600).ours


class Fails(LockedTask):
    """Fails before its body; `where` says in which place."""

    abstract = True
    dedup_key = CLAIM
    lock_key = "k"
    where = "before_start"
    failure: BaseException | None = LookupError()

    def before_start(self, task_id, args, kwargs):
        self.fail("before_start")

    def __call__(self, *args, **kwargs):
        self.fail("__call__")
        return super().__call__(*args, **kwargs)

    def fail(self, where):
        if where == self.where and self.failure is not None:
            raise self.failure


def make(app, **options):
    @app.task(base=Fails, shared=False, **options)
    def f(n=1):
        return "ran"

    return f


@pytest.mark.parametrize("where", ["before_start", "__call__"])
@pytest.mark.parametrize("failure", [LookupError(), Ignore(), Reject(requeue=False)], ids=["error", "ignore", "reject"])
@pytest.mark.parametrize("until", ["done", "start"])
def test_what_ends_before_its_body_ends_its_claim(app, is_free, where, failure, until):
    make(app, where=where, failure=failure, dedup_until=until).delay()
    assert is_free()


def test_a_claim_that_lasts_to_its_ttl_stays(app, is_free):
    make(app).apply_async(dedup_until="ttl")
    assert not is_free()


def test_what_goes_back_to_the_queue_keeps_its_claim(app, is_free):
    make(app, failure=Reject(requeue=True)).delay()
    assert not is_free()


def test_what_is_retried_before_its_body_keeps_its_claim_until_the_last_attempt(app, is_free):
    class Retries(Fails):
        abstract = True
        free_between = ()

        def fail(self, where):
            if where == "before_start":
                self.retry(countdown=0, max_retries=1)

        def on_retry(self, exc, task_id, args, kwargs, einfo):
            self.free_between += (self.is_free(),)

    @app.task(base=Retries, shared=False)
    def f():
        """Does not run."""

    f.is_free = is_free
    f.delay()
    assert f.free_between == (False,)
    assert is_free()


def test_what_is_answered_without_its_body_ends_its_claim(app, is_free):
    class Knows(Fails):
        abstract = True
        failure = None

        def __call__(self, *args, **kwargs):
            return "known"

    @app.task(base=Knows, shared=False)
    def f():
        """Does not run."""

    assert f.delay().result == "known"
    assert is_free()


@pytest.mark.parametrize("unreadable", [{"key": 7}, {"v": 2}, {"options": 5}, {"held": "x"}], ids=str)
def test_a_message_whose_header_cannot_be_read_ends_its_claim(app, is_free, unreadable):
    """Sent by somebody who gave a claim and something that is wrong, or by a newer version."""
    f = make(app, failure=None, lock_key="{n}")
    assert app_state.guard_for(app).store.claim(CLAIM, task_id="t", ttl=600).ours
    header = {"claim": CLAIM, "claimed": True, **unreadable}
    result = super(LockedTask, f).apply((), task_id="t", headers={"syncguard": header})
    assert result.state == "FAILURE"
    assert is_free()
