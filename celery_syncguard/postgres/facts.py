"""Turns an error of psycopg, or of the caller's driver, into one of ours: what happened, where, and what to do about it.

A wait that hit the lock_timeout is `Busy`: the server answered, and it is not known who holds. Not here: repeating what
failed (`store`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors as pg

from celery_syncguard.errors import InvalidKey, LeaseNotVisible, SchemaBehind, StoreUnavailable, SyncGuardError
from celery_syncguard.postgres.adapters import InSavepoint
from celery_syncguard.postgres.connection import describe_dsn, in_statement_mode

__all__ = ["PLACE", "Busy", "Facts", "fact", "fact_of_caller", "may_pass", "not_visible"]

#: The connection is gone or of no use, or the server is going down, coming up or full: another connection may work.
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


#: Which server, database and schema a connection leads to, to compare, and for people; its isolation. Addresses differ
#: by the way in.
PLACE = """
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


class Busy(StoreUnavailable):
    """A wait for a row on the server came to its bound, the lock_timeout."""

    busy = True


class Facts:
    """Turns psycopg's errors into ours. One object serves every statement of a store."""

    __slots__ = ("_dsn", "_schema")

    def __init__(self, dsn: str, schema: str | None) -> None:
        self._dsn = dsn
        self._schema = schema

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, psycopg.Error):
            raise fact(exc, dsn=self._dsn, schema=self._schema) from exc


def may_pass(exc: BaseException | None) -> bool:
    """Whether the same statement may work on another connection soon."""
    return isinstance(exc, _TRANSIENT) and not isinstance(exc, _FINAL)


def fact(exc: psycopg.Error, *, dsn: str, schema: str | None) -> SyncGuardError:
    """Our error for psycopg's: what happened, where, and what to do about it."""
    where = describe_dsn(dsn)
    text = " ".join((exc.diag.message_primary or str(exc)).split())
    if isinstance(exc, pg.LockNotAvailable):
        return Busy(
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


def fact_of_caller(exc: Exception, name: str, *, key: str, kind: str, dsn: str) -> SyncGuardError | None:
    """Our error for one of the caller's driver, from our SQL function `name`. None: it stays as it is."""
    state = _sqlstate(exc)
    if state == "SG004":
        return InSavepoint(
            f"the lease on {key!r} is proved inside a savepoint first (a block in an open transaction is one), and a "
            f"rollback to it would end the proof: call lease.fenced(connection) once in the transaction, before its "
            f"first savepoint, or use lease.transaction(connection) in place of that savepoint",
            key=key,
            what="lease.fenced()",
            kind=kind,
        )
    if name == "fenced" and state == pg.LockNotAvailable.sqlstate:
        return StoreUnavailable(f"the lock row of {key!r} is locked by another transaction: roll back and try again")
    if "syncguard_" in str(exc) and "does not exist" in str(exc):
        return SchemaBehind(
            f"this connection does not see syncguard_{name}(): lease.{name}() needs a connection to the database in "
            f"which the locks live ({describe_dsn(dsn)}), with our schema on its search path or named by syncguard_schema"
        )
    return None


def not_visible(key: str, *, here: Sequence[Any], there: Sequence[Any]) -> LeaseNotVisible | None:
    """The error for a lease that is alive in our database and missing on the caller's connection. None: it is lost.

    Arguments:
        here, there: the rows of `PLACE` on the caller's connection and on ours.
    """
    if here[0] != there[0]:
        text = (
            f"the lease on {key!r} is alive in {there[1]}, but this connection leads to {here[1]}: fence a connection to "
            f"the database in which the locks live, or let syncguard_dsn lead to the other"
        )
    elif here[2] != "read committed":
        text = (
            f"the lease on {key!r} is alive, but this {here[2]} transaction is older than the lease: "
            f"roll back, and call lease.fenced() first in a new one"
        )
    else:
        return None
    return LeaseNotVisible(text, key=key, here=here[1], there=there[1])


def _sqlstate(exc: BaseException | None) -> str | None:
    """Of an error of the caller's driver, or of what wraps it."""
    while exc is not None:
        state = getattr(exc, "sqlstate", None) or getattr(exc, "pgcode", None)
        if state:
            return str(state)
        exc = exc.__cause__
    return None
