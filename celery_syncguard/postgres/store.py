"""The PostgreSQL store: one SQL function per operation (migrations), one round trip and one commit each.

A statement is repeated on a fresh connection when its connection broke or the server was restarting, for `timeout`
seconds in all. That is safe because every operation may be repeated: an acquire with the same lock_id returns the same
grant.

Not here: connections (`connection`, `pool`), what an error means (`facts`), waiting for a release (`listen`), the text of
the functions (`migrations/`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Any, TypeVar

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.process import forget_in_children
from celery_syncguard.core.store import (
    Acquire,
    Buried,
    Claim,
    Dead,
    Done,
    Grant,
    Held,
    LockRow,
    Pruned,
    Release,
    Renewal,
)
from celery_syncguard.errors import StoreUnavailable, SyncGuardError
from celery_syncguard.postgres.adapters import adapter_for
from celery_syncguard.postgres.connection import Connection, connection_parameters, describe_dsn
from celery_syncguard.postgres.facts import PLACE, Busy, Facts, fact_of_caller, may_pass, not_visible
from celery_syncguard.postgres.hosts import Hosts
from celery_syncguard.postgres.listen import Listener
from celery_syncguard.postgres.pool import Connections

__all__ = ["PostgresStore"]

T = TypeVar("T")

#: Fences from here on work, but the counter of that key has been tampered with or a clock was far in the future.
WARN_FENCE = 90_000_000_000_000

#: With numbered places for `Connection.call`, with %s for a cursor, ours or the caller's.
_QUERIES = {
    "acquire": "select to_json({}syncguard_acquire($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13))",
    "renew": "select lock_id, expires_at_ms from {}syncguard_renew(%s, %s, %s)",
    "release": "select to_json({}syncguard_release($1, $2, $3, $4, $5, $6, $7, $8, $9))",
    "release_process": "select to_json({}syncguard_release_process($1))",
    "list": "select * from {}syncguard_list(%s, %s)",
    "prune": "select to_json({}syncguard_prune($1, $2))",
    "wait": "select to_json({}syncguard_wait($1, $2))",
    # Without waiting for the disk: its confirmation waits, and nothing relies on the claim before that.
    "claim": "select to_json(claim) from set_config('synchronous_commit', 'off', true), "
    "{}syncguard_claim($1, $2, $3, $4, $5, $6) as claim",
    "confirm": "select to_json({}syncguard_confirm($1, $2, $3))",
    "unclaim": "select to_json({}syncguard_unclaim($1, $2))",
    "fenced": "select {}syncguard_fenced(%s, %s, %s, %s)",
    "complete": "select {}syncguard_complete(%s, %s, %s, %s)",
}


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))


def _instant(ms: int) -> datetime:
    try:
        return datetime.fromtimestamp(ms / 1000, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        # Another client wrote it. A row that is wrong is shown all the same.
        return datetime(9999 if ms > 0 else 1, 1, 1, tzinfo=timezone.utc)


class PostgresStore:
    """Locks in a PostgreSQL database.

    Arguments:
        dsn: a libpq connection string or URL.
        schema: of our tables and functions; None: the first of the search path.
        pool_size: connections per process, one of which is only for renewing while the others are busy.
        timeout: seconds for which an operation tries to reach the server.

    Raises:
        ImproperlyConfigured: the dsn is empty or no PostgreSQL connection string. Nothing is connected to here.
    """

    def __init__(self, dsn: str, *, schema: str | None = None, pool_size: int = 2, timeout: float = 5.0) -> None:
        self.dsn = dsn
        self.schema = schema
        self.timeout = timeout
        self._hosts = Hosts(connection_parameters(dsn, timeout=timeout))
        self._connections = Connections(self._hosts, size=pool_size - 1, timeout=timeout)
        self._facts = Facts(dsn, schema)
        self._listener = Listener(self._connections.keep())
        # Quoted here and not by psycopg, as some are sent on the caller's connection.
        self._prefix = "" if schema is None else '"' + schema.replace('"', '""') + '".'
        # In a query with %s, a % of the schema's name would be read as a placeholder.
        escaped = self._prefix.replace("%", "%%")
        self._queries = {
            name: query.format(escaped if "%s" in query else self._prefix).encode() for name, query in _QUERIES.items()
        }
        forget_in_children(self)

    def __repr__(self) -> str:
        return f"<PostgresStore {describe_dsn(self.dsn)}>"

    # Locks

    def acquire(self, request: Acquire) -> Grant | Held | Done | Dead:
        parameters = (
            request.key,
            request.lock_id,
            _ms(request.ttl),
            request.holder,
            request.process,
            request.task_id,
            request.attempt,
            request.run_keys or None,
            request.max_deaths,
            request.claim_key,
            _ms(request.claim_ttl),
            request.call_id,
            _ms(request.claim_wait),
        )
        # A deadline does not count from here: a busy process may queue for a connection for longer than a ttl. But from the
        # first time it is sent, because a repeated request returns the same grant.
        sent: list[float] = []

        def ask(conn: Connection) -> Any:
            sent.append(clock.now())
            return conn.call(self._queries["acquire"], parameters)

        row = self.run(ask)
        outcome, now_ms, fence = row["outcome"], row["now_ms"], row["fence"]
        acquired, expires = row["acquired_at_ms"], row["expires_at_ms"]
        if outcome == "granted":
            if fence >= WARN_FENCE:
                logger.warning("the fence counter of %r is at %d: was a server clock far ahead?", request.key, fence)
            return Grant(request.key, row["lock_id"], fence, _instant(acquired), _instant(expires), sent_at=sent[0])
        if outcome == "done":
            return Done(row["run_key"], row["task_id"], (now_ms - acquired) / 1000, row["fingerprint"])
        if outcome == "dead":
            return Dead(deaths=row["deaths"], of_task=row["task_id"] is not None)
        return Held(
            key=request.key,
            lock_id=row["lock_id"],
            fence=fence,
            since=0.0 if acquired is None else (now_ms - acquired) / 1000,
            remaining=0.0 if expires is None else max(0.0, (expires - now_ms) / 1000),
            holder=row["holder"],
            task_id=row["task_id"],
            attempt=row["attempt"],
            call_id=row["call_id"],
        )

    def renew(self, renewals: Sequence[Renewal]) -> dict[str, bool | None]:
        parameters = (
            [one.key for one in renewals],
            [one.lock_id for one in renewals],
            [_ms(one.ttl) for one in renewals],
        )
        try:
            with self._facts, self._connections.lend(renewal=True) as conn:
                rows = conn.execute(self._queries["renew"], parameters).fetchall()
        except Busy:
            return {one.lock_id: None for one in renewals}
        answer: dict[str, bool | None] = {}
        for lock_id, expires in rows:
            answer[lock_id] = True if expires is not None else answer.get(lock_id)
        return answer

    def release(self, release: Release) -> bool:
        parameters = (
            release.key,
            release.lock_id,
            _ms(release.min_hold),
            release.task_id,
            release.run_key,
            _ms(release.run_ttl),
            release.claim_key,
            release.attempt_done,
            release.fingerprint,
        )
        try:
            return bool(self._call("release", parameters))
        except Busy as exc:
            raise Busy(
                f"the lock row of {release.key!r} is locked by another transaction: one that called fenced() and has not "
                f"ended, or a renewal whose commit waits"
            ) from exc

    def release_process(self, process: str) -> Buried:
        return Buried(**self._call("release_process", (process,)))

    def locks(self, key: str | None = None, *, limit: int | None = None) -> list[LockRow]:
        rows = self.run(lambda conn: conn.execute(self._queries["list"], (key, limit)).fetchall())
        return [
            LockRow(
                key=name,
                lock_id=lock_id,
                fence=int(fence) if fence.isascii() and fence.isdigit() else fence,
                acquired_at=_instant(acquired),
                expires_at=_instant(expires),
                since=(now_ms - acquired) / 1000,
                remaining=(expires - now_ms) / 1000,
                holder=holder,
                task_id=task_id,
                attempt=attempt,
            )
            for name, lock_id, fence, acquired, expires, now_ms, holder, task_id, attempt in rows
        ]

    def prune(self, *, older: float, counters: bool = False) -> Pruned:
        return Pruned(**self._call("prune", (round(older * 1000), counters)))

    def wait(self, key: str, timeout: float) -> bool:
        def ask() -> bool:
            return bool(self._call("wait", (key, 10_000)))

        try:
            return self._listener.wait(key, timeout, ask)
        except Busy:
            # The holder's row is in use: it is held as before, and its release could not be asked to tell us.
            return False

    # Claims

    def claim(
        self,
        key: str,
        *,
        task_id: str,
        ttl: float,
        holder: str | None = None,
        again: bool = False,
        fingerprint: str | None = None,
    ) -> Claim:
        row = self._call("claim", (key, task_id, _ms(ttl), holder, again, fingerprint))
        return Claim(
            key=key,
            task_id=row["task_id"],
            ours=row["outcome"] == "claimed",
            age=max(0.0, (row["now_ms"] - row["claimed_at_ms"]) / 1000),
            remaining=max(0.0, (row["expires_at_ms"] - row["now_ms"]) / 1000),
            holder=row["holder"],
            fingerprint=row["fingerprint"],
        )

    def confirm(self, claims: Sequence[tuple[str, str, float]]) -> int:
        keys, tasks, ttls = zip(*claims, strict=True)
        return int(self._call("confirm", (keys, tasks, tuple(map(_ms, ttls)))))

    def unclaim(self, key: str, *, task_id: str) -> bool:
        return bool(self._call("unclaim", (key, task_id)))

    # In the caller's transaction

    def fenced(self, conn: Any, *, key: str, lock_id: str, fence: int) -> bool:
        if self._in_caller(conn, "fenced", (key, lock_id, fence, adapter_for(conn).in_test_case())):
            return True
        # It may be alive where the caller's connection does not see it.
        function = f"{self._prefix}syncguard_fenced(text, text, bigint, boolean)"
        try:
            if all(row.lock_id != lock_id for row in self.locks(key)):
                return False
            there = self.run(lambda own: own.execute(PLACE, (function,)).fetchall())[0]
        except SyncGuardError:
            return False  # nothing contradicts the caller's connection
        unseen = not_visible(key, here=adapter_for(conn).rows(PLACE, (function,))[0], there=there)
        if unseen is not None:
            raise unseen
        return False

    def complete(
        self, conn: Any, *, run_key: str, task_id: str | None, ttl: float, fingerprint: str | None = None
    ) -> bool:
        return bool(self._in_caller(conn, "complete", (run_key, task_id, _ms(ttl), fingerprint)))

    def _in_caller(self, conn: Any, name: str, parameters: tuple[Any, ...]) -> Any:
        adapter = adapter_for(conn)
        try:
            return adapter.rows(self._queries[name].decode(), parameters)[0][0]
        except Exception as exc:
            ours = fact_of_caller(exc, name, key=parameters[0], kind=adapter.kind, dsn=self.dsn)
            if ours is None:
                raise
            raise ours from exc

    # Life

    def idle(self) -> float | None:
        """Close the connection reserved for renewals if it is idle; seconds until that is due, or None."""
        return self._connections.reserved.close_if_idle()

    def connection(self) -> AbstractContextManager[Connection]:
        """A connection for statements that are not operations on locks (`doctor`, beat)."""
        return self._connections.lend()

    def forget(self) -> None:
        self._hosts.forget()
        self._connections.forget()
        self._listener.forget()

    def close(self) -> None:
        self._listener.close()
        self._connections.close()

    # One statement

    def run(self, work: Callable[[Connection], T]) -> T:
        """`work(connection)`, repeated on another connection while the server cannot be reached.

        The work must be one that may be repeated.

        Raises:
            StoreUnavailable: not within `timeout` seconds, or for a reason that time does not cure.
            SchemaBehind: our functions or tables are missing, or are not for this role.
        """
        give_up_at = clock.now() + self.timeout
        attempt = 0
        sent = False
        while True:
            try:
                with self._facts, self._connections.lend() as conn:
                    sent = True
                    return work(conn)
            except StoreUnavailable as exc:
                left = give_up_at - clock.now()
                # Where the server answered that it did not, an attempt before that may have.
                exc.sent = sent and not (exc.busy and attempt == 0)
                if not may_pass(exc.__cause__) or left <= 0:
                    raise
                if attempt:
                    threading.Event().wait(min(left, random.uniform(0.01, 0.05 * 2 ** min(attempt, 5))))
                attempt += 1

    def _call(self, name: str, parameters: tuple[Any, ...]) -> Any:
        return self.run(lambda conn: conn.call(self._queries[name], parameters))
