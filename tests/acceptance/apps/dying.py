"""Locked bodies whose processes die, in every way that a process can; with a plain twin for the negative controls."""

import ctypes
import os
import resource
import signal
import time

from celery import Task

from celery_syncguard import LockedTask
from celery_syncguard.tasks.undertaker import undertaker
from tests.fixtures import gate
from tests.fixtures.app import make_app, misdeed
from tests.fixtures.history import record_task

app = make_app(__name__)

if misdeed("WITHOUT_UNDERTAKER"):
    # For the negative control: nobody sees the dead off.
    undertaker.watch = lambda pid: None

LOCKED = {"base": LockedTask, "lock_key": "{key}", "lock_ttl": 60, "lock_retry_delay": (0.1, 0.3)}


@app.task(bind=True, **LOCKED)
def work(self, key, gate_name=None):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return key


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
