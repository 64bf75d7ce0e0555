"""Stamps on messages where one process has several applications; the workers are in `tests/acceptance`."""

from __future__ import annotations

import gc
import weakref

import pytest
from celery import Celery
from kombu import Connection

from celery_syncguard import stamps
from celery_syncguard.hlc import HybridLogicalClock
from celery_syncguard.stamps import HEADER, follow_setting, install_stamps


@pytest.fixture(autouse=True)
def _no_applications_of_other_tests(monkeypatch):
    """All applications of a process stamp its messages. Some of other tests stay, and some here have impossible clocks."""
    monkeypatch.setattr(stamps, "_all", weakref.WeakSet())


def application(name: str) -> Celery:
    app = Celery(name, broker=f"memory://{name}", set_as_current=False)

    @app.task(name="noop", shared=False)
    def noop() -> None: ...

    return app


def published_stamp(app: Celery) -> int | None:
    app.tasks["noop"].apply_async(queue=app.main)
    with Connection(app.conf.broker_url) as connection:
        return connection.SimpleQueue(app.main).get_nowait().headers.get(HEADER)


def test_every_application_of_a_process_stamps_whatever_others_there_are_or_were():
    """Some versions of Celery take the same method of two objects for one receiver of a signal."""
    without = application("without")
    follow_setting(without)
    assert published_stamp(without) is None
    for round_ in range(20):  # an object of a later round may get the address of a dead one
        apps = [application(f"app{round_}-{n}") for n in range(2)]
        for app in apps:
            install_stamps(app)
        assert all(published_stamp(app) is not None for app in apps), round_
        del apps, app
        gc.collect()
    assert published_stamp(without) is None


def test_an_application_that_is_gone_stamps_no_more():
    app, other = application("gone"), application("left")
    follow_setting(other)
    install_stamps(app)
    assert published_stamp(other) is not None, "control: what one application publishes is stamped for all"
    del app
    gc.collect()
    assert published_stamp(other) is None


def test_running_a_task_moves_the_clock_of_its_own_application_only():
    clocks = [HybridLogicalClock(name) for name in ("a", "b")]
    apps = [application(f"run-{clock.device_id}") for clock in clocks]
    for app, clock in zip(apps, clocks, strict=True):
        install_stamps(app, clock)
    ahead = HybridLogicalClock("far", physical=lambda: 9_000_000_000_000).now()
    apps[0].tasks["noop"].apply(headers={HEADER: ahead})
    assert clocks[0].now() > ahead > clocks[1].now()


def test_an_application_that_cannot_stamp_takes_nobody_elses_stamp_away():
    app, broken = application("working"), application("broken")
    install_stamps(app)
    # More of them, as the order in which they stamp is nobody's choice.
    others = [application(f"broken-{n}") for n in range(20)]
    for one in (broken, *others):
        install_stamps(one, HybridLogicalClock("broken", physical=lambda: -1))
    assert published_stamp(app) is not None
    assert published_stamp(broken) is not None
