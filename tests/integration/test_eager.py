"""Eager and direct calls: they lock as a worker does, or not at all, and never wait for themselves."""

import subprocess
import sys
import threading

import pytest
from celery import Celery

from celery_syncguard import SKIPPED, LeaseLost, LockedTask, LockHeld, NoLease
from celery_syncguard.tasks import app_state
from tests.fixtures.cluster import ROOT


@pytest.fixture(params=["memory", "postgresql"])
def app(request):
    app = Celery("eager", set_as_current=False)
    dsn = "memory://" if request.param == "memory" else request.getfixturevalue("pg_dsn")
    app.conf.update(syncguard_dsn=dsn, task_always_eager=True, broker_url="memory://", result_backend="cache+memory://")
    yield app
    app_state.state_of(app).close()


def guard_of(app):
    return app_state.guard_for(app)


def test_eager_calls_lock_as_a_worker_does(app):
    @app.task(shared=False, base=LockedTask, bind=True, lock_key="{key}")
    def body(self, key):
        (row,) = guard_of(app).locks()
        assert (row.key, row.task_id, row.fence) == (key, self.request.id, int(self.fence))
        self.lease.check()
        return int(self.fence)

    fences = [body.apply(("a",)).get(), body.delay("a").get(), body.apply_async(kwargs={"key": "a"}).get()]
    assert fences == sorted(set(fences))
    assert guard_of(app).locks() == []


def test_an_eager_call_meets_a_held_lock_with_its_own_answer(app):
    @app.task(shared=False, base=LockedTask, lock_key="{key}", lock_on_held="raise")
    def raising(key):
        return "ran"

    @app.task(shared=False, base=LockedTask, lock_key="{key}", lock_on_held="skip")
    def skipping(key):
        return "ran"

    @app.task(shared=False, base=LockedTask, lock_key="{key}", lock_retry_delay=(0.01, 0.05))
    def retrying(key):
        return "ran"

    with guard_of(app).hold("a", holder="the test") as lease:
        error = raising.apply(("a",)).result
        assert isinstance(error, LockHeld)
        assert (error.holder, error.fence) == ("the test", lease.fence)
        skipped = skipping.apply(("a",))
        assert (skipped.state, skipped.get().holder) == (SKIPPED, "the test")
        waiting = []
        thread = threading.Thread(target=lambda: waiting.append(retrying.apply(("a",)).get()))
        thread.start()
        assert waiting == []
    thread.join(30)
    assert waiting == ["ran"]


def test_a_nested_call_with_the_same_key_fails_at_once_and_names_the_outer_task(app):
    @app.task(shared=False, base=LockedTask, name="inner", lock_key="{key}", lock_wait=60)
    def inner(key):
        raise AssertionError("ran inside the lock that it needs")

    @app.task(shared=False, base=LockedTask, bind=True, name="outer", lock_key="{key}")
    def outer(self, key):
        result = inner.apply((key,))
        return self.request.id, self.fence, result.result

    task_id, fence, error = outer.apply(("a",)).get()
    assert isinstance(error, LockHeld)
    assert (error.task_id, error.fence) == (task_id, fence)
    assert error.key == "a"
    assert f"outer[{task_id}]" in str(error)
    assert guard_of(app).locks() == []


def test_a_nested_call_that_gets_the_headers_of_the_outer_one_has_a_key_of_its_own(app):
    @app.task(shared=False, base=LockedTask, bind=True, lock_key="inner")
    def inner(self):
        return self.request.headers["x-mine"], self.lease.key

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="outer")
    def outer(self):
        headers = self.request.headers
        return inner.apply(headers=headers).result, inner.apply_async(headers=headers).result

    for result in (outer.apply(headers={"x-mine": 1}), outer.apply_async(headers={"x-mine": 1})):
        assert result.result == ((1, "inner"), (1, "inner"))


def test_a_nested_call_with_another_key_has_its_own_lease(app):
    @app.task(shared=False, base=LockedTask, bind=True, lock_key="inner")
    def inner(self):
        return int(self.fence), sorted(row.key for row in guard_of(app).locks())

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="outer")
    def outer(self):
        fence = int(self.fence)
        inner_fence, keys = inner.delay().get(disable_sync_subtasks=False)
        assert int(self.fence) == fence
        return fence, inner_fence, keys

    _, _, keys = outer.delay().get()
    assert keys == ["inner", "outer"]
    assert guard_of(app).locks() == []


def test_an_interrupt_during_a_nested_call_reaches_the_body_that_it_is_for(app):
    entered, lost = threading.Event(), []

    @app.task(shared=False, base=LockedTask, lock_key="inner")
    def inner():
        entered.set()
        for _ in range(3000):
            threading.Event().wait(0.01)

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="outer")
    def outer(self):
        lost.append(self.lease)
        inner.apply()
        raise AssertionError("went on without its lease")

    def lose():
        entered.wait(30)
        lost[0].lose("taken away by the test")

    thread = threading.Thread(target=lose)
    thread.start()
    result = outer.apply()
    thread.join()
    assert isinstance(result.result, LeaseLost)
    assert (result.result.key, result.result.reason) == ("outer", "taken away by the test")
    assert guard_of(app).locks() == []


@pytest.mark.parametrize("on_lost", ["interrupt", "continue"])
def test_a_lost_lease_shows_where_its_body_was(app, on_lost):
    """In the traceback that Celery stores: the line that was interrupted, or that asked."""

    def deep_inside(lease):
        loser = threading.Thread(target=lease.lose, args=("taken away by the test",))
        loser.start()
        loser.join()
        for _ in range(3000):
            threading.Event().wait(0.01)
            lease.check()

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="k", lock_on_lost=on_lost)
    def body(self):
        deep_inside(self.lease)

    result = body.apply()
    assert isinstance(result.result, LeaseLost)
    assert result.result.reason == "taken away by the test"
    assert "in body" in result.traceback
    assert "in deep_inside" in result.traceback


def test_a_direct_call_takes_no_lock_and_says_how_to_test_with_one(app):
    @app.task(shared=False, base=LockedTask, bind=True, lock_key="{key}")
    def body(self, key, *, ask=False):
        if ask:
            return self.fence
        return guard_of(app).locks()

    assert body("a") == []
    with guard_of(app).hold("a"):
        assert len(body("a")) == 1  # and does not wait for it
    with pytest.raises(NoLease, match=r"\.apply\(.*memory://"):
        body("a", ask=True)


def test_an_eager_retry_gets_its_lock_again(app):
    attempts = []

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="{key}", max_retries=3)
    def body(self, key):
        attempts.append(int(self.fence))
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return len(attempts)

    # Celery runs an eager retry inside the hooks of the attempt that asked for it.
    assert body.apply(("a",)).get() == 3
    assert attempts == sorted(set(attempts))
    assert guard_of(app).locks() == []


def test_memory_needs_no_postgresql_and_no_broker():
    """A team can see its locks work in eager mode, without a server and without the driver."""
    program = """
import sys
from celery import Celery
from celery_syncguard import LockedTask
app = Celery("tests")
app.conf.update(task_always_eager=True, syncguard_dsn="memory://")

@app.task(base=LockedTask, bind=True, lock_key="invoice:{number}")
def charge(self, number):
    return int(self.fence)

assert charge.delay(1).get() < charge.delay(1).get()
print("ok")
"""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PGHOST": "127.0.0.1", "PGPORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == "ok\n", done.stderr


@pytest.fixture
def replacing(app):
    """A task that puts another with its own key in its place; answers with the keys that are locked meanwhile."""

    def locked():
        return [row.key for row in guard_of(app).locks()]

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="{key}", lock_min_hold=60)
    def inner(self, key):
        return "inner", locked(), self.lease.key

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="{key}", lock_min_hold=60)
    def outer(self, key, of_inner):
        assert locked() == [key]
        return self.replace(inner.s(of_inner))

    return outer


@pytest.mark.parametrize("inner", ["a", "b"])
def test_what_a_body_puts_in_its_own_place_gets_the_same_lock(replacing, inner):
    """As in a worker, where it comes after the body. Control: `test_a_nested_call_with_the_same_key_fails_at_once`."""
    assert replacing.apply(("a", inner)).get() == ("inner", [inner], inner)


def test_what_took_a_body_s_place_keeps_its_own_min_hold(app, replacing):
    assert replacing.apply(("a", "b")).successful()
    assert [row.key for row in guard_of(app).locks()] == ["b"]


def test_a_stored_eager_result_says_what_a_worker_s_would(app):
    app.conf.update(task_store_eager_result=True)

    @app.task(shared=False, base=LockedTask, lock_key="a", lock_on_held="skip")
    def skipping():
        """Does not run."""

    @app.task(shared=False, base=LockedTask, run_once="work")
    def once(n):
        return n

    with guard_of(app).hold("a", holder="the test"):
        result = skipping.apply()
    stored = app.AsyncResult(result.id)
    assert (stored.state, stored.result.holder) == (SKIPPED, "the test")
    assert once.apply((1,)).get() == 1
    again = once.apply((2,))
    assert again.get() == 1
    assert app.AsyncResult(again.id).result == 1


def test_without_stored_eager_results_there_is_nothing_to_answer_with(app):
    """The negative control, and what the documents say."""

    @app.task(shared=False, base=LockedTask, run_once="work")
    def once(n):
        return n

    assert once.apply((1,)).get() == 1
    again = once.apply((2,))
    assert (again.state, again.get()) == ("SUCCESS", None)
