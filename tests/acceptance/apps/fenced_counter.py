"""Bodies that read a number, think, and write it back plus one: with exact fencing, and with the lock alone."""

import os
import threading

import psycopg

from celery_syncguard import LeaseLost, LockedTask
from tests.fixtures.app import make_app
from tests.fixtures.history import DSN_VARIABLE

app = make_app(__name__)

_connections = {}


def connection():
    if os.getpid() not in _connections:
        _connections[os.getpid()] = psycopg.connect(os.environ[DSN_VARIABLE], autocommit=True, application_name="user")
    return _connections[os.getpid()]


def _increment(conn, fence):
    (value,) = conn.execute("select value from counter").fetchone()
    threading.Event().wait(0.001)
    # As an object-relational mapper writes: what was read, changed.
    conn.execute("update counter set value = %s", (value + 1,))
    conn.execute("insert into steps (seen, fence, pid) values (%s, %s, %s)", (value, int(fence), os.getpid()))


# "continue": what keeps a late writer off is to be the fence alone, not the interrupt.
OPTIONS = {
    "bind": True,
    "base": LockedTask,
    "lock_key": "counter",
    "lock_ttl": 0.5,
    "lock_wait": 60,
    "lock_on_lost": "continue",
    "ignore_result": True,
}


@app.task(**OPTIONS)
def fenced(self, times):
    try:
        for _ in range(times):
            with self.lease.transaction(connection()):
                _increment(connection(), self.fence)
    except LeaseLost:
        connection().execute("insert into refused (fence) values (%s)", (int(self.fence),))


@app.task(**OPTIONS)
def only_locked(self, times):
    for _ in range(times):
        with connection().transaction():
            _increment(connection(), self.fence)
