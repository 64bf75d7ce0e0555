"""A report per customer: however often it is asked for, one customer's is made one at a time, others' beside it."""

import os
import time

from celery import Celery

from celery_syncguard import LockedTask

app = Celery(
    "locked_report",
    broker=os.environ.get("BROKER_URL", "redis://localhost"),
    backend=os.environ.get("RESULT_BACKEND", "redis://localhost"),
)
app.conf.syncguard_dsn = os.environ.get("SYNCGUARD_DSN", "postgresql://localhost/postgres")


@app.task(base=LockedTask, bind=True, lock_key="report:{customer}", lock_retry_delay=(0.2, 1))
def report(self, customer, seconds=1.0):
    """Make a report. Returns when it began and ended, and under which fence."""
    began = time.time()
    time.sleep(seconds)  # the work
    self.lease.check()  # raises LeaseLost; costs no I/O, so call it before each step that matters
    return {"customer": customer, "began": began, "ended": time.time(), "fence": self.fence}
