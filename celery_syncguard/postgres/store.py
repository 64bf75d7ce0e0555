"""The PostgreSQL store: one SQL function per operation (migrations), one round trip and one commit each.

A statement is repeated on a fresh connection when its connection broke or the server was restarting, for `timeout`
seconds in all. That is safe because every operation may be repeated: an acquire with the same lock_id answers with the
same grant. Errors become facts: what cannot be asked is `StoreUnavailable`, what lacks our functions is `SchemaBehind`,
and so is a wait that hit the lock_timeout: it says nothing about who holds.

Not here: connections (`connection`, `pool`), waiting for a release (`listen`), the text of the functions (`migrations/`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg import sql

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
from celery_syncguard.errors import InvalidKey, LeaseNotVisible, SchemaBehind, StoreUnavailable, SyncGuardError
from celery_syncguard.postgres.adapters import InSavepoint, adapter_for
from celery_syncguard.postgres.connection import Connection, connection_parameters, describe_dsn, in_statement_mode
from celery_syncguard.postgres.hosts import Hosts
from celery_syncguard.postgres.listen import Listener
from celery_syncguard.postgres.pool import Pool, Session

__all__ = ["PostgresStore"]

T = TypeVar("T")

#: Fences from here on work, but the counter of that key has been tampered with or a clock was far in the future.
WARN_FENCE = 90_000_000_000_000

#: With numbered places for `Connection.call`, others for a cursor.
_QUERIES = {
    "acquire": "select to_json({}syncguard_acquire($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13))",
    "renew": "select lock_id, expires_at_ms from {}syncguard_renew(%s, %s, %s)",
    "release": "select to_json({}syncguard_release($1, $2, $3, $4, $5, $6, $7, $8, $9))",
    "release_process": "select to_json({}syncguard_release_process($1))",
    "list": "select * from {}syncguard_list(%s, %s)",
    "prune": "select to_json({}syncguard_prune($1, $2))",
    "wait": "select to_json({}syncguard_wait($1, $2))",
    # Without waiting for the disk: its confirmation waits, before which nobody relies on it.
    "claim": "select to_json(claim) from set_config('synchronous_commit', 'off', true), "
    "{}syncguard_claim($1, $2, $3, $4, $5, $6) as claim",
    "confirm": "select to_json({}syncguard_confirm($1, $2, $3))",
    "unclaim": "select to_json({}syncguard_unclaim($1, $2))",
    "fenced": "select {}syncguard_fenced(%s, %s, %s, %s)",
    "complete": "select {}syncguard_complete(%s, %s, %s, %s)",
}

#: Which server, database and schema a connection leads to, for comparing and for people. Addresses differ by the way in.
_PLACE = """
select concat_ws('/', extract(epoch from pg_postmaster_start_time()), databases.oid, functions.pronamespace),
    concat(
        'database ', quote_ident(databases.datname),
        ', schema ', functions.pronamespace::regnamespace,
        ', at ', coalesce(host(inet_server_addr()), 'the local socket'), ':', current_setting('port')
    ),
    current_setting('transaction_isolation')
from pg_database as databases
left join pg_proc as functions on functions.oid = to_regprocedure(%s)
where databases.datname = current_database()
"""

#: The connection is gone or of no use, or the server is going down, coming up or full: another one may work.
_TRANSIENT = (psycopg.OperationalError, psycopg.InterfaceError, pg.SerializationFailure, pg.DeadlockDetected)

#: Operational errors that another connection would only meet again.
_FINAL = (
    pg.LockNotAvailable,
    pg.QueryCanceled,
    pg.InvalidPassword,
    pg.InvalidAuthorizationSpecification,
    pg.ProtocolViolation,
)

_MISSING = (pg.UndefinedFunction, pg.UndefinedTable, pg.UndefinedColumn, pg.InvalidSchemaName)


class _Busy(StoreUnavailable):
    """A wait for a row on the server came to its bound, the lock_timeout."""

    busy = True


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


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
        self._pool = Pool(self._hosts, size=pool_size - 1, timeout=timeout)
        self._standing = Session(self._hosts, timeout=timeout)
        self._listener = Listener(self._hosts, timeout=timeout)
        self._queries: dict[str, bytes] = {}
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
            None if request.claim_ttl is None else _ms(request.claim_ttl),
            request.call_id,
            None if request.claim_wait is None else _ms(request.claim_wait),
        )
        # Not counted from here: a busy process may queue for a connection for longer than a ttl. But from the first time,
        # because a request that is repeated is answered with the same grant.
        sent: list[float] = []

        def ask(conn: Connection) -> Any:
            sent.append(clock.now())
            return conn.call(self._query("acquire", conn), parameters)

        row = self.run(ask)
        outcome, now_ms, fence = row["outcome"], row["now_ms"], row["fence"]
        acquired, expires = row["acquired_at_ms"], row["expires_at_ms"]
        if outcome == "granted":
            if fence >= WARN_FENCE:
                logger.warning("the fence counter of %r is at %d: was a server clock far ahead?", request.key, fence)
            return Grant(
                key=request.key,
                lock_id=row["lock_id"],
                fence=fence,
                acquired_at=_instant(acquired),
                expires_at=_instant(expires),
                sent_at=sent[0],
            )
        if outcome == "done":
            return Done(
                run_key=row["run_key"],
                task_id=row["task_id"],
                age=(now_ms - acquired) / 1000,
                fingerprint=row["fingerprint"],
            )
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
            with self._facts(), self._renewing() as conn:
                rows = conn.execute(self._query("renew", conn), parameters).fetchall()
        except _Busy:
            return {one.lock_id: None for one in renewals}
        answer: dict[str, bool | None] = {}
        for lock_id, expires in rows:
            answer[lock_id] = True if expires is not None else answer.get(lock_id)
        return answer

    @contextmanager
    def _renewing(self) -> Iterator[Connection]:
        # A process that runs one task at a time has nothing to do on its connection while the body runs.
        with self._pool.spare() as conn:
            if conn is not None:
                yield conn
                return
        with self._standing.use() as conn:
            yield conn

    def release(self, release: Release) -> bool:
        parameters = (
            release.key,
            release.lock_id,
            None if release.min_hold is None else _ms(release.min_hold),
            release.task_id,
            release.run_key,
            None if release.run_ttl is None else _ms(release.run_ttl),
            release.claim_key,
            release.attempt_done,
            release.fingerprint,
        )
        try:
            return bool(self._call("release", parameters))
        except _Busy as exc:
            raise StoreUnavailable(
                f"the lock row of {release.key!r} is locked by another transaction: one that called fenced() and has not "
                f"ended, or a renewal whose commit waits"
            ) from exc

    def release_process(self, process: str) -> Buried:
        return Buried(**self._call("release_process", (process,)))

    def locks(self, key: str | None = None, *, limit: int | None = None) -> list[LockRow]:
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
            for name, lock_id, fence, acquired, expires, now_ms, holder, task_id, attempt in self._all(
                "list", (key, limit)
            )
        ]

    def prune(self, *, older: float, counters: bool = False) -> Pruned:
        return Pruned(**self._call("prune", (round(older * 1000), counters)))

    def wait(self, key: str, timeout: float) -> bool:
        def ask() -> bool:
            return bool(self._call("wait", (key, 10_000)))

        try:
            return self._listener.wait(key, timeout, ask)
        except _Busy:
            # The holder's row is in use: it is held as before, and nobody could tell its release that we wait.
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
        self._refuse_if_alive_elsewhere(conn, key, lock_id)
        return False

    def complete(
        self, conn: Any, *, run_key: str, task_id: str | None, ttl: float, fingerprint: str | None = None
    ) -> bool:
        return bool(self._in_caller(conn, "complete", (run_key, task_id, _ms(ttl), fingerprint)))

    def _refuse_if_alive_elsewhere(self, conn: Any, key: str, lock_id: str) -> None:
        """Raise `LeaseNotVisible` if the caller's connection misses a lease that is alive in our database."""
        function = f"{self._prefix()}syncguard_fenced(text, text, bigint, boolean)"
        try:
            if all(row.lock_id != lock_id for row in self.locks(key)):
                return
            where, there, _ = self.run(lambda own: own.execute(_PLACE, (function,)).fetchall())[0]
        except SyncGuardError:
            return  # nobody contradicts the caller's connection
        looked_at, here, isolation = adapter_for(conn).rows(_PLACE, (function,))[0]
        if looked_at != where:
            raise LeaseNotVisible(
                f"the lease on {key!r} is alive in {there}, but this connection leads to {here}: fence a connection to the "
                f"database in which the locks live, or let syncguard_dsn lead to the other",
                key=key,
                here=here,
                there=there,
            )
        if isolation != "read committed":
            raise LeaseNotVisible(
                f"the lease on {key!r} is alive, but this {isolation} transaction is older than the lease: "
                f"roll back, and call lease.fenced() first in a new one",
                key=key,
                here=here,
                there=there,
            )

    def _prefix(self) -> str:
        return "" if self.schema is None else '"' + self.schema.replace('"', '""') + '".'

    def _in_caller(self, conn: Any, name: str, parameters: tuple[Any, ...]) -> Any:
        # The caller's driver may be psycopg2 or Django's, so the schema is quoted here and not by psycopg.
        prefix = self._prefix().replace("%", "%%")
        try:
            return adapter_for(conn).rows(_QUERIES[name].format(prefix), parameters)[0][0]
        except Exception as exc:
            if _sqlstate(exc) == "SG004":
                raise InSavepoint(
                    f"the lease on {parameters[0]!r} is proved inside a savepoint first (a block in an open transaction is one), "
                    f"and a rollback to it would end the proof: call lease.fenced(connection) once in the transaction, before "
                    f"its first savepoint, or use lease.transaction(connection) in place of that savepoint",
                    key=parameters[0],
                    what="lease.fenced()",
                    kind=adapter_for(conn).kind,
                ) from exc
            if name == "fenced" and _sqlstate(exc) == pg.LockNotAvailable.sqlstate:
                raise StoreUnavailable(
                    f"the lock row of {parameters[0]!r} is locked by another transaction: roll back and try again"
                ) from exc
            if "syncguard_" in str(exc) and "does not exist" in str(exc):
                raise SchemaBehind(
                    f"this connection does not see syncguard_{name}(): lease.{name}() needs a connection to the "
                    f"database in which the locks live ({describe_dsn(self.dsn)}), with our schema on its search path "
                    f"or named by syncguard_schema"
                ) from exc
            raise

    # Life

    def idle(self) -> float | None:
        """Close the standing connection if it is idle; seconds until that is due, or None."""
        return self._standing.close_if_idle()

    def connection(self) -> AbstractContextManager[Connection]:
        """A connection of the pool, for statements that are not operations on locks (`doctor`, beat)."""
        return self._pool.connection()

    def forget(self) -> None:
        self._hosts.forget()
        self._pool.forget()
        self._standing.forget()
        self._listener.forget()

    def close(self) -> None:
        self._listener.close()
        self._standing.close()
        self._pool.close()

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
                with self._facts(), self._pool.connection() as conn:
                    sent = True
                    return work(conn)
            except StoreUnavailable as exc:
                left = give_up_at - clock.now()
                # Where the server answered that it did not, an attempt before that may have.
                exc.sent = sent and not (exc.busy and attempt == 0)
                if not isinstance(exc.__cause__, _TRANSIENT) or isinstance(exc.__cause__, _FINAL) or left <= 0:
                    raise
                if attempt:
                    threading.Event().wait(min(left, random.uniform(0.01, 0.05 * 2 ** min(attempt, 5))))
                attempt += 1

    def _call(self, name: str, parameters: tuple[Any, ...]) -> Any:
        return self.run(lambda conn: conn.call(self._query(name, conn), parameters))

    def _all(self, name: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self.run(lambda conn: conn.execute(self._query(name, conn), parameters).fetchall())

    def _query(self, name: str, conn: Connection) -> bytes:
        query = self._queries.get(name)
        if query is None:
            prefix = "" if self.schema is None else (sql.Identifier(self.schema) + sql.SQL(".")).as_string(conn)
            text = _QUERIES[name]
            if "%s" in text:
                # A % in the schema's name would be read as a placeholder.
                prefix = prefix.replace("%", "%%")
            query = self._queries[name] = text.format(prefix).encode()
        return query

    def _facts(self) -> _Facts:
        return _Facts(self)


class _Facts:
    """Turns psycopg's errors into ours."""

    __slots__ = ("_store",)

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        if not isinstance(exc, psycopg.Error):
            return
        if isinstance(exc, pg.ReadOnlySqlTransaction):
            self._store._hosts.mistrust()  # noqa: SLF001 - its own
        raise fact(exc, dsn=self._store.dsn, schema=self._store.schema) from exc


def _sqlstate(exc: BaseException | None) -> str | None:
    """Of an error of the caller's driver, or of what wraps it."""
    while exc is not None:
        state = getattr(exc, "sqlstate", None) or getattr(exc, "pgcode", None)
        if state:
            return str(state)
        exc = exc.__cause__
    return None


def fact(exc: psycopg.Error, *, dsn: str, schema: str | None) -> SyncGuardError:
    """Our error for psycopg's: what happened, where, and what to do about it."""
    where = describe_dsn(dsn)
    text = " ".join((exc.diag.message_primary or str(exc)).split())
    if isinstance(exc, pg.LockNotAvailable):
        return _Busy(
            f"{where}: what we wait for is locked by another transaction, one that does not end or whose commit waits for "
            f"a standby (see pg_stat_activity): {text}"
        )
    if isinstance(exc, _MISSING):
        place = f"schema {schema!r} of {where}" if schema else where
        return SchemaBehind(f"{place} lacks syncguard's tables or functions ({text}): run `celery syncguard migrate`")
    if isinstance(exc, pg.ProgramLimitExceeded) and exc.diag.context is None:
        # Not from inside a function of ours, so it was the commit. Repeated, the release sees that the queue is full.
        return StoreUnavailable(f"{where}: {text}: a session that listens stands still in a transaction")
    if isinstance(exc, (psycopg.DataError, pg.ProgramLimitExceeded)):
        # Time does not cure it, and a task that came back with it would come back for ever.
        return InvalidKey(f"{where} cannot store this key, holder or task id: {text}")
    if isinstance(exc, pg.InsufficientPrivilege):
        return StoreUnavailable(
            f"{where}: {text}. Grant the worker's role what it needs: GRANT USAGE ON SCHEMA {schema or 'public'}, and "
            f"SELECT, INSERT, UPDATE, DELETE ON the syncguard_* tables there; `celery syncguard doctor` prints the GRANT "
            f"that is missing"
        )
    if isinstance(exc, pg.ReadOnlySqlTransaction):
        return StoreUnavailable(
            f"{where} is read-only (a standby, default_transaction_read_only, or a pooler that sends us to a standby): {text}"
        )
    if in_statement_mode(exc):
        return StoreUnavailable(
            f"{where} is a pooler in statement mode, where no lock can be proved in a transaction: set pool_mode = "
            f"transaction, or point syncguard_dsn past the pooler"
        )
    if exc.sqlstate == "SG001":
        return SyncGuardError(f"{where}: {text}: the counter of this key has left its range and must be repaired")
    return StoreUnavailable(f"{where}: {text}")
