"""One connection of this library's own to PostgreSQL: what it is opened with, and how a statement is sent on it.

Connections are in autocommit, and prepare statements only where there is no pooler in between.

No statement waits for ever: a server that hangs (frozen, or behind a network that drops packets) keeps its TCP connection
alive, so the client stops waiting for an answer after a while. What is given up is cancelled: a server whose client only
goes away finishes its statement first, and a commit that waits for a standby waits for ever.

Not here: which server it leads to (`hosts`), how many there are (`pool`), what is said to it (`store`), and the caller's
connections (`adapters`).
"""

from __future__ import annotations

import json
import re
import secrets
import select
from collections.abc import Callable, Generator
from typing import Any

import psycopg
import psycopg.conninfo
from psycopg import capabilities, pq
from psycopg.pq.abc import PGconn

from celery_syncguard.core import clock
from celery_syncguard.errors import ImproperlyConfigured
from celery_syncguard.postgres import psycopg_internals

__all__ = ["Connection", "cancelled", "connection_parameters", "describe_dsn", "ended", "in_statement_mode"]

#: So that a peer that vanished without a FIN is noticed in seconds. The user's own values win.
_NETWORK = {
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "celery-syncguard",
}

#: Seconds that a request to cancel may take, and for which it is repeated until what it cancels has ended.
_CANCEL = 1.0

#: SQLSTATE invalid_sql_statement_name.
_NO_SUCH_STATEMENT = b"26000"

_from_json = json.JSONDecoder().decode


def connection_parameters(dsn: str, *, timeout: float) -> dict[str, Any]:
    """The libpq parameters for `dsn`. `timeout` seconds are for all its hosts, in equal parts of at least 2 s, which is
    libpq's minimum; a `connect_timeout` in the dsn is for each host.

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
    if _ambiguous(dsn, parameters):
        raise ImproperlyConfigured(
            "syncguard_dsn has a host or a port that cannot be one: is there an '@', ':', '/' or '?' in the user or the "
            "password? In a URL write %40, %3A, %2F or %3F for it (the text is not repeated here, it may be a password)"
        )
    # Text is UTF-8 on the way, whatever the database is encoded in; one in SQL_ASCII would make it bytes.
    hosts = max(str(parameters.get(key, "")).count(",") + 1 for key in ("host", "hostaddr"))
    return {**_NETWORK, "connect_timeout": str(max(2, round(timeout / hosts))), **parameters, "client_encoding": "UTF8"}


#: A name, an address, a folder of sockets (whose name may have colons, as Cloud SQL's), or Linux's abstract socket.
_HOST = re.compile(r"[\w.:%-]*|/[^@?#]*|@[^@:?#]*")


def _ambiguous(dsn: str, parameters: dict[str, Any]) -> bool:
    """Whether libpq has taken a part of the password for something else, which errors and messages would repeat.

    It ends the password at the first '@', '/' or '?', and reads the rest as host, port, database or option.
    """
    hosts = ",".join(str(parameters.get(name) or "") for name in ("host", "hostaddr")).split(",")
    ports = str(parameters.get("port") or "").split(",")
    scheme, separator, rest = dsn.partition("://")
    url = separator and scheme in ("postgresql", "postgres")
    return (
        not all(_HOST.fullmatch(host) for host in hosts)
        or not all(re.fullmatch(r"[0-9]*", port) for port in ports)
        # No '@' belongs after the one that ends the password; elsewhere it can be written as %40.
        or bool(url and "@" in rest.partition("@" if "@" in re.split("[/?]", rest)[0] else "/")[2])
    )


def describe_dsn(dsn: str) -> str:
    """Where a dsn leads, for logs and messages: never its password, nor what may be a part of it."""
    try:
        parameters = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "an unreadable dsn"
    if _ambiguous(dsn, parameters):
        return "an ambiguous dsn"
    host = parameters.get("host") or parameters.get("hostaddr") or "the local socket"
    port = parameters.get("port") or "5432"
    name = parameters.get("dbname") or parameters.get("user") or "the default database"
    return f"{name} at {host}:{port}"


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that does not wait for ever: after `patience` seconds without an answer it is given up.

    `leave` is given the socket of one whose statement the server has perhaps not ended; without it, that is closed.
    """

    patience = 10.0
    leave: Callable[[PGconn], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._direct: bool | None = None  # not known yet
        self.last_words = ""  # what the server said to a cancel
        self._statements: dict[bytes, bytes | None] = {}

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        return psycopg_internals.wait(self, self._patient(gen), *args, **kwargs)

    def call(self, query: bytes, parameters: tuple[Any, ...]) -> Any:
        """The one value of a statement with numbered places (`$1`), decoded from JSON.

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
                # Nothing was executed. There is a pooler after all.
                self._direct = False
                name = None
        if name is None:
            self.pgconn.send_query_params(query, texts)
            result = self._answer()
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg_internals.error_of(result)
        return _from_json((result.get_value(0, 0) or b"null").decode())

    @property
    def usable(self) -> bool:
        """Whether this idle connection is open as far as one can see without asking the server."""
        if self.closed:
            return False
        # What a server says unasked is its goodbye, nearly always; a connection too many is no loss.
        return not _ready(self.pgconn.socket, 0.0)

    def _hear(self, notice: psycopg.errors.Diagnostic) -> None:
        self.last_words = f": {notice.message_primary}"

    @property
    def active(self) -> bool:
        """Whether it is in the middle of a statement."""
        return not self.closed and self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE

    def abandon(self) -> None:
        """Close it, even in the middle of a statement, which is cancelled first. Takes two seconds at most.

        What that statement came to is not known: a commit that waited for a standby stands, though only on this server.
        """
        if not self.active:
            self.close()
            return
        pgconn = self.pgconn
        self.add_notice_handler(self._hear)
        give_up_at = clock.now() + _CANCEL
        has_ended = False
        # More than once: a request that comes before the statement has begun is forgotten.
        while not has_ended and cancelled(pgconn, timeout=_CANCEL):
            has_ended = ended(pgconn, timeout=_CANCEL / 4)
            if clock.now() >= give_up_at:
                break
        if has_ended or self.leave is None:
            pgconn.finish()
            return
        self.leave(psycopg_internals.detach(self))

    def _statement(self, query: bytes) -> bytes | None:
        """The name of the prepared statement for a query, from its second call on a direct connection."""
        if query not in self._statements:
            self._statements[query] = None
            return None
        if self._direct is None:
            # A pooler in transaction mode is not one server process: the process id that it told us is none of theirs.
            self.pgconn.send_query_params(b"select pg_backend_pid()", [])
            self._direct = self._answer().get_value(0, 0) == str(self.pgconn.backend_pid).encode()
        if not self._direct:
            return None
        name = self._statements[query]
        if name is None:
            # A name that is used nowhere else, in case there is a pooler that looks like a server.
            name = b"syncguard_" + secrets.token_hex(8).encode()
            self.pgconn.send_prepare(name, query)
            if self._answer().status != pq.ExecStatus.COMMAND_OK:
                return None  # what is wrong with it, the query itself will say
            self._statements[query] = name
        return name

    def _answer(self) -> Any:
        return self.wait(psycopg_internals.answers(self.pgconn))[-1]

    def _patient(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        # The generator is asked again after each interval, with "nothing is ready yet".
        give_up_at = clock.now() + self.patience
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and clock.now() >= give_up_at:
                    self.abandon()
                    raise psycopg.OperationalError(
                        f"the server did not answer within {self.patience:g} s{self.last_words}"
                    )
                wanted = gen.send(ready)
        except StopIteration as stop:
            return stop.value


def cancelled(pgconn: PGconn, *, timeout: float) -> bool:
    """Ask the server to cancel what it does on a connection. False: it could not be asked within `timeout` seconds."""
    if not capabilities.has_cancel_safe():
        return False  # libpq before 17: its request has no bound, and would hang with a server that hangs
    give_up_at = clock.now() + timeout
    try:
        request = pgconn.cancel_conn()
        request.start()
        while (status := request.poll()) != pq.PollingStatus.OK:
            left = give_up_at - clock.now()
            if left <= 0 or status == pq.PollingStatus.FAILED:
                return False
            _ready(request.socket, left, to_write=status == pq.PollingStatus.WRITING)
    except psycopg.Error:
        return False
    return True


def ended(pgconn: PGconn, *, timeout: float) -> bool:
    """Whether the server has ended what it did on a connection, or the connection, within `timeout` seconds."""
    give_up_at = clock.now() + timeout
    try:
        while True:
            pgconn.consume_input()
            while not pgconn.is_busy():
                if pgconn.get_result() is None:
                    return True
            left = give_up_at - clock.now()
            if left <= 0:
                return False
            _ready(pgconn.socket, left)
    except psycopg.Error:
        return True


def in_statement_mode(exc: psycopg.Error) -> bool:
    """Whether a pooler has refused a transaction because it gives out a server for one statement only."""
    return isinstance(exc, psycopg.errors.ProtocolViolation) and "statement pooling mode" in str(exc)


def _ready(number: int, timeout: float, *, to_write: bool = False) -> bool:
    """Whether a socket has something to say within `timeout` seconds, or takes something."""
    if not hasattr(select, "poll"):  # Windows, where no socket's number is too high for select
        one = [number]
        readable, writable, _ = select.select([] if to_write else one, one if to_write else [], [], timeout)
        return bool(readable or writable)
    poll = select.poll()
    poll.register(number, select.POLLOUT if to_write else select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _text(value: Any) -> bytes | None:
    """A parameter as PostgreSQL reads it; a tuple is an array."""
    if value is None:
        return None
    if isinstance(value, tuple):
        quoted = (str(one).replace("\\", "\\\\").replace('"', '\\"') for one in value)
        value = "{" + ",".join(f'"{one}"' for one in quoted) + "}"
    return str(value).encode()
