"""Deduplicated bodies that wait, fail, retry and die."""

import os
import signal
import sys

from celery_syncguard import LockedTask
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record_task

app = make_app(__name__)


def _work(self, key, gate_name=None):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return key


@app.task(bind=True, base=LockedTask, dedup_key="done:{key}")
def work(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, base=LockedTask, dedup_key="locked:{key}", lock_key="lock:{key}", lock_ttl=2)
def locked(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(
    bind=True,
    base=LockedTask,
    dedup_key="queued:{key}",
    dedup_until="start",
    lock_key="{key}",
    lock_retry_delay=(0.1, 0.3),
)
def one_running_one_waiting(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, base=LockedTask, dedup_key="window:{key}", dedup_until="ttl", dedup_ttl=4)
def throttled(self, key, fails=False):
    _work(self, key)
    if fails:
        raise LookupError(key)


@app.task(bind=True, base=LockedTask, dedup_key="mutated:{payload[x]}", lock_key="mutated")
def mutating(self, payload):
    payload.pop("x")
    return _work(self, "mutated")


@app.task(bind=True, base=LockedTask, dedup_key="retried:{key}", lock_key="{key}", max_retries=3)
def retrying(self, key, gate_name=None):
    _work(self, key, gate_name)
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return key


@app.task(
    bind=True,
    base=LockedTask,
    dedup_key="auto:{key}",
    lock_key="{key}",
    autoretry_for=(ValueError,),
    retry_backoff=0.1,
    retry_jitter=True,
    max_retries=3,
)
def autoretrying(self, key):
    _work(self, key)
    raise ValueError(key)


@app.task(bind=True, base=LockedTask, dedup_key="changed:{key}", max_retries=3)
def retrying_with_another_key(self, key):
    _work(self, key)
    if key == "first":
        raise self.retry(args=("second",), countdown=60)


@app.task(bind=True, base=LockedTask, dedup_key="queued:{key}", dedup_until="start", lock_key="{key}", max_retries=1)
def retrying_after_start(self, key, gate_name=None):
    _work(self, key, gate_name)
    if self.request.retries < 1:
        raise self.retry(countdown=0)


@app.task(bind=True, base=LockedTask, dedup_key="skipped:{key}", lock_key="lock:{key}", lock_on_held="skip")
def skipping(self, key):
    return _work(self, key)


class Refusing(LockedTask):
    abstract = True

    def before_start(self, task_id, args, kwargs):
        record_task("start", self)
        gate.wait_at("refuse")
        raise PermissionError(task_id)


@app.task(base=Refusing, dedup_key="refused:{key}")
def refused(key):
    """Never runs."""


@app.task(bind=True, base=LockedTask, dedup_key="deadly:{key}")
def dying(self, key):
    record_task("start", self, key=key)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(
    bind=True,
    base=LockedTask,
    dedup_key="retried:{key}",
    retry_on_worker_lost=True,
    default_retry_delay=60,
    max_retries=1,
)
def dying_and_retried(self, key):
    record_task("start", self, key=key)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True, base=LockedTask, dedup_key="exits:{key}", lock_key="exits:{key}")
def exiting(self, key):
    record_task("start", self, key=key)
    sys.exit(1)


@app.task(
    bind=True,
    base=LockedTask,
    dedup_key="exits-once:{key}",
    lock_key="exits-once:{key}",
    acks_late=True,
    reject_on_worker_lost=True,
)
def exiting_once(self, key):
    record_task("start", self, key=key)
    if gate.is_open("exited"):
        gate.wait_at("go")
        return key
    gate.open_gate("exited")
    sys.exit(1)


@app.task(bind=True, base=LockedTask, dedup_key="overrun:{key}", time_limit=1)
def overrunning(self, key):
    return _work(self, key, "never")


@app.task(bind=True)
def plain(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task
def gather(results):
    return results


@app.task(bind=True, base=LockedTask, dedup_key="hot:{key}", lock_key="hot:{key}", lock_retry_delay=(0.05, 0.2))
def hot(self, key):
    return _work(self, key)


@app.task(bind=True)
def publishing(self, key, queue):
    result = hot.apply_async((key,), queue=queue)
    record_task("published", self, key="duplicate" if result.duplicate else "new")
