"""Two beats, and the one that leads goes away: until the next message is sent.

Killed (SIGKILL) and stopped (SIGTERM), with our default ttl of 15 s. The peer is redbeat, with the same ttl (and its
standby looking every second), and with its defaults, of which only the time that its lock still has is read off: nobody
wants to wait 25 minutes.
"""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import redis

from benchmarks.measure import Estimate, Figure, Goal, estimate
from benchmarks.programs import Program, program
from benchmarks.rig import Rig

NAME = "takeover"
_QUEUE = "bench-beat"


def run(rig: Rig) -> list[Figure]:
    ttl = 3.0 if rig.quick else 15.0
    repeat = rig.size(3, 1)
    with ThreadPoolExecutor(6) as crew:  # they mostly wait
        crash = [crew.submit(_ours, rig, ttl, signal.SIGKILL) for _ in range(repeat)]
        same = crew.submit(_redbeat, rig, ttl)
        crashes = [one.result() for one in crash]
        same_ttl = same.result()
    clean = [_ours(rig, ttl, signal.SIGTERM) for _ in range(repeat)]
    default = _redbeat_by_default(rig)
    return [
        Figure(
            NAME,
            f"leader killed, ttl {ttl:g} s",
            estimate(crashes),
            "s",
            Goal(at_most=ttl + 1),
            {f"redbeat, ttl {ttl:g} s": _one(same_ttl), "redbeat, its defaults (lock still held for)": _one(default)},
            "s",
            floor="what is left of the ttl",
        ),
        Figure(NAME, "leader stopped", estimate(clean), "s", Goal(at_most=1)),
    ]


def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=200)


def _one(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _ours(rig: Rig, ttl: float, signum: int) -> float:
    dsn, url = rig.database(), rig.redis_url()
    conf = {"broker_url": url, "task_default_queue": _QUEUE, "syncguard_dsn": dsn, "syncguard_leader_ttl": ttl}
    with ExitStack() as stack:
        beats = {
            one.process.pid: one
            for one in (stack.enter_context(_beat(rig.folder, conf, "syncguard")) for _ in range(2))
        }
        client = stack.enter_context(_client(url))
        client.brpop([_QUEUE], 60)
        _settle(client)
        # Fresh from a renewal or long after one: the moment is as good as any.
        return _until_next(client, beats[_leader(dsn)], signum)


def _leader(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        ((holder,),) = conn.execute(
            "select holder from syncguard_locks where key = '__syncguard_leader:beat'"
        ).fetchall()
    return int(re.search(r"pid (\d+)", holder)[1])


def _redbeat(rig: Rig, ttl: float) -> float:
    url = rig.redis_url()
    conf = {
        "broker_url": url,
        "task_default_queue": _QUEUE,
        "redbeat_redis_url": url,
        "redbeat_lock_timeout": round(ttl),
    }
    arguments = ("--max-interval", "1")
    with ExitStack() as stack:
        first = stack.enter_context(_beat(rig.folder, conf, "redbeat.RedBeatScheduler", *arguments))
        client = stack.enter_context(_client(url))
        client.brpop([_QUEUE], 60)
        second = stack.enter_context(_beat(rig.folder, conf, "redbeat.RedBeatScheduler", *arguments))
        second.wait_for("Acquiring lock")
        _settle(client)
        return _until_next(client, first, signal.SIGKILL)


def _redbeat_by_default(rig: Rig) -> float:
    url = rig.redis_url()
    conf = {"broker_url": url, "task_default_queue": _QUEUE, "redbeat_redis_url": url}
    with _beat(rig.folder, conf, "redbeat.RedBeatScheduler") as one, _client(url) as client:
        one.wait_for("Acquired lock")
        one.stop()
        return client.pttl("redbeat::lock") / 1e3


def _beat(folder: Path, conf: dict[str, Any], scheduler: str, *arguments: str) -> Any:
    command = ["beat", "-S", scheduler, "--pidfile", "", "-l", "DEBUG", *arguments]
    return program(command, conf=conf, folder=folder)


def _settle(client: redis.Redis) -> None:
    """Two seconds of ordinary life."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        client.brpop([_QUEUE], 1)


def _until_next(client: redis.Redis, leader: Program, signum: int) -> float:
    client.brpop([_QUEUE], 5)
    client.delete(_QUEUE)
    os.kill(leader.process.pid, signum)
    began = time.monotonic()
    if signum == signal.SIGKILL:
        leader.process.wait()
        client.delete(_QUEUE)  # what it sent with its last breath
    answer = client.brpop([_QUEUE], 120)
    return time.monotonic() - began if answer else float("inf")
