"""The checks of one installation: can a worker do its work here, and if not, which statement or setting repairs it.

A check finds `ok`, `warn` (it works, but not as well as it could) or `fail` (a promise cannot be kept), with the facts in
the message and the remedy in `fix`. Nothing is changed and nothing is written.

Not here: the checks that ask the server (`server_checks`), and how the checks are printed (`commands`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg

from celery_syncguard.cli.server_checks import CHECKS, Finding, Server, fail, ok, value, warn
from celery_syncguard.core.config import Settings
from celery_syncguard.core.lease import margin
from celery_syncguard.postgres.connection import Connection, connection_parameters, describe_dsn, in_statement_mode
from celery_syncguard.postgres.hosts import Hosts
from celery_syncguard.tasks.publisher_confirms import turned_off

__all__ = ["Check", "examine"]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What one check found. `status` is `ok`, `warn` or `fail`; `fix` is what to do, or empty."""

    name: str
    status: str
    message: str
    fix: str = ""


def examine(settings: Settings, *, app: Any = None) -> Iterator[Check]:
    """Every check, in an order in which the first failure explains the later ones.

    Arguments:
        app: the application, if its tasks and its broker are checked too.
    """
    yield Check("settings", *_settings(settings))
    if app is not None and (found := _broker(app)) is not None:
        yield Check("broker", *found)
    where = describe_dsn(settings.dsn)
    hosts = Hosts(connection_parameters(settings.dsn, timeout=settings.timeout))
    yield from _hosts(hosts)
    with ExitStack() as stack:
        try:
            conns = [stack.enter_context(hosts.connect(autocommit=True, prepare_threshold=None)) for _ in range(2)]
        except psycopg.Error as exc:
            fix = "check host, port, database, role and password of syncguard_dsn, and that the server runs"
            yield Check("connection", *fail(f"{where}: {text(exc)}", fix))
            return
        server = Server(conns, settings, where)
        try:
            for name, check in CHECKS:
                found = check(server)
                if found is not None:
                    yield Check(name, *found)
        except psycopg.Error as exc:
            yield _broken_off(exc, where)


def _broken_off(exc: psycopg.Error, where: str) -> Check:
    if in_statement_mode(exc):
        found = fail(
            "a pooler in statement mode: it refuses transactions, which migrations and fenced writes need",
            "set pool_mode = transaction in pgbouncer.ini, or point syncguard_dsn past the pooler",
        )
        return Check("pooler", *found)
    message = f"{where} ended a statement of this check: {text(exc)}"
    return Check("connection", *fail(message, "if the message gives no reason, try again"))


def text(exc: object) -> str:
    return " ".join(str(exc).split())


def _settings(settings: Settings) -> Finding:
    ttls = (("syncguard_lock_ttl", settings.lock_ttl), ("syncguard_leader_ttl", settings.leader_ttl))
    # A renewal is sent at a third of the ttl; what is left until the deadline is for a slow answer.
    tight = [f"{name} {ttl:g} s" for name, ttl in ttls if settings.timeout > ttl - margin(ttl) - ttl / 3]
    if tight:
        return warn(
            f"one attempt to reach the server may take syncguard_timeout ({settings.timeout:g} s), which is longer than "
            f"a renewal can wait with {' and '.join(tight)}: one slow answer costs the lease",
            "raise the ttl, or lower syncguard_timeout",
        )
    return ok(
        f"lock ttl {settings.lock_ttl:g} s, leader ttl {settings.leader_ttl:g} s, timeout {settings.timeout:g} s, "
        f"{settings.pool_size} connections per process"
    )


def _broker(app: Any) -> Finding | None:
    """Whether a claim can outlive a message that the broker never got. Connects to nothing."""
    try:
        app.loader.import_default_modules()
        names = sorted(task.name for task in app.tasks.values() if getattr(task, "dedup_key", None))
    except Exception as exc:  # the application's own code, which may fail in any way  # noqa: BLE001
        return warn(f"the tasks cannot be imported: {type(exc).__name__}: {exc}", "see the message")
    try:
        unconfirmed = turned_off(app)
    except Exception as exc:  # kombu raises anything for a broker that it does not know  # noqa: BLE001
        # Not the URL: it may hold a password.
        reason = "no such transport" if isinstance(exc, KeyError) else f"{type(exc).__name__}"
        return fail(
            f"broker_url cannot be used ({reason}): no worker starts with it, and nothing can be published",
            "write amqp://… or redis://…, and install the client that this needs",
        )
    if not names:
        return None
    if unconfirmed:
        return warn(
            f"confirm_publish is off in broker_transport_options: a message that is lost on its way to RabbitMQ raises no "
            f"error, and its claim stays for dedup_ttl ({len(names)} task(s) with dedup_key, such as {names[0]})",
            "take confirm_publish out of broker_transport_options",
        )
    return ok(f"the broker confirms what is published with a claim ({len(names)} task(s) with dedup_key)")


def _hosts(hosts: Hosts) -> Iterator[Check]:
    """Each server of a dsn that names several."""
    found = list(hosts.each())
    if len(found) == 1:
        conn = found[0][1]
        if isinstance(conn, Connection):
            conn.close()
        return
    for name, conn in found:
        if not isinstance(conn, Connection):
            fix = "if it should run, start it, or check the network; the others are used meanwhile"
            yield Check(f"host {name}", *warn(text(conn), fix))
            continue
        try:
            with conn:
                standby = value(conn, "SELECT pg_is_in_recovery()")
        except psycopg.Error as exc:  # a pooler accepts clients also while it has no server
            yield Check(f"host {name}", *warn(text(exc), "check the server behind it"))
            continue
        yield Check(f"host {name}", *ok("a standby" if standby else "a primary"))
