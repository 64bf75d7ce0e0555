"""This library's own connections to PostgreSQL: few, opened when first needed, closed when idle, one set per process.

Two kinds. `Pool` lends connections to whoever acquires and releases (psycopg_pool does the lending). `Session` is one
connection for one thread's standing work: the listener's, and the renewer's while the pool has none to spare, so that
renewals never queue behind tasks. Both are in autocommit, prepare statements only where no pooler is in between, and
after a fork are abandoned without being closed, because the socket is the parent's too.

No statement waits for ever: a server that hangs (frozen, or behind a network that drops packets) keeps its TCP connection
alive, so the client itself stops waiting for an answer after a while.

Not here: what is said to the server (`postgres`), and the caller's connections (`caller`).
"""

from __future__ import annotations

import inspect
import json
import math
import secrets
import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psycopg
import psycopg.conninfo
import psycopg_pool
from psycopg import generators, pq, waiting

from celery_syncguard import clock
from celery_syncguard.errors import ImproperlyConfigured, StoreUnavailable

__all__ = ["Pool", "Session", "connection_parameters", "describe_dsn"]

#: Seconds for which a function of ours may wait for a row on the server (its lock_timeout), before it answers.
LOCK_TIMEOUT = 2.0

#: Seconds for which a thread queues for a connection, as long as others get theirs.
LONGEST_QUEUE = 60.0

#: Seconds that it takes to open a connection to a server that answers.
_MOMENT = 0.1

#: Seconds after which an unused connection may be closed.
MAX_IDLE = 30.0

#: So that a peer that vanished without a FIN is noticed in seconds. The user's own values win.
_NETWORK = {
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "celery-syncguard",
}

#: SQLSTATE invalid_sql_statement_name.
_NO_SUCH_STATEMENT = b"26000"

_from_json = json.JSONDecoder().decode

#: Inherited connections end here, so that nobody's destructor closes a socket that the parent still uses.
_abandoned: list[Any] = []


def connection_parameters(dsn: str, *, timeout: float) -> dict[str, Any]:
    """The libpq parameters for `dsn`; `timeout` seconds bound a connection attempt.

    Raises:
        ImproperlyConfigured: the dsn is empty, or is no connection string. Its text is not repeated: it may hold a
            password.
    """
    if not dsn:
        raise ImproperlyConfigured(
            "no database: set syncguard_dsn in the Celery configuration, or SYNCGUARD_DSN in the environment, "
            "to something like postgresql://user@host/database"
        )
    try:
        parameters = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # Without its cause: libpq repeats the text that it could not read, password and all.
        raise ImproperlyConfigured(
            "syncguard_dsn is not a PostgreSQL connection string (expected postgresql://user@host/database "
            "or host=… dbname=…)"
        ) from None
    # Text is UTF-8 on the way, whatever the database is encoded in; one in SQL_ASCII would make it bytes.
    return {**_NETWORK, "connect_timeout": str(max(2, round(timeout))), **parameters, "client_encoding": "UTF8"}


def describe_dsn(dsn: str) -> str:
    """Where a dsn leads, for logs and messages: never its password."""
    try:
        parameters = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "an unreadable dsn"
    host = parameters.get("host") or parameters.get("hostaddr") or "the local socket"
    port = parameters.get("port") or "5432"
    name = parameters.get("dbname") or parameters.get("user") or "the default database"
    return f"{name} at {host}:{port}"


#: Whether psycopg's fast wait asks a generator again while nothing is ready. Before 3.3 only those in Python did.
_ASKS_AGAIN = "timeout" in inspect.signature(psycopg.Connection.wait).parameters


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that does not wait for ever: after `patience` seconds without an answer it is given up."""

    patience = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._direct: bool | None = None  # not known yet
        self._statements: dict[bytes, bytes | None] = {}

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        if _ASKS_AGAIN:
            return super().wait(self._patient(gen), *args, **kwargs)
        interval = kwargs.get("interval", args[0] if args else None)
        return waiting.wait_selector(self._patient(gen), self.pgconn.socket, interval=interval or 0.1)

    def call(self, query: bytes, parameters: tuple[Any, ...]) -> Any:
        """The value that a statement answers with as JSON, decoded. It has numbered places (`$1`) and one value.

        For the statements of every task: a cursor, which would look up how to convert each parameter and column, costs
        about twice as much CPU.

        Raises:
            psycopg.Error: as `execute`.
        """
        texts = [value.encode() if type(value) is str else _text(value) for value in parameters]
        if any(text is not None and b"\0" in text for text in texts):
            # libpq would end the text there.
            raise psycopg.DataError("PostgreSQL text cannot contain NUL")
        name = self._statement(query)
        if name is not None:
            self.pgconn.send_query_prepared(name, texts)
            result = self._answer()
            if result.error_field(pq.DiagnosticField.SQLSTATE) == _NO_SUCH_STATEMENT:
                # Nothing was executed. Somebody is in between after all.
                self._direct = False
                name = None
        if name is None:
            self.pgconn.send_query_params(query, texts)
            result = self._answer()
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)
        return _from_json((result.get_value(0, 0) or b"null").decode())

    def _statement(self, query: bytes) -> bytes | None:
        """The name of the prepared statement for a query, from its second call on a direct connection."""
        if query not in self._statements:
            self._statements[query] = None
            return None
        if self._direct is None:
            # A pooler that gives each transaction another server connection answers for none of them in particular: the
            # process id that it told us is none of theirs.
            self.pgconn.send_query_params(b"SELECT pg_backend_pid()", [])
            self._direct = self._answer().get_value(0, 0) == str(self.pgconn.backend_pid).encode()
        if not self._direct:
            return None
        name = self._statements[query]
        if name is None:
            # A name that nobody else can have used, in case there is a pooler that looks like a server.
            name = b"syncguard_" + secrets.token_hex(8).encode()
            self.pgconn.send_prepare(name, query)
            if self._answer().status != pq.ExecStatus.COMMAND_OK:
                return None  # what is wrong with it, the query itself will say
            self._statements[query] = name
        return name

    def _answer(self) -> Any:
        return self.wait(generators.execute(self.pgconn))[-1]

    def _patient(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        # The generator is asked again after each interval, with "nothing is ready yet".
        give_up_at = clock.now() + self.patience
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and clock.now() >= give_up_at:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server did not answer within {self.patience:g} s")
                wanted = gen.send(ready)
        except StopIteration as stop:
            return stop.value


def _text(value: Any) -> bytes | None:
    """A parameter as PostgreSQL reads it; a tuple is an array."""
    if value is None:
        return None
    if isinstance(value, tuple):
        quoted = (str(one).replace("\\", "\\\\").replace('"', '\\"') for one in value)
        value = "{" + ",".join(f'"{one}"' for one in quoted) + "}"
    return str(value).encode()


def _settings(parameters: dict[str, Any]) -> dict[str, Any]:
    return {**parameters, "autocommit": True, "prepare_threshold": None}


class Pool:
    """Lends connections, at most `size` at a time."""

    def __init__(self, parameters: dict[str, Any], *, size: int, timeout: float) -> None:
        self._parameters = parameters
        self._size = size
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[Connection] | None = None
        self._last_error: Exception | None = None
        self.lent: set[Connection] = set()
        self.lent_at = -math.inf
        self.returned_at = -math.inf
        self._closed = False

    def connection(self) -> AbstractContextManager[Connection]:
        """Borrow a connection. A broken one is thrown away afterwards.

        Raises:
            StoreUnavailable: none was to be had in time.
        """
        return _Loan(self, self._pool or self._open())

    @contextmanager
    def spare(self) -> Iterator[Connection | None]:
        """Borrow a connection that nobody needs just now. None if all are in use, or none is to be had in a moment."""
        pool, conn = self._pool, None
        if pool is not None and len(self.lent) < self._size:
            with suppress(psycopg_pool.PoolTimeout, psycopg_pool.PoolClosed):
                conn = pool.getconn(timeout=_MOMENT)
        if pool is None or conn is None:
            yield None
            return
        with _Loan(self, pool, conn):
            yield conn

    def borrow(self, pool: psycopg_pool.ConnectionPool[Connection]) -> Connection:
        started_at = clock.now()
        failure: Exception | None = None
        while (left := self._give_up_at(started_at) - clock.now()) > 0:
            try:
                # Asked anew every second, because each request has the pool try to connect: its own attempts come
                # more and more rarely, and a server that is back should be found at once.
                return pool.getconn(timeout=min(left, 1.0))
            except psycopg_pool.PoolTimeout as exc:
                failure = exc
            except psycopg_pool.PoolClosed as exc:
                raise StoreUnavailable("this SyncGuard was closed") from exc
        cause = self._last_error
        if cause is None and max(self.lent_at, self.returned_at) < clock.now() - self._timeout - LOCK_TIMEOUT - 1.0:
            self._replace(pool)
        detail = str(cause).strip() if cause is not None else "all connections of this process are in use"
        raise StoreUnavailable(f"no connection to PostgreSQL within {self._timeout:g} s: {detail}") from failure

    def _give_up_at(self, started_at: float) -> float:
        # The timeout is for a server that does not answer. Where it does, a long queue moves, and whoever gave up and
        # came back would only make it longer.
        return max(started_at, min(self.returned_at, started_at + LONGEST_QUEUE)) + self._timeout

    def _replace(self, pool: psycopg_pool.ConnectionPool[Connection]) -> None:
        # No statement takes so long: what was lent is lost, to an exception that came into its thread (a soft time limit,
        # an interrupt) between the pool's steps.
        with self._mutex:
            if self._pool is pool:
                self._pool = None
                self.lent = set()
        pool.close(timeout=0.0)

    def _open(self) -> psycopg_pool.ConnectionPool[Connection]:
        with self._mutex:
            if self._closed:
                raise StoreUnavailable("this SyncGuard was closed")
            if self._pool is None:
                remember = self._remember

                class Remembering(Connection):
                    """Keeps the reason of a failed attempt, which the pool only logs."""

                    patience = self._timeout + LOCK_TIMEOUT

                    @classmethod
                    def connect(cls, *args: Any, **kwargs: Any) -> Any:
                        try:
                            conn = super().connect(*args, **kwargs)
                        except psycopg.Error as exc:
                            remember(exc)
                            raise
                        remember(None)
                        return conn

                self._pool = psycopg_pool.ConnectionPool(
                    kwargs=_settings(self._parameters),
                    connection_class=Remembering,
                    min_size=0,
                    max_size=self._size,
                    max_idle=MAX_IDLE,
                    num_workers=1,
                    reconnect_timeout=min(0.5, self._timeout),
                    name="syncguard",
                    open=True,
                )
            return self._pool

    def _remember(self, error: Exception | None) -> None:
        self._last_error = error

    def forget(self) -> None:
        """After a fork."""
        if self._pool is not None:
            _abandoned.append(self._pool)
        self._pool = None
        self.lent = set()
        self._mutex = threading.Lock()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(timeout=1.0)


class _Loan:
    """A connection of a pool for as long as a `with` lasts. Not made with contextlib, as every statement takes one."""

    __slots__ = ("_conn", "_lender", "_pool")

    def __init__(
        self, lender: Pool, pool: psycopg_pool.ConnectionPool[Connection], conn: Connection | None = None
    ) -> None:
        self._lender = lender
        self._pool = pool
        self._conn = conn

    def __enter__(self) -> Connection:
        conn = self._conn
        if conn is None:
            conn = self._conn = self._lender.borrow(self._pool)
        self._lender.lent.add(conn)
        self._lender.lent_at = clock.now()
        return conn

    def __exit__(self, *_: object) -> None:
        conn = self._conn
        assert conn is not None
        self._lender.lent.discard(conn)
        if not conn.closed:
            self._lender.returned_at = clock.now()
        self._pool.putconn(conn)


class Session:
    """One connection for one standing task. `use()` gives it to one thread at a time."""

    def __init__(self, parameters: dict[str, Any], *, timeout: float) -> None:
        self._parameters = parameters
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._conn: Connection | None = None
        self._used_at = 0.0

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """The connection, opened if need be; closed again if the block raises.

        Raises:
            psycopg.Error: it cannot be opened.
        """
        with self._mutex:
            if self._conn is None or self._conn.closed:
                self._conn = Connection.connect(**_settings(self._parameters))
                self._conn.patience = self._timeout + LOCK_TIMEOUT
            try:
                yield self._conn
            except BaseException:
                self._drop()
                raise
            self._used_at = clock.now()

    def close_if_idle(self, seconds: float = MAX_IDLE) -> float | None:
        """Close after so long without use. Seconds until it would; None if there is nothing to close."""
        with self._mutex:
            if self._conn is None:
                return None
            left = self._used_at + seconds - clock.now()
            if left <= 0:
                self._drop()
                return None
            return left

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def forget(self) -> None:
        """After a fork."""
        if self._conn is not None:
            _abandoned.append(self._conn)
        self._conn = None
        self._mutex = threading.Lock()

    def close(self) -> None:
        with self._mutex:
            self._drop()
