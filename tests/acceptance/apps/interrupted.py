"""Bodies that an interrupt has to reach: in one long sleep, and in one long call of C."""

import hashlib
import os
import time
from functools import partial

from celery_syncguard import LeaseLost
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.held import Held, start, try_to_write
from tests.fixtures.history import record_task

app = make_app(__name__, task_acks_late=False, worker_proc_alive_timeout=30)


@app.task(base=Held, bind=True)
def ask(self, key, gate_name):
    """Goes on where nothing interrupts it, and asks before it writes."""
    start(self, key)
    gate.wait_at(gate_name)
    try_to_write(self, key)
    self.lease.check()


@app.task(base=Held, bind=True)
def sleep_long(self, key, seconds):
    """One long sleep, which a signal has to break."""
    try:
        start(self, key)
        time.sleep(seconds)
    except LeaseLost:
        record_task("lost", self, key=key)
        raise
    record_task("end", self, key=key)


@app.task(base=Held, bind=True)
def compute(self, key, seconds):
    """One long C call, which nothing can break: the interrupt comes when it returns."""
    started = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000)
    rounds = int(200_000 * seconds / (time.monotonic() - started))
    # One after the other without a bytecode in between, at which the interrupt could come: so the end is always known.
    call = partial(hashlib.pbkdf2_hmac, "sha256", b"x", b"y", rounds)
    returned = []
    try:
        start(self, key)
        returned.extend(map(partial.__call__, [call, partial(time.monotonic)]))
        time.sleep(0.001)  # under gevent the first moment at which the body gives way
        for _ in range(100):
            time.sleep(0.01)
    except LeaseLost:
        record_task("lost", self, key=key, note=f"{time.monotonic() - returned[1]:.3f}")
        try_to_write(self, key)
        raise
    record_task("end", self, key=key)


@app.task(base=Held, bind=True, lock_ttl=30)
def quick(self, key):
    return int(self.fence)


@app.task
def plain():
    """Not one of ours."""
    return os.getpid()
