"""What we use of psycopg and psycopg_pool that they do not document, and nothing else. The other modules of `postgres` use only
documented parts, such as `psycopg.pq`, whose functions are those of libpq.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn

from celery_syncguard.core.libraries import find, require

__all__ = ["answers", "detach", "error_of", "quieten_pool", "refuse_unfit", "wait"]

_generators: Any = find("psycopg.generators")
_waiting: Any = find("psycopg.waiting")


def refuse_unfit() -> None:
    """Raises ImproperlyConfigured, before a connection is made, if this psycopg cannot send a statement as we do."""
    require(
        "psycopg",
        "psycopg:Connection.wait",
        "psycopg.generators:execute",
        "psycopg.waiting:wait_selector",
        "psycopg.errors:error_from_result",
    )


def wait(conn: psycopg.Connection[Any], gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
    """What `Connection.wait` does, but `gen` is asked again after each interval, with "nothing is ready yet".

    Relies on psycopg sending each statement through `Connection.wait`, as a generator that yields what it waits for. If it does
    not, a server that hangs is noticed by TCP only, after `tcp_user_timeout`. Before 3.3 only the wait in Python asks again.
    """
    if _asks_again():
        return psycopg.Connection.wait(conn, gen, *args, **kwargs)
    interval = kwargs.get("interval", args[0] if args else None)
    return _waiting.wait_selector(gen, conn.pgconn.socket, interval=interval or 0.1)


@functools.cache
def _asks_again() -> bool:
    """Relies on `Connection.wait` having a `timeout` from 3.3 on. If that is gone, the wait in Python is used, which is slower."""
    return "timeout" in inspect.signature(psycopg.Connection.wait).parameters


def answers(pgconn: PGconn) -> Generator[Any, Any, list[pq.abc.PGresult]]:
    """For `Connection.wait`: sends what was given to libpq, and returns the server's answers.

    Relies on `psycopg.generators.execute`. Without it: refused by `refuse_unfit`.
    """
    found: Generator[Any, Any, list[pq.abc.PGresult]] = _generators.execute(pgconn)
    return found


def error_of(result: pq.abc.PGresult) -> psycopg.Error:
    """The exception for an answer that is an error.

    Relies on `psycopg.errors.error_from_result`. Without it: refused by `refuse_unfit`.
    """
    return psycopg.errors.error_from_result(result)


def detach(conn: psycopg.Connection[Any]) -> PGconn:
    """Take libpq's connection out of psycopg's, which counts as closed from then on, without closing it.

    Relies on psycopg looking at `Connection.pgconn` for each call. If that cannot be set, libpq's is closed.
    """
    pgconn = conn.pgconn
    try:
        conn.pgconn = pq.PGconn.connect_start(b"closed")  # was never open
    except AttributeError:
        pgconn.finish()
    return pgconn


def quieten_pool(name: str, kind: type) -> None:
    """Keep the lines of the pool of that name, and about connections of that kind, out of the log `psycopg.pool`: it logs each
    attempt that fails, twice a second, and the caller is told once.

    Relies on a line naming the pool in quotes, or having the connection as its first argument. If not, there are more lines.
    """

    def is_about_others(record: logging.LogRecord) -> bool:
        about = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return not isinstance(about, kind) and repr(name) not in record.getMessage()

    logging.getLogger("psycopg.pool").addFilter(is_about_others)
