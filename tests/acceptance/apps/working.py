"""Locked bodies that wait for the test, and fail where they are told to; with a plain twin for the negative controls."""

import os

import psycopg

from celery_syncguard import LockedTask
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import DSN_VARIABLE, record, record_task

app = make_app(__name__)

LOCKED = {"base": LockedTask, "lock_key": "{key}", "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}


def _work(self, key, gate_name):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return key


@app.task(bind=True, **LOCKED)
def work(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True, **LOCKED)
def work_late(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True)
def plain_work(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True, run_once=True, **LOCKED)
def work_once(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, **{**LOCKED, "lock_ttl": 3})
def work_briefly_leased(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True, **{**LOCKED, "lock_ttl": 6})
def work_late_briefly_leased(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, **LOCKED)
def fail(self, key, gate_name=None):
    _work(self, key, gate_name)
    raise LookupError(key)


session = None


@app.task(bind=True)
def fail_with_a_session_lock(self, key):
    """What we do not build on: a lock that is the connection's, which nobody closes."""
    global session  # noqa: PLW0603
    session = psycopg.connect(os.environ[DSN_VARIABLE], autocommit=True)
    session.execute("select pg_advisory_lock(32)")
    raise LookupError(key)


class LockedWithHooks(LockedTask):
    """Records every hook of the task that runs in whichever process."""

    abstract = True

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        record("after_return", task_id=task_id)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        record("on_failure", task_id=task_id)


@app.task(bind=True, **{**LOCKED, "base": LockedWithHooks})
def work_with_hooks(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, lock_wait=20, dedup_key="{name}", **LOCKED)
def work_in_wait(self, key, name):
    return _work(self, key, None)


@app.task(bind=True, dedup_key="work:{key}", **LOCKED)
def work_deduplicated(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, dedup_key="work:{key}", dedup_ttl=2, **LOCKED)
def work_deduplicated_briefly(self, key, gate_name=None):
    return _work(self, key, gate_name)
