"""Which calls of a task are Celery's, and run under its lock, and which are the user's own.

Celery puts a request on the task's stack for each, and what its tracer calls looks like a plain call where `__call__` is
overridden or the task is applied inside itself; in a worker other than elsewhere, and in 5.4 other than in 5.7.
"""

import pytest
from celery import Celery
from celery.app.trace import reset_worker_optimizations, setup_worker_optimizations

from celery_syncguard import LockedTask, guard_for
from celery_syncguard.errors import LockHeld
from celery_syncguard.testing import hold_elsewhere


class Calls(LockedTask):
    abstract = True

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


@pytest.fixture
def app():
    app = Celery("calls", broker="memory://", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_always_eager=True)
    return app


@pytest.fixture(params=["here", "worker"])
def _optimized(request, app):
    """As a worker patches Celery when it starts, and as it is elsewhere."""
    if request.param == "worker":
        setup_worker_optimizations(app)
    yield
    if request.param == "worker":
        reset_worker_optimizations(app)


pytestmark = pytest.mark.usefixtures("_optimized")
BASES = pytest.mark.parametrize("base", [LockedTask, Calls])


def keys(app):
    return sorted(row.key for row in guard_for(app).locks())


@BASES
def test_an_eager_call_is_locked(app, base):
    @app.task(base=base, lock_key="k:{n}", shared=False, bind=True)
    def f(self, n):
        return keys(app), self.lease.key

    assert f.delay(1).get() == (["k:1"], "k:1")
    assert f.apply((2,)).get() == (["k:2"], "k:2")
    assert keys(app) == []


@BASES
def test_an_eager_call_inside_another_of_the_same_task_is_locked(app, base):
    @app.task(base=base, lock_key="k:{n}", shared=False, bind=True)
    def f(self, n):
        return [*keys(app), *(f.apply((n - 1,)).get() if n else ())]

    assert f.apply((2,)).get() == ["k:2", "k:1", "k:2", "k:0", "k:1", "k:2"]


@BASES
def test_an_eager_call_with_the_key_of_its_caller_is_refused(app, base):
    @app.task(base=base, lock_key="k", shared=False, bind=True)
    def f(self, inner):
        return inner or f.apply((True,)).get()

    with pytest.raises(LockHeld, match="would wait for itself"):
        f.apply((False,)).get()


@BASES
def test_a_plain_call_takes_no_lock_wherever_it_is_made(app, base):
    seen = []

    @app.task(base=base, lock_key="k", shared=False)
    def f(deep=False):
        seen.append(keys(app))
        return f() if deep else None

    @app.task(base=base, lock_key="outer", shared=False)
    def g():
        f()

    f(deep=True)
    g.delay()
    assert seen == [[], [], ["outer"]]


@BASES
def test_an_errback_called_as_a_function_is_locked(app, base):
    seen = []

    @app.task(shared=False)
    def fail():
        raise LookupError

    @app.task(base=base, lock_key="mourn", shared=False, lock_on_held="skip")
    def mourn(request, exc, traceback):
        seen.append((keys(app), repr(exc)))

    fail.apply_async(link_error=mourn.s())
    assert seen == [(["mourn"], "LookupError()")]
    with hold_elsewhere(guard_for(app), "mourn"):
        fail.apply_async(link_error=mourn.s())
    assert len(seen) == 1
