"""Bodies that call other bodies right where they are."""

import time

from celery_syncguard import LockedTask, LockHeld
from celery_syncguard.tasks import app_state
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record_task

app = make_app(__name__)

LOCKED = {"base": LockedTask, "bind": True, "lock_key": "{key}", "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}


@app.task(lock_wait=60, **LOCKED)
def inner(self, key, gate_name=None):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return f"inner {key}"


@app.task(**LOCKED)
def outer(self, key, inner_key):
    """How an eager call of `inner` ends: its state, its result or its error, and the seconds that it took."""
    record_task("start", self, key=key)
    started = time.monotonic()
    result = inner.apply((inner_key,))
    took = time.monotonic() - started
    record_task("end", self, key=key)
    return result.state, str(result.result), getattr(result.result, "task_id", None), took


@app.task(**LOCKED)
def outer_that_waits(self, key):
    """Without our check: waiting for a lock which this very body holds ends with the wait, and with nothing else."""
    started = time.monotonic()
    try:
        with app_state.guard_for(app).hold(key, wait=2):
            raise AssertionError("two holders of one lock")
    except LockHeld:
        return time.monotonic() - started


@app.task(**LOCKED)
def outer_that_calls(self, key):
    """Calls `inner` as a plain function, which takes no lock and so waits for none."""
    return inner(key), int(self.fence)


# Without a database at all


@app.task(base=LockedTask, bind=True, lock_key="{key}", lock_retry_delay=(0.05, 0.1))
def timed(self, key, seconds):
    """When the body began and ended, on the clock that all processes of a machine share; and its fence."""
    began = time.monotonic()
    time.sleep(seconds)
    return began, time.monotonic(), int(self.fence)


@app.task
def plain_timed(key, seconds):
    began = time.monotonic()
    time.sleep(seconds)
    return began, time.monotonic(), 0
