"""Tasks that stamp, in workers whose clocks lie: CLOCK_OFFSET is added to the physical clock, in seconds.

Without OBSERVE the plugin is not installed, and the clocks only know their own machine.
"""

import json
import os
import socket

from celery import signals

from celery_syncguard.core import clock as local_clock
from celery_syncguard.hlc import HybridLogicalClock
from celery_syncguard.stamps import HEADER, MAX_DRIFT, install_stamps
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record

OFFSET_MS = int(float(os.environ.get("CLOCK_OFFSET", "0")) * 1000)
app = make_app(__name__, beat_schedule={"beat": {"task": "seen", "schedule": 0.2, "args": ["beat"]}})
clock = HybridLogicalClock(
    f"{socket.gethostname()}-{os.getpid()}",
    max_drift=MAX_DRIFT,
    physical=lambda: local_clock.wall_ms() + OFFSET_MS,
)
if os.environ.get("OBSERVE", "1") == "1":
    install_stamps(app, clock)


def note(task, label, **facts):
    stamp = clock.now()
    header = task.request.get(HEADER)
    text = json.dumps({"stamp": stamp, "header": header, "device_id": clock.device_id, **facts})
    record("stamped", key=label, task_id=task.request.id, attempt=task.request.retries, note=text)
    return stamp


@app.task(bind=True, shared=False, name="step")
def step(self, label):
    return note(self, label)


@app.task(bind=True, shared=False, name="occupy")
def occupy(self, label):
    note(self, label)
    gate.wait_at("free")


@app.task(bind=True, shared=False, name="seen")
def seen(self, label, *_):
    return note(self, label)


@app.task(bind=True, shared=False, name="again", max_retries=3)
def again(self, label):
    note(self, label)
    if self.request.retries < 3:
        raise self.retry(countdown=0)


@app.task(bind=True, shared=False, name="parent")
def parent(self, label):
    before = note(self, f"{label} before")
    seen.delay(label)
    return before


def replace_header(value):
    """In a test: let every message of this process carry `value` instead of its stamp; None: no header at all."""

    def replace(headers=None, **_):
        headers.pop(HEADER, None)
        if value is not None:
            headers[HEADER] = value

    signals.before_task_publish.connect(replace)
    return replace
