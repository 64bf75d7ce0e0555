"""Our Celery signals: who sends them, with what, and in which order.

Eagerly and on both stores, where a body can look at what was heard so far. `tests/acceptance/test_signals.py` hears them in
workers.
"""

import threading

import pytest

from celery_syncguard import LockedTask, LockHeld, SyncGuard, signals
from celery_syncguard.core.store import Held
from celery_syncguard.skipped import Skipped
from celery_syncguard.tasks import app_state
from celery_syncguard.testing import hold_elsewhere
from tests.fixtures.polling import poll

NAMES = ["lock_acquired", "lock_held", "lock_released", "lease_lost", "task_skipped"]


@pytest.fixture
def app(eager_app):
    return eager_app


@pytest.fixture
def guard(app):
    return app_state.guard_for(app)


@pytest.fixture
def heard(app):
    """What was sent so far: (name, sender, arguments), and whatever a body puts in between."""
    rows = []
    receivers = {}
    for name in NAMES:

        def hear(sender, name=name, **facts):
            assert facts.pop("signal") is getattr(signals, name)
            rows.append((name, sender, facts))

        receivers[name] = hear
        getattr(signals, name).connect(hear, weak=False)
    yield rows
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


def test_a_run_is_between_the_two_signals_of_its_lease(app, heard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k")
    def f(self):
        heard.append(("body", self.name, {"lease": self.lease}))

    f.apply()
    assert [name for name, _, _ in heard] == ["lock_acquired", "body", "lock_released"]
    (_, acquirer, acquired), (_, _, seen), (_, releaser, released) = heard
    assert acquirer.name == releaser.name == f.name
    assert acquired == {"lease": seen["lease"]}
    assert released == {"lease": seen["lease"], "released": True}


def test_the_release_of_a_failed_run_is_signalled_too(app, heard):
    @app.task(base=LockedTask, shared=False, lock_key="k")
    def f():
        raise ValueError

    assert isinstance(f.apply().result, ValueError)
    assert [name for name, _, _ in heard] == ["lock_acquired", "lock_released"]
    assert heard[-1][2]["released"] is True


def test_a_release_that_came_too_late_is_signalled_as_such(app, guard, heard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k", lock_on_lost="continue")
    def f(self):
        # As a takeover does, and nobody has noticed yet.
        assert guard.release("k", lock_id=self.lease.lock_id)

    f.apply()
    assert [name for name, _, _ in heard] == ["lock_acquired", "lock_released"]
    assert heard[-1][2]["released"] is False


def test_a_lost_lease_is_signalled_once_by_its_guard(app, guard, heard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k", lock_on_lost="continue")
    def f(self):
        assert guard.release("k", lock_id=self.lease.lock_id)
        # Several notice at the same time, and the renewer perhaps too.
        noticing = [threading.Thread(target=self.lease.renew) for _ in range(4)]
        for thread in noticing:
            thread.start()
        for thread in noticing:
            thread.join()
        assert self.lease.lost

    f.apply()
    assert [name for name, _, _ in heard] == ["lock_acquired", "lease_lost", "lock_released"]
    (_, _, acquired), (_, sender, lost), (_, _, released) = heard
    assert sender is guard
    assert isinstance(sender, SyncGuard)
    assert lost == acquired
    assert released == {**acquired, "released": False}


def test_a_lease_that_no_task_holds_is_signalled_when_it_is_lost_and_only_then(app, guard, heard):
    with guard.hold("k", ttl=5) as lease:
        assert heard == []
        assert guard.release("k", lock_id=lease.lock_id)
        assert not lease.renew()
    assert heard == [("lease_lost", guard, {"lease": lease})]


def test_a_skipped_task_is_signalled_as_held_and_then_as_skipped(app, guard, heard):
    @app.task(base=LockedTask, shared=False, lock_key="k", lock_on_held="skip")
    def f():
        raise AssertionError("it ran")

    with hold_elsewhere(guard, "k", holder="another worker", task_id="t") as grant:
        result = f.apply()
    assert [name for name, _, _ in heard] == ["lock_held", "task_skipped"]
    (_, holding, about_held), (_, skipping, about_skipped) = heard
    assert holding.name == skipping.name == f.name
    held = about_held.pop("held")
    assert about_held == {"outcome": "skip", "delay": None}
    assert isinstance(held, Held)
    assert (held.key, held.lock_id, held.fence) == ("k", grant.lock_id, grant.fence)
    assert (held.holder, held.task_id) == ("another worker", "t")
    assert about_skipped == {"skipped": result.get()}
    assert isinstance(about_skipped["skipped"], Skipped)


def test_a_task_that_fails_for_a_held_lock_is_signalled_as_held(app, guard, heard):
    @app.task(base=LockedTask, shared=False, lock_key="k", lock_on_held="raise")
    def f():
        raise AssertionError("it ran")

    with hold_elsewhere(guard, "k") as grant:
        assert isinstance(f.apply().result, LockHeld)
    ((name, sender, facts),) = heard
    assert (name, sender.name) == ("lock_held", f.name)
    assert facts.pop("held").fence == grant.fence
    assert facts == {"outcome": "raise", "delay": None}


def test_each_look_of_a_task_that_comes_back_is_signalled_with_its_delay(app, guard, heard):
    @app.task(base=LockedTask, shared=False, lock_key="k", lock_retry_delay=(0.02, 0.1))
    def f():
        heard.append(("body", None, {}))

    with hold_elsewhere(guard, "k") as grant:
        thread = threading.Thread(target=f.apply)
        thread.start()
        poll(lambda: len(heard) >= 3, timeout=20)
    thread.join(20)
    looks, rest = heard[:-3], heard[-3:]
    assert [name for name, _, _ in rest] == ["lock_acquired", "body", "lock_released"]
    assert len(looks) >= 3
    for name, sender, facts in looks:
        assert (name, sender.name) == ("lock_held", f.name)
        assert facts.pop("held").lock_id == grant.lock_id
        assert facts.pop("outcome") == "retry"
        assert 0.02 <= facts.pop("delay") <= 0.1
        assert facts == {}


def test_a_copy_of_a_running_task_is_signalled_as_a_copy_whatever_its_option_says(app, guard, heard):
    @app.task(base=LockedTask, shared=False, lock_key="k", lock_on_held="raise", lock_retry_delay=(0.02, 0.1))
    def f():
        """Runs when the other one is gone."""

    with hold_elsewhere(guard, "k", task_id="the same"):
        thread = threading.Thread(target=lambda: f.apply(task_id="the same"))
        thread.start()
        poll(lambda: heard, timeout=20)
    thread.join(20)
    name, _, facts = heard[0]
    assert (name, facts["outcome"]) == ("lock_held", "copy")
    assert 0.02 <= facts["delay"] <= 0.1
