"""The example of offline sync does what its README says, with a real worker."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from tests.fixtures.cluster import ROOT

FOLDER = ROOT / "examples" / "offline_sync"

pytestmark = pytest.mark.parametrize("broker", ["redis"], indirect=True)


@pytest.fixture
def example(celery_setup, broker, pg_dsn, app_dsn, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    setup = celery_setup(
        "app",
        broker=broker,
        environment={
            "SYNCGUARD_DSN": app_dsn,
            "BROKER_URL": broker.url,
            "RESULT_BACKEND": broker.result_backend,
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)]),
        },
    )
    setup.start_worker(concurrency=2)
    return setup.module


@pytest.mark.usefixtures("example")
def test_the_example_runs_as_its_readme_says_and_once_more():
    for _ in range(2):
        runs_as_its_readme_says()


def runs_as_its_readme_says():
    done = subprocess.run(
        [sys.executable, "try_it.py"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "laptop has what the phone wrote: ['dear diary', 'milk']",
        "the later edit wins on both: milk, bread = milk, bread",
        "somebody else's device learns of an announcement: ['the server moves on Sunday']",
        "deletions forgotten by the server: 1",
        "the laptop was away and had to start again: True True",
        "in sync: True",
    ]


def test_devices_with_wrong_clocks_agree_through_edits_deletes_and_a_purge(example):
    example.create_tables()
    owner, other = str(uuid.uuid4()), str(uuid.uuid4())
    example.create_owner(owner)
    example.create_owner(other)
    slow = example.Device(owner, "slow", physical=lambda: 1_700_000_000_000)  # years behind
    right = example.Device(owner, "right")
    first, second = str(uuid.uuid4()), str(uuid.uuid4())

    right.edit(first, "by right")
    right.edit(second, "kept")
    right.sync()
    slow.sync()
    slow.edit(first, "by slow, who has read it")
    slow.sync()
    right.sync()
    assert right.notes == slow.notes == {first: "by slow, who has read it", second: "kept"}

    # An edit that was made before, but arrives after, changes nothing.
    stale = example.HybridLogicalClock("stale", physical=lambda: 1_600_000_000_000).now()
    assert example.write_note.delay(owner, first, "stale", int(stale), "stale").get(timeout=30) == "older"

    example.announce.delay([other, owner], "hello").get(timeout=30)
    slow.edit(first, None)
    slow.sync()
    assert first not in slow.notes
    assert sorted(slow.notes.values()) == ["hello", "kept"]
    assert example.purge.delay(0).get(timeout=30) == 1
    right.sync()
    assert (right.resyncs, right.notes) == (1, slow.notes)


def test_a_client_that_compares_physical_times_loses_the_edit_of_the_slow_device(example):
    """The control of the test above: without an HLC the slow device's edit looks older than what it had read."""
    example.create_tables()
    owner, note = str(uuid.uuid4()), str(uuid.uuid4())
    example.create_owner(owner)
    physical = {"right": 1_800_000_000_000, "slow": 1_700_000_000_000}
    stamps = {
        name: int(example.HybridLogicalClock(name, physical=lambda n=ms: n).now()) for name, ms in physical.items()
    }
    assert example.write_note.delay(owner, note, "by right", stamps["right"], "right").get(timeout=30) == "written"
    answer = example.write_note.delay(owner, note, "by slow, who has read it", stamps["slow"], "slow").get(timeout=30)
    assert answer == "older"
