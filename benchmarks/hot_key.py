"""One key that everybody wants: from a release to the next waiter's body, and what waiting costs the database.

The waiters are threads of up to eight processes; each holds the lock for 5 ms, again and again. The peer is
python-redis-lock, whose waiters block in Redis.
"""

from __future__ import annotations

import itertools
import json
import statistics

import psutil

from benchmarks.measure import Estimate, Figure, Goal, paired
from benchmarks.rig import Rig, processes

NAME = "hot_key"


def run(rig: Rig) -> list[Figure]:
    dsn = rig.database()
    counts = (1, 10) if rig.quick else (1, 10, 200)
    seconds = 1.5 if rig.quick else 4.0
    ours: dict[int, list[list[float]]] = {count: [] for count in counts}
    theirs: dict[int, list[list[float]]] = {count: [] for count in counts}
    cpu: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(rig.size(3, 1)):
        for count in counts:
            handoffs, used = _handoffs(rig, "ours", dsn, f"hot:{turn}:{count}", waiters=count, seconds=seconds)
            ours[count].append(handoffs)
            cpu[count].append(used / max(1, len(handoffs)) * 1e3)
            theirs[count].append(_handoffs(rig, "redis", rig.redis_url(), "hot", waiters=count, seconds=seconds)[0])
    figures = []
    for count in counts:
        own = [value for block in ours[count] for value in block] or [float("inf")]
        peer = [value for block in theirs[count] for value in block] or [float("inf")]
        figures.append(
            Figure(
                NAME,
                f"hand-off, {count} waiter{'s' if count > 1 else ''}",
                _spread(own),
                "ms",
                Goal(at_most=20),
                {"python-redis-lock": _spread(peer), "database CPU per hand-off": _spread(cpu[count])},
                "ms",
                floor="a release, a notification, an acquire",
            )
        )
    most = counts[-1]
    figures.append(
        Figure(
            NAME,
            f"database CPU per hand-off, {most} waiters / {counts[1]}"
            if len(counts) > 2
            else "database CPU per hand-off, 10 / 1",
            paired(cpu[most], cpu[counts[1] if len(counts) > 2 else counts[0]]),
            goal=Goal(at_most=1.5),
        )
    )
    return figures


def _spread(values: list[float]) -> Estimate:
    """The median with the 5th and 95th percentile: hand-offs are no independent rounds."""
    ordered = sorted(values)
    return Estimate(
        statistics.median(ordered),
        ordered[int(0.05 * len(ordered))],
        ordered[int(0.95 * (len(ordered) - 1))],
        len(ordered),
    )


def _handoffs(rig: Rig, kind: str, url: str, key: str, *, waiters: int, seconds: float) -> tuple[list[float], float]:
    """Milliseconds of each hand-off, and the seconds of CPU that PostgreSQL used meanwhile."""
    threads = waiters + 1  # somebody holds it
    crews = [len(range(first, threads, 8)) for first in range(min(8, threads))]
    with processes(
        "benchmarks.clients", [("wait", kind, url, key, str(crew), str(seconds)) for crew in crews]
    ) as clients:
        for client in clients:
            assert client.stdout.readline() == "ready\n"
        before = _cpu(rig)
        for client in clients:
            client.stdin.write("go\n")
            client.stdin.flush()
        bodies = sorted(tuple(one) for client in clients for one in json.loads(client.stdout.readline()))
        used = _cpu(rig) - before
    return [(after[0] - this[1]) * 1e3 for this, after in itertools.pairwise(bodies)], used


def _cpu(rig: Rig) -> float:
    total = 0.0
    for process in psutil.Process(rig.pg.process.pid).children():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
