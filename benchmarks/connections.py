"""How many server connections a prefork worker holds: `-c 32`, all children busy with short and with long tasks, and idle."""

from __future__ import annotations

import time
import uuid

from benchmarks.measure import Estimate, Figure, Goal
from benchmarks.programs import busy, program
from benchmarks.rig import Rig

NAME = "connections"


def run(rig: Rig) -> list[Figure]:
    children = rig.size(32, 4)
    dsn, url = rig.database(), rig.redis_url()
    name = dsn.rpartition("/")[2]
    conf = {"broker_url": url, "syncguard_dsn": dsn, "task_default_queue": f"q{uuid.uuid4().hex[:8]}"}
    done = rig.folder / f"{NAME}-done"
    done.touch()
    command = [
        "worker",
        "-c",
        str(children),
        "--without-gossip",
        "--without-mingle",
        "--prefetch-multiplier",
        "1",
        "-l",
        "INFO",
    ]

    def count() -> int:
        query = f"select count(*) from pg_stat_activity where datname = '{name}' and backend_type = 'client backend'"
        return int(rig.pg.execute(query)[0][0])

    def peak(seconds: float) -> int:
        most, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            most = max(most, count())
            time.sleep(0.1)
        return most

    with program(command, conf=conf, folder=rig.folder, done=done, ready=" ready.") as worker:
        fresh = count()
        busy.app.conf.update(conf)
        with busy.app.connection_for_write(url) as connection:
            for seconds in (1.0,) if rig.quick else (2.0, 15.0):
                before = done.stat().st_size
                for number in range(children):
                    busy.apply_async((number, seconds), connection=connection, queue=conf["task_default_queue"])
                end = time.monotonic() + 60
                while done.stat().st_size < before + children and time.monotonic() < end:
                    time.sleep(0.02)
                if seconds < 15:
                    short = peak(seconds)
                else:
                    long = peak(seconds + 2)
        if not rig.quick:
            time.sleep(60)
        idle = count()
        del worker

    def figure(what: str, value: float, goal: float) -> Figure:
        return Figure(NAME, what, Estimate(value, value, value, 1), "", Goal(at_most=goal))

    figures = [
        figure("per child, at the start", fresh / children, 0),
        figure("per child, all busy with short tasks", short / children, 1),
    ]
    if not rig.quick:
        figures.append(figure("per child, all busy with tasks of 15 s, being renewed", long / children, 1))
        figures.append(figure("after a minute of idleness", idle, 0))
    return figures
