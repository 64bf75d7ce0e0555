"""This library's own connections to PostgreSQL: few, opened when first needed, closed when idle, one set per process.

`Connections.lend` is the one way to get one. Work waits in a queue for the pool's connections (psycopg_pool lends them).
A renewal never queues: it takes one of the pool's that is spare, otherwise the one that is reserved for renewals. So a
process that runs one task at a time has one connection, as its task does not use it while the body runs. The listener
keeps a connection of its own. After a fork all of them are abandoned without being closed, because the sockets are the
parent's too.

Not here: a single connection (`connection`), which server it leads to (`hosts`), and what is said to it (`store`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psycopg
import psycopg_pool

from celery_syncguard.core import clock
from celery_syncguard.errors import StoreUnavailable
from celery_syncguard.postgres import psycopg_internals
from celery_syncguard.postgres.connection import Connection
from celery_syncguard.postgres.hosts import Dial, Hosts

__all__ = ["Connections", "Kept"]

#: Seconds for which a function of ours may wait for a row on the server (its lock_timeout) before it returns.
LOCK_TIMEOUT = 2.0

#: Seconds for which a thread queues for a connection, as long as others get theirs.
LONGEST_QUEUE = 60.0

#: Seconds that it takes to open a connection to a server that answers.
_MOMENT = 0.1

#: Seconds until a statement is answered or given up, beside the timeout and its wait for a row.
_GIVING_UP = 3.0

#: Seconds after which an unused connection may be closed.
MAX_IDLE = 30.0

#: Of psycopg's pool.
_NAME = "syncguard"

#: Inherited connections are kept here, so that no destructor closes a socket that the parent still uses.
_abandoned: list[Any] = []


psycopg_internals.quieten_pool(_NAME, Connection)


class Connections:
    """Lends connections: at most `size` for work, one reserved for renewals, and those that others keep."""

    def __init__(self, hosts: Hosts, *, size: int, timeout: float) -> None:
        self._hosts = hosts
        self._size = size
        self._timeout = timeout
        self._kept: list[Kept] = []
        self.reserved = self.keep()
        self._mutex = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[Connection] | None = None
        self._last_error: Exception | None = None
        self._dial: Dial | None = None
        self._dialled_at = -math.inf
        self.lent: set[Connection] = set()
        self.lent_at = -math.inf
        self.returned_at = -math.inf
        self._closed = False

    def lend(self, *, renewal: bool = False) -> AbstractContextManager[Connection]:
        """A connection for as long as a `with` lasts. A broken one is thrown away afterwards.

        Raises:
            StoreUnavailable: no connection was available in time.
            psycopg.Error: the connection for a renewal cannot be opened.
        """
        return self._for_renewal() if renewal else _Loan(self, self._pool or self._open())

    def keep(self) -> Kept:
        """A place for one connection that its owner keeps between uses."""
        kept = Kept(self._hosts, timeout=self._timeout)
        self._kept.append(kept)
        return kept

    @contextmanager
    def _for_renewal(self) -> Iterator[Connection]:
        pool, conn = self._pool, None
        if pool is not None and len(self.lent) < self._size:
            # A task may be quicker between the look and the request.
            with suppress(psycopg_pool.PoolTimeout, psycopg_pool.PoolClosed):
                conn = pool.getconn(timeout=_MOMENT)
        if pool is not None and conn is not None:
            with _Loan(self, pool, conn):
                if conn.usable:
                    yield conn
                    return
                # What broke this idle connection may break the pool's next one before the next renewal, too.
                conn.close()
        with self.reserved.use() as conn:
            yield conn

    def borrow(self, pool: psycopg_pool.ConnectionPool[Connection]) -> Connection:
        started_at = clock.now()
        failure: Exception | None = None
        full = self._hosts.full
        while (left := self._give_up_at(started_at) - clock.now()) > 0:
            try:
                # Asked anew every second, because each request has the pool try to connect: its own attempts come
                # more and more rarely, and a server that is back should be found at once.
                return pool.getconn(timeout=min(left, _MOMENT if full else 1.0))
            except psycopg_pool.PoolTimeout as exc:
                failure = exc
                full = self._hosts.full
                if full:
                    raise StoreUnavailable(
                        f"no connection to PostgreSQL: {self._hosts.left_over} statements of this process were given up, "
                        f"and the server neither ended nor cancelled them (see pg_stat_activity)"
                    ) from None
            except psycopg_pool.PoolClosed as exc:
                raise StoreUnavailable("this SyncGuard was closed") from exc
        waited = clock.now() - started_at
        raise StoreUnavailable(f"no connection to PostgreSQL in {waited:.1f} s: {self._why_none(pool)}") from failure

    def _why_none(self, pool: psycopg_pool.ConnectionPool[Connection]) -> str:
        dial, error = self._dial, self._last_error
        if dial is not None and (dial.said or error is None):
            return str(dial)
        if error is not None:
            return " ".join(str(error).split())
        quiet_since = max(self.lent_at, self.returned_at, self._dialled_at)
        if dial is None and quiet_since < clock.now() - self._timeout - LOCK_TIMEOUT - _GIVING_UP:
            self._replace(pool)
        if len(self.lent) < self._size:
            return "this process has lost its connection, to an exception that came into a thread; it gets another one"
        return f"all {self._size} connections of this process are in use (syncguard_pool_size leaves one for renewals)"

    def _give_up_at(self, started_at: float) -> float:
        # The timeout is for a server that does not answer. Where it does, a long queue moves, and a thread that gave up
        # and came back would only make it longer.
        give_up_at = max(started_at, min(self.returned_at, started_at + LONGEST_QUEUE)) + self._timeout
        dial = self._dial
        if dial is None:
            return give_up_at
        # Every host of the dsn gets its time.
        return max(give_up_at, min(started_at, dial.started_at) + dial.patience)

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
                lender = self

                class Remembering(Connection):
                    """Keeps the reason of a failed attempt, which the pool only logs."""

                    patience = self._timeout + LOCK_TIMEOUT

                    @classmethod
                    def connect(cls, *_: Any, **kwargs: Any) -> Any:
                        dial = lender._dial = Dial()
                        try:
                            conn = lender._hosts.connect(super().connect, dial=dial, **kwargs)
                        except psycopg.Error as exc:
                            lender._last_error = exc
                            raise
                        finally:
                            lender._dial = None
                            lender._dialled_at = clock.now()
                        lender._last_error = None
                        return conn

                self._pool = psycopg_pool.ConnectionPool(
                    kwargs={"autocommit": True, "prepare_threshold": None},
                    connection_class=Remembering,
                    min_size=0,
                    max_size=self._size,
                    max_idle=MAX_IDLE,
                    num_workers=1,
                    reconnect_timeout=min(0.5, self._timeout),
                    name=_NAME,
                    open=True,
                )
            return self._pool

    def forget(self) -> None:
        """After a fork."""
        if self._pool is not None:
            _abandoned.append(self._pool)
        self._pool = None
        self.lent = set()
        self._mutex = threading.Lock()
        for kept in self._kept:
            kept.forget()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            pool, self._pool = self._pool, None
        for kept in self._kept:
            kept.close()
        if pool is not None:
            pool.close(timeout=1.0)


class _Loan:
    """A connection of a pool for as long as a `with` lasts. Not made with contextlib, as every statement takes one."""

    __slots__ = ("_conn", "_lender", "_pool")

    def __init__(
        self, lender: Connections, pool: psycopg_pool.ConnectionPool[Connection], conn: Connection | None = None
    ) -> None:
        self._lender = lender
        self._pool = pool
        self._conn = conn

    def __enter__(self) -> Connection:
        try:
            conn = self._conn
            if conn is None:
                conn = self._conn = self._lender.borrow(self._pool)
            self._lender.lent.add(conn)
            self._lender.lent_at = clock.now()
        except BaseException:
            # One that came into this thread after the connection did.
            if self._conn is not None:
                self._return(self._conn)
            raise
        return conn

    def __exit__(self, _: object, exc: BaseException | None, *__: object) -> None:
        conn = self._conn
        assert conn is not None
        try:
            if isinstance(exc, psycopg.errors.ReadOnlySqlTransaction):
                # Perhaps a standby, while another host of the dsn is the primary. Before the pool is told that this one is
                # closed, as it makes the next one at once.
                self._lender._hosts.mistrust()  # noqa: SLF001 - its own
                conn.close()
            if conn.active:  # an exception came into this thread in the middle of a statement
                conn.abandon()
        finally:
            self._return(conn)

    def _return(self, conn: Connection) -> None:
        try:
            self._lender.lent.discard(conn)
            if not conn.closed:
                self._lender.returned_at = clock.now()
        finally:
            self._pool.putconn(conn)


class Kept:
    """One connection for one standing purpose. `use` gives it to one thread at a time."""

    def __init__(self, hosts: Hosts, *, timeout: float) -> None:
        self._hosts = hosts
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._conn: Connection | None = None
        self._used_at = 0.0

    @contextmanager
    def use(self, *, look: bool = True) -> Iterator[Connection]:
        """The connection, opened if need be; closed again if the block raises.

        Arguments:
            look: replace one on which the server has said something unasked, as that is its goodbye. Not for a connection
                that listens.

        Raises:
            psycopg.Error: it cannot be opened.
        """
        with self._mutex:
            if self._conn is not None and not (self._conn.usable if look else not self._conn.closed):
                self._drop()
            if self._conn is None:
                self._conn = self._hosts.connect(autocommit=True, prepare_threshold=None)
                self._conn.patience = self._timeout + LOCK_TIMEOUT
            try:
                yield self._conn
            except BaseException as exc:
                if isinstance(exc, psycopg.errors.ReadOnlySqlTransaction):
                    self._hosts.mistrust()
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
            conn.abandon()

    def forget(self) -> None:
        """After a fork."""
        if self._conn is not None:
            _abandoned.append(self._conn)
        self._conn = None
        self._mutex = threading.Lock()

    def close(self) -> None:
        with self._mutex:
            self._drop()
