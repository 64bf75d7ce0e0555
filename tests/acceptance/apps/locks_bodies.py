"""Locked bodies that wait, retry, die and overrun, each with a plain twin for the negative controls."""

import ctypes
import os
import resource
import signal
import time

import psycopg
from celery import Task
from celery.exceptions import Reject

from celery_syncguard import LockedTask
from celery_syncguard.tasks.undertaker import undertaker
from tests.fixtures import gate
from tests.fixtures.app import make_app, misdeed
from tests.fixtures.history import DSN_VARIABLE, record, record_task

app = make_app(__name__, result_extended=True)

if misdeed("WITHOUT_UNDERTAKER"):
    # For the negative control: nobody sees the dead off.
    undertaker.watch = lambda pid: None

LOCKED = {"base": LockedTask, "lock_key": "{key}", "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}


def _work(self, key, gate_name):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return key


@app.task(bind=True, **LOCKED)
def work(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True, **LOCKED)
def work_late(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True)
def plain_work(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True, run_once=True, **LOCKED)
def work_once(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, **{**LOCKED, "lock_ttl": 3})
def work_briefly_leased(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, acks_late=True, **{**LOCKED, "lock_ttl": 6})
def work_late_briefly_leased(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, **LOCKED)
def fail(self, key, gate_name=None):
    _work(self, key, gate_name)
    raise LookupError(key)


session = None


@app.task(bind=True)
def fail_with_a_session_lock(self, key):
    """What we do not build on: a lock that is the connection's, which nobody closes."""
    global session  # noqa: PLW0603
    session = psycopg.connect(os.environ[DSN_VARIABLE], autocommit=True)
    session.execute("select pg_advisory_lock(32)")
    raise LookupError(key)


class LockedWithHooks(LockedTask):
    """Records every hook of the task that runs in whichever process."""

    abstract = True

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        record("after_return", task_id=task_id)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        record("on_failure", task_id=task_id)


@app.task(bind=True, **{**LOCKED, "base": LockedWithHooks})
def work_with_hooks(self, key, gate_name=None):
    return _work(self, key, gate_name)


# Retries


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


# Deaths


def _die(self, key, manner, gate_name=None):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    if manner == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif manner == "segfault":
        ctypes.string_at(0)
    elif manner == "exit":
        os._exit(3)
    elif manner == "cpu limit":
        # The kernel kills, as it does when memory is short.
        used = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used, used))
        while True:
            pass
    elif manner == "memory limit":
        _exhaust_memory()
    elif manner == "hard limit":
        # Not even a signal that can be handled ends this body.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGURG})
        gate.wait_at("never")


def _exhaust_memory():
    """Grow to the limit, and die as C code does that takes memory for granted: of a segmentation fault at an address
    that malloc refused. The kernel's own choice of a victim is a SIGKILL instead, as in `killed` and `cpu limit`."""
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 64 * 2**20,) * 2)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    while True:
        ctypes.memset(libc.malloc(ctypes.c_size_t(2**20)), 1, 2**20)


@app.task(bind=True, **LOCKED)
def die(self, key, manner, gate_name=None):
    _die(self, key, manner, gate_name)


DIES_AGAIN = {"bind": True, "acks_late": True, "reject_on_worker_lost": True}


@app.task(lock_max_deaths=2, autoretry_for=(Exception,), max_retries=None, **DIES_AGAIN, **LOCKED)
def die_again(self, key, manner):
    _die(self, key, manner)


@app.task(base=Task, **DIES_AGAIN)
def plain_die_again(self, key, manner):
    _die(self, key, manner)


# Limits


@app.task(bind=True, dedup_key="work:{key}", **LOCKED)
def work_deduplicated(self, key, gate_name=None):
    return _work(self, key, gate_name)


@app.task(bind=True, dedup_key="work:{key}", dedup_ttl=2, **LOCKED)
def work_deduplicated_briefly(self, key, gate_name=None):
    return _work(self, key, gate_name)
