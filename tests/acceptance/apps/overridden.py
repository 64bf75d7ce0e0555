"""One body in every shape that lies around the lock, on our class (`locked_…`) and on Celery's own (`plain_…`)."""

import functools

import celery.app.trace
import flask
from celery import Task
from celery.contrib.django.task import DjangoTask

from celery_syncguard import LockedTask
from tests.fixtures import gate
from tests.fixtures.app import make_app, misdeed
from tests.fixtures.history import record, record_task

app = make_app(__name__)
web = flask.Flask("overrides")


def body(self, key, ends="well"):
    record_task("start", self, key=key)
    gate.wait_at(key)
    record_task("end", self, key=key)
    if ends == "badly":
        raise ValueError(key)
    if ends == "again" and not self.request.retries:
        raise self.retry(countdown=0)
    return key


class Silent:
    """Overrides everything that Celery lets one override, and calls super() nowhere."""

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)

    def before_start(self, task_id, args, kwargs):
        record("before_start", task_id=task_id)

    def on_success(self, retval, task_id, args, kwargs):
        record("on_success", task_id=task_id)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        record("on_failure", task_id=task_id)

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        record("on_retry", task_id=task_id)

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        record("after_return", task_id=task_id)


class FlaskTask(Task):
    """As Flask's documentation has it."""

    abstract = True

    def __call__(self, *args, **kwargs):
        with web.app_context():
            record("context", note=flask.current_app.name)
            return self.run(*args, **kwargs)


#: What a shape's class inherits from, when `Base` is our class or Celery's.
SHAPES = {
    "silent": lambda Base: (Silent, Base),
    "flask": lambda Base: (FlaskTask, Base),
    "django": lambda Base: (DjangoTask, Base),
    # Bases the other way round, which only a class that adds something to Celery's can have.
    "flask_after_ours": lambda Base: (Base, FlaskTask) if Base is LockedTask else (FlaskTask,),
    "django_after_ours": lambda Base: (Base, DjangoTask) if Base is LockedTask else (DjangoTask,),
    # Patched in the worker, see below.
    "patched_run": lambda Base: (Base,),
    "patched_call": lambda Base: (Silent, Base),
    "patched_base_call": lambda Base: (Base,),
}
LOCKED = {"lock_key": "{key}", "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}

for shape, bases in SHAPES.items():
    for kind, Base, options in (("locked", LockedTask, LOCKED), ("plain", Task, {})):
        abstract = type(f"{kind}_{shape}", bases(Base), {"abstract": True})
        task = app.task(base=abstract, bind=True, name=f"{__name__}.{kind}_{shape}", max_retries=1, **options)(body)
        globals()[f"{kind}_{shape}"] = task


def traced(original, what):
    """As tracing tools do it: something of their own around whatever they found."""

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        record("traced", note=what)
        return original(*args, **kwargs)

    return wrapper


def build_tracer(name, task, *args, **kwargs):
    """As Sentry's: patches each task once, when the worker makes its tracer, `__call__` if the class has one of its own and
    else `run` of the instance."""
    if not getattr(task, "_is_patched", False):
        if "patched_call" in name:
            type(task).__call__ = traced(type(task).__call__, name)
        elif "patched_run" in name:
            task.run = traced(task.run, name)
        elif "patched_base_call" in name:
            # As instruments that wrap the class from outside: the class had none of its own before.
            type(task).__call__ = traced(Task.__call__, name)
        task._is_patched = True
    return original_build_tracer(name, task, *args, **kwargs)


original_build_tracer = celery.app.trace.build_tracer
if misdeed("SYNCGUARD_TEST_PATCHED"):
    # In the worker alone, before Celery's other modules have taken the name from there, as `sentry_sdk.init()` does.
    celery.app.trace.build_tracer = build_tracer
