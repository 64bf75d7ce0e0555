"""Periodic tasks of the beat tests. The schedule comes from the environment, so that two beats can differ."""

import json
import os
import signal
import socket
from datetime import timedelta
from types import SimpleNamespace

from celery import beat
from celery.schedules import crontab

import celery_syncguard.beat.scheduler
import celery_syncguard.core.process
from celery_syncguard import LockedTask
from celery_syncguard.core import clock
from celery_syncguard.core.lease import Lease
from tests.fixtures import gate
from tests.fixtures.app import make_app, misdeed
from tests.fixtures.history import record, record_task

app = make_app(__name__)

SCHEDULE_VARIABLE = "SYNCGUARD_TEST_SCHEDULE"


@app.task(bind=True)
def note(self, name):
    record(
        "run", key=name, task_id=self.request.id, fence=self.request.syncguard_term, note=self.request.syncguard_due_at
    )


@app.task(bind=True, base=LockedTask, lock_key=None, run_once=True)
def once(self, name):
    record_task("run", self, key=name)


@app.task(bind=True, base=LockedTask, lock_key=None, dedup_key="{name}", dedup_on_duplicate="raise")
def alone(self, name):
    """While one copy is queued, the next one is a duplicate."""


@app.task(bind=True, base=LockedTask, lock_key="{name}", lock_on_held="skip")
def locked(self, name):
    """Skipped while somebody else holds the lock of its name."""


def trap(name):
    """Evaluated by beat between the claim of a slot and its publishing. A gate makes it a trap for whoever comes first."""
    if gate.is_open("kill"):
        gate.close_gate("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    if gate.is_open("trap"):
        gate.close_gate("trap")
        gate.open_gate("trapped")
        gate.wait_at("free", timeout=120)
    return name


def entries(text):
    """{"fast": 1.0, "daily": "30 2", "chatty": {"every": 2, "syncguard_catch_up": "all"}} as a `beat_schedule`."""
    found = {}
    for name, given in json.loads(text).items():
        facts = given if isinstance(given, dict) else {"every": given}
        options = {key: value for key, value in facts.items() if key not in ("every", "task")}
        task = f"{__name__}.{facts['task']}" if "task" in facts else note.name
        every = facts["every"]
        if isinstance(every, str):
            minute, hour = every.split()
            schedule = crontab(minute=minute, hour=hour)
        else:
            schedule = timedelta(seconds=every)
        args = (beat.BeatLazyFunc(trap, name),)
        found[name] = {"task": task, "schedule": schedule, "args": args, "options": options}
    return found


app.conf.beat_schedule = entries(os.environ.get(SCHEDULE_VARIABLE, '{"fast": 1.0}'))


class OwnScheduler(beat.Scheduler):
    """Somebody's own: adds an entry, and has an opinion on when and how to send."""

    def setup_schedule(self):
        super().setup_schedule()
        self.update_from_dict({"own": {"task": note.name, "schedule": timedelta(seconds=1), "args": ("own",)}})

    def is_due(self, entry):
        return (False, 0.5) if entry.name == "fast" else super().is_due(entry)

    def apply_entry(self, entry, producer=None):
        print(f"own way of sending {entry.name}", flush=True)
        super().apply_entry(entry, producer=producer)


if shift := float(misdeed("SYNCGUARD_TEST_CLOCK_SHIFT") or 0):
    # A host whose clock is wrong: setting the machine's own would be wrong for everybody on it.
    right_now, right_wall = app.now, clock.wall_ms
    app.now = lambda: right_now() + timedelta(seconds=shift)
    clock.wall_ms = lambda: right_wall() + int(shift * 1000)

if misdeed("SYNCGUARD_TEST_SAME_IDENTITY"):
    # What a process sees of itself in a container: not every machine lets a test make one. Only where we ask who we are,
    # since signals go to pids.
    celery_syncguard.core.process.os = celery_syncguard.beat.scheduler.os = SimpleNamespace(getpid=lambda: 1)
    socket.gethostname = lambda: "web"

if misdeed("SYNCGUARD_TEST_WITHOUT_CHECK"):
    # For the negative control: nobody looks at the deadline before sending.
    Lease.check = lambda self: None
