"""Locked bodies that retry, in every way that Celery has; and what the message of the next attempt carries."""

from celery.exceptions import Reject

from celery_syncguard import LockedTask
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record_task

app = make_app(__name__, result_extended=True)

LOCKED = {"base": LockedTask, "lock_key": "{key}", "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}


def _retry(self, key, times, **options):
    record_task("start", self, key=key)
    retries = self.request.retries
    record_task("end", self, key=key)
    if retries < times:
        raise self.retry(**options)
    return retries


@app.task(bind=True, max_retries=2, **LOCKED)
def retry(self, key, times, countdown):
    return _retry(self, key, times, countdown=countdown)


@app.task(bind=True, max_retries=2, default_retry_delay=0.2, **LOCKED)
def retry_by_default(self, key, times):
    return _retry(self, key, times)


@app.task(bind=True, max_retries=2, lock_wait=20, dedup_key="{name}", **LOCKED)
def retry_in_wait(self, key, name, times):
    return _retry(self, key, times, countdown=0)


AUTORETRY = {"autoretry_for": (ValueError,), "retry_backoff": True, "retry_jitter": True, "max_retries": 3}


@app.task(bind=True, retry_backoff_max=1, dedup_key="auto:{key}", **AUTORETRY, **LOCKED)
def autoretry(self, key, failures):
    record_task("start", self, key=key)
    record_task("end", self, key=key)
    if self.request.retries < failures:
        raise ValueError(key)
    return self.request.retries


def _retry_early(self, key, gate_name):
    """Publishes the next attempt long before it ends."""
    record_task("start", self, key=key)
    if self.request.retries:
        record_task("end", self, key=key)
        return self.request.retries
    retry = self.retry(countdown=0, throw=False)
    record_task("published", self, key=key)
    gate.wait_at(gate_name)
    record_task("end", self, key=key)
    raise retry


@app.task(bind=True, max_retries=1, **LOCKED)
def retry_early(self, key, gate_name):
    return _retry_early(self, key, gate_name)


@app.task(bind=True, max_retries=1)
def plain_retry_early(self, key, gate_name):
    return _retry_early(self, key, gate_name)


@app.task(bind=True, max_retries=1, acks_late=True, lock_min_hold=60, lock_on_held="skip", **LOCKED)
def come_again_under_min_hold(self, key, how):
    record_task("start", self, key=key)
    record_task("end", self, key=key)
    if gate.is_open(key):
        return key
    gate.open_gate(key)
    if how == "requeue":
        raise Reject(requeue=True)
    if how == "replace":
        raise self.replace(self.s(key, how))
    if how == "in silence":
        return self.retry(countdown=0, throw=False).when
    raise self.retry(countdown=0)


# What a message carries


def _describe(self):
    request = self.request
    return {
        "group": request.group,
        "group_index": request.group_index,
        "chord": request.chord and request.chord["task"],
        "chain": [step["task"] for step in request.chain or ()],
        "callbacks": [one["task"] for one in request.callbacks or ()],
        "errbacks": [one["task"] for one in request.errbacks or ()],
        "expires": request.expires,
        "timelimit": list(request.timelimit),
        "trace": (request.headers or {}).get("trace"),
        "priority": (request.delivery_info or {}).get("priority"),
        "routing_key": (request.delivery_info or {}).get("routing_key"),
        "retries": request.retries,
        "shadow": request.shadow,
        "reply_to": request.reply_to,
        "root_id": request.root_id,
        "ignore_result": request.ignore_result,
        "args": list(request.args),
        "kwargs": request.kwargs,
    }


@app.task(bind=True, max_retries=0, **LOCKED)
def describe(self, key):
    record_task("start", self, key=key)
    record_task("end", self, key=key)
    return {**_describe(self), "held": (self.request.headers or {})["syncguard"].get("held", 0)}


@app.task
def note(*args, **kwargs):
    return repr(args)


@app.task
def plain_sum(parts):
    return parts
