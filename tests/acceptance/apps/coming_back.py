"""Bodies that many messages wait for, in the default way: they come back."""

import time

from celery.signals import task_received

from celery_syncguard import LockedTask
from tests.fixtures.app import make_app
from tests.fixtures.history import record, record_task

app = make_app(__name__)

LOCKED = {"base": LockedTask, "bind": True, "lock_key": "{key}", "lock_ttl": 60}


def count_of(headers):
    """How often the message came back, as it says itself."""
    return (headers or {})["syncguard"].get("held", 0)


@app.task(lock_retry_delay=(0.1, 0.3), **LOCKED)
def counted(self, key):
    record_task("start", self, key=key, note=str(count_of(self.request.headers)))
    return count_of(self.request.headers)


@app.task(**LOCKED)
def queued(self, key):
    """When the body began and ended, on the clock that all processes of a machine share, and how often it came back."""
    began = time.monotonic()
    return began, time.monotonic(), count_of(self.request.headers)


@app.task(max_retries=1, lock_retry_delay=(0.1, 0.3), **LOCKED)
def retried(self, key, times):
    """What is on the task object, to show that no run leaves anything there."""
    record_task("start", self, key=key)
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return sorted(vars(self)), sorted(vars(type(self))), self.max_retries


@task_received.connect
def record_delivery(request, **_):
    """In the main process, as the message came from the broker."""
    if request.name.endswith(".counted"):
        count = count_of(request.request_dict)
        record("delivered", task_id=request.id, attempt=request.request_dict["retries"], note=str(count))
