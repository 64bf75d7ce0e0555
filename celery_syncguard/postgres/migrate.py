"""Our schema: the numbered migrations, applying them once, and telling what a database has of them.

Forward only, one transaction each, never run by a worker. A migration inserts its own record first, and runners take
turns, so two at once apply once. A record keeps the checksum of the text that was applied, so an edited file is noticed.

The files lie in `migrations/` inside the installed package, and beside the package in a checkout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from celery_syncguard.errors import SchemaBehind, SyncGuardError
from celery_syncguard.postgres.connection import connection_parameters, describe_dsn

__all__ = ["Migration", "SchemaState", "check", "copyable_sql", "folder", "migrate", "migrations", "state"]

Connection: TypeAlias = psycopg.Connection[Any]

#: Created before the first migration.
_RECORDS = """\
create table if not exists syncguard_migrations (
  name text primary key,
  checksum text not null,
  applied_at timestamptz not null default clock_timestamp()
)"""

#: Outside a transaction a local setting is gone by the next statement, and the tables would land anywhere.
_ONE_TRANSACTION = """\
do $$
begin
  if current_setting('search_path') not like '%, pg_temp' then
    raise exception 'run this in one transaction, for example with psql -1 -v ON_ERROR_STOP=1';
  end if;
end
$$;"""


@dataclasses.dataclass(frozen=True, slots=True)
class Migration:
    """One file. `name` has its number and no suffix."""

    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that it makes."""
        return tuple(re.findall(r"^create (?:or replace )?function (\w+)", self.text, flags=re.MULTILINE))

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that it makes."""
        return tuple(re.findall(r"^create table (?:if not exists )?(\w+)", self.text, flags=re.MULTILINE))

    @property
    def indexes(self) -> tuple[str, ...]:
        """The named indexes that it makes. Without the one on lock_id, a fenced transaction does not hold its lease."""
        pattern = r"^create (?:unique )?index (?:if not exists )?(\w+)"
        return tuple(re.findall(pattern, self.text, flags=re.MULTILINE))


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaState:
    """What a database has of our schema. `schema` is the one that was looked at; None: the search path is empty."""

    schema: str | None
    applied: tuple[str, ...]
    pending: tuple[str, ...]
    edited: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return not (self.pending or self.edited or self.missing)


def folder() -> Path:
    """Where the SQL files are.

    Raises:
        SyncGuardError: nowhere: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for place in (package / "migrations", package.parent / "migrations"):  # the wheel's, the checkout's
        if any(place.glob("[0-9]*_*.sql")):
            return place
    raise SyncGuardError("the SQL files of celery-syncguard are not installed: reinstall the package")


def migrations() -> list[Migration]:
    """All of them, in order."""
    return [Migration(path.stem, path.read_text("utf-8")) for path in sorted(folder().glob("[0-9]*_*.sql"))]


def migrate(conninfo: str, *, schema: str | None = None, warn: Callable[[str], object] = lambda _: None) -> list[str]:
    """Bring the database up to date; the names of what was applied, which is nothing the second time.

    Arguments:
        schema: where our tables go; created if it is missing. None: the first of the search path.
        warn: called with each warning of a migration.

    Raises:
        SchemaBehind: an applied migration's text differs from ours, or an object that a pending one makes is there.
        psycopg.Error: no connection, no permission.
    """
    done: list[str] = []

    def pass_on(notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            warn(notice.message_primary or "")

    with psycopg.connect(autocommit=True, **connection_parameters(conninfo, timeout=10.0)) as conn:
        conn.add_notice_handler(pass_on)
        for migration in migrations():
            with conn.transaction():
                # Runners take turns; the second finds the record.
                conn.execute("select pg_advisory_xact_lock(hashtext('syncguard_migrations'))")
                _enter_schema(conn, schema, create=True)
                conn.execute(_RECORDS)
                row = conn.execute(
                    "insert into syncguard_migrations (name, checksum) values (%s, %s) on conflict do nothing returning 1",
                    (migration.name, migration.checksum),
                ).fetchone()
                if row is not None:
                    _apply(conn, migration, describe_dsn(conninfo))
                    done.append(migration.name)
        check(conn, schema=schema, where=describe_dsn(conninfo))
    return done


def _apply(conn: Connection, migration: Migration, where: str) -> None:
    try:
        conn.execute(migration.text.encode())
    except (
        psycopg.errors.DuplicateTable,
        psycopg.errors.DuplicateColumn,
        psycopg.errors.DuplicateFunction,
        psycopg.errors.DuplicateObject,
    ) as exc:
        raise SchemaBehind(
            f"{migration.name} is not recorded in {where}, but a part of it is there ({exc.diag.message_primary}): it "
            f"was applied by hand or half. Drop that part, or finish it from `celery syncguard sql`, which records it"
        ) from exc


def _enter_schema(conn: Connection, schema: str | None, *, create: bool = False) -> str | None:
    """For this transaction, make `schema` (or the first of the search path) the only one besides pg_catalog."""
    if schema is not None and create:
        # IF NOT EXISTS would ask for the right to create schemas even where there is nothing to create.
        there = conn.execute("select 1 from pg_catalog.pg_namespace where nspname = %s", (schema,)).fetchone()
        if there is None:
            conn.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
    if schema is None:
        row = conn.execute("select current_schema()").fetchone()
        schema = row[0] if row is not None else None
        if schema is None:
            if not create:
                return None
            raise SchemaBehind("the search path names no schema that exists: set syncguard_schema")
    conn.execute(sql.SQL("set local search_path to {}, pg_temp").format(sql.Identifier(schema)))
    return schema


def state(conn: Connection, *, schema: str | None = None) -> SchemaState:
    """What the database behind `conn` has. Reads only; works on a standby too."""
    wanted = migrations()
    with conn.transaction():
        found = _enter_schema(conn, schema)
        applied: dict[str, str] = {}
        objects: set[str] = set()
        if found is not None:
            there = conn.execute(
                "select 1 from pg_catalog.pg_tables where schemaname = %s and tablename = 'syncguard_migrations'",
                (found,),
            ).fetchone()
            if there is not None:
                applied = dict(conn.execute("select name, checksum from syncguard_migrations").fetchall())
            objects = {
                name
                for (name,) in conn.execute(
                    "select p.proname from pg_catalog.pg_proc p where p.pronamespace = "
                    "(select oid from pg_catalog.pg_namespace where nspname = %(schema)s) "
                    "union all select tablename from pg_catalog.pg_tables where schemaname = %(schema)s "
                    "union all select indexname from pg_catalog.pg_indexes where schemaname = %(schema)s",
                    {"schema": found},
                ).fetchall()
            }
    ours = {one.name for one in wanted}
    return SchemaState(
        schema=found,
        applied=tuple(one.name for one in wanted if one.name in applied),
        pending=tuple(one.name for one in wanted if one.name not in applied),
        edited=tuple(one.name for one in wanted if applied.get(one.name, one.checksum) != one.checksum),
        unknown=tuple(sorted(set(applied) - ours)),
        # Once each: a later migration may make a function anew.
        missing=tuple(
            dict.fromkeys(
                name
                for one in wanted
                if one.name in applied
                for name in (*one.tables, *one.indexes, *one.functions)
                if name not in objects
            )
        ),
    )


def check(conn: Connection, *, schema: str | None = None, where: str = "the database") -> SchemaState:
    """`state`, and complain if our schema is not there as a whole.

    Raises:
        SchemaBehind: says what is wrong and which command helps.
    """
    found = state(conn, schema=schema)
    if not found.ready:
        raise SchemaBehind(_complaint(found, where))
    return found


def _complaint(found: SchemaState, where: str) -> str:
    place = f"{where}, schema {found.schema!r}," if found.schema else where
    if found.edited:
        return (
            f"{place} has other texts of {', '.join(found.edited)} than this version: an edited migration, or another "
            f"version's. Install the version that made them, or compare with `celery syncguard sql`"
        )
    if found.missing:
        return f"{place} has lost {', '.join(found.missing)}, which its migrations made: restore them from `celery syncguard sql`"
    if not found.applied:
        return f"{place} has no syncguard tables: run `celery syncguard migrate`"
    return f"{place} is behind by {', '.join(found.pending)}: run `celery syncguard migrate`"


def copyable_sql(*, schema: str | None = None) -> str:
    """All migrations in order with their records, as one text for psql or for a team's own migrations.

    It is for one transaction, during which the search path is our schema alone, as when `migrate` runs: the functions
    remember it. At the end the search path is what it was, since the team's tool goes on in that transaction.
    """
    path = "quote_ident(current_schema())" if schema is None else _literal(_identifier(schema))
    parts: list[str] = [
        "-- celery-syncguard: everything, in order. Run it once, in one transaction (psql -1 -v ON_ERROR_STOP=1).",
    ]
    if schema is not None:
        parts.append(f"create schema if not exists {_identifier(schema)};")
    parts.append("select set_config('syncguard.search_path', current_setting('search_path'), true);")
    parts.append(f"select set_config('search_path', {path} || ', pg_temp', true);")
    parts.append(_ONE_TRANSACTION)
    parts.append(_RECORDS + ";")
    for one in migrations():
        parts.append(f"-- {one.name}")
        parts.append(f"insert into syncguard_migrations (name, checksum) values ('{one.name}', '{one.checksum}');")
        parts.append(one.text.rstrip())
    parts.append("select set_config('search_path', current_setting('syncguard.search_path'), true);")
    return "\n\n".join(parts) + "\n"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    escaped = text.replace("'", "''")
    # An E literal reads the same whatever standard_conforming_strings says.
    return "E'" + escaped.replace("\\", "\\\\") + "'" if "\\" in text else f"'{escaped}'"
