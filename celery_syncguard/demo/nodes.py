"""Celery processes of the demo: real `celery worker` and `celery beat`, each in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["Node"]


class Node:
    """One celery process and its children."""

    def __init__(self, name: str, arguments: list[str], *, folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._arguments = arguments
        self._folder = folder
        self._environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "celery_syncguard.demo.app", *self._arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """To the whole group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """As if the host were gone. May be called twice."""
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None
