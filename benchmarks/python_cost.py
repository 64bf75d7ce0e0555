"""Our CPU per locked task, publish and run, without a database: the memory store against a plain task."""

from __future__ import annotations

import time

from benchmarks.contestants import locked, plain
from benchmarks.measure import Figure, Goal, blocks, estimate
from benchmarks.rig import Rig, application, loop

NAME = "python_cost"


def run(rig: Rig) -> list[Figure]:
    app = application("memory://")
    with loop(app) as worker:
        tasks = {
            "plain": plain(app),
            "lock": locked(app, "lock"),
            "all three": locked(app, "all", dedup_key="bench:{number}", run_once=True),
        }
        calls = {name: worker.call(task) for name, task in tasks.items()}
        results = blocks(calls, rounds=rig.size(100, 3), repeat=rig.size(50, 10), clock=time.process_time)
    base = results["plain"]
    added = {name: [a - b for a, b in zip(results[name], base, strict=True)] for name in ("lock", "all three")}
    parts = {"plain task": estimate(base)}
    floor = "two random ids, two signals nobody hears, a key, a deadline"
    return [
        Figure(NAME, "lock only, added CPU", estimate(added["lock"]), "µs", Goal(at_most=60), parts, floor=floor),
        Figure(NAME, "lock + dedup + run_once, added CPU", estimate(added["all three"]), "µs"),
    ]
