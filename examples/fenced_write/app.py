"""Two ways to keep a writer off that woke up late: its transaction is fenced, or the table refuses its older fence."""

import os
import signal
import subprocess

import psycopg
from celery import Celery

from celery_syncguard import LeaseLost, LockedTask

DSN = os.environ.get("SYNCGUARD_DSN", "postgresql://localhost/postgres")

app = Celery(
    "fenced_write",
    broker=os.environ.get("BROKER_URL", "redis://localhost"),
    backend=os.environ.get("RESULT_BACKEND", "redis://localhost"),
)
app.conf.syncguard_dsn = DSN
app.conf.task_track_started = True

# In your application this is a migration. The trigger is for a table that lies in a *different* database than the locks,
# or that is written by code which does not have the lease; here it is the same one, to keep the example small.
TABLES = """
create table if not exists pages (id text primary key, body text not null);
create table if not exists guarded_pages (id text primary key, body text not null, fence bigint not null);
create or replace trigger refuse_stale_fence before insert or update on guarded_pages
  for each row execute function syncguard_refuse_stale_fence('fence');
"""

OPTIONS = {
    "base": LockedTask,
    "bind": True,
    "lock_key": "page:{page}",
    "lock_ttl": 1,
    "lock_retry_delay": (0.2, 0.5),
    # By default LeaseLost is raised inside the body as soon as the loss is noticed. Here the late writer is to try.
    "lock_on_lost": "continue",
}


def freeze(seconds):
    """Stop this process for a while, renewals and all, as a paused virtual machine would."""
    if seconds:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


@app.task(**OPTIONS)
def write(self, page, body, frozen=0):
    """Same database as the locks: the transaction commits only while the lease is held."""
    freeze(frozen)
    try:
        with psycopg.connect(DSN) as connection, self.lease.transaction(connection):
            connection.execute(
                "insert into pages values (%s, %s) on conflict (id) do update set body = excluded.body", (page, body)
            )
    except LeaseLost as exc:
        return f"refused: {exc}"
    return "written"


@app.task(**OPTIONS)
def write_in_transaction(self, page, body, frozen=0):
    """The same where somebody else opens the transaction, such as a framework: prove the lease in it, before all else."""
    freeze(frozen)
    try:
        with psycopg.connect(DSN) as connection:  # psycopg opens one, and commits it at the end of the block
            self.lease.fenced(connection)
            connection.execute(
                "insert into pages values (%s, %s) on conflict (id) do update set body = excluded.body", (page, body)
            )
    except LeaseLost as exc:
        return f"refused: {exc}"
    return "written"


@app.task(**OPTIONS)
def write_elsewhere(self, page, body, frozen=0):
    """Any other database: the fence is written along, and the table refuses a lower one."""
    freeze(frozen)
    try:
        with psycopg.connect(DSN) as connection:
            connection.execute(
                "insert into guarded_pages values (%s, %s, %s)"
                " on conflict (id) do update set body = excluded.body, fence = excluded.fence",
                (page, body, self.fence),
            )
    except psycopg.Error as exc:
        if exc.sqlstate != "SG003":
            raise
        return f"refused: {exc.diag.message_primary}"
    return "written"
