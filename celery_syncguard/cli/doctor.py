"""Checks of one installation: can a worker here do its work, and if not, which statement or setting cures it.

Each check answers `ok`, `warn` (it works, but not as well as it could) or `fail` (a promise cannot be kept), with the
facts in the message and the cure in `fix`. Nothing is changed, and nothing is written.

Not here: how the answers are printed (`cli`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
from psycopg import sql

from celery_syncguard.core import clock
from celery_syncguard.core.config import Settings
from celery_syncguard.core.lease import margin
from celery_syncguard.errors import SchemaBehind
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.connection import Connection, connection_parameters, describe_dsn, in_statement_mode
from celery_syncguard.postgres.hosts import Hosts
from celery_syncguard.tasks.publisher_confirms import turned_off

__all__ = ["Check", "examine", "missing_grants"]

#: PostgreSQL 14 is the oldest version that is tested.
_OLDEST_SERVER = 140_000

#: Milliseconds by which a fence counter may be ahead of the server's clock: a burst of a thousand grants of one key.
_AHEAD_MS = 1000

#: Milliseconds that a statement of ours may take: its wait for a row, and some.
_STATEMENT_MS = 3000

#: Seconds by which this host's clock may differ from the server's before it is worth a word.
_CLOCK_OFFSET = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One answer. `status` is `ok`, `warn` or `fail`; `fix` is what to do, or empty."""

    name: str
    status: str
    message: str
    fix: str = ""


def examine(settings: Settings, *, app: Any = None) -> Iterator[Check]:
    """Every check, in an order in which the first failure explains the later ones.

    Arguments:
        app: the application, if its tasks and its broker are to be looked at too.
    """
    yield from _settings(settings)
    if app is not None:
        yield from _broker(app)
    where = describe_dsn(settings.dsn)
    hosts = Hosts(connection_parameters(settings.dsn, timeout=settings.timeout))
    yield from _hosts(hosts)
    with ExitStack() as stack:
        try:
            conns = [stack.enter_context(hosts.connect(autocommit=True, prepare_threshold=None)) for _ in range(2)]
        except psycopg.Error as exc:
            yield Check(
                "connection",
                "fail",
                f"{where}: {' '.join(str(exc).split())}",
                "check host, port, database, role and password of syncguard_dsn, and that the server runs",
            )
            return
        conn = conns[0]
        role = _value(conn, "SELECT current_user")
        version = conn.info.server_version
        if version < _OLDEST_SERVER:
            yield Check(
                "connection", "fail", f"PostgreSQL {version // 10_000} at {where}", "use PostgreSQL 14 or later"
            )
        else:
            yield Check("connection", "ok", f"PostgreSQL {_value(conn, 'SHOW server_version')}, {where}, role {role}")
        try:
            yield _writable(conn, role)
            yield from _schema(conn, settings, where, role)
            yield _pooler(conns)
            yield _clock(conn)
            yield _isolation(conn, role)
            yield from _timeouts(conn, role)
            yield _durability(conn, role)
            yield _notifications(conn)
            yield from _fences(conn, settings)
        except psycopg.Error as exc:
            if in_statement_mode(exc):
                yield Check(
                    "pooler",
                    "fail",
                    "a pooler in statement mode: it refuses transactions, in which leases are proved and migrations run",
                    "set pool_mode = transaction in pgbouncer.ini, or point syncguard_dsn past the pooler",
                )
                return
            yield Check(
                "connection",
                "fail",
                f"{where} ended a statement of this check: {' '.join(str(exc).split())}",
                "if the message names no reason, try again",
            )


def _value(conn: Connection, query: str, parameters: tuple[Any, ...] = ()) -> Any:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    assert row is not None  # only asked for what always answers
    return row[0]


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
            yield Check(
                f"host {name}",
                "warn",
                " ".join(str(conn).split()),
                "if it is to be there, start it, or look at the network; the others are used meanwhile",
            )
            continue
        try:
            with conn:
                standby = _value(conn, "SELECT pg_is_in_recovery()")
        except psycopg.Error as exc:  # a pooler takes clients also while there is no server behind it
            yield Check(f"host {name}", "warn", " ".join(str(exc).split()), "look at the server behind it")
            continue
        yield Check(f"host {name}", "ok", "a standby" if standby else "a primary")


def _settings(settings: Settings) -> Iterator[Check]:
    tight = [
        f"{name} {ttl:g} s"
        for name, ttl in (("syncguard_lock_ttl", settings.lock_ttl), ("syncguard_leader_ttl", settings.leader_ttl))
        # A renewal is sent at a third of the ttl; what is left until the deadline is for a slow answer.
        if settings.timeout > ttl - margin(ttl) - ttl / 3
    ]
    if tight:
        yield Check(
            "settings",
            "warn",
            f"one attempt to reach the server may take syncguard_timeout ({settings.timeout:g} s), which is longer than "
            f"a renewal can wait with {' and '.join(tight)}: one slow answer costs the lease",
            "raise the ttl, or lower syncguard_timeout",
        )
    else:
        yield Check(
            "settings",
            "ok",
            f"lock ttl {settings.lock_ttl:g} s, leader ttl {settings.leader_ttl:g} s, timeout {settings.timeout:g} s, "
            f"{settings.pool_size} connections per process",
        )


def _broker(app: Any) -> Iterator[Check]:
    """Whether claims outlive messages that the broker never got. Nothing is connected to."""
    try:
        app.loader.import_default_modules()
        names = sorted(task.name for task in app.tasks.values() if getattr(task, "dedup_key", None))
    except Exception as exc:  # the application's own code, which may fail in any way  # noqa: BLE001
        yield Check("broker", "warn", f"the tasks cannot be imported: {type(exc).__name__}: {exc}", "see the message")
        return
    try:
        unanswered = turned_off(app)
    except Exception as exc:  # kombu raises anything for a broker that it does not know  # noqa: BLE001
        # Not the URL: it may hold a password.
        reason = "no such transport" if isinstance(exc, KeyError) else f"{type(exc).__name__}"
        yield Check(
            "broker",
            "fail",
            f"broker_url cannot be used ({reason}): no worker starts with it, and nothing can be published",
            "write amqp://… or redis://…, and install the client that this needs",
        )
        return
    if names and unanswered:
        yield Check(
            "broker",
            "warn",
            f"confirm_publish is off in broker_transport_options: a message that is lost on its way to RabbitMQ is no error, "
            f"and its claim stays for dedup_ttl ({len(names)} task(s) with dedup_key, such as {names[0]})",
            "take confirm_publish out of broker_transport_options",
        )
    elif names:
        yield Check(
            "broker", "ok", f"what is published with a claim is answered for ({len(names)} task(s) with dedup_key)"
        )


def _writable(conn: Connection, role: str) -> Check:
    if _value(conn, "SELECT pg_is_in_recovery()"):
        return Check(
            "server",
            "fail",
            "the server is in recovery: a standby, where no lock can be taken",
            "point syncguard_dsn at the primary, or list all hosts with target_session_attrs=read-write",
        )
    # In one statement with a volatile function, as ours are: a pooler that balances may ask a standby for anything else.
    if _value(conn, "SELECT current_setting('transaction_read_only') FROM pg_is_in_recovery()") == "on":
        return Check(
            "server",
            "fail",
            "transactions are read-only (default_transaction_read_only)",
            f"ALTER ROLE {_quoted(role, conn)} SET default_transaction_read_only = off, or the same for the database or the "
            f"server, wherever it was set",
        )
    return Check("server", "ok", "a primary that takes writes")


def _schema(conn: Connection, settings: Settings, where: str, role: str) -> Iterator[Check]:
    name = settings.schema
    if name is None and _value(conn, "SELECT current_schema()") is None:
        yield Check(
            "schema",
            "fail",
            f"the search path ({_value(conn, 'SHOW search_path')}) names no schema that role {role} may use",
            f"GRANT USAGE ON SCHEMA public TO {_quoted(role, conn)}, or set syncguard_schema",
        )
        return
    if name is not None:
        there = _value(conn, "SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = %s", (name,))
        if there and not _value(conn, "SELECT has_schema_privilege(%s, 'USAGE')", (name,)):
            yield Check(
                "schema",
                "fail",
                f"role {role} may not look into schema {name!r}",
                f"GRANT USAGE ON SCHEMA {_quoted(name, conn)} TO {_quoted(role, conn)}",
            )
            return
    try:
        found = migrate.state(conn, schema=name)
    except psycopg.errors.InsufficientPrivilege as exc:
        place = name or _value(conn, "SELECT current_schema()")
        records = _quoted(place, conn) + ".syncguard_migrations"
        yield Check(
            "schema",
            "fail",
            f"role {role} cannot read what has been migrated: {exc.diag.message_primary}",
            f"GRANT SELECT ON {records} TO {_quoted(role, conn)}",
        )
        found = None
    if found is not None:
        try:
            if not found.ready:
                migrate.check(conn, schema=name, where=where)
        except SchemaBehind as exc:
            yield Check("schema", "fail", str(exc), "celery syncguard migrate" if found.pending else "")
            return
        if found.unknown:
            yield Check(
                "schema",
                "warn",
                f"schema {found.schema!r} has migrations that this version does not know: {', '.join(found.unknown)}",
                "update celery-syncguard here; until then both versions work on this database",
            )
        else:
            yield Check("schema", "ok", f"schema {found.schema!r}, {len(found.applied)} migrations applied")
        name = found.schema
    place = name or _value(conn, "SELECT current_schema()")
    lacking = missing_grants(conn, schema=place)
    if lacking:
        yield Check(
            "permissions",
            "fail",
            f"role {role} lacks {len(lacking)} of the privileges that a worker needs",
            "; ".join(lacking),
        )
    else:
        yield Check("permissions", "ok", f"role {role} has what a worker needs")


def missing_grants(conn: Connection, *, schema: str) -> list[str]:
    """The GRANT statements that this connection's role lacks to do everything that a worker, a beat and `prune` do."""
    grantee = _quoted(_value(conn, "SELECT current_user"), conn)
    tables: dict[str, tuple[str, ...]] = {"syncguard_migrations": ("SELECT",)}
    functions: list[str] = []
    for one in migrate.migrations():
        tables.update(dict.fromkeys(one.tables, ("SELECT", "INSERT", "UPDATE", "DELETE")))
        functions.extend(one.functions)
    lacking = []
    if not _value(conn, "SELECT has_schema_privilege(%s, 'USAGE')", (schema,)):
        lacking.append(f"GRANT USAGE ON SCHEMA {_quoted(schema, conn)} TO {grantee}")
    rows = conn.execute(
        "SELECT c.relname, p.privilege FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) WITH ORDINALITY AS p (privilege, place) "
        "WHERE n.nspname = %s AND c.relname = ANY (%s) AND NOT has_table_privilege(c.oid, p.privilege) "
        "ORDER BY c.relname, p.place",
        (schema, list(tables)),
    ).fetchall()
    for table, needed in tables.items():
        absent = [privilege for name, privilege in rows if name == table and privilege in needed]
        if absent:
            lacking.append(f"GRANT {', '.join(absent)} ON {_quoted(schema, conn)}.{table} TO {grantee}")
    rows = conn.execute(
        "SELECT p.proname, pg_get_function_identity_arguments(p.oid) FROM pg_catalog.pg_proc p "
        "JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace "
        "WHERE n.nspname = %s AND p.proname = ANY (%s) AND NOT has_function_privilege(p.oid, 'EXECUTE') "
        "ORDER BY p.proname",
        (schema, functions),
    ).fetchall()
    if rows:
        names = ", ".join(f"{_quoted(schema, conn)}.{name}" for name in dict.fromkeys(name for name, _ in rows))
        lacking.append(f"GRANT EXECUTE ON FUNCTION {names} TO {grantee}")
    return lacking


def _pooler(conns: list[Connection]) -> Check:
    """Whether a session stays on one server process.

    Two clients in an uneven rhythm make any pooler mix them up. No transaction is held open meanwhile: a pool of one
    server connection would never answer the other client.
    """
    seen: list[set[int]] = [set(), set()]
    for one in (0, 1, 0, 0, 1, 0, 1, 1):
        seen[one].add(_value(conns[one], "SELECT pg_backend_pid()"))
    if any(len(pids) > 1 for pids in seen) or seen[0] & seen[1]:
        return Check(
            "pooler",
            "warn",
            "statements of one session run on several server processes: a pooler in transaction mode. LISTEN does not "
            "work there, so that whoever waits for a lock looks again after up to a second instead of at once. "
            "Everything else works",
            "nothing, or point syncguard_dsn past the pooler for quicker hand-over to waiters",
        )
    process = _value(conns[0], "SELECT pg_backend_pid() FROM pg_is_in_recovery()")
    if seen[0] != {process}:
        return Check(
            "pooler",
            "warn",
            "what only reads runs on another server than what writes: a pooler that balances, such as pgpool-II. Locks are "
            "right there, as every function of ours goes to the primary; what `status` and this check read may be late",
            "run `migrate` past the pooler, and turn its load balancing off for the role or the database of syncguard_dsn",
        )
    return Check("pooler", "ok", "each session stays on one server process: direct, or a pooler in session mode")


def _clock(conn: Connection) -> Check:
    best: tuple[float, float] | None = None
    for _ in range(3):
        before = clock.wall_ms() / 1000
        theirs = float(_value(conn, "SELECT extract(epoch FROM clock_timestamp())"))
        after = clock.wall_ms() / 1000
        if best is None or after - before < best[1]:
            best = theirs - (before + after) / 2, after - before
    assert best is not None
    offset, trip = best
    message = f"this host's clock is {abs(offset):.3f} s {'behind' if offset > 0 else 'ahead of'} the server's (±{trip / 2:.3f})"
    if abs(offset) - trip / 2 > _CLOCK_OFFSET:
        return Check(
            "clock",
            "warn",
            f"{message}. Locks do not mind, they use the server's; schedules, expiry of messages and HLC stamps do",
            "synchronise this host's clock (NTP)",
        )
    return Check("clock", "ok", message)


def _isolation(conn: Connection, role: str) -> Check:
    level = _value(conn, "SHOW default_transaction_isolation")
    if level != "read committed":
        return Check(
            "isolation",
            "warn",
            f"default_transaction_isolation is {level!r}: contended operations meet serialization failures and are repeated",
            f"ALTER ROLE {_quoted(role, conn)} SET default_transaction_isolation = 'read committed'",
        )
    return Check("isolation", "ok", level)


def _timeouts(conn: Connection, role: str) -> Iterator[Check]:
    for name in ("statement_timeout", "transaction_timeout"):
        # The second one is new in PostgreSQL 17.
        value = _value(conn, "SELECT max(s.setting::bigint) FROM pg_catalog.pg_settings s WHERE s.name = %s", (name,))
        if value and value < _STATEMENT_MS:
            yield Check(
                "timeouts",
                "warn",
                f"{name} is {value} ms: a statement of ours that waits for a row, up to 2 s, is cut off before it knows who holds",
                f"ALTER ROLE {_quoted(role, conn)} SET {name} = 0, or {_STATEMENT_MS} ms and more",
            )


def _durability(conn: Connection, role: str) -> Check:
    if _value(conn, "SHOW fsync") == "off":
        return Check(
            "durability",
            "warn",
            "fsync is off: a crash of the server's machine can take the database with it",
            "set fsync = on in the server's configuration",
        )
    level = _value(conn, "SHOW synchronous_commit")
    waits_for = _value(conn, "SHOW synchronous_standby_names")
    if waits_for and level not in ("off", "local") and not _value(conn, "SELECT count(*) FROM pg_stat_replication"):
        return Check(
            "durability",
            "fail",
            f"synchronous_standby_names is {waits_for!r} and no standby is connected: every grant waits for one, and is given up",
            "bring the standby back, or take it out of synchronous_standby_names (and reload)",
        )
    if level == "off":
        return Check(
            "durability",
            "warn",
            "synchronous_commit is off: a crash of the server forgets the last grants, so that a lock can be granted "
            "again while its holder works (its fence is still higher). Completions are written through all the same",
            f"ALTER ROLE {_quoted(role, conn)} SET synchronous_commit = on",
        )
    return Check("durability", "ok", f"fsync on, synchronous_commit {level}")


def _notifications(conn: Connection) -> Check:
    usage = float(_value(conn, "SELECT pg_notification_queue_usage()"))
    if usage >= 0.5:
        return Check(
            "notifications",
            "warn",
            f"the server's queue of notifications is {usage:.0%} full, so that waiters look again after up to a second "
            f"instead of being woken",
            "end the transaction of the session that listens and stands still: the server's log names its process id",
        )
    return Check("notifications", "ok", f"the queue is {usage:.0%} full")


def _fences(conn: Connection, settings: Settings) -> Iterator[Check]:
    place = "" if settings.schema is None else f"{_quoted(settings.schema, conn)}."
    try:
        row = conn.execute(
            f"SELECT count(*), max(c.fence - t.now_ms), min(c.fence_key) FROM {place}syncguard_fence_counters c, "
            f"(SELECT {place}syncguard_clock_ms() AS now_ms) t WHERE c.fence > t.now_ms + {_AHEAD_MS}".encode()
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return  # `permissions` has said so
    assert row is not None
    ahead, most, key = row
    if ahead:
        yield Check(
            "fences",
            "warn",
            f"{ahead} fence counter(s) are ahead of the server's clock, by up to {most / 1000:.0f} s (such as {key!r}): it was "
            f"set back, or a counter was edited. They rise by ones meanwhile, and a failover that loses grants of such a key may "
            f"give their fences again",
            "nothing: it ends when the clock has caught up. Until then do not rely on fences across a failover",
        )
    else:
        yield Check("fences", "ok", "no fence counter is ahead of the server's clock")


def _quoted(name: str, conn: Connection) -> str:
    return sql.Identifier(name).as_string(conn)
