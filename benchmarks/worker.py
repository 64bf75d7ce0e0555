"""Tasks per second of a real prefork worker with two children, for empty tasks that wait in the queue when it starts.

From the first body to the last. Plain, locked with distinct keys, and celery-singleton, on Redis and on RabbitMQ.
"""

from __future__ import annotations

import time
import uuid

from benchmarks.measure import Figure, Goal, estimate, paired
from benchmarks.programs import app, locked, plain, program, singleton
from benchmarks.rig import Rig, rabbit

NAME = "worker"


def run(rig: Rig) -> list[Figure]:
    dsn, peer = rig.database(), rig.redis_url()
    figures = _broker(rig, "Redis", rig.redis_url(), dsn, peer)
    with rabbit() as url:
        if url is not None:
            figures += _broker(rig, "RabbitMQ", url, dsn, peer)
    return figures


def _broker(rig: Rig, name: str, url: str, dsn: str, peer: str) -> list[Figure]:
    tasks = {"plain": plain, "locked": locked, "celery-singleton": singleton}
    rates: dict[str, list[float]] = {kind: [] for kind in tasks}
    order = list(tasks)
    for _ in range(rig.size(4, 1)):
        for kind in order:
            rates[kind].append(_rate(rig, tasks[kind], url, dsn, peer))
        order.reverse()
    return [
        Figure(
            NAME,
            f"locked / plain, {name}",
            paired(rates["locked"], rates["plain"]),
            goal=Goal(at_least=0.75),
            parts={kind: estimate(values) for kind, values in rates.items()},
            part_unit="tasks/s",
        ),
        Figure(NAME, f"locked / celery-singleton, {name}", paired(rates["locked"], rates["celery-singleton"])),
    ]


def _rate(rig: Rig, task: object, url: str, dsn: str, peer: str) -> float:
    count = rig.size(4000, 100)
    queue = f"bench-{uuid.uuid4().hex[:8]}"
    conf = {"broker_url": url, "syncguard_dsn": dsn, "task_default_queue": queue, "singleton_backend_url": peer}
    app.conf.update(conf)
    done = rig.folder / f"done-{queue}"
    done.touch()
    with app.connection_for_write(url) as connection, app.amqp.Producer(connection) as producer:
        for number in range(count):
            # Never the same twice: the peer's locks outlive a worker that is killed.
            task.apply_async((f"{queue}-{number}",), producer=producer, queue=queue)
        command = [
            "worker",
            "-c",
            "2",
            "-Q",
            queue,
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
            "-l",
            "INFO",
        ]
        with program(command, conf=conf, folder=rig.folder, done=done, ready=" ready."):
            first = _wait(done, 1)
            last = _wait(done, count)
    return (count - 1) / (last - first)


def _wait(done, count: int) -> float:
    end = time.monotonic() + 120
    while done.stat().st_size < count:
        if time.monotonic() > end:
            raise RuntimeError(f"only {done.stat().st_size} of {count} tasks ran")
        time.sleep(0.001)
    return time.monotonic()
