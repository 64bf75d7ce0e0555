"""Frees what a dead child of a worker held.

No hook of Celery runs for every kind of death, and the one for a hard time limit runs before the child is dead. So the
processes themselves are watched: each child that was given one of our tasks has a pidfd, which becomes readable the moment
the process is gone, however it went. Only then are exactly its leases freed, by the name that they carry
(`process.process_id`), which is never used again. A lease whose row is locked, as the server still ends the statement of
the dead child, is asked for again.

The ttl is the backstop: for a lost main process, a lost host, or a database that does not answer.
"""

from __future__ import annotations

import dataclasses
import os
import select
import threading
from pathlib import Path
from typing import Any

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.lease import MAX_TTL
from celery_syncguard.core.loop import Bell, Loop
from celery_syncguard.core.outbox import Letter
from celery_syncguard.core.process import child_process_id, process_id
from celery_syncguard.core.store import LockStore
from celery_syncguard.errors import StoreUnavailable, SyncGuardError

__all__ = ["Undertaker", "undertaker"]

#: Seconds between two looks at processes that have no pidfd.
_LOOKS = 0.2


@dataclasses.dataclass(slots=True, eq=False)
class _Child:
    pid: int
    fd: int  # its pidfd, or -1 where the system has none
    birth: str | None
    replaced: bool = False

    @property
    def gone(self) -> bool:
        """Whether another look than that of its pidfd says that it is dead."""
        return self.replaced or (birth := _birth(self.pid)) is None or birth != self.birth


class Undertaker:
    """Of a worker's main process: one thread that waits for deaths. The outbox buries."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._owner = process_id()
        self._mutex = threading.Lock()
        self._watched: dict[str, _Child] = {}  # by the name that its leases carry
        self._epoll: Any = None
        self._loop = Loop("syncguard-undertaker", self._step)
        self._worker: Any = None
        self._state: Any = None
        self._guard: Any = None

    @property
    def at_work(self) -> bool:
        """Whether this is the main process of a worker that has not ended."""
        return self._state is not None and self._owner == process_id()

    @property
    def is_bound(self) -> bool:
        """Whether this process is a worker's, or a child of one."""
        return self._worker is not None

    def bind(self, worker: Any, state: Any) -> None:
        """For the worker, and the state of its application."""
        self._reset()
        self._worker = worker
        self._state = state
        # Made now, as a signal handler must not.
        self._guard = state.guard

    def watch(self, pid: int) -> None:
        """This child was given one of our tasks."""
        if not self.at_work or pid == os.getpid() or self._worker.pool_cls.is_green:
            return  # no child; a pool of greenlets gives the number of one
        name = child_process_id(pid)
        if name is None or name in self._watched:
            return
        try:
            fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        except ProcessLookupError:
            self._bury(name, pid)
            return
        except OSError:
            fd = -1
        with self._mutex:
            for other in list(self._watched.values()):
                # Its pid is used again, so it is dead. All that a system without pidfd and /proc tells.
                other.replaced = other.replaced or other.pid == pid
            self._watched[name] = _Child(pid, fd, _birth(pid))
            if fd >= 0:
                # Unlike a poll, it may be added to while the thread waits.
                self._epoll = self._epoll or select.epoll()
                self._epoll.register(fd, select.EPOLLIN)
        self._loop.start()

    def stop(self) -> None:
        """At the end of the main process: free what its dead children held, for a second or so."""
        if not self.at_work:
            return
        self._loop.stop(wait=False)
        outbox = self._guard.outbox
        until = clock.now() + 1.0
        # A cold shutdown has just killed the children.
        while (outbox.waiting or any(child.gone for child in list(self._watched.values()))) and clock.now() < until:
            self._look(0.05)
            if self._epoll is None:
                Bell().wait(0.05)
            try:
                outbox.deliver()
            except SyncGuardError as exc:
                if not (isinstance(exc, StoreUnavailable) and exc.busy):
                    break
        self._state.close()
        self._state = None

    def _step(self) -> float | None:
        self._look(1.0)
        return _LOOKS if self._epoll is None else 0.0

    def _look(self, timeout: float) -> None:
        """Wait a moment for a death, where the system can tell of one, and bury who is dead."""
        # Before the wait: another thread (at the stop) may bury one of these and close its fd, which a new child then has.
        children = list(self._watched.items())
        if any(child.fd < 0 for _, child in children):
            timeout = min(timeout, _LOOKS)
        ready = {fd for fd, _ in self._epoll.poll(timeout)} if self._epoll is not None else set()
        for name, child in children:
            if name in self._watched and (child.fd in ready or (child.fd < 0 and child.gone)):
                # Before it is forgotten: at any moment the stop sees the one or the other.
                self._bury(name, child.pid)
                if self._watched.pop(name, None) is not None and child.fd >= 0:
                    self._epoll.unregister(child.fd)
                    os.close(child.fd)
        # For what was put in without starting its thread.
        self._guard.outbox.start()

    def _bury(self, name: str, pid: int) -> None:
        store: LockStore = self._guard.store

        def call() -> None:
            buried = store.release_process(name)
            if buried.freed:
                logger.warning("child process %d is dead: freed %d lease(s) that it held", pid, buried.freed)
            if buried.busy:
                raise StoreUnavailable(
                    f"{buried.busy} lease(s) of the dead child process {pid} are in use on the server", busy=True
                )

        def loss() -> None:
            logger.error("could not free what the dead child process %d held: it is free when its ttl is over", pid)

        self._guard.outbox.put(Letter(call, loss, until=clock.now() + MAX_TTL, about=name))


def _birth(pid: int) -> str | None:
    """When the process that has this pid began, as the system counts; empty where it does not say. None: it is dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in ("Z", "X") else fields[19]


undertaker = Undertaker()
