"""The examples about leaders run as their README says."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll


@pytest.fixture
def run(app_dsn, tmp_path):
    """Start a command in an example's folder; its output is a file. All of them are killed at the end."""
    with ExitStack() as stack:
        count = iter(range(100))

        def start(example, *command, **environment):
            log = tmp_path / f"log{next(count)}"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT / "examples" / example,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join([str(ROOT), "."]),
                        "PYTHONUNBUFFERED": "1",
                        "SYNCGUARD_DSN": app_dsn,
                        **environment,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            stack.callback(lambda: print(log.read_text()))
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            process.log = log
            return process

        yield start


def test_two_beats_tick_on_when_the_leader_is_killed(run, broker, app_dsn):
    url = {"BROKER_URL": broker.url}
    celery = ("-m", "celery", "-A", "app")
    worker = run(
        "two_beats", *celery, "worker", "-P", "solo", "-l", "INFO", "--without-mingle", C_FORCE_ROOT="1", **url
    )
    beats = [run("two_beats", *celery, "beat", "--pidfile=", "-l", "INFO", **url) for _ in range(2)]

    def ticks():
        return re.findall(r"tick (\S+) of term (\d+)", worker.log.read_text())

    poll(lambda: len(ticks()) >= 2, timeout=40)
    shown = subprocess.run(
        [sys.executable, *celery, "syncguard", "leader"],
        cwd=ROOT / "examples" / "two_beats",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), "."]), "SYNCGUARD_DSN": app_dsn, **url},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (leader,) = [beat for beat in beats if f"pid {beat.pid}" in shown]
    leader.kill()
    poll(lambda: len({term for _, term in ticks()}) == 2, timeout=40)
    poll(lambda: len(ticks()) >= 10, timeout=40)
    # One after another, one second apart, whoever sent them.
    seconds = [int(due[17:19]) for due, _ in ticks()]
    assert sorted(set(ticks())) == ticks()
    assert {(after - before) % 60 for before, after in zip(seconds, seconds[1:], strict=False)} == {1}


def test_the_relay_goes_on_when_its_leader_is_stopped_and_when_it_is_killed(run, pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("create table outbox (id bigint generated always as identity, body text)")
        conn.execute("create table delivered (id bigint primary key, body text, term bigint)")
        crowd = [run("leader_relay", "app.py", TTL="2") for _ in range(3)]

        def leaders():
            return [one for one in crowd if one.poll() is None and "leading, term" in one.log.read_text()]

        for round_, end in enumerate((None, "terminate", "kill")):
            if end is not None:
                (leader,) = leaders()
                getattr(leader, end)()
                assert leader.wait(10) == (0 if end == "terminate" else -9)
            poll(lambda: len(leaders()) == 1, timeout=20)
            conn.execute("insert into outbox (body) select 'row' from generate_series(1, 50)")
            done = "select count(*), count(distinct term), array_agg(id order by id) = array_agg(id order by term, id) from delivered"
            poll(lambda: conn.execute(done).fetchone()[0] == 50 * (round_ + 1), timeout=20)
        assert conn.execute(done).fetchone() == (150, 3, True)
        assert Path(crowd[0].log).exists()
