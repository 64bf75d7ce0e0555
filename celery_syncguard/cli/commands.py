"""The command line: `celery -A proj syncguard …`, and `celery-syncguard --app proj …` (or `--dsn …`) without Celery's.

A command changes only what its name says. Tables are for people, `--json` for programs: its keys stay, seconds are numbers,
instants ISO 8601. Exit codes: 0 done, 1 not done (one line on stderr says why), 2 wrong usage.

Every `celery` command loads this through its entry point, so imports are inside the commands. Not here: what commands
share (`console`), the checks (`doctor`), the commands for the leader (`beat`).
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import click

from celery_syncguard.cli.beat import COMMANDS as BEAT_COMMANDS
from celery_syncguard.cli.console import (
    Commands,
    Target,
    as_json,
    database_errors,
    duration,
    fail,
    json_option,
    load_app,
    printable,
    seconds_of,
    table,
    target,
)

__all__ = ["main", "syncguard"]

#: What one call of the SQL function deletes of each kind.
_PRUNE_LIMIT = 10_000

_dsn = click.option(
    "--dsn", help="Connection string or URL of the database, instead of the application's syncguard_dsn."
)
_schema = click.option(
    "--schema", help="Schema of the syncguard tables, instead of the application's syncguard_schema."
)


@click.group(cls=Commands)
@_dsn
@_schema
@click.pass_context
def syncguard(ctx: click.Context, /, dsn: str | None, schema: str | None, **_preload: Any) -> None:
    """Locks: who holds what, checks, and the schema of the tables.

    \b
    A task does not start?    celery -A proj syncguard locks
    Is the set-up right?      celery -A proj syncguard doctor
    Its holder is dead?       the lock is free at its ttl; sooner by release
    A new version?            celery -A proj syncguard migrate, before its workers start
    """  # noqa: D301 - click wants the backspace character
    # _preload: options that an application adds to every command (user_options["preload"]), which are not ours.
    app = getattr(ctx.obj, "app", None)
    named = ctx.parent is not None and ctx.parent.params.get("app")
    # Without -A, Celery's default application reads a celeryconfig module, which --dsn does not need.
    target(ctx, Target(app=app if named or dsn is None else None, dsn=dsn, schema=schema, app_named=bool(named)))


@click.group(name="celery-syncguard", cls=Commands, commands=syncguard.commands)
@click.option("-A", "--app", help="The Celery application, as for `celery -A`: proj, or proj.celery:app.")
@_dsn
@_schema
@click.version_option(package_name="celery-syncguard")
@click.pass_context
def main(ctx: click.Context, app: str | None, dsn: str | None, schema: str | None) -> None:
    """Locks: who holds what, checks, and the schema of the tables.

    The database is that of --app, of --dsn, or of SYNCGUARD_DSN in the environment.
    """
    target(ctx, Target(app=app, dsn=dsn, schema=schema, app_named=app is not None))


@syncguard.command()
@click.pass_context
def migrate(ctx: click.Context) -> None:
    """Create or update the tables and functions.

    Run it once per deployment, before the new workers start; old workers keep working meanwhile. It is safe to run
    twice, also at the same time. It needs a role that may create tables; workers need much less (docs/operations.md).
    """
    import psycopg

    from celery_syncguard.errors import StoreUnavailable
    from celery_syncguard.postgres.connection import describe_dsn
    from celery_syncguard.postgres.migrate import migrate as apply

    settings = target(ctx).database()
    where = describe_dsn(settings.dsn)
    with database_errors(settings):
        try:
            done = apply(settings.dsn, schema=settings.schema, warn=lambda line: click.echo(f"note: {line}"))
        except psycopg.errors.InsufficientPrivilege as exc:
            raise StoreUnavailable(
                f"{where}: {exc.diag.message_primary}: migrate as a role that owns the existing tables and may create "
                f"others in the schema (GRANT CREATE ON SCHEMA …), not as the workers' role"
            ) from exc
    for name in done:
        click.echo(f"applied {name}")
    if not done:
        click.echo(f"{where} is up to date")


@syncguard.command()
@click.argument("what", required=False, type=click.Choice(["revisions", "revisions-rename"]))
@_schema
@click.pass_context
def sql(ctx: click.Context, what: str | None, schema: str | None) -> None:
    """Print the SQL of all migrations, for teams that run their own.

    Needs no server, and an application only for its syncguard_schema. Run the output in one transaction (`psql -1 -v
    ON_ERROR_STOP=1`, an Alembic or Django migration); it records what it applied, so `migrate` and the workers accept it.

    \b
    sql                    locks, claims, completions, beat
    sql revisions          the tables of per-owner revisions, which are your application's own
    sql revisions-rename   once, to rename user_id to owner_id in them
    """  # noqa: D301 - click wants the backspace character
    if what is not None:
        from celery_syncguard.revisions import copy_sql

        click.echo(copy_sql(what), nl=False)  # type: ignore[arg-type]  # click.Choice accepts only these two
        return
    from celery_syncguard.postgres.migrate import copyable_sql

    chosen = target(ctx)
    schema = chosen.schema if schema is None else schema
    if schema is None and chosen.app_named:
        schema = chosen.settings().schema
    click.echo(copyable_sql(schema=schema), nl=False)


@syncguard.command()
@json_option
@click.pass_context
def status(ctx: click.Context, *, json_wanted: bool) -> None:
    """Show the server, the schema and how much is in it. Changes nothing."""
    facts = _status(target(ctx))
    if json_wanted:
        as_json(facts)
        return
    recovery = ", in recovery (read-only)" if facts["in_recovery"] else ""
    lines = [
        ("server", f"PostgreSQL {facts['server_version']}, {facts['where']}, role {facts['role']}"),
        ("timeline", f"{facts['timeline'] or 'unknown'}{recovery}"),
        ("schema", printable(facts["schema"])),
        ("migrations", f"{len(facts['applied'])} applied, {len(facts['pending'])} pending"),
        *(("", f"pending: {name}") for name in facts["pending"]),
        *(("", problem) for problem in facts["problems"]),
    ]
    if facts["counts"] is not None:
        lines += [
            ("live", "{locks} locks, {claims} claims, {completions} completions".format(**facts["counts"])),
            ("counters", str(facts["counts"]["counters"])),
        ]
    for name, text in lines:
        click.echo(f"{name:<12}{text}")


def _status(chosen: Target) -> dict[str, Any]:
    import psycopg
    from psycopg import sql as compose
    from psycopg.rows import dict_row

    from celery_syncguard.postgres.connection import describe_dsn
    from celery_syncguard.postgres.migrate import state

    settings = chosen.database()
    with chosen.connection() as conn, conn.cursor(row_factory=dict_row) as cursor:
        found = state(conn, schema=settings.schema)
        query = "SELECT current_setting('server_version') AS server_version, current_user AS role, pg_is_in_recovery() AS in_recovery"
        server = cursor.execute(query).fetchone() or {}
        # A standby writes no WAL of its own; its last checkpoint tells the timeline that it follows.
        query = (
            "SELECT timeline_id AS timeline FROM pg_control_checkpoint()"
            if server["in_recovery"]
            else "SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer AS timeline"
        )
        try:
            timeline = cursor.execute(query).fetchone()
        except psycopg.errors.InsufficientPrivilege:  # some hosted servers do not show it
            timeline = None
        counts = None
        if found.ready and found.schema is not None:
            query = """
                SELECT (SELECT count(*) FROM {0}.syncguard_locks l WHERE l.expires_at_ms > t.now_ms) AS locks,
                       (SELECT count(*) FROM {0}.syncguard_claims c WHERE c.expires_at_ms > t.now_ms) AS claims,
                       (SELECT count(*) FROM {0}.syncguard_completions c WHERE c.expires_at_ms > t.now_ms) AS completions,
                       (SELECT count(*) FROM {0}.syncguard_fence_counters) AS counters
                FROM (SELECT {0}.syncguard_clock_ms() AS now_ms) t
                """
            counts = cursor.execute(compose.SQL(query).format(compose.Identifier(found.schema))).fetchone()
    return {
        **server,
        **(timeline or {"timeline": None}),
        "where": describe_dsn(settings.dsn),
        "schema": found.schema,
        "ready": found.ready,
        "applied": list(found.applied),
        "pending": list(found.pending),
        "problems": [
            *(f"edited: {name}" for name in found.edited),
            *(f"missing: {name}" for name in found.missing),
            *(f"unknown to this version: {name}" for name in found.unknown),
        ],
        "counts": counts,
    }


@syncguard.command()
@click.argument("key", required=False)
@click.option("--limit", type=click.IntRange(min=1), help="Only the oldest so many.")
@json_option
@click.pass_context
def locks(ctx: click.Context, *, key: str | None, limit: int | None, json_wanted: bool) -> None:
    """List the locks that are held now.

    Oldest first; with KEY only the lock on it.

    AGE is the time since the holder acquired; a lock that is renewed may be old and healthy. REMAINING is the time until
    it is free if its holder is dead. A lock with no holder was taken by another client of the same tables.
    """
    with target(ctx).guard() as guard:
        found = None if key is None else guard.inspect(key)
        rows = guard.locks(limit=limit) if key is None else [found] if found is not None else []
    if json_wanted:
        facts = [dataclasses.asdict(row) for row in rows]
        as_json([{"age" if name == "since" else name: fact for name, fact in row.items()} for row in facts])
    elif not rows:
        click.echo("no locks are held" if key is None else f"{printable(key)} is free")
    else:
        table(
            ("KEY", "HOLDER", "TASK", "AGE", "REMAINING", "FENCE", "LOCK_ID"),
            [
                (row.key, row.holder, row.task_id, duration(row.since), duration(row.remaining), row.fence, row.lock_id)
                for row in rows
            ],
        )


@syncguard.command()
@click.argument("key")
@click.option("--lock-id", required=True, help="Which lease; `locks` shows it. A newer lease on KEY is left alone.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def release(ctx: click.Context, *, key: str, lock_id: str, yes: bool) -> None:
    """Release a lock by hand.

    Rarely needed: the lock of a dead holder is free at its ttl. A living holder is NOT stopped by this; it notices at its
    next renewal, and until then two may work. Fenced writes stay safe. Exit code 1 if there was no such lease.
    """
    with target(ctx).guard() as guard:
        found = guard.inspect(key)
        if found is None:
            fail(f"nothing to release: {printable(key)} is free")
        if found.lock_id != lock_id:
            fail(f"nothing to release: {printable(key)} is held by another lease, {found.lock_id}")
        if not yes:
            task = f" for task {printable(found.task_id)}" if found.task_id else ""
            click.echo(
                f"{printable(key)} has been held by {printable(found.holder or 'an unnamed holder')}{task} for "
                f"{duration(found.since)} and expires in {duration(found.remaining)} unless renewed."
            )
            click.confirm("If its holder lives, it works on until its next renewal. Release?", abort=True)
        if not guard.release(key, lock_id=lock_id):
            fail(f"nothing to release: {printable(key)} has just been released or taken over")
    click.echo(f"released {printable(key)}")


@syncguard.command()
@click.option(
    "--older-than",
    default="1d",
    show_default=True,
    callback=lambda *given: seconds_of(given[-1]),
    help="30s, 15m, 12h, 7d.",
)
@click.option("--counters", is_flag=True, help="Idle fence counters too. Not on tables shared with another client.")
@json_option
@click.pass_context
def prune(ctx: click.Context, *, older_than: float, counters: bool, json_wanted: bool) -> None:
    """Delete rows that expired some time ago. Run it daily.

    It keeps the tables small; expired rows are ignored and taken over anyway. It never touches what is live and waits for
    no lock, so it may run at any time.
    """
    total: dict[str, int] = {}
    with target(ctx).guard() as guard:
        while True:
            batch = dataclasses.asdict(guard.prune(older=older_than, counters=counters))
            total = {name: total.get(name, 0) + count for name, count in batch.items()}
            if max(batch.values()) < _PRUNE_LIMIT:
                break
    if json_wanted:
        as_json(total)
    else:
        click.echo("deleted " + ", ".join(f"{count} {name}" for name, count in total.items()))


@syncguard.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, *, json_wanted: bool) -> None:
    """Check everything that a worker needs.

    Run it as the workers run: on their host, with their role. It changes nothing. Exit code 1 if something fails.
    """
    from celery_syncguard.cli.doctor import Check, examine

    checks: list[Check] = []
    chosen = target(ctx)
    for check in examine(chosen.database(), app=load_app(chosen.app) if chosen.app_named else None):
        checks.append(check)
        if not json_wanted:  # shown as they come, since a slow one tells something too
            click.echo(f"{check.status:<4}  {check.name:<11}  {printable(check.message)}")
            if check.fix:
                click.echo(f"      {'':<11}  -> {printable(check.fix)}")
    healthy = all(check.status != "fail" for check in checks)
    if json_wanted:
        as_json({"ok": healthy, "checks": [dataclasses.asdict(check) for check in checks]})
    if not healthy:
        ctx.exit(1)


@syncguard.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Write the checks to FILE.")
@click.pass_context
def demo(ctx: click.Context, *, json_path: str | None) -> None:
    """Show it at work, and check what happened.

    Real servers, real workers, a kill, a freeze, and a history that is checked at the end. Needs none of your
    applications and servers, only: pip install celery-syncguard[demo].
    """
    try:
        run = import_module("celery_syncguard.demo").run
    except ModuleNotFoundError as exc:
        fail(f"the demo needs {exc.name}: pip install celery-syncguard[demo]")
    ctx.exit(run(json_path))


for _command in BEAT_COMMANDS:
    syncguard.add_command(_command)
