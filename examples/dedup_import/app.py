"""Importing feeds: a burst of requests for one feed becomes one import, and everybody gets its result."""

import os
import time

from celery import Celery

from celery_syncguard import LockedTask

app = Celery(
    "dedup_import",
    broker=os.environ.get("BROKER_URL", "redis://localhost"),
    backend=os.environ.get("RESULT_BACKEND", "redis://localhost"),
)
app.conf.syncguard_dsn = os.environ.get("SYNCGUARD_DSN", "postgresql://localhost/postgres")


def fetch(feed, seconds):
    time.sleep(seconds)
    return f"{feed} as of {time.time():.2f}"


@app.task(base=LockedTask, dedup_key="import:{feed}")
def import_feed(feed, seconds=1.0):
    """Queued or running: a second request gets this one's result."""
    return fetch(feed, seconds)


@app.task(
    base=LockedTask,
    dedup_key="refresh:{feed}",
    dedup_until="start",
    lock_key="refresh:{feed}",
    lock_retry_delay=(0.1, 0.5),
)
def refresh(feed, seconds=1.0):
    """The feed may change while it is being read, so one more may wait: one running, one waiting, no third."""
    return fetch(feed, seconds)


@app.task(base=LockedTask, dedup_key="ping:{feed}", dedup_until="ttl", dedup_ttl=60)
def ping(feed):
    """At most once a minute, also after it has ended."""
    return f"pinged {feed}"
