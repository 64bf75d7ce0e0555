"""An application that writes down every signal of this library that it hears, and a body that loses its lease."""

import os

from celery_syncguard import LeaseLost, LockedTask, SyncGuard, signals
from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record, record_task

app = make_app(__name__)

NAMES = ["lock_acquired", "lock_held", "lock_released", "lease_lost", "task_skipped"]


def _recorder(name):
    def hear(sender, **facts):
        assert facts.pop("signal") is getattr(signals, name)
        # The sender is the guard itself where a lease is lost: whoever notices may know no task.
        who = f"SyncGuard in {os.getpid()}" if isinstance(sender, SyncGuard) else sender.name
        lease = facts.get("lease") or facts.get("held")
        key = lease.key if lease is not None else facts["skipped"].key
        task_id = getattr(lease, "task_id", None)
        values = {fact: facts[fact] for fact in ("outcome", "delay", "released") if fact in facts}
        record(
            name,
            key=key,
            task_id=task_id,
            fence=getattr(lease, "fence", None),
            note=" ".join([who, *sorted(facts), *(f"{fact}={value}" for fact, value in sorted(values.items()))]),
        )

    return hear


for one in NAMES:
    getattr(signals, one).connect(_recorder(one), weak=False)


OPTIONS = {"base": LockedTask, "bind": True, "lock_key": "{key}", "lock_ttl": 2, "lock_retry_delay": (0.1, 0.3)}


@app.task(**OPTIONS)
def hold(self, key, gate_name):
    record_task("start", self, key=key)
    gate.open_gate(f"in-{key}")
    try:
        gate.wait_at(gate_name)
    except LeaseLost:
        record_task("interrupted", self, key=key)
        raise
    record_task("end", self, key=key)


@app.task(lock_on_held="skip", **OPTIONS)
def skip(self, key):
    record_task("start", self, key=key)
