"""Many beats, one leader: real `celery beat` processes on real brokers."""

import json

import psycopg
import pytest

from tests.fixtures.polling import poll

MODULE = "tests.acceptance.tasks_of_beat"


def test_two_beats_send_each_slot_once(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE, conf={"syncguard_leader_ttl": 3})
    setup.start_worker(concurrency=1, pool="solo")
    for _ in range(2):
        setup.start_beat("-S", "syncguard")
    runs = history.wait_for("run", count=5)
    due = [row.note for row in runs]
    assert len(due) == len(set(due))
    assert len({row.fence for row in runs}) == 1
