"""Whatever a subclass or an instrument overrides, the lock still covers the body."""

import functools

import pytest
from celery import Celery, Task

from celery_syncguard import LockedTask
from celery_syncguard.tasks import app_state


@pytest.fixture
def app():
    app = Celery("overrides", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", broker_url="memory://", result_backend="cache+memory://")
    yield app
    app_state.state_of(app).close()


def keys(app):
    return [row.key for row in app_state.guard_for(app).locks()]


def locked_while_running(app, task, *args):
    """The body returns the keys that are held while it runs; nothing is held afterwards."""
    assert task.apply(args).get() == ["a"]
    assert keys(app) == []


class Silent(LockedTask):
    """Overrides everything that Celery lets one override, and calls super() nowhere."""

    abstract = True
    lock_key = "a"

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)

    def before_start(self, task_id, args, kwargs):
        pass

    def on_success(self, retval, task_id, args, kwargs):
        pass

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        pass

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        pass

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        pass


def test_hooks_without_super_change_nothing(app):
    @app.task(shared=False, base=Silent)
    def body():
        return keys(app)

    @app.task(shared=False, base=Silent)
    def failing():
        assert keys(app) == ["a"]
        raise ValueError

    locked_while_running(app, body)
    assert failing.apply().state == "FAILURE"
    assert keys(app) == []


def test_the_same_hooks_are_no_lock_by_themselves(app):
    """The negative control: on Celery's own class the same body runs unlocked."""

    @app.task(shared=False, base=type("Plain", (Task,), {"abstract": True, "__call__": Silent.__call__}))
    def body():
        return keys(app)

    assert body.apply().get() == []


def test_a_hook_that_raises_leaves_no_lock(app):
    class Raising(LockedTask):
        abstract = True
        lock_key = "a"

        def on_success(self, *args):
            assert keys(app) == [], "released before the hooks"
            raise ValueError("in on_success")

    @app.task(shared=False, base=Raising)
    def body():
        return keys(app)

    with pytest.raises(ValueError, match="in on_success"):
        body.apply()
    assert keys(app) == []


def test_flask_s_application_context_covers_and_is_covered(app):
    import flask

    web = flask.Flask("overrides")

    class FlaskTask(LockedTask):
        """As Flask's documentation has it."""

        abstract = True
        lock_key = "a"

        def __call__(self, *args, **kwargs):
            with web.app_context():
                return self.run(*args, **kwargs)

    @app.task(shared=False, base=FlaskTask)
    def body():
        assert flask.current_app.name == "overrides"
        return keys(app)

    locked_while_running(app, body)


def test_django_s_task_class_covers_the_body_too():
    from celery.contrib.django.task import DjangoTask

    class LockedDjangoTask(LockedTask, DjangoTask):
        abstract = True
        lock_key = "a"

    class DjangoLockedTask(DjangoTask, LockedTask):
        abstract = True
        lock_key = "a"

    for base in (LockedDjangoTask, DjangoLockedTask):
        app = Celery("overrides", set_as_current=False, task_cls=base)
        app.conf.update(syncguard_dsn="memory://", broker_url="memory://", result_backend="cache+memory://")

        @app.task(shared=False)
        def body(app=app):
            return keys(app)

        locked_while_running(app, body)
        assert hasattr(body, "delay_on_commit")
        app_state.state_of(app).close()


def test_an_instrument_that_wraps_run_lies_around_the_lock_or_inside_and_loses_nothing(app):
    """Sentry wraps `task.run` and `__call__` when the tracer is built; OpenTelemetry listens to signals."""

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="a")
    def body(self):
        return keys(app)

    calls = []
    original = body.run

    @functools.wraps(original)
    def traced(*args, **kwargs):
        calls.append("run")
        return original(*args, **kwargs)

    body.run = traced
    locked_while_running(app, body)
    assert calls == ["run"]

    cls = body.__class__
    call = cls.__call__

    def traced_call(self, *args, **kwargs):
        calls.append("call")
        return call(self, *args, **kwargs)

    cls.__call__ = traced_call
    locked_while_running(app, body)
    assert calls[1:] == ["call", "run"]


def test_a_class_whose_run_calls_super_locks_once(app):
    class Base(LockedTask):
        abstract = True
        lock_key = "a"

        def run(self):
            return keys(app)

    class Derived(Base):
        name = "derived"

        def run(self):
            assert keys(app) == ["a"]
            return super().run()

    task = app.register_task(Derived())
    locked_while_running(app, task)


def test_autoretry_sees_the_lock_released(app):
    seen = []

    @app.task(
        shared=False,
        base=LockedTask,
        bind=True,
        lock_key="a",
        autoretry_for=(ValueError,),
        retry_kwargs={"countdown": 0},
    )
    def body(self):
        seen.append(keys(app))
        if self.request.retries < 2:
            raise ValueError
        return keys(app)

    locked_while_running(app, body)
    assert seen == [["a"]] * 3
