"""The examples do what their READMEs say, by the commands that their READMEs give."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import kombu
import pytest

from tests.fixtures.cluster import ROOT

#: What each prints at least; a … in a README stands for what differs from run to run.
EXPECTED = {
    "locked_report": ["5 reports of acme, one at a time; 1 of globex beside them"],
    "fenced_write": [
        "write: the late one: refused: the lease on 'page:home'",
        "write: the page is by the punctual one",
        "write_in_transaction: the late one: refused: the lease on 'page:home'",
        "write_in_transaction: the page is by the punctual one",
        "write_elsewhere: the late one: refused: stale fence",
        "write_elsewhere: the page is by the punctual one",
    ],
    "dedup_import": [
        "import: 10 requests, 1 queued",
        "import: once it is done, the next request is a new one",
        "refresh: 11 requests, 2 tasks: one running, one waiting",
        "ping: 4 requests within the minute, 1 sent",
    ],
    "exactly_once_ledger": ["120 messages for 40 payments: 40 entries, balance 820"],
}


def commands(example):
    text = (ROOT / "examples" / example / "README.md").read_text()
    (block,) = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    return [line.removeprefix("$ ") for line in block.splitlines()]


@pytest.fixture
def own_queue(broker):
    """Examples use the queue that Celery calls "celery"; nobody else here does. Redis has a database for each test."""
    if broker.kind == "redis":
        yield
        return
    with kombu.Connection(broker.url, connect_timeout=4) as connection:
        connection.default_channel.queue_delete("celery")
    yield
    with kombu.Connection(broker.url, connect_timeout=4) as connection:
        connection.default_channel.queue_delete("celery")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXPECTED)
def test_an_example_runs_as_its_readme_says(example, empty_app_dsn, broker, own_queue, tmp_path):
    export, migrate, worker, try_it = commands(example)
    variables = dict(pair.split("=") for pair in export.removeprefix("export ").split())
    servers = {"SYNCGUARD_DSN": empty_app_dsn, "BROKER_URL": broker.url, "RESULT_BACKEND": broker.result_backend}
    assert variables.keys() == servers.keys()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **servers}

    def run(command):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(migrate)
    assert worker.endswith(" &")
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", "exec " + worker.removesuffix(" &")],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        printed = run(try_it)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        print((tmp_path / "worker.log").read_text(errors="replace"))
    readme = (ROOT / "examples" / example / "README.md").read_text()
    for line in EXPECTED[example]:
        assert line in printed
        assert line in readme
