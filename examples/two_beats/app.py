"""Two beats, one schedule: whichever leads sends, and the other takes over.

The task says which slot it is, so that you can see that none is missing and none comes twice.
"""

import os

from celery import Celery

from celery_syncguard import LockedTask

app = Celery("two_beats", broker=os.environ.get("BROKER_URL", "redis://localhost"))
app.conf.beat_scheduler = "syncguard"
app.conf.syncguard_leader_ttl = 3  # seconds until a killed leader is replaced; 15 unless you say otherwise
app.conf.beat_schedule = {
    "tick": {
        "task": "app.tick",
        "schedule": 1.0,
        # Ticks that were due while nobody led are sent late instead of being left out.
        "options": {"syncguard_catch_up": "all"},
    },
}


@app.task(name="app.tick", bind=True, base=LockedTask, lock_key=None, run_once=True)
def tick(self):
    """`run_once`: if a leader dies between sending and noting that it sent, the copy is answered and not run."""
    print(f"tick {self.request.syncguard_due_at} of term {self.request.syncguard_term}", flush=True)
