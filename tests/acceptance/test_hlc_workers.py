"""Stamps travel with messages: effects sort after causes in real workers, whatever their machines' clocks say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from celery import chain, chord, group, signals

from celery_syncguard.hlc import decode, encode
from tests.fixtures.cluster import ROOT

MODULE = "tests.acceptance.apps.clocks"
HOUR = 3600
OFFSETS = (0, -HOUR / 2, HOUR / 2, -HOUR / 4)  # seconds; the two furthest apart differ by an hour


def notes(history: Any, label: str, count: int) -> list[dict[str, Any]]:
    rows = history.wait_for("stamped", key=label, count=count, timeout=60)
    return [json.loads(row.note) | {"attempt": row.attempt} for row in rows]


def stamps_of_a_chain(setup: Any, history: Any, *, steps: int, **options: Any) -> list[dict[str, Any]]:
    """Run a chain whose every step is run by another worker than the one before; what each recorded, in order."""
    queues = [f"{setup.broker.queue}-{n}" for n in range(len(OFFSETS))]
    for queue, offset in zip(queues, OFFSETS, strict=True):
        setup.start_worker("-Q", queue, environment={"CLOCK_OFFSET": str(offset)}, wait=False, **options)
    for worker in setup.worker_cluster:
        worker.wait_ready()
    signatures = [
        setup.module.step.si(f"{n:03}").set(queue=queues[n * 7 % 4 if n % 5 else (n * 7 + 2) % 4]) for n in range(steps)
    ]
    chain(signatures).apply_async()
    history.wait_for("stamped", count=steps, timeout=90)
    rows = sorted(history.events("stamped"), key=lambda row: row.key)
    assert [row.key for row in rows] == [f"{n:03}" for n in range(steps)]
    assert len({row.pid for row in rows}) >= 4
    return [json.loads(row.note) for row in rows]


@pytest.mark.smoke
def test_stamps_strictly_increase_in_a_chain_of_50_over_4_workers_an_hour_apart(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    recorded = stamps_of_a_chain(setup, history, steps=50, pool="solo", concurrency=1)
    stamps = [one["stamp"] for one in recorded]
    assert all(earlier < later for earlier, later in pairwise(stamps))
    assert all(one["header"] < one["stamp"] for one in recorded)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_without_observing_the_same_chain_has_effects_before_causes(celery_setup, broker, pg_dsn, history):
    """The control of the test above."""
    setup = celery_setup(MODULE, environment={"OBSERVE": "0"})
    stamps = [one["stamp"] for one in stamps_of_a_chain(setup, history, steps=50, pool="solo", concurrency=1)]
    assert any(earlier > later for earlier, later in pairwise(stamps))


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_stamps_strictly_increase_in_every_pool(celery_setup, broker, pg_dsn, history, pool):
    setup = celery_setup(MODULE)
    recorded = stamps_of_a_chain(setup, history, steps=24, pool=pool, concurrency=2)
    stamps = [one["stamp"] for one in recorded]
    assert all(earlier < later for earlier, later in pairwise(stamps))


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_children_of_a_prefork_worker_stamp_under_device_ids_of_their_own(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    setup.start_worker(pool="prefork", concurrency=3)
    for _ in range(3):
        setup.module.occupy.delay("fork")
    history.wait_for("stamped", key="fork", count=3)
    setup.open_gate("free")
    seen = {(row.pid, json.loads(row.note)["device_id"]) for row in history.events("stamped", key="fork")}
    assert len(seen) == len({pid for pid, _ in seen}) == len({device_id for _, device_id in seen}) == 3


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_whoever_publishes_the_stamp_is_on_the_message_and_below_what_the_body_stamps(
    celery_setup, broker, pg_dsn, history
):
    setup = celery_setup(MODULE)
    module, app = setup.module, setup.app
    seen = module.seen
    setup.start_worker(concurrency=2)
    setup.start_beat()
    before = module.clock.now()
    publishers = {
        "delay": seen.delay,
        "by name": lambda label: app.send_task("seen", args=[label]),
        "signature by name": lambda label: app.signature("seen", args=[label]).apply_async(),
        "group": lambda label: group(seen.s(label), seen.s(label)).apply_async(),
        "chain": lambda label: chain(seen.si(label), seen.si(label)).apply_async(),
        "chord": lambda label: chord([seen.si(label), seen.si(label)], seen.si(label)).apply_async(),
        "link": lambda label: seen.apply_async([label], link=seen.si(label)),
        "from a task": module.parent.delay,
    }
    counts = {"group": 2, "chain": 2, "chord": 3, "link": 2}
    for label, publish in publishers.items():
        publish(label)
    for label in publishers:
        for one in notes(history, label, counts.get(label, 1)):
            assert before < one["header"] < one["stamp"], label
    (parent,) = notes(history, "from a task before", 1)
    (child,) = notes(history, "from a task", 1)
    assert parent["stamp"] < child["header"]
    assert all(one["header"] < one["stamp"] for one in notes(history, "beat", 2))


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_retry_carries_a_new_stamp(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    setup.start_worker("-Q", setup.broker.queue, environment={"CLOCK_OFFSET": str(HOUR)}, concurrency=1)
    setup.module.again.delay("retried")
    order = [value for one in notes(history, "retried", 4) for value in (one["header"], one["stamp"])]
    assert order == sorted(set(order))


NONSENSE = ["nonsense", -1, 0, 2**60, 1.5, [1], {"a": 1}, True, int(encode(2**42, 0))]


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_malformed_or_far_future_stamp_is_logged_and_ignored(celery_setup, broker, pg_dsn, history, pool):
    setup = celery_setup(MODULE)
    worker = setup.start_worker(pool=pool, concurrency=1)
    before = setup.module.clock.now()
    for n, value in enumerate(NONSENSE):
        replace = setup.module.replace_header(value)
        try:
            result = setup.module.step.delay(f"nonsense {n}")
        finally:
            signals.before_task_publish.disconnect(replace)
        assert result.get(timeout=30) > before
        worker.wait_for_log(rf"WARNING/.*ignored the stamp of a message \(task {result.id}\)")
    last = setup.module.step.delay("at last").get(timeout=30)
    assert decode(last)[0] - decode(before)[0] < 120_000, "one of them was believed"


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_producer_without_the_plugin_is_fine(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    worker = setup.start_worker(concurrency=1)
    publish = f"from {MODULE} import step; step.delay('plain')"
    environment = {**os.environ, "OBSERVE": "0"}
    subprocess.run([sys.executable, "-c", publish], cwd=ROOT, env=environment, check=True, timeout=60)
    (one,) = notes(history, "plain", 1)
    assert one["header"] is None
    assert "ignored the stamp" not in worker.logs()
