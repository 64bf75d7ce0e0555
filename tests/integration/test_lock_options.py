"""What single options of a task do, seen from outside. Eagerly, on both stores.

Not here: `lock_key` (`test_task_keys`), what happens when a lock is held, lost or cannot be asked for (`tests/acceptance`).
"""

import time

import pytest
from celery.exceptions import Reject, Retry

from celery_syncguard import ImproperlyConfigured, LockedTask, TooManyDeaths
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.store import Acquire, Buried, Grant
from celery_syncguard.tasks import app_state
from celery_syncguard.tasks.options import DEFAULTS
from tests.fixtures.polling import poll


@pytest.fixture
def app(eager_app):
    return eager_app


@pytest.fixture
def guard(app):
    return app_state.guard_for(app)


# lock_min_hold


def test_a_task_that_ends_sooner_leaves_its_key_taken_until_min_hold_is_over(app, guard):

    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k", lock_min_hold=1.5, lock_on_held="skip")
    def f(self):
        return time.monotonic()

    began = f.apply().get()
    row = guard.inspect("k")
    assert 0 < row.remaining <= 1.5
    assert f.apply().state == "SKIPPED"
    again = poll(lambda: result.get() if (result := f.apply()).state == "SUCCESS" else None)
    # The key is counted by the database's clock, from an acquire just before the body's first line.
    assert 1.3 < again - began < 6
    # Without the option the key is free at once: the control.
    poll(lambda: guard.inspect("k") is None)
    f.apply(lock_min_hold=0)
    assert guard.inspect("k") is None


def test_a_task_that_lasts_longer_than_min_hold_frees_its_key_when_it_ends(app, guard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k", lock_min_hold=0.2)
    def f(self):
        poll(lambda: guard.inspect("k").since > 0.25)

    f.apply()
    assert guard.inspect("k") is None


def test_min_hold_is_not_prolonged_by_a_renewal_and_may_be_longer_than_the_ttl(app, guard):
    @app.task(base=LockedTask, shared=False, lock_key="k", lock_ttl=0.5, lock_min_hold=20)
    def f():
        """Ends at once."""

    f.apply()
    assert 15 < guard.inspect("k").remaining <= 20


@pytest.mark.parametrize("how", ["retry", "autoretry", "requeue", "exit"])
def test_a_task_that_comes_again_is_not_kept_away_by_its_own_min_hold(app, guard, how):
    """Only its last attempt holds on to the key."""
    attempts = []

    @app.task(
        base=LockedTask,
        bind=True,
        shared=False,
        lock_key="k",
        lock_min_hold=60,
        lock_on_held="skip",
        autoretry_for=(OSError,),
        max_retries=1,
    )
    def f(self):
        attempts.append(self.request.retries)
        if attempts != [0]:
            return
        if how == "retry":
            # Not `self.retry`: eagerly that runs the next attempt inside of this one.
            raise Retry
        if how == "requeue":
            raise Reject(requeue=True)
        raise SystemExit if how == "exit" else OSError

    if how == "exit":
        with pytest.raises(SystemExit):
            f.apply()
    else:
        f.apply()
    if how != "autoretry":
        assert guard.inspect("k") is None
        assert f.apply().state == "SUCCESS"
    assert len(attempts) == 2
    assert 50 < guard.inspect("k").remaining <= 60
    assert f.apply().state == "SKIPPED"


def test_a_retry_with_another_key_leaves_the_first_one_taken_for_its_min_hold(app, guard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="{key}", lock_min_hold=60, lock_on_held="skip")
    def f(self, key):
        if key == "a":
            raise self.retry(("b",), countdown=0)

    f.apply(("a",))
    assert [50 < guard.inspect(key).remaining <= 60 for key in ("a", "b")] == [True, True]


# lock_ttl


def test_the_setting_is_the_ttl_of_whoever_names_none(app):
    app.conf.syncguard_lock_ttl = 7

    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k")
    def by_the_setting(self):
        (row,) = app_state.guard_for(app).locks()
        return self.lease.ttl, row.remaining

    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k", lock_ttl=9)
    def by_itself(self):
        return self.lease.ttl

    ttl, remaining = by_the_setting.apply().get()
    assert ttl == 7
    assert 5 < remaining <= 7
    assert by_itself.apply().get() == 9
    assert by_the_setting.apply(lock_ttl=11).get()[0] == 11
    with app_state.guard_for(app).hold("k") as lease:
        assert lease.ttl == 7


def test_without_the_setting_a_lease_lasts_thirty_seconds(app, guard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k")
    def f(self):
        return self.lease.ttl

    assert f.apply().get() == 30
    with guard.hold("k") as lease:
        assert lease.ttl == 30


# lock_max_deaths


def die(guard, task_id, *, times):
    """What a child that is killed leaves behind, so many times."""
    for _ in range(times):
        request = Acquire(key="k", lock_id=new_lock_id(), ttl=60, process="p:1", task_id=task_id)
        assert isinstance(guard.store.acquire(request), Grant)
        assert guard.store.release_process("p:1") == Buried(1)


def an_hour_goes_by(guard):
    if isinstance(guard.store, MemoryStore):
        for deaths in guard.store._deaths.values():
            deaths.last -= 3600
    else:
        guard.store.run(lambda conn: conn.execute("update syncguard_deaths set last_at_ms = last_at_ms - 3600000"))


def test_a_good_attempt_ends_the_row_of_a_keys_deaths_however_old_they_are(app, guard):
    @app.task(base=LockedTask, shared=False, lock_key="k")
    def f():
        return "ran"

    for task_id in ("one", "two", "three"):
        die(guard, task_id, times=3)
    an_hour_goes_by(guard)
    assert f.apply(task_id="good").get() == "ran"
    die(guard, "another", times=1)
    assert f.apply(task_id="new").get() == "ran", "it was the tenth death, though not in a row"


def test_a_task_runs_after_four_deaths_and_fails_after_five_unless_told_otherwise(app, guard):
    @app.task(base=LockedTask, shared=False, lock_key="k")
    def f():
        return "ran"

    assert DEFAULTS.lock_max_deaths == 5
    die(guard, "four", times=4)
    assert f.apply(task_id="four").get() == "ran"
    die(guard, "five", times=5)
    error = f.apply(task_id="five").result
    assert isinstance(error, TooManyDeaths)
    assert (error.task_id, error.key, error.deaths) == ("five", "k", 5)
    assert f.apply(task_id="five", lock_max_deaths=6).get() == "ran"
    # The key itself is none the worse.
    assert f.apply(task_id="another").get() == "ran"


def test_work_that_is_published_anew_does_not_kill_processes_for_ever(app, guard):
    """An hour after the last death one is tried, and only if that ends well, the next."""

    @app.task(base=LockedTask, shared=False, lock_key="k")
    def f():
        return "ran"

    for number in range(10):
        die(guard, f"id {number}", times=1)
    error = f.apply(task_id="new").result
    assert isinstance(error, TooManyDeaths)
    assert "the last 10 processes that held 'k' for a task died" in str(error)
    an_hour_goes_by(guard)
    die(guard, "the hour's only one", times=1)
    assert isinstance(f.apply(task_id="new").result, TooManyDeaths)
    an_hour_goes_by(guard)
    assert [f.apply(task_id=task_id).get() for task_id in ("new", "next")] == ["ran", "ran"]


@pytest.mark.parametrize("options", [{"lock_key": None}, {"dedup_key": "f"}], ids=str)
def test_a_bound_on_deaths_is_refused_for_a_call_without_a_lock(app, options):
    @app.task(base=LockedTask, shared=False, **options)
    def f():
        return "ran"

    with pytest.raises(ImproperlyConfigured, match="needs a task with a lock_key or run_once"):
        f.apply(lock_max_deaths=3)
    assert f.apply(lock_max_deaths=3, lock_key="k").get() == "ran"
    assert f.apply(lock_max_deaths=3, run_once=True).get() == "ran"
