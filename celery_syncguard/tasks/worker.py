"""In a worker's main process: checks at the start, and the undertaker.

The undertaker frees what a dead child held. No hook of Celery runs for every kind of death, and the one for a hard time
limit runs before the child is dead, so the processes themselves are watched: each child that was given one of our tasks
has a pidfd in one poll set, which becomes readable the moment the process is gone, however it went. Only then are
exactly its leases freed, by the name that the child's leases carry (`process.process_id`), which is never used again. A lease
whose row is locked, as the server still ends the statement of the dead child, is asked for again, and holds up nobody else's.

The ttl is the backstop: for a lost main process, a lost host, or a database that does not answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import task_revoked
from celery.worker.request import Request

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.loop import Bell, Loop
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.process import child_process_id, process_id
from celery_syncguard.errors import StoreUnavailable, SyncGuardError
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.connection import describe_dsn
from celery_syncguard.postgres.store import PostgresStore
from celery_syncguard.tasks.billiard_internals import cause_of
from celery_syncguard.tasks.celery_internals import SeesReturn, active_requests, headers_of, refuse_unfit_worker
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.task import LockedTask

__all__ = ["GuardedRequest", "is_worker", "start", "stop"]

#: Seconds for which freeing a dead child's leases is tried again.
_PATIENCE = 3600.0


def start(worker: Any, binding: Any) -> None:
    """Check settings, server and schema before the worker takes its first task.

    Raises:
        SystemExit: with one line that names the fix.
    """
    try:
        with _driver_muted():
            check(binding)
    except SyncGuardError as exc:
        # Logging is not set up yet, and a handler's exceptions would be swallowed: only SystemExit gets through. One line,
        # whatever libpq's message was laid out like.
        sys.stderr.write(f"celery-syncguard: {' '.join(_advice(exc, binding).split())}\n")
        raise SystemExit(78) from None  # EX_CONFIG
    _undertaker.bind(worker, binding)


@contextlib.contextmanager
def _driver_muted() -> Iterator[None]:
    """The pool logs each attempt that fails. Without logging set up that goes to stderr, and says less than we do."""
    log = logging.getLogger("psycopg.pool")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _advice(exc: SyncGuardError, binding: Any) -> str:
    if isinstance(exc, StoreUnavailable) and not exc.sent:
        # The reason is a server's or libpq's, and they do not know where the address came from.
        where = describe_dsn(binding.settings.dsn)
        return f"{exc}: check that the server runs, and that syncguard_dsn leads to it (now: {where})"
    return str(exc)


def check(binding: Any) -> None:
    """Raises SyncGuardError unless this application's database, and this Celery, can be used for locks."""
    refuse_unfit_worker(LockedTask)
    guard = binding.guard
    store = guard.store
    if isinstance(store, MemoryStore):
        logger.warning("syncguard_dsn is memory://: locks are seen by this process only")
        return
    if isinstance(store, PostgresStore):
        store.run(_check_server)
        store.run(
            lambda conn: migrate.check(conn, schema=guard.settings.schema, where=describe_dsn(guard.settings.dsn))
        )
        # Nothing may be left open for the children to inherit.
        binding.close()


def _check_server(conn: Any) -> None:
    row = conn.execute("SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')").fetchone()
    if row[0]:
        raise SyncGuardError("the server is a standby (in recovery): point syncguard_dsn at the primary")
    if row[1] == "on":
        raise SyncGuardError("default_transaction_read_only is on for this role or database: locks need to write")


def is_worker() -> bool:
    """Whether this process is a worker's, or a child of one."""
    return _undertaker.is_bound


def stop() -> None:
    """At the end of a worker's main process: free what its dead children held, for at most a second."""
    _undertaker.stop()


class GuardedRequest(SeesReturn, Request):  # type: ignore[misc]
    """A message for one of our tasks, in the worker's main process."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        super().on_accepted(pid, time_accepted)
        _undertaker.watch(pid)

    def cancel(self, pool: Any, signal: Any = None, **rest: Any) -> None:
        """A cold shutdown cuts the task off, perhaps from inside a signal handler. What else Celery asks for depends on
        its version: `emit_retry` is unknown to 5.4 and 5.5.
        """
        super().cancel(pool, signal, **rest)
        _undertaker.cut_off(self)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        super().on_timeout(soft, timeout)
        if not soft and not self.comes_again:
            self._end_claim()

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        exc = cause_of(exc_info.exception)
        answer = super().on_failure(exc_info, *args, **kwargs)
        if self._is_lost(exc) and not self.comes_again:
            self._end_claim()
        return answer

    def _is_lost(self, exc: BaseException) -> bool:
        """Whether the body was cut off in mid-course. Since billiard 4.3 an exit of its own is told before its process
        ends; one by our signal has been seen to where that was sent.
        """
        if isinstance(exc, (SystemExit, KeyboardInterrupt)):
            return not self.was_ended
        return isinstance(exc, (WorkerLostError, TimeLimitExceeded))

    def _end_claim(self) -> None:
        claim_key = Header.claim_in(headers_of(self))
        if claim_key is not None:
            _undertaker.end_claim(claim_key, self.id)


@task_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
def _on_revoked(request: Any = None, **_: Any) -> None:
    # Revoked, expired or terminated: the only thing that Celery says of it, and only in the main process.
    claim_key = Header.claim_in(headers_of(request))
    if claim_key is not None:
        _undertaker.end_claim(claim_key, request.id)


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


@dataclasses.dataclass(slots=True, eq=False)
class _Work:
    do: Callable[[Any], bool]  # false: not yet possible
    loss: str  # what it means if it is never done
    until: float
    at: float = -math.inf
    pause: float = 0.1


class _Naps:
    """In place of `select.poll` where there is none, as on Windows. Nor are there pidfds, so all that comes is a wake-up."""

    def __init__(self) -> None:
        self._bell = Bell()
        self.wake = self._bell.set

    def register(self, *_: Any) -> None:
        pass

    def unregister(self, *_: Any) -> None:
        pass

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self._bell.wait(milliseconds / 1000)
        self._bell.clear()
        return []


class _Undertaker:
    """One thread that waits for deaths and does what has to be done then."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._owner = process_id()
        self._mutex = threading.Lock()
        self._watched: dict[str, _Child] = {}  # by the name that its leases carry
        self._work: deque[_Work] = deque()
        self._poll: Any = None
        self._wake_fds: tuple[int, int] | None = None
        self._loop = Loop("syncguard-undertaker", self._step)
        self._worker: Any = None
        self._binding: Any = None

    @property
    def is_bound(self) -> bool:
        return self._worker is not None

    def bind(self, worker: Any, binding: Any) -> None:
        self._reset()
        self._worker = worker
        self._binding = binding

    def watch(self, pid: int) -> None:
        if self._binding is None or self._owner != process_id():
            return
        if pid == os.getpid() or self._worker.pool_cls.is_green:
            return  # no child; a pool of greenlets gives the number of one
        name = child_process_id(pid)
        if name is None or name in self._watched:
            return
        try:
            fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        except ProcessLookupError:
            self._do(_burial(name, pid))
            return
        except OSError:
            fd = -1
        with self._mutex:
            self._prepare()
            for other in self._watched.values():
                # Its pid is used again, so it is dead. All that a system without pidfd and /proc tells.
                other.replaced = other.replaced or other.pid == pid
            self._watched[name] = _Child(pid, fd, _birth(pid))
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)
        self._wake()

    def cut_off(self, request: GuardedRequest) -> None:
        """End the claim of a task that will not end by itself. If it acknowledges late, its message comes again.

        Takes no lock, as a signal handler calls it: the work is done at the thread's next turn, or at the stop.
        """
        key = Header.claim_in(headers_of(request))
        if key is not None and not request.task.acks_late:
            self._work.append(_end_of_claim(key, request.id))

    def end_claim(self, key: str, task_id: str) -> None:
        if self._binding is not None and self._owner == process_id():
            self._do(_end_of_claim(key, task_id))

    def _do(self, work: _Work) -> None:
        with self._mutex:
            self._prepare()
            self._work.append(work)
        self._wake()

    def _prepare(self) -> None:
        if self._poll is None and not hasattr(select, "poll"):
            self._poll = _Naps()
        elif self._poll is None:
            self._poll = select.poll()
            self._wake_fds = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
            self._poll.register(self._wake_fds[0], select.POLLIN)

    def _wake(self) -> None:
        self._loop.start()
        self._break_poll()

    def _break_poll(self) -> None:
        if self._wake_fds is not None:
            with contextlib.suppress(BlockingIOError):  # enough wake-ups are under way
                os.write(self._wake_fds[1], b"x")
        elif self._poll is not None:
            self._poll.wake()

    def _step(self) -> float | None:
        self._look()
        # After a failure not at once: others would only fail in the same way.
        return 0.0 if self._work_off() else 0.5

    def _look(self) -> None:
        """Wait a moment for a death or for work; what a death makes necessary becomes work."""
        with self._mutex:
            blind = any(child.fd < 0 for child in self._watched.values())
        ready = {fd for fd, _ in self._poll.poll(200 if blind or self._work else 1000)}
        if self._wake_fds is not None and self._wake_fds[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_fds[0], 4096)
        for name, child in list(self._watched.items()):
            if child.fd in ready or (child.fd < 0 and child.gone):
                with self._mutex:
                    del self._watched[name]
                    if child.fd >= 0:
                        self._poll.unregister(child.fd)
                if child.fd >= 0:
                    os.close(child.fd)
                self._work.append(_burial(name, child.pid))

    def _work_off(self) -> bool:
        """False: the database does not answer, and the rest has to wait too."""
        for _ in range(len(self._work)):
            try:
                work = self._work.popleft()
            except IndexError:  # at the stop, where the thread may still be at its last step
                break
            now = clock.now()
            if now < work.at:
                self._work.append(work)
                continue
            try:
                done = work.do(self._binding.guard.store)
            except SyncGuardError as exc:
                self._again(work)
                logger.warning("could not free what a dead task held, trying again: %s", exc)
                return False
            if not done:
                # What holds it up is its own: the others do not wait for that.
                work.pause = min(2 * work.pause, 2.0)
                work.at = now + work.pause
                self._again(work)
        return True

    def _again(self, work: _Work) -> None:
        if clock.now() < work.until:
            self._work.append(work)
        else:
            logger.error("%s", work.loss)

    def stop(self) -> None:
        if self._binding is None or self._owner != process_id():
            return
        until = clock.now() + 1.0
        self._loop.stop(wait=False)
        self._break_poll()
        self._loop.stop(timeout=0.5)
        # A cold shutdown has just killed the children: see them off, within reason.
        for request in active_requests():
            if isinstance(request, GuardedRequest):
                self.cut_off(request)
        answers = self._work_off()
        while answers and clock.now() < until and (self._work or any(one.gone for one in self._watched.values())):
            self._look()
            answers = self._work_off()
        for work in self._work:
            logger.error("%s", work.loss)
        self._work.clear()
        self._binding.close()
        self._binding = None


def _burial(name: str, pid: int) -> _Work:
    def bury(store: Any) -> bool:
        buried = store.release_process(name)
        if buried.freed:
            logger.warning("child process %d is dead: freed %d lease(s) that it held", pid, buried.freed)
        return not buried.busy

    loss = f"could not free what the dead child process {pid} held: it is free when its ttl is over"
    return _Work(bury, loss, clock.now() + _PATIENCE)


def _end_of_claim(key: str, task_id: str) -> _Work:
    def end(store: Any) -> bool:
        store.unclaim(key, task_id=task_id)
        return True

    loss = f"could not end the claim {key!r} of task {task_id}: the same work counts as queued until dedup_ttl is over"
    return _Work(end, loss, clock.now() + _PATIENCE)


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


_undertaker = _Undertaker()
