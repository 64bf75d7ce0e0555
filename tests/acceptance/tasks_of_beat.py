"""Periodic tasks of the beat tests. The schedule comes from the environment, so that two beats can differ."""

import json
import os
from datetime import timedelta

from celery.schedules import crontab

from tests.fixtures.app import make_app
from tests.fixtures.history import record

app = make_app(__name__)

SCHEDULE_VARIABLE = "SYNCGUARD_TEST_SCHEDULE"


@app.task(bind=True)
def note(self, name):
    record(
        "run", key=name, task_id=self.request.id, fence=self.request.syncguard_term, note=self.request.syncguard_due_at
    )


@app.task(bind=True)
def plain(self, name):
    """For a beat without us: there is no slot to speak of."""
    record("run", key=name, task_id=self.request.id)


def entries(text):
    """{"fast": 1.0, "daily": "30 2", "chatty": {"every": 2, "catch_up": "all"}} as a `beat_schedule`."""
    found = {}
    for name, given in json.loads(text).items():
        options = {}
        if isinstance(given, dict):
            options = {key: value for key, value in given.items() if key != "every"}
            given = given["every"]
        schedule = timedelta(seconds=given)
        if isinstance(given, str):
            minute, hour = given.split()
            schedule = crontab(minute=minute, hour=hour)
        task = options.pop("task", note.name)
        found[name] = {"task": task, "schedule": schedule, "args": (name,), "options": options}
    return found


app.conf.beat_schedule = entries(os.environ.get(SCHEDULE_VARIABLE, '{"fast": 1.0}'))
