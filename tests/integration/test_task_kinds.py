"""Every way to write a task: the lock covers its body, whatever is overridden around it.

Eager mode on the memory store: a worker calls a task in the same way.
"""

import threading

import pytest
from celery import Celery, Task
from celery.contrib.django.task import DjangoTask
from celery.exceptions import MaxRetriesExceededError
from pydantic import BaseModel

from celery_syncguard import SKIPPED, Fence, LockedTask, LockHeld, NoLease, Skipped, guard_for, signals
from celery_syncguard.tasks import app_state
from celery_syncguard.testing import hold_elsewhere


@pytest.fixture
def app():
    app = Celery("kinds", broker="memory://", set_as_current=False)
    # Without task_eager_propagates, which makes Celery raise Retry at the caller of a task that retries.
    app.conf.update(syncguard_dsn="memory://", task_always_eager=True)
    return app


@pytest.fixture
def guard(app):
    return app_state.guard_for(app)


@pytest.fixture
def seen(guard):
    """What bodies saw: the keys that were locked while they ran."""

    class Seen(list):
        def look(self):
            self.append(sorted(row.key for row in guard.locks()))

    return Seen()


def test_subclasses_inherit_options_and_change_some(app, guard, seen):
    class Base(LockedTask):
        abstract = True
        lock_key = "base:{n}"
        lock_ttl = 77
        lock_on_held = "skip"

    class Child(Base):
        abstract = True
        lock_ttl = 88

    @app.task(base=Base, bind=True, shared=False)
    def first(self, n):
        seen.look()
        return self.lease.ttl

    @app.task(base=Child, bind=True, shared=False, lock_key="child:{n}")
    def second(self, n):
        seen.look()
        return self.lease.ttl

    assert (first.delay(1).get(), second.delay(1).get()) == (77, 88)
    assert seen == [["base:1"], ["child:1"]]
    with hold_elsewhere(guard, "child:1"):
        assert second.delay(1).state == SKIPPED


def test_an_application_has_one_guard_which_its_tasks_use_too(app):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="shared", lock_on_held="skip")
    def f(self):
        return [row.key for row in guard_for(self.app).locks()], guard_for(app).try_acquire("shared")

    assert f.delay().get() == (["shared"], None)
    with guard_for(app).hold("shared"):
        assert f.delay().state == SKIPPED
    assert guard_for(app).counts["skip"] == 1


def test_a_body_knows_its_lease_and_a_plain_call_has_none(app, guard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="f")
    def f(self, look=True):
        return (self.fence, self.lease.key, self.lease.remaining > 20) if look else guard.locks()

    first, second = f.delay().get(), f.delay().get()
    assert isinstance(first[0], Fence)
    assert second[0] > first[0]
    assert first[1:] == ("f", True)
    assert f(look=False) == []
    with pytest.raises(NoLease, match=r"f\.apply\(\.\.\.\) with syncguard_dsn"):
        f()
    with pytest.raises(NoLease):
        f.fence


def test_a_task_without_a_lock_runs_without_one(app, guard):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key=None)
    def f(self):
        with pytest.raises(NoLease):
            self.lease
        return guard.locks()

    assert f.delay().get() == []


@pytest.mark.parametrize("typing", [True, False])
def test_typing_is_as_without_a_lock(app, seen, typing):
    @app.task(base=LockedTask, shared=False, lock_key="f", typing=typing)
    def f(n):
        seen.look()

    with pytest.raises(TypeError):
        f.delay(1, 2).get()
    assert seen == []
    f.delay(1)
    assert seen == [["f"]]


def test_pydantic_arguments_make_keys_and_reach_the_body_as_models(app, seen):
    class Order(BaseModel):
        customer: int

    @app.task(base=LockedTask, shared=False, pydantic=True, lock_key="order:{order[customer]}")
    def f(order: Order, n: int = 1) -> Order:
        seen.look()
        assert isinstance(order, Order)
        return order

    assert f.delay(Order(customer=7)).get() == {"customer": 7}
    assert f.delay({"customer": 7}).get() == {"customer": 7}
    assert f.delay(order={"customer": 7}, n=1).get() == {"customer": 7}
    assert seen == [["order:7"]] * 3


def test_autoretry_lies_around_the_lock(app, guard, seen):
    @app.task(
        base=LockedTask,
        bind=True,
        shared=False,
        lock_key="f",
        autoretry_for=(ValueError,),
        max_retries=2,
        retry_backoff=False,
        default_retry_delay=0,
    )
    def f(self, failures):
        seen.look()
        if self.request.retries < failures:
            raise ValueError(failures)
        return self.request.retries

    assert f.delay(2).get() == 2
    with pytest.raises(ValueError, match="3"):
        f.delay(3).get()
    assert seen == [["f"]] * 6
    assert guard.locks() == []


def test_retries_in_eager_mode_get_the_lock_and_end(app, guard, seen):
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="f", max_retries=1)
    def f(self, times):
        seen.look()
        if self.request.retries < times:
            raise self.retry(countdown=0)
        return self.request.retries

    assert f.delay(1).get() == 1
    with pytest.raises(MaxRetriesExceededError):
        f.delay(2).get()
    assert guard.locks() == []


def test_whatever_a_subclass_overrides_without_super_the_lock_covers_the_body(app, guard, seen):
    class Own(LockedTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            calls.append("__call__")
            return self.run(*args, **kwargs)

        def before_start(self, *args):
            calls.append("before_start")

        def on_success(self, *args):
            calls.append(("on_success", guard.locks()))

        def on_failure(self, *args, **kwargs):
            calls.append(("on_failure", guard.locks()))

        def after_return(self, *args):
            calls.append(("after_return", guard.locks()))

        def apply_async(self, *args, **kwargs):
            calls.append("apply_async")
            return super().apply_async(*args, **kwargs)

    @app.task(base=Own, shared=False, lock_key="f")
    def f(fails=False):
        seen.look()
        if fails:
            raise LookupError

    calls = []
    f.delay()
    with pytest.raises(LookupError):
        f.delay(True).get()
    assert seen == [["f"]] * 2
    assert calls == [
        "apply_async",
        "before_start",
        "__call__",
        # Released before any of these, so that what they start can have the lock.
        ("on_success", []),
        ("after_return", []),
        "apply_async",
        "before_start",
        "__call__",
        ("on_failure", []),
        ("after_return", []),
    ]


def test_a_body_may_call_the_body_that_it_overrides(app, seen):
    class Parent(LockedTask):
        name = "parent"
        lock_key = "f:{n}"

        def run(self, n):
            seen.look()
            return n

    class Child(Parent):
        name = "child"

        def run(self, n):
            return super().run(n) + 1

    assert app.register_task(Child()).delay(1).get() == 2
    assert seen == [["f:1"]]


def test_run_that_is_patched_from_outside_still_runs_under_the_lock(app, seen):
    """As monitoring tools do it, on the instance."""

    @app.task(base=LockedTask, shared=False, lock_key="f")
    def f():
        seen.look()

    spans = []
    original = f.run
    f.run = lambda *args, **kwargs: (spans.append("begin"), original(*args, **kwargs), spans.append("end"))[1]
    f.delay()
    assert seen == [["f"]]
    assert spans == ["begin", "end"]


def test_flasks_task_class_runs_bodies_in_its_context_and_under_the_lock(app, seen):
    """The class from Flask's documentation, as a base beside ours, in either order."""
    import flask

    web = flask.Flask("web")
    web.config["answer"] = 42

    class FlaskTask(Task):
        def __call__(self, *args, **kwargs):
            with web.app_context():
                return self.run(*args, **kwargs)

    for number, bases in enumerate([(FlaskTask, LockedTask), (LockedTask, FlaskTask)]):
        base = type("Both", bases, {"abstract": True})

        @app.task(base=base, bind=True, shared=False, name=f"f{number}", lock_key="f")
        def f(self):
            seen.look()
            assert self.fence
            return flask.current_app.config["answer"]

        assert f.delay().get() == 42
    assert seen == [["f"]] * 2


def test_an_application_whose_default_task_class_is_ours_locks_what_has_a_key(seen):
    class Own(LockedTask):
        abstract = True
        lock_key = None

    app = Celery("own", task_cls=Own, set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_always_eager=True, task_eager_propagates=True)
    guard = app_state.guard_for(app)

    @app.task(shared=False, lock_key="f")
    def f():
        return [row.key for row in guard.locks()]

    @app.task(shared=False)
    def g():
        return guard.locks()

    assert f.delay().get() == ["f"]
    assert g.delay().get() == []


def test_djangos_task_class_publishes_on_commit_and_locks(app, seen):

    import django

    django.setup()
    from django.db import transaction

    class Both(LockedTask, DjangoTask):
        abstract = True

    @app.task(base=Both, shared=False, lock_key="f:{n}")
    def f(n):
        seen.look()

    with transaction.atomic():
        f.delay_on_commit(1)
        f.apply_async_on_commit([2])
        assert seen == []
    assert seen == [["f:1"], ["f:2"]]


def test_an_eager_task_that_calls_itself_under_its_own_lock_is_told_so_at_once(app, guard):
    @app.task(base=LockedTask, bind=True, shared=False, name="inner", lock_key="{key}")
    def inner(self, key):
        return key

    @app.task(base=LockedTask, bind=True, shared=False, name="outer", lock_key="{key}")
    def outer(self, key, of_inner):
        return inner.delay(of_inner).get(disable_sync_subtasks=False)

    assert outer.delay("a", "b").get() == "b"
    with pytest.raises(LockHeld, match=r"would wait for itself: 'a' is held by outer\[") as caught:
        outer.apply(("a", "a"), task_id="the outer id").get()
    assert caught.value.task_id == "the outer id"
    assert guard.locks() == []


@pytest.mark.parametrize("on_held", ["retry", "skip", "raise"])
def test_eager_mode_locks_as_a_worker_does(app, guard, on_held):

    @app.task(base=LockedTask, shared=False, lock_key="f", lock_on_held=on_held, lock_retry_delay=(0.01, 0.02))
    def f():
        return "ran"

    told = []
    released = threading.Event()

    def on_lock_held(held, outcome, **_):
        told.append((held.holder, outcome))
        released.set()

    signals.lock_held.connect(on_lock_held)
    try:
        with hold_elsewhere(guard, "f", holder="the test"):
            if on_held == "raise":
                with pytest.raises(LockHeld, match="the test"):
                    f.delay().get()
            elif on_held == "skip":
                result = f.delay()
                assert result.state == SKIPPED
                assert isinstance(result.get(), Skipped)
                assert result.get().holder == "the test"
                assert not result.successful()
                assert not result.failed()
            else:
                results = []
                waiting = threading.Thread(target=lambda: results.append(f.delay().get()))
                waiting.start()
                assert released.wait(10)
                assert results == []
        if on_held == "retry":
            waiting.join(10)
            assert results == ["ran"]
    finally:
        signals.lock_held.disconnect(on_lock_held)
    assert set(told) == {("the test", on_held)}
    assert f.delay().get() == "ran"


def test_a_lock_leaves_nothing_on_the_task(app, guard):

    @app.task(base=LockedTask, bind=True, shared=False, lock_key="f:{n}", max_retries=1)
    def f(self, n):
        if n:
            raise self.retry(countdown=0)
        return vars(self).keys() | vars(type(self)).keys()

    before = f.delay(0).get()
    for n in (1, 2):
        with pytest.raises(MaxRetriesExceededError):
            f.delay(n).get()
    with hold_elsewhere(guard, "f:3"), pytest.raises(LockHeld):
        f.apply_async([3], lock_on_held="raise").get()
    assert f.delay(0).get() == before
    assert f.max_retries == 1
