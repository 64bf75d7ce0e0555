"""An interrupt is raised inside the body whose lease was lost, or not at all."""

import json
import re
import subprocess
import sys
import threading

import pytest
from celery import Celery

from celery_syncguard import LeaseLost, LockedTask
from celery_syncguard.tasks import interrupt
from tests.fixtures import soak
from tests.fixtures.cluster import ROOT

IN_THREADS = sys.version_info >= (3, 12)

ROUNDS = {
    "main": soak.rounds(1000, soak=2000),
    "threads": soak.rounds(1600, soak=4800),
    "gevent": soak.rounds(600, soak=1200),
}


WHERE = pytest.mark.parametrize(
    "where",
    [
        "main",
        pytest.param(
            "threads", marks=pytest.mark.skipif(not IN_THREADS, reason="no interrupts in threads before 3.12")
        ),
        "gevent",
    ],
)


def race(where, protection):
    command = [sys.executable, "-m", "tests.integration.interrupt_race", where, str(ROUNDS[where]), protection]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def faults(seen):
    names = ("escaped", "bystanders hit", "failed otherwise", "stuck")
    names += ("locks left", "armed left", "running left", "requests left")
    return {name: seen[name] for name in names if seen.get(name)}


@pytest.mark.soak
@WHERE
def test_a_lease_lost_around_the_end_of_its_body_interrupts_that_body_or_nothing(where):
    seen = race(where, "whole")
    assert faults(seen) == {}, seen
    assert seen["interrupted"] + seen["ended"] == ROUNDS[where]
    assert seen["bystanders"] == 2 * ROUNDS[where]
    # Both happened, often: the losses did fall around the ends.
    assert min(seen["interrupted"], seen["ended"]) > ROUNDS[where] / 50, seen


@WHERE
def test_without_the_end_that_disarms_it_an_interrupt_hits_what_comes_after_the_body(where):
    """The negative control."""
    assert faults(race(where, "disarmless")) != {}


@pytest.mark.soak
def test_an_exception_strikes_no_thread_that_is_just_starting_since_python_3_12():
    """Before, it does, and who started that waits for ever: so bodies in threads are interrupted from 3.12 on only."""
    seconds = soak.rounds(3, soak=30) if IN_THREADS else 60
    command = [sys.executable, "-m", "tests.integration.thread_births", str(seconds)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout.strip()
    assert re.fullmatch(r"interrupted [1-9]\d* times" if IN_THREADS else "hangs", answer), answer


def test_before_python_3_12_a_body_in_a_thread_learns_of_a_loss_by_asking_and_the_log_says_so_once(caplog, monkeypatch):
    app = Celery("asking", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://")

    @app.task(base=LockedTask, bind=True, lock_key="k", shared=False)
    def asking(self):
        loser = threading.Thread(target=self.lease.lose, args=("sabotage",))
        loser.start()
        loser.join(10)
        went_on.append(True)
        self.lease.check()
        went_on.append(False)

    monkeypatch.setattr(interrupt, "_IN_THREADS", False)
    interrupt._tell_of_threads.cache_clear()
    went_on, results = [], []
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.append(asking.apply().result))
        thread.start()
        thread.join(20)
    assert went_on == [True, True]
    assert [(type(one), one.reason) for one in results] == [(LeaseLost, "sabotage")] * 2
    (line,) = [one.message for one in caplog.records if "not interrupted" in one.message]
    assert "lease.check()" in line
