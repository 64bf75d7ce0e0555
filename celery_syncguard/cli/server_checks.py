"""The checks that ask the server: each is a function of a `Server` that returns what it found, and a row of `CHECKS`.

Not here: the order of all checks and what happens if the server cannot be reached (`doctor`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from celery_syncguard.core import clock
from celery_syncguard.core.config import Settings
from celery_syncguard.errors import SchemaBehind
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.connection import Connection

__all__ = ["CHECKS", "Finding", "Server", "fail", "missing_grants", "ok", "value", "warn"]

#: PostgreSQL 14 is the oldest version that is tested.
_OLDEST_SERVER = 140_000

#: Milliseconds by which a fence counter may be ahead of the server's clock: a burst of a thousand grants of one key.
_AHEAD_MS = 1000

#: Milliseconds that one of our statements may take: it may wait 2 s for a row.
_STATEMENT_MS = 3000

#: Seconds by which this host's clock may differ from the server's without a warning.
_CLOCK_OFFSET = 1.0

#: Status, message, what to do.
Finding = tuple[str, str, str]


def ok(message: str) -> Finding:
    """Nothing to do."""
    return "ok", message, ""


def warn(message: str, fix: str) -> Finding:
    """It works, but not as well as it could."""
    return "warn", message, fix


def fail(message: str, fix: str) -> Finding:
    """A promise cannot be kept."""
    return "fail", message, fix


class Server:
    """What a check asks, over two connections. `schema` is None until the check of the schema has found it."""

    def __init__(self, conns: list[Connection], settings: Settings, where: str) -> None:
        self.conns = conns
        self.conn = conns[0]
        self.settings = settings
        self.where = where
        self.schema: str | None = None

    def value(self, query: str, *parameters: Any) -> Any:
        return value(self.conn, query, parameters)

    def quoted(self, name: str) -> str:
        return quoted(name, self.conn)

    @property
    def role(self) -> str:
        return str(self.value("SELECT current_user"))

    def alter_role(self, setting: str) -> str:
        return f"ALTER ROLE {self.quoted(self.role)} SET {setting}"


def value(conn: Connection, query: str, parameters: tuple[Any, ...] = ()) -> Any:
    """The one value of a query that always returns a row."""
    row = conn.execute(query.encode(), parameters or None).fetchone()
    assert row is not None
    return row[0]


def quoted(name: str, conn: Connection) -> str:
    return sql.Identifier(name).as_string(conn)


def _connection(server: Server) -> Finding:
    version = server.conn.info.server_version
    if version < _OLDEST_SERVER:
        return fail(f"PostgreSQL {version // 10_000} at {server.where}", "use PostgreSQL 14 or later")
    return ok(f"PostgreSQL {server.value('SHOW server_version')}, {server.where}, role {server.role}")


def _writable(server: Server) -> Finding:
    if server.value("SELECT pg_is_in_recovery()"):
        return fail(
            "the server is in recovery: a standby, where no lock can be taken",
            "point syncguard_dsn at the primary, or list all hosts with target_session_attrs=read-write",
        )
    # In one statement with a volatile function, as ours are: a pooler that balances may ask a standby for anything else.
    if server.value("SELECT current_setting('transaction_read_only') FROM pg_is_in_recovery()") == "on":
        return fail(
            "transactions are read-only (default_transaction_read_only)",
            f"{server.alter_role('default_transaction_read_only = off')}, or the same for the database or the server, "
            f"wherever it was set",
        )
    return ok("a primary that accepts writes")


def _schema(server: Server) -> Finding:
    name, conn, role = server.settings.schema, server.conn, server.role
    if name is None and server.value("SELECT current_schema()") is None:
        return fail(
            f"the search path ({server.value('SHOW search_path')}) names no schema that role {role} may use",
            f"GRANT USAGE ON SCHEMA public TO {server.quoted(role)}, or set syncguard_schema",
        )
    if name is not None:
        exists = server.value("SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = %s", name)
        if exists and not server.value("SELECT has_schema_privilege(%s, 'USAGE')", name):
            return fail(
                f"role {role} has no USAGE on schema {name!r}",
                f"GRANT USAGE ON SCHEMA {server.quoted(name)} TO {server.quoted(role)}",
            )
    try:
        found = migrate.state(conn, schema=name)
        if not found.ready:
            migrate.check(conn, schema=name, where=server.where)
    except psycopg.errors.InsufficientPrivilege as exc:
        server.schema = name or str(server.value("SELECT current_schema()"))
        return fail(
            f"role {role} cannot read which migrations were applied: {exc.diag.message_primary}",
            f"GRANT SELECT ON {server.quoted(server.schema)}.syncguard_migrations TO {server.quoted(role)}",
        )
    except SchemaBehind as exc:
        return fail(str(exc), "celery syncguard migrate" if found.pending else "")
    server.schema = found.schema
    if found.unknown:
        return warn(
            f"schema {found.schema!r} has migrations that this version does not know: {', '.join(found.unknown)}",
            "update celery-syncguard here; until then both versions work on this database",
        )
    return ok(f"schema {found.schema!r}, {len(found.applied)} migrations applied")


def _permissions(server: Server) -> Finding | None:
    if server.schema is None:
        return None
    lacking = missing_grants(server.conn, schema=server.schema)
    if lacking:
        return fail(
            f"role {server.role} lacks {len(lacking)} of the privileges that a worker needs", "; ".join(lacking)
        )
    return ok(f"role {server.role} has what a worker needs")


def missing_grants(conn: Connection, *, schema: str) -> list[str]:
    """The GRANT statements that this connection's role lacks to do all that a worker, a beat and `prune` do."""
    migrations = migrate.migrations()
    rows = conn.execute(
        """
        select 'USAGE ON SCHEMA ' || %(place)s::text
        where not has_schema_privilege(%(schema)s, 'USAGE')
        union all (
            select string_agg(p.privilege, ', ' order by p.rank) || ' ON ' || %(place)s || '.' || c.relname
            from pg_catalog.pg_class c
            join pg_catalog.pg_namespace n on n.oid = c.relnamespace
            cross join unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) with ordinality as p (privilege, rank)
            where n.nspname = %(schema)s and c.relname = any (%(tables)s)
              and (p.privilege = 'SELECT' or c.relname <> 'syncguard_migrations')
              and not has_table_privilege(c.oid, p.privilege)
            group by c.relname
        ) union all
        select 'EXECUTE ON FUNCTION ' || string_agg(distinct %(place)s || '.' || f.proname, ', ')
        from pg_catalog.pg_proc f
        join pg_catalog.pg_namespace n on n.oid = f.pronamespace
        where n.nspname = %(schema)s and f.proname = any (%(functions)s)
          and not has_function_privilege(f.oid, 'EXECUTE')
        having count(*) > 0
        """,
        {
            "schema": schema,
            "place": quoted(schema, conn),
            "tables": ["syncguard_migrations", *(table for one in migrations for table in one.tables)],
            "functions": [function for one in migrations for function in one.functions],
        },
    ).fetchall()
    grantee = quoted(value(conn, "SELECT current_user"), conn)
    return [f"GRANT {privilege} TO {grantee}" for (privilege,) in rows]


def _pooler(server: Server) -> Finding:
    """Whether a session stays on one server process.

    Two clients in an uneven rhythm make any pooler mix them up. No transaction is held open meanwhile: a pool of one
    server connection would never answer the other client.
    """
    seen: list[set[int]] = [set(), set()]
    for one in (0, 1, 0, 0, 1, 0, 1, 1):
        seen[one].add(value(server.conns[one], "SELECT pg_backend_pid()"))
    if any(len(pids) > 1 for pids in seen) or seen[0] & seen[1]:
        return warn(
            "statements of one session run on several server processes: a pooler in transaction mode. LISTEN does not "
            "work there, so a waiter for a lock looks again after up to a second instead of at once. Everything else works",
            "nothing, or point syncguard_dsn past the pooler for quicker hand-over to waiters",
        )
    if seen[0] != {server.value("SELECT pg_backend_pid() FROM pg_is_in_recovery()")}:
        return warn(
            "reads run on another server than writes: a pooler that balances, such as pgpool-II. Locks are right there, "
            "since each of our functions goes to the primary; what `status` and this check read may be late",
            "run `migrate` past the pooler, and turn its load balancing off for the role or the database of syncguard_dsn",
        )
    return ok("each session stays on one server process: direct, or a pooler in session mode")


def _clock(server: Server) -> Finding:
    """Of three measurements, the one with the shortest round trip."""
    measured = []
    for _ in range(3):
        before = clock.wall_ms() / 1000
        theirs = float(server.value("SELECT extract(epoch FROM clock_timestamp())"))
        after = clock.wall_ms() / 1000
        measured.append((after - before, theirs - (before + after) / 2))
    trip, offset = min(measured)
    message = f"this host's clock is {abs(offset):.3f} s {'behind' if offset > 0 else 'ahead of'} the server's (±{trip / 2:.3f})"
    if abs(offset) - trip / 2 > _CLOCK_OFFSET:
        return warn(
            f"{message}. Locks use the server's clock; schedules, expiry of messages and HLC stamps use this one",
            "synchronise this host's clock (NTP)",
        )
    return ok(message)


def _isolation(server: Server) -> Finding:
    level = server.value("SHOW default_transaction_isolation")
    if level != "read committed":
        return warn(
            f"default_transaction_isolation is {level!r}: contended operations fail with serialization errors and are repeated",
            server.alter_role("default_transaction_isolation = 'read committed'"),
        )
    return ok(level)


def _timeout(server: Server, *, name: str) -> Finding | None:
    value = server.value("SELECT max(s.setting::bigint) FROM pg_catalog.pg_settings s WHERE s.name = %s", name)
    if not value or value >= _STATEMENT_MS:
        return None
    return warn(
        f"{name} is {value} ms: it ends statements of ours that wait for a row, up to 2 s, before they know who holds",
        f"{server.alter_role(f'{name} = 0')}, or at least {_STATEMENT_MS} ms",
    )


def _durability(server: Server) -> Finding:
    if server.value("SHOW fsync") == "off":
        return warn(
            "fsync is off: a crash of the server's machine can destroy the database",
            "set fsync = on in the server's configuration",
        )
    level = server.value("SHOW synchronous_commit")
    standbys = server.value("SHOW synchronous_standby_names")
    if standbys and level not in ("off", "local") and not server.value("SELECT count(*) FROM pg_stat_replication"):
        return fail(
            f"synchronous_standby_names is {standbys!r} and no standby is connected: every grant waits for one, and is given up",
            "bring the standby back, or take it out of synchronous_standby_names (and reload)",
        )
    if level == "off":
        return warn(
            "synchronous_commit is off: a crash of the server forgets the last grants, so a lock can be granted again while "
            "its holder works (its fence is still higher). Completions are written to disk all the same",
            server.alter_role("synchronous_commit = on"),
        )
    return ok(f"fsync on, synchronous_commit {level}")


def _notifications(server: Server) -> Finding:
    usage = float(server.value("SELECT pg_notification_queue_usage()"))
    if usage >= 0.5:
        return warn(
            f"the server's queue of notifications is {usage:.0%} full: when it is full, waiters look again after up to a "
            f"second instead of being woken",
            "end the transaction of the session that listens and does not move: the server's log names its process id",
        )
    return ok(f"the queue is {usage:.0%} full")


def _fences(server: Server) -> Finding | None:
    if server.schema is None:
        return None
    place = server.quoted(server.schema)
    try:
        row = server.conn.execute(
            f"SELECT count(*), max(c.fence - t.now_ms), min(c.fence_key) FROM {place}.syncguard_fence_counters c, "
            f"(SELECT {place}.syncguard_clock_ms() AS now_ms) t WHERE c.fence > t.now_ms + {_AHEAD_MS}".encode()
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return None  # `permissions` has said so
    ahead, most, key = row or (0, 0, "")
    if not ahead:
        return ok("no fence counter is ahead of the server's clock")
    return warn(
        f"{ahead} fence counter(s) are ahead of the server's clock, by up to {most / 1000:.0f} s (such as {key!r}): the clock "
        f"was set back, or a counter was edited. They rise by one per grant meanwhile, and a failover that loses grants of "
        f"such a key may give their fences again",
        "nothing: it ends when the clock has caught up. Until then do not rely on fences across a failover",
    )


CHECKS: tuple[tuple[str, Callable[[Server], Finding | None]], ...] = (
    ("connection", _connection),
    ("server", _writable),
    ("schema", _schema),
    ("permissions", _permissions),
    ("pooler", _pooler),
    ("clock", _clock),
    ("isolation", _isolation),
    ("timeouts", partial(_timeout, name="statement_timeout")),
    ("timeouts", partial(_timeout, name="transaction_timeout")),  # new in PostgreSQL 17
    ("durability", _durability),
    ("notifications", _notifications),
    ("fences", _fences),
)
