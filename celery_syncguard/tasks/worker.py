"""In a worker's main process: the checks at its start, and the end of the claims of messages that do not end in a child:
revoked, expired, cut off, or their child died.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import task_revoked
from celery.worker.request import Request

from celery_syncguard.core.events import logger
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.errors import StoreUnavailable, SyncGuardError
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.connection import describe_dsn
from celery_syncguard.postgres.store import PostgresStore
from celery_syncguard.tasks import app_state, claims
from celery_syncguard.tasks.billiard_internals import cause_of
from celery_syncguard.tasks.celery_internals import SeesReturn, active_requests, headers_of, refuse_unfit_worker
from celery_syncguard.tasks.claims import Outcome
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.task import LockedTask
from celery_syncguard.tasks.undertaker import undertaker

__all__ = ["GuardedRequest", "start", "stop"]


def start(worker: Any, state: Any) -> None:
    """Check settings, server and schema before the worker takes its first task.

    Raises:
        SystemExit: with one line that names the fix.
    """
    try:
        with _driver_muted():
            check(state)
    except SyncGuardError as exc:
        # Logging is not set up yet, and a handler's exceptions would be swallowed: only SystemExit gets through. One line,
        # whatever libpq's message was laid out like.
        sys.stderr.write(f"celery-syncguard: {' '.join(_advice(exc, state).split())}\n")
        raise SystemExit(78) from None  # EX_CONFIG
    undertaker.bind(worker, state)


@contextlib.contextmanager
def _driver_muted() -> Iterator[None]:
    """The pool logs each attempt that fails. Without logging set up that goes to stderr, and says less than we do."""
    log = logging.getLogger("psycopg.pool")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _advice(exc: SyncGuardError, state: Any) -> str:
    if isinstance(exc, StoreUnavailable) and not exc.sent:
        # The reason is a server's or libpq's, and they do not know where the address came from.
        where = describe_dsn(state.settings.dsn)
        return f"{exc}: check that the server runs, and that syncguard_dsn leads to it (now: {where})"
    return str(exc)


def check(state: Any) -> None:
    """Raises SyncGuardError unless this application's database can be used for locks."""
    refuse_unfit_worker(LockedTask)
    guard = state.guard
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
        state.close()


def _check_server(conn: Any) -> None:
    row = conn.execute("SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')").fetchone()
    if row[0]:
        raise SyncGuardError("the server is a standby (in recovery): point syncguard_dsn at the primary")
    if row[1] == "on":
        raise SyncGuardError("default_transaction_read_only is on for this role or database: locks need to write")


def stop() -> None:
    """At the end of a worker's main process."""
    if undertaker.at_work:
        for request in active_requests():
            if isinstance(request, GuardedRequest):
                # A cold shutdown has just cut it off.
                request.end_if_cut_off()
        undertaker.stop()


class GuardedRequest(SeesReturn, Request):  # type: ignore[misc]
    """A message for one of our tasks, in the worker's main process."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        super().on_accepted(pid, time_accepted)
        undertaker.watch(pid)

    def cancel(self, pool: Any, signal: Any = None, **rest: Any) -> None:
        """A cold shutdown cuts the task off, perhaps from inside a signal handler. What else Celery asks for depends on
        its version: `emit_retry` is unknown to 5.4 and 5.5.
        """
        super().cancel(pool, signal, **rest)
        self.end_if_cut_off()

    def end_if_cut_off(self) -> None:
        """End the claim of a task that will not end by itself. If it acknowledges late, its message comes again."""
        if not self.task.acks_late:
            self._end_claim(start=False)

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
        ends; a process that our signal ended is handled where the signal was sent.
        """
        if isinstance(exc, (SystemExit, KeyboardInterrupt)):
            return not self.was_ended
        return isinstance(exc, (WorkerLostError, TimeLimitExceeded))

    def _end_claim(self, *, start: bool = True) -> None:
        _end_claim(self.app, headers_of(self), self.id, start=start)


@task_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
def _on_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    # Revoked, expired or terminated: the only thing that Celery says of it, and only in the main process.
    _end_claim(sender.app, headers_of(request), request.id)


def _end_claim(app: Any, headers: Mapping[str, Any] | None, task_id: str, *, start: bool = True) -> None:
    """In the background: the main process must not wait for the database."""
    claim_key = Header.claim_in(headers)
    if claim_key is not None:
        claims.end(app_state.guard_for(app), claim_key, Outcome.VOID, task_id=task_id, later=True, start=start)
