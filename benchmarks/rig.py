"""What the rows run on: PostgreSQL with its default settings, Redis without persistence, applications, and a worker
without a process.

`Loop` publishes and runs one task in this process: the broker is in memory, the message is encoded, queued, taken out
and decoded by Celery's own code, and traced as in a worker. What is left out is what costs everybody the same: sockets
to a broker, and the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import redis
from celery import Celery
from celery.worker.request import Request

from celery_syncguard.postgres.migrate import migrate
from celery_syncguard.tasks.app_state import state_of
from tests.fixtures.servers import PostgresServer, RabbitServer, ValkeyServer, missing

__all__ = ["ROOT", "Loop", "Rig", "application", "machine", "pgbench", "rig"]

ROOT = Path(__file__).resolve().parent.parent


class Redis(ValkeyServer):
    """Nothing is written to disk: the fastest that the peers can be."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--save", "", "--appendonly", "no"]


@dataclasses.dataclass(slots=True)
class Rig:
    """The servers of one run. `quick`: few repetitions, for a look whether everything runs."""

    pg: PostgresServer
    redis: Redis
    folder: Path
    quick: bool

    def database(self) -> str:
        """A new database with our schema; its dsn."""
        name = f"bench_{uuid.uuid4().hex[:12]}"
        self.pg.execute(f"create database {name}")
        dsn = self.pg.dsn(name)
        migrate(dsn)
        return dsn

    def redis_url(self) -> str:
        """A Redis database of one's own."""
        return self.redis.url(next(_databases))

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full


_databases = itertools.count(1)


@contextlib.contextmanager
def rig(*, quick: bool) -> Iterator[Rig]:
    """Start the servers, stop them afterwards."""
    with contextlib.ExitStack() as stack:
        # More connections than the default 100, since one row has 64 clients and their renewers. All else is as installed.
        pg = stack.enter_context(PostgresServer(settings={"max_connections": 300, "log_min_messages": "fatal"}))
        server = stack.enter_context(Redis())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncguard-bench-")))
        yield Rig(pg=pg, redis=server, folder=folder, quick=quick)


@contextlib.contextmanager
def rabbit() -> Iterator[str | None]:
    """A RabbitMQ of our own, or None where there is none to be had."""
    if missing("rabbitmq"):
        yield None
        return
    with RabbitServer() as server:
        yield server.url()


def application(dsn: str, *, broker: str = "memory://", **conf: Any) -> Celery:
    """An application for `dsn`."""
    app = Celery(f"bench-{uuid.uuid4().hex[:8]}", broker=broker, set_as_current=False)
    app.conf.update(
        syncguard_dsn=dsn,
        task_ignore_result=True,
        task_default_queue=f"bench-{uuid.uuid4().hex[:8]}",
        worker_hijack_root_logger=False,
        **conf,
    )
    return app


class Loop:
    """Publishes and runs tasks of one application, one after the other, in this thread."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._connection = app.connection_for_read()
        self._channel = self._connection.default_channel
        self._queue = app.amqp.queues[app.conf.task_default_queue]
        self._queue(self._channel).declare()
        self._numbers = itertools.count()

    def call(self, task: Any) -> Any:
        """A function without arguments that publishes and runs `task(n)` for a new n each time."""
        if task.__trace__ is None:
            from celery.app.trace import build_tracer

            task.__trace__ = build_tracer(task.name, task, app=self._app, loader=self._app.loader)
        numbers = self._numbers
        queue = self._queue(self._channel)
        app = self._app

        def publish_and_run() -> None:
            task.apply_async((next(numbers),))
            message = queue.get(no_ack=True)
            request = Request(message, on_ack=_acknowledge, app=app, task=task, hostname="bench", decoded=False)
            request.execute()

        return publish_and_run

    def close(self) -> None:
        state_of(self._app).close()
        self._connection.close()
        self._app.close()


def _acknowledge(*arguments: Any) -> None:
    """Celery calls it as on_ack(logger, connection errors)."""


@contextlib.contextmanager
def loop(app: Celery) -> Iterator[Loop]:
    worker = Loop(app)
    try:
        yield worker
    finally:
        worker.close()


def pgbench(rig: Rig, dsn: str, script: str, *, clients: int, seconds: float, protocol: str = "prepared") -> float:
    """Transactions per second of a pgbench script."""
    file = rig.folder / f"{uuid.uuid4().hex}.sql"
    file.write_text(script)
    command = [str(rig.pg.bin_dir / "pgbench"), "-n", "-f", str(file), "-c", str(clients), "-j", str(min(clients, 2))]
    command += ["-T", str(max(1, round(seconds))), "-M", protocol, dsn]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pgbench failed: {done.stderr[:1000]}")
    return next(float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("tps"))


@contextlib.contextmanager
def processes(
    module: str, arguments: Sequence[Sequence[str]], *, environment: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `python -m module …` once per list of arguments, with pipes; killed at the end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "C_FORCE_ROOT": "1", **(environment or {})}
    children: list[subprocess.Popen[str]] = []
    try:
        for one in arguments:
            command = [sys.executable, "-m", module, *one]
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
            )
            children.append(child)
        yield children
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def machine(rig: Rig) -> dict[str, Any]:
    """What the figures were measured on."""
    import celery

    with psycopg.connect(rig.pg.dsn()) as conn:
        settings = dict(
            conn.execute(
                "select name, setting from pg_settings where name = any(%s)",
                (["fsync", "synchronous_commit", "shared_buffers", "server_version", "wal_sync_method"],),
            ).fetchall()
        )
    client = redis.Redis.from_url(rig.redis.url())
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "python": platform.python_version(),
        "celery": celery.__version__,
        "psycopg": psycopg.__version__,
        "postgresql": settings,
        "redis": str(client.info("server").get("redis_version", "")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": model,
        "load": round(os.getloadavg()[0], 1),
        "system": platform.system(),
    }
