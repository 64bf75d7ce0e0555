"""The tasks of the demo. Their bodies write what they do into the table `demo_history`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import psycopg
from celery import Celery

from celery_syncguard import LeaseLost, LockedTask

SCHEMA = """
CREATE TABLE demo_history (
  id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
  event TEXT NOT NULL,
  key TEXT NOT NULL,
  task_id TEXT NOT NULL,
  fence BIGINT,
  worker TEXT NOT NULL
);
CREATE TABLE demo_accounts (name TEXT PRIMARY KEY, owner TEXT NOT NULL, fence BIGINT NOT NULL);
CREATE TABLE demo_effects (name TEXT PRIMARY KEY, count INTEGER NOT NULL);
"""

#: Seconds. Short, so that the demo need not wait long for a dead worker's lease.
TTL = 3.0

app = Celery("demo")
app.conf.update(
    broker_url=os.environ.get("SYNCGUARD_DEMO_REDIS", "memory://"),
    result_backend=os.environ.get("SYNCGUARD_DEMO_REDIS", "cache+memory://"),
    task_default_queue="any",
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    syncguard_lock_ttl=TTL,
    syncguard_leader_ttl=TTL,
    beat_max_loop_interval=0.5,
    beat_schedule={"tick": {"task": "demo.tick", "schedule": 0.5}},
)


@cache
def connection() -> psycopg.Connection[Any]:
    return psycopg.connect(os.environ["SYNCGUARD_DSN"], autocommit=True)


def record(event: str, key: str, task: Any) -> None:
    try:
        fence = int(task.fence)
    except (AttributeError, RuntimeError):  # a plain task, or one without a lock
        fence = None
    connection().execute(
        "INSERT INTO demo_history (event, key, task_id, fence, worker) VALUES (%s, %s, %s, %s, %s)",
        (event, key, task.request.id, fence, worker_of(task)),
    )


def worker_of(task: Any) -> str:
    return str(task.request.hostname).split("@")[0]


def pause(seconds: float) -> None:
    """Stands for work."""
    threading.Event().wait(seconds)


def locked(**options: Any) -> Callable[[Callable[..., None]], Any]:
    return app.task(base=LockedTask, bind=True, lock_retry_delay=(0.1, 0.4), **options)  # type: ignore[no-any-return]


@locked(name="demo.charge", lock_key="{key}")
def charge(self: Any, key: str, seconds: float) -> None:
    record("start", key, self)
    pause(seconds)
    record("end", key, self)


@locked(name="demo.pay_out", lock_key="account:{name}", lock_on_lost="continue")
def pay_out(self: Any, name: str, seconds: float) -> None:
    """Writes late: after a pause in which its worker may have been frozen. It trusts only the database."""
    key = f"account:{name}"
    record("start", key, self)
    pause(seconds)
    # What any other system can do with a fence: refuse a lower one.
    written = connection().execute(
        "UPDATE demo_accounts SET owner = %s, fence = %s WHERE name = %s AND fence <= %s",
        (worker_of(self), int(self.fence), name, int(self.fence)),
    )
    record("written" if written.rowcount else "refused", key, self)
    # What PostgreSQL can do besides: commit only while the lease is held.
    try:
        with self.lease.transaction(connection()):
            connection().execute("UPDATE demo_accounts SET owner = owner || '!' WHERE name = %s", (name,))
        record("committed", key, self)
    except LeaseLost:
        record("lost", key, self)


@locked(name="demo.import_file", dedup_key="import:{path}")
def import_file(self: Any, path: str) -> None:
    record("start", path, self)
    pause(0.5)
    record("end", path, self)


@locked(name="demo.book", run_once=True, acks_late=True)
def book(self: Any, name: str) -> None:
    conn = connection()
    with self.lease.transaction(conn):
        conn.execute(
            "INSERT INTO demo_effects VALUES (%s, 1) ON CONFLICT (name) DO UPDATE SET count = demo_effects.count + 1",
            (name,),
        )
        self.lease.complete(conn)
    record("booked", name, self)


@app.task(bind=True, name="demo.tick", ignore_result=True)  # type: ignore[untyped-decorator]
def tick(self: Any) -> None:
    record("tick", "beat", self)
