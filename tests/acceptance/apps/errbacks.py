"""Tasks that fail, and errbacks in the three forms that Celery knows, which it runs in two ways."""

import os
import signal

from celery import Task

from celery_syncguard import LockedTask
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record, record_task

app = make_app(__name__)

LOCKED = {"base": LockedTask, "lock_key": "the key", "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}


@app.task(bind=True, **LOCKED)
def hold(self):
    record_task("start", self, key="the key")
    gate.wait_at("release")
    record_task("end", self, key="the key")


@app.task
def fail():
    raise LookupError("this task fails")


@app.task(acks_late=False)
def die():
    os.kill(os.getpid(), signal.SIGKILL)


def _record(form):
    record("start", key="the key", task_id=form)
    record("end", key="the key", task_id=form)


def make(on_held, base=LockedTask):
    options = {**LOCKED, "base": base, "lock_on_held": on_held} if base is LockedTask else {}

    @app.task(name=f"inline_{on_held}", **options)
    def inline(request, exc, traceback):
        """Called as a function, where the other task failed."""
        _record("inline")

    @app.task(name=f"published_{on_held}", **options)
    def published(task_id):
        """Published, as it takes one argument."""
        _record("published")

    @app.task(name=f"bound_{on_held}", bind=True, **options)
    def bound(self, task_id):
        """Published, as it is bound."""
        _record("bound")

    return [inline, published, bound]


ERRBACKS = {on_held: make(on_held) for on_held in ("retry", "skip", "raise")}
PLAIN = make("plain", base=Task)


@app.task(name="inline_deduplicated", dedup_key=True, **LOCKED)
def deduplicated(request, exc, traceback):
    _record("deduplicated")
