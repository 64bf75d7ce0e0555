"""The setting `syncguard_hlc` alone makes every task of an application stamp and observe."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import uuid
import weakref

import pytest
from celery import Celery

from celery_syncguard.hlc import HybridLogicalClock
from celery_syncguard.stamps import HEADER, MAX_DRIFT, clock_for, install_stamps
from tests.fixtures.cluster import ROOT

# Publishes into this process's memory and prints the headers of what it sent.
PRODUCER = """
import json, sys
from celery import Celery, signals
from celery_syncguard import LockedTask

headers_seen = []
signals.after_task_publish.connect(lambda headers=None, **_: headers_seen.append(headers), weak=False)
app = Celery("producer", broker="memory://", backend="cache+memory://")
app.conf.update(syncguard_dsn="memory://", syncguard_hlc=json.loads(sys.argv[1]))

@app.task(base=LockedTask, lock_key=None)
def locked(): ...

@app.task
def plain(): ...

for publish in (lambda: app.send_task("elsewhere"), plain.delay, locked.delay):
    publish()
print(json.dumps([headers.get("syncguard_hlc") for headers in headers_seen]))
"""


def publish(setting: bool) -> list[int | None]:
    command = [sys.executable, "-c", PRODUCER, json.dumps(setting)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60, env=os.environ)
    return json.loads(done.stdout)


def test_with_the_setting_every_message_is_stamped_in_order():
    stamps = publish(setting=True)
    assert len(stamps) == 3
    assert all(type(stamp) is int for stamp in stamps)
    assert stamps == sorted(set(stamps))


def test_without_the_setting_no_message_is():
    """The control of the test above."""
    assert publish(setting=False) == [None, None, None]


@pytest.fixture(autouse=True)
def _no_applications_of_earlier_tests():
    """All applications of a process stamp its messages, and some of earlier tests have impossible clocks."""
    gc.collect()


@pytest.fixture
def make_app():
    made = []

    def make() -> Celery:
        made.append(Celery(f"app{len(made)}", broker="memory://", set_as_current=False))
        # All that is in memory is shared by the process: another test may have left messages in Celery's default queue.
        made[-1].conf.task_default_queue = str(uuid.uuid4())
        return made[-1]

    return make


def published_header(app) -> int:
    with app.connection_for_write() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        app.send_task("anything", connection=connection)
        message = queue.get(timeout=5)
        message.ack()
        queue.close()
    return message.headers[HEADER]


def test_one_clock_for_each_application_and_installing_again_keeps_it(make_app):
    one, other = make_app(), make_app()
    assert clock_for(one) is clock_for(one) is install_stamps(one) is install_stamps(one)
    assert clock_for(one) is not clock_for(other)
    mine = HybridLogicalClock("mine")
    assert install_stamps(one, mine) is mine is install_stamps(one) is clock_for(one)


def test_a_message_comes_after_all_that_any_application_of_the_process_has_stamped(make_app):
    one, other = make_app(), make_app()
    behind = install_stamps(one, HybridLogicalClock("one", physical=lambda: 1_000_000))
    ahead = install_stamps(other, HybridLogicalClock("other", physical=lambda: 2_000_000))
    for app in (one, other):
        before = max(behind.now(), ahead.now())
        assert published_header(app) > before


def test_a_clock_that_cannot_stamp_does_not_stop_the_message(make_app, caplog):
    app = make_app()
    install_stamps(app, HybridLogicalClock("broken", physical=lambda: -1))
    with app.connection_for_write() as connection:
        assert app.send_task("anything", connection=connection).id
    assert "message sent without a stamp" in caplog.text


def test_an_application_that_is_gone_stamps_no_more():
    app = Celery("short-lived", set_as_current=False)
    clock = weakref.ref(install_stamps(app))
    assert clock() is not None
    del app
    gc.collect()
    assert clock() is None  # and with it the handlers, which Celery's signals do not keep alive


def test_the_clock_of_an_application_refuses_the_far_future(make_app):
    clock = clock_for(make_app())
    with pytest.raises(ValueError, match="ahead"):
        clock.observe(clock.now() + int((MAX_DRIFT + 60) * 1_000_000))
    assert clock.observe(clock.now() + int((MAX_DRIFT - 60) * 1_000_000)) > 0
