"""The servers that a dsn names: tried one by one, the one that answered last first, and what of ours is left on each.

libpq begins at the first host of a list each time, so one that hangs there would cost its timeout for every connection.
Here it costs that once per process. The rules of libpq hold otherwise: the order of the list, `connect_timeout` for each
address, and `target_session_attrs`.

A connection whose statement was given up is *left over* while nothing shows that the server has ended that statement.
There are few of those: a server on which they have become too many is not connected to until one of them ends.

Not here: how a statement is given up (`connection`), who gets a connection (`pool`).
"""

from __future__ import annotations

import math
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
from psycopg.pq.abc import PGconn

from celery_syncguard.core import clock
from celery_syncguard.postgres import psycopg_internals
from celery_syncguard.postgres.connection import Connection, cancelled, ended

__all__ = ["LEFT_OVER", "Dial", "Hosts", "addresses"]

Address = tuple[str, str, str]

#: The most connections per process and server whose statement was given up and has perhaps not ended.
LEFT_OVER = 2

#: How many seconds one repeated cancel may take, and how many to wait before the next.
_AGAIN, _AGAIN_AFTER = 0.5, 5.0

#: Connections that belong to the parent of a fork are kept here, so that no destructor closes its sockets.
_inherited: list[PGconn] = []


class Dial:
    """One attempt to connect, host by host, for the threads that wait for it."""

    def __init__(self) -> None:
        self.started_at = clock.now()
        #: Seconds that it takes if no host answers. 0.0 for a single host.
        self.patience = 0.0
        self._trying = ""
        self._said: list[str] = []

    def tries(self, name: str) -> None:
        self._trying = name

    def heard(self, name: str, what: object) -> None:
        text = " ".join(str(what).split())
        self._said.append(text if name.rpartition(":")[0] in text else f"{name}: {text}")

    @property
    def said(self) -> str:
        """What each host has said so far."""
        return "; ".join(self._said)

    def __str__(self) -> str:
        return "; ".join([*self._said, *([f"{self._trying} does not answer"] if self._trying else [])])


class Hosts:
    """The servers of one dsn, for one process.

    Arguments:
        parameters: for libpq (`connection.connection_parameters`).

    Raises:
        ImproperlyConfigured: this version of psycopg does not fit.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        psycopg_internals.refuse_unfit()
        self._parameters = parameters
        self.forget()

    def forget(self) -> None:
        """After a fork (and at the start)."""
        for left in getattr(self, "_left", {}).values():
            _inherited.extend(left)
        self._mutex = threading.Lock()
        self._best: Address | None = None
        self._left: dict[Address, list[PGconn]] = {}
        self._looking: set[Address] = set()  # at what is left over there, one thread at a time
        self._told_at = -math.inf

    def connect(
        self, kind: Callable[..., Connection] = Connection.connect, *, dial: Dial | None = None, **arguments: Any
    ) -> Connection:
        """A new connection to the first server that is what the dsn asks for.

        Arguments:
            kind: makes a connection from parameters.
            dial: told how it goes.
            arguments: of `psycopg.connect`, beside the dsn's.

        Raises:
            psycopg.Error: none; what each of them said.
        """
        dial = dial or Dial()
        failures: list[psycopg.Error] = []
        found = sorted(addresses(self._parameters), key=lambda one: self._rank(_address(one)))
        if len(found) > 1:
            dial.patience = len(found) * float(self._parameters["connect_timeout"]) + 1.0
        for one in found:
            address = _address(one)
            name = describe(one)
            dial.tries(name)
            if self._too_many(address):
                failures.append(
                    psycopg.OperationalError(f"{name} has not ended {LEFT_OVER} statements that were given up")
                )
                dial.heard(name, failures[-1])
                continue
            try:
                conn = kind(**one, **arguments)
            except psycopg.Error as exc:
                failures.append(exc)
                dial.heard(name, exc)
                continue
            conn.leave = partial(self._leave, address)
            self._best = address
            return conn
        dial.tries("")
        same = {type(one) for one in failures}
        raise (same.pop() if len(same) == 1 else psycopg.OperationalError)(dial.said) from failures[-1]

    def each(self) -> Iterator[tuple[str, Connection | psycopg.Error]]:
        """Every address by its name, with a new connection to whatever server is there, or why there is none."""
        for one in addresses({**self._parameters, "target_session_attrs": "any"}):
            try:
                yield describe(one), Connection.connect(**one, autocommit=True, prepare_threshold=None)
            except psycopg.Error as exc:
                yield describe(one), exc

    def mistrust(self) -> None:
        """The server that answered last does not take writes: begin at the first host again."""
        self._best = None

    @property
    def full(self) -> bool:
        """Whether there is a server, and only such, with too many left over."""
        return bool(self._left) and all(self._too_many(_address(one)) for one in addresses(self._parameters))

    @property
    def left_over(self) -> int:
        """How many connections there are whose statement was given up and has perhaps not ended."""
        with self._mutex:
            return sum(map(len, self._left.values()))

    def _rank(self, address: Address) -> tuple[bool, bool]:
        return address in self._left, address != self._best

    def _leave(self, address: Address, pgconn: PGconn) -> None:
        with self._mutex:
            self._left.setdefault(address, []).append(pgconn)

    def _too_many(self, address: Address) -> bool:
        with self._mutex:
            left = list(self._left.get(address, ()))
            if not left or address in self._looking:
                return len(left) >= LEFT_OVER
            self._looking.add(address)
        gone: list[PGconn] = []
        try:
            gone += [one for one in left if ended(one, timeout=0.0)]
            if len(left) - len(gone) >= LEFT_OVER and clock.now() > self._told_at + _AGAIN_AFTER:
                # The server may have been unable to hear it the first time.
                self._told_at = clock.now()
                for one in left:
                    if one not in gone and cancelled(one, timeout=_AGAIN) and ended(one, timeout=_AGAIN):
                        gone.append(one)
        finally:
            with self._mutex:
                self._looking.discard(address)
                still = [one for one in self._left.pop(address, []) if one not in gone]
                if still:
                    self._left[address] = still
        for one in gone:
            one.finish()
        return len(still) >= LEFT_OVER


def addresses(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters of each attempt that libpq would make: one for each host, and for each address of its name."""
    lists = {key: _listed(parameters, key) for key in ("host", "hostaddr", "port")}
    count = max(len(lists["host"]), len(lists["hostaddr"]), 1)
    if len(lists["port"]) == 1:
        lists["port"] *= count
    if any(len(values) not in (0, count) for values in lists.values()):
        return [parameters]  # libpq says what is wrong with it
    found = []
    for index in range(count):
        one = {**parameters, **{key: values[index] for key, values in lists.items() if values}}
        found += _resolved(one)
    if parameters.get("load_balance_hosts") == "random":
        random.shuffle(found)
    return found


def _listed(parameters: dict[str, Any], key: str) -> list[str]:
    value = parameters.get(key) or os.environ.get(f"PG{key.upper()}")
    return str(value).split(",") if value else []


def _resolved(one: dict[str, Any]) -> list[dict[str, Any]]:
    host = one.get("host", "")
    if not host or host[0] in "/@" or host[1:2] == ":" or one.get("hostaddr"):
        return [one]
    try:
        answers = socket.getaddrinfo(host, one.get("port") or "5432", type=socket.SOCK_STREAM)
    except OSError:
        return [one]  # psycopg says so
    return [{**one, "hostaddr": address} for address in dict.fromkeys(str(answer[4][0]) for answer in answers)]


def _address(one: dict[str, Any]) -> Address:
    return str(one.get("host", "")), str(one.get("hostaddr", "")), str(one.get("port", ""))


def describe(one: dict[str, Any]) -> str:
    """An address for people: host and port, and which address of the host if that is not the same."""
    host, hostaddr, port = _address(one)
    name = f"{host or hostaddr or 'the local socket'}:{port or '5432'}"
    return name if hostaddr in ("", host) or not host else f"{name} ({hostaddr})"
