"""Run-once bodies that write to a ledger and whose processes die at random points; and the same without run-once."""

import os
import random
import signal
import threading

import psycopg

from celery_syncguard import LockedTask, signals
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import DSN_VARIABLE, record, record_task

app = make_app(__name__)
DEATHS = float(os.environ.get("DEATHS", "0"))
#: Those that stay between commit and acknowledgement until the test has killed their worker.
LINGERING = {int(n) for n in os.environ.get("LINGERING", "").split()}

_connections = {}


def connection():
    """The user's own, one per process and thread."""
    identity = (os.getpid(), threading.get_ident())
    known = _connections.get(identity)
    # An interrupt that came in the middle of a statement leaves it under way.
    if known is None or known.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        _connections[identity] = psycopg.connect(os.environ[DSN_VARIABLE], autocommit=True, application_name="user")
    return _connections[identity]


def maybe_die(self, where, share=DEATHS):
    if random.random() < share:
        record_task("death", self, key=where)
        os.kill(os.getpid(), signal.SIGKILL)


@signals.run_answered.connect
def _answered(sender, done, **_):
    record("answered", task_id=done.task_id, key=done.run_key)


OPTIONS = {"bind": True, "acks_late": True, "reject_on_worker_lost": True}
LOCK = {"base": LockedTask, "lock_ttl": 1, "lock_retry_delay": (0.05, 0.5), "lock_max_deaths": 1000}


def _increment(self, n):
    conn = connection()
    maybe_die(self, "before")
    with conn.transaction():
        if isinstance(self, LockedTask):
            self.lease.complete(conn)
        conn.execute("insert into effects (n) values (%s)", (n,))
        conn.execute("update counter set value = value + 1")
        maybe_die(self, "inside")
    # The most dangerous moment: done, and nobody has been told.
    if n in LINGERING:
        record_task("lingers", self, key=str(n))
        gate.wait_at(f"killed-{n}")
    else:
        maybe_die(self, "after", 2 * DEATHS)
    return n


@app.task(run_once=True, **OPTIONS, **LOCK)
def increment(self, n):
    return _increment(self, n)


@app.task(**OPTIONS)
def increment_plainly(self, n):
    return _increment(self, n)


@app.task(bind=True, base=LockedTask, run_once=True, acks_late=True, lock_retry_delay=(0.1, 0.3))
def work(self, key, gate_name=None):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return f"{key} by {self.request.id}"


class SlowToStore:
    """A result that the first to store it, and nobody else, stores only when the gate opens."""

    def __json__(self):
        record("storing")
        gate.wait_at("store")
        return "the result"


@app.task(bind=True, base=LockedTask, run_once=True)
def slow_to_store(self):
    return SlowToStore()


@app.task(bind=True, acks_late=True)
def plain(self, key, gate_name=None):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)


@app.task(bind=True, base=LockedTask, run_once="import:{day}", run_once_ttl=3600, lock_retry_delay=(0.1, 0.3))
def daily(self, day, fails=False):
    record_task("start", self, key=day)
    if fails:
        raise LookupError(day)
    return f"{day} by {self.request.id}"
