"""Steps of workflows. What a locked step does when its lock is held is said where the workflow is made."""

from celery import Task
from celery.exceptions import Ignore

from celery_syncguard import LockedTask, Skipped
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record_task

app = make_app(__name__)

LOCKED = {"base": LockedTask, "bind": True, "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}


@app.task(lock_key="{key}", **LOCKED)
def hold(self, key):
    record_task("holds", self, key=key)
    gate.wait_at("release")


@app.task(lock_key="{key}", **LOCKED)
def step(self, *before, key, tag):
    record_task("step", self, key=key, note=tag)
    return tag


@app.task(lock_key="{key}", **LOCKED)
def replaced_by(self, *before, key, signature):
    raise self.replace(self.app.signature(signature))


@app.task(bind=True)
def plain(self, *before, tag):
    record_task("plain", self, note=tag)
    return tag


@app.task(bind=True)
def collect(self, parts, tag):
    record_task("collect", self, note=tag)
    return [part.as_dict() if isinstance(part, Skipped) else part for part in parts]


@app.task
def told(before):
    return before


@app.task(bind=True)
def linked(self, *arguments, tag):
    record_task("linked", self, note=tag)


@app.task(base=Task)
def ignored():
    raise Ignore("as a skipped task would be without a state of its own")


@app.task(lock_key="{rows.first}", dedup_key="{rows.first}", **LOCKED)
def picky(self, rows):
    return "never"
