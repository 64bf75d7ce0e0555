"""Publish and run one empty task, minus the same with a plain task: what a lock adds to a task's life.

Ours is durable (fsync on) and one or two round trips to PostgreSQL; the peers' are two round trips to a Redis that
writes nothing to disk. All keys are distinct: nobody waits for anybody.
"""

from __future__ import annotations

from benchmarks.contestants import locked, once, plain, singleton
from benchmarks.measure import Figure, Goal, blocks, estimate, paired
from benchmarks.rig import Rig, application, loop

NAME = "task_overhead"


def run(rig: Rig) -> list[Figure]:
    app = application(rig.database())
    with loop(app) as worker:
        tasks = {
            "plain": plain(app),
            "lock": locked(app, "lock"),
            "dedup": locked(app, "dedup", lock_key=None, dedup_key="bench:{number}"),
            "all three": locked(app, "all", dedup_key="bench:{number}", run_once=True),
            "celery-once": once(app, rig.redis_url()),
            "celery-singleton": singleton(app, rig.redis_url()),
        }
        calls = {name: worker.call(task) for name, task in tasks.items()}
        results = blocks(calls, rounds=rig.size(40, 2), repeat=rig.size(60, 5))
    base = results.pop("plain")
    added = {name: [a - b for a, b in zip(values, base, strict=True)] for name, values in results.items()}
    parts = {name: estimate(values) for name, values in added.items()}
    parts["plain task"] = estimate(base)
    peer = min(("celery-once", "celery-singleton"), key=lambda name: parts[name].median)
    floor = "two round trips to PostgreSQL, one of them waits for the disk"
    return [
        Figure(
            NAME,
            f"lock only / {peer}",
            paired(added["lock"], added[peer]),
            goal=Goal(at_most=0.8),
            parts=parts,
            floor=floor,
        ),
        Figure(NAME, f"dedup only / {peer}", paired(added["dedup"], added[peer])),
        Figure(
            NAME, f"lock + dedup + run_once / {peer}", paired(added["all three"], added[peer]), goal=Goal(at_most=1.2)
        ),
    ]
