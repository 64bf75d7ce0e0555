"""Bodies that hold a lock while the test freezes, kills, shuts down or starves their worker; and what it says of itself."""

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from types import TracebackType

from celery.app.task import Context
from celery.signals import worker_process_init

from celery_syncguard import Lease, LeaseLost, SyncGuard
from celery_syncguard.postgres import pool
from tests.fixtures import gate
from tests.fixtures.app import make_app, misdeed
from tests.fixtures.held import Held, start, try_to_write
from tests.fixtures.history import record, record_task

app = make_app(__name__, task_acks_late=False, worker_proc_alive_timeout=30)

if max_idle := misdeed("SYNCGUARD_TEST_MAX_IDLE"):
    pool.MAX_IDLE = float(max_idle)

#: In the worker's main process, before it forks: a lease and an open connection, when the test asks for it.
parent = None
if "SYNCGUARD_TEST_PARENT_DSN" in os.environ and "worker" in os.environ.get("SYNCGUARD_TEST_NODE", ""):
    parent = SyncGuard(os.environ["SYNCGUARD_TEST_PARENT_DSN"])
    parent_lease = parent.try_acquire("parent", ttl=3)


if "SYNCGUARD_TEST_ORPHANS" in os.environ:

    @worker_process_init.connect(weak=False)
    def outlive_the_main_process(**_):
        """On Linux Celery has the kernel kill the children of a main process that dies (PR_SET_PDEATHSIG, 1). Elsewhere
        they live on, as they do after this."""
        ctypes.CDLL(None).prctl(1, 0)


@app.task(base=Held, bind=True)
def hold(self, key, gate_name):
    """Wait at the gate, in many short sleeps."""
    try:
        start(self, key)
        gate.wait_at(gate_name)
    except LeaseLost as exc:
        record_task("lost", self, key=key, note=exc.reason)
        try_to_write(self, key)
        raise
    record_task("end", self, key=key)
    return key


@app.task(base=Held, bind=True, lock_on_lost="continue")
def hold_on(self, key, gate_name):
    """The same without our protection: told nothing, and does not ask."""
    start(self, key)
    gate.wait_at(gate_name)
    record_task("end", self, key=key)


@app.task(bind=True)
def plain_hold(self, key, gate_name):
    """The same without any lock."""
    record_task("start", self, key=key)
    gate.wait_at(gate_name)
    record_task("end", self, key=key)


@app.task(base=Held, bind=True, lock_ttl=30)
def quick(self, key, fail=False, seconds=0.0):
    if seconds:
        record_task("start", self, key=key)
        time.sleep(seconds)
        record_task("end", self, key=key)
    if fail:
        raise ValueError(key)
    return int(self.fence)


@app.task(base=Held, bind=True, lock_ttl=30, lock_on_held="skip")
def skipping(self, key):
    return int(self.fence)


@app.task(base=Held, bind=True, lock_ttl=30, lock_on_held="raise")
def raising(self, key):
    return int(self.fence)


@app.task(base=Held, bind=True, dedup_key="{key}", run_once="once:{key}")
def deduplicated(self, key, gate_name):
    record_task("start", self, key=key)
    gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return key


@app.task(base=Held, bind=True, lock_on_unavailable="raise")
def raise_unavailable(self, key):
    record_task("start", self, key=key)


@app.task(base=Held, bind=True, lock_on_unavailable="run")
def run_unavailable(self, key):
    return "ran"


@app.task(base=Held, bind=True, lock_on_unavailable="retry")
def retry_unavailable(self, key):
    return "ran"


@app.task
def plain(gate_name=None):
    """Not one of ours."""
    if gate_name:
        record("start", key="plain")
        gate.wait_at(gate_name)
        record("end", key="plain")
    return os.getpid()


@app.task
def facts():
    """What this process has, after much work."""
    with open("/proc/self/status") as status:
        memory = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    gc.collect()
    kept = Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, (Lease, Context, TracebackType)))
    return {"pid": os.getpid(), "threads": threading.active_count(), "memory": memory, "kept": kept}
