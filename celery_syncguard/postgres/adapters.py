"""A caller's connection: run our SQL inside the caller's own transaction, whichever library the connection comes from.

`lease.fenced(conn)` and the revision functions must share the fate of the caller's writes, so they take the connection
that the caller writes through. Nothing is committed or rolled back here, except by `Adapter.transaction`. A connection in
autocommit without a transaction is refused before the first statement: our statement would be a transaction of its own.
No library is imported to find out what an object is: who made the object has imported it.

Not here: connections of our own (`pool`, `connection`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from celery_syncguard.errors import SyncGuardError

__all__ = ["Adapter", "InSavepoint", "NotInTransaction", "adapter_for"]

_OPENERS = {
    "psycopg": "`with connection.transaction():`",
    "sqlalchemy": "`with engine.begin() as connection:`, without isolation_level AUTOCOMMIT",
    "django": "`with transaction.atomic():`",
}
_DRIVERS = ("psycopg", "psycopg2")  # of SQLAlchemy's dialect, each with %s placeholders
_OUTSIDE = (0, 1)  # libpq's PQTRANS_IDLE and PQTRANS_ACTIVE, the same numbers in psycopg and psycopg2


class NotInTransaction(SyncGuardError, RuntimeError):
    """The connection is in autocommit and no transaction is open, so there is nothing to take part in.

    Attributes: `what` was refused; `kind` is "psycopg", "sqlalchemy" or "django".
    """

    what: str = ""
    kind: str = ""


class InSavepoint(NotInTransaction):
    """The proof would end with a rollback to the savepoint that is open, and the transaction could commit without it.

    Attributes: `key` of the lease; `what` and `kind` as in `NotInTransaction`.
    """

    key: str = ""


class Adapter(ABC):
    """One connection of the caller, whatever library it comes from. Made by `adapter_for`."""

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether the next statement is, or begins, part of a transaction that the caller ends."""

    @abstractmethod
    def nests(self) -> bool:
        """Whether a transaction is open, so that `transaction` makes a savepoint. No I/O.

        Raises the library's own error where the library would refuse to open one.
        """

    def in_test_case(self) -> bool:
        """Whether the outermost block of the caller's own is a savepoint, in a test's transaction that never commits."""
        return False

    @abstractmethod
    def rows(self, query: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of one statement with `%s` placeholders, as plain tuples. Errors of the caller's library pass unchanged."""

    @abstractmethod
    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction around the block, or a savepoint where `nests`."""

    def require_transaction(self, what: str) -> None:
        """Raise `NotInTransaction`, naming `what`, unless `in_transaction`."""
        if not self.in_transaction():
            raise NotInTransaction(
                f"{what} takes part in your transaction, but this {self.kind} connection is in autocommit and has none; "
                f"use {_OPENERS[self.kind]}",
                what=what,
                kind=self.kind,
            )


def adapter_for(conn: Any) -> Adapter:
    """The `Adapter` for a connection of the caller.

    Arguments:
        conn: a psycopg `Connection` or `Cursor`; a SQLAlchemy `Connection`, `Session` or `scoped_session`; a Django
            connection, or its alias in a process that uses Django.

    Raises:
        TypeError: anything else, as asyncio variants, other drivers of SQLAlchemy, and other databases.
    """
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None:
        if isinstance(conn, psycopg.Cursor | psycopg.ServerCursor):
            conn = conn.connection
        if isinstance(conn, psycopg.Connection):
            return _Psycopg(conn)
    if "sqlalchemy" in sys.modules:
        found = _sqlalchemy(conn)
        if found is not None:
            return found
    if "django.db" in sys.modules:
        found = _django(conn)
        if found is not None:
            return found
    raise TypeError(
        f"expected a connection of psycopg, SQLAlchemy or Django, not {type(conn).__module__}.{type(conn).__qualname__}"
        + _async_hint(conn)
    )


def _sqlalchemy(conn: Any) -> Adapter | None:
    orm = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(conn, orm.scoped_session):
        conn = conn()
    is_session = orm is not None and isinstance(conn, orm.Session)
    if not is_session and not isinstance(conn, sys.modules["sqlalchemy"].Connection):
        return None
    return _SQLAlchemy(conn, is_session)


def _django(conn: Any) -> Adapter | None:
    if isinstance(conn, import_module("django.utils.connection").ConnectionProxy):  # django.db.connection
        conn = conn.alias
    if isinstance(conn, str):
        conn = import_module("django.db").connections[conn]
    if not isinstance(conn, import_module("django.db.backends.base.base").BaseDatabaseWrapper):
        return None
    if conn.vendor != "postgresql":
        raise TypeError(f"expected a connection to PostgreSQL, not to {conn.vendor}")
    return _Django(conn)


def _async_hint(conn: Any) -> str:
    module = type(conn).__module__
    if module.startswith("sqlalchemy.ext.asyncio"):
        return "; inside asyncio use `await connection.run_sync(...)`"
    return "; asyncio connections are not supported" if "Async" in type(conn).__name__ else ""


def _driver_in_transaction(driver: Any) -> bool:
    """Ask a DBAPI connection (psycopg, psycopg2, or one that has ``autocommit`` alone), with no I/O."""
    if not driver.autocommit:
        return True
    info = getattr(driver, "info", None)
    return info is not None and int(info.transaction_status) not in _OUTSIDE


@dataclass(frozen=True, slots=True)
class _Psycopg(Adapter):
    connection: Any
    kind: ClassVar[str] = "psycopg"

    def in_transaction(self) -> bool:
        with self._answered():
            pass
        return _driver_in_transaction(self.connection)

    def nests(self) -> bool:
        with self._answered():
            pass
        return int(self.connection.info.transaction_status) not in _OUTSIDE

    def rows(self, query: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        # Not connection.cursor(): its cursor_factory may be one without %s, its row_factory one without tuples.
        psycopg = sys.modules["psycopg"]
        with psycopg.Cursor(self.connection, row_factory=psycopg.rows.tuple_row) as cursor:
            with self._answered():
                cursor.execute(query, tuple(params))
            return cursor.fetchall() if cursor.description is not None else []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.connection.transaction():
            yield

    def _answered(self) -> AbstractContextManager[object]:
        """In pipeline mode, wait for all answers at the end of the block; until then nothing is known."""
        return self.connection.pipeline() if self.connection.info.pipeline_status else nullcontext()


@dataclass(frozen=True, slots=True)
class _SQLAlchemy(Adapter):
    target: Any  # a Connection or a Session
    is_session: bool
    kind: ClassVar[str] = "sqlalchemy"

    def connection(self) -> Any:
        # A session may use another connection after each commit, so it is asked every time.
        connection = self.target.connection() if self.is_session else self.target
        if connection.dialect.name != "postgresql":
            raise TypeError(f"expected a connection to PostgreSQL, not to {connection.dialect.name}")
        if connection.dialect.driver not in _DRIVERS:
            raise TypeError(
                f"SQLAlchemy's driver {connection.dialect.driver} is not supported: use psycopg or psycopg2, "
                f"with a URL that begins with postgresql+psycopg://"
            )
        return connection

    def in_transaction(self) -> bool:
        # Connection.in_transaction() is True even under AUTOCOMMIT, where begin() is only make-believe.
        return _driver_in_transaction(self.connection().connection.dbapi_connection)

    def nests(self) -> bool:
        if not self.target.in_transaction():
            return False
        if self._autobegun():
            # As SQLAlchemy's own begin(). A savepoint would not be committed at the end of the block.
            raise sys.modules["sqlalchemy"].exc.InvalidRequestError(
                "an earlier statement has begun a transaction on this "
                f"{'session' if self.is_session else 'connection'}, and nothing here would commit it: commit() or rollback() "
                "first, or open it with `with ….begin():`, or call lease.fenced() in it and commit it yourself"
            )
        return True

    def _autobegun(self) -> bool:
        if self.is_session:
            return bool(self.target.get_transaction().origin.name == "AUTOBEGIN")
        # A connection does not say who began its transaction, but whether it is inside a `with connection.begin():`.
        return not _is_in_begin_block(self.target)

    def rows(self, query: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        result = self.connection().exec_driver_sql(query, tuple(params))
        return [tuple(row) for row in result] if result.returns_rows else []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.target.begin_nested() if self.nests() else self.target.begin():
            yield


@dataclass(frozen=True, slots=True)
class _Django(Adapter):
    wrapper: Any
    kind: ClassVar[str] = "django"

    def in_transaction(self) -> bool:
        return bool(self.wrapper.in_atomic_block or not self.wrapper.get_autocommit())

    def nests(self) -> bool:
        return self.in_transaction()

    def in_test_case(self) -> bool:
        # TestCase marks the blocks that it puts around each test. Within them, the first block of the code under test
        # stands for its transaction and the next ones are savepoints, as without the test.
        blocks = self.wrapper.atomic_blocks
        ours = [block for block in blocks if not _is_of_a_test_case(block)]
        return len(ours) < len(blocks) and not any(block.savepoint for block in ours[1:])

    def rows(self, query: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self.wrapper.cursor() as cursor:
            cursor.execute(query, tuple(params))
            return [tuple(row) for row in cursor.fetchall()] if cursor.description is not None else []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with import_module("django.db.transaction").atomic(using=self.wrapper.alias):
            yield


# Insides of other libraries: what they do not document, and what happens where it has changed.


def _is_in_begin_block(connection: Any) -> bool:
    """Whether a SQLAlchemy connection is inside a `with connection.begin():`.

    Relies on `TransactionalContext._trans_context_manager`. Without it: no, so that opening a fenced block there is refused.
    """
    return getattr(connection, "_trans_context_manager", None) is not None


def _is_of_a_test_case(block: Any) -> bool:
    """Whether Django's TestCase has put this `atomic` block around a test.

    Relies on `Atomic._from_testcase`. Without it: no, so that a fence in a test raises InSavepoint.
    """
    return getattr(block, "_from_testcase", False)
