"""The application of the rows that need real `celery worker` and `celery beat` processes. Configured by BENCH_CONF (JSON)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from celery_singleton import Singleton

from benchmarks.rig import ROOT
from celery_syncguard import LockedTask

__all__ = ["VARIABLE", "Program", "app", "program"]

VARIABLE = "BENCH_CONF"
_DONE = "BENCH_DONE"

app = Celery("benchmarks", set_as_current=False)
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=True,
    beat_schedule={"tick": {"task": "bench.tick", "schedule": timedelta(seconds=0.5)}},
)
app.conf.update(json.loads(os.environ.get(VARIABLE, "{}")))

#: Each body leaves a byte in this file: so its size is how many have run.
_done = os.open(os.environ[_DONE], os.O_WRONLY | os.O_APPEND) if _DONE in os.environ else None


def _note() -> None:
    if _done is not None:
        os.write(_done, b"x")


@app.task(name="bench.tick")
def tick() -> None:
    pass


@app.task(name="bench.plain")
def plain(number: int) -> None:
    _note()


@app.task(name="bench.locked", base=LockedTask, lock_key="bench:{number}")
def locked(number: int) -> None:
    _note()


@app.task(name="bench.singleton", base=Singleton)
def singleton(number: int) -> None:
    _note()


@app.task(name="bench.busy", base=LockedTask, lock_key="busy:{number}")
def busy(number: int, seconds: float) -> None:
    _note()
    time.sleep(seconds)


class Program:
    """One `celery …` process in a session of its own."""

    def __init__(self, command: list[str], conf: Mapping[str, Any], log: Path, done: Path | None) -> None:
        environment = {**os.environ, VARIABLE: json.dumps(conf), "PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1"}
        if done is not None:
            environment[_DONE] = str(done)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "benchmarks.programs", *command],
                cwd=log.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._log = log

    def wait_for(self, text: str, *, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while text not in self._log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"no {text!r} from a celery process:\n{self._log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.02)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def program(
    command: list[str], *, conf: Mapping[str, Any], folder: Path, done: Path | None = None, ready: str = ""
) -> Iterator[Program]:
    """Run `celery -A benchmarks.programs …`; killed at the end."""
    log = folder / f"{command[0]}-{time.monotonic_ns()}.log"
    log.touch()
    one = Program(command, conf, log, done)
    try:
        if ready:
            one.wait_for(ready)
        yield one
    finally:
        one.stop()
