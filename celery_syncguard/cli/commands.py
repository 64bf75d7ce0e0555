"""The command line: `celery -A proj syncguard …`, and `celery-syncguard --app proj …` (or `--dsn …`) without Celery's.

Commands look, and change nothing but what they are named after. Tables are for people, `--json` for programs: its keys
stay, seconds are numbers, instants ISO 8601. Exit codes: 0 done, 1 not done (one line on stderr says why), 2 wrong usage.

Every `celery` command imports this module through its entry point, so imports are inside the commands. Not here: what
commands share (`console`), the checks (`doctor`), the commands about the leader (`beat_cli`).
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import click

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
    set_target,
    table,
    target,
)

__all__ = ["main", "syncguard"]

#: What one call of the SQL function deletes of each kind.
_PRUNE_LIMIT = 10_000

_DSN_HELP = "Connection string or URL of the database; instead of the application's syncguard_dsn."
_SCHEMA_HELP = "Schema of the syncguard tables; instead of the application's syncguard_schema."


@click.group(cls=Commands)
@click.option("--dsn", help=_DSN_HELP)
@click.option("--schema", help=_SCHEMA_HELP)
@click.pass_context
def syncguard(ctx: click.Context, /, dsn: str | None, schema: str | None, **_preload: Any) -> None:
    """Locks: who holds what, is all well, and the schema they live in.

    \b
    Something is stuck?       celery -A proj syncguard locks
    Is the set-up right?      celery -A proj syncguard doctor
    A holder that is gone?    its lock is free at its ttl; sooner by release
    A new version?            celery -A proj syncguard migrate, before its workers start
    """  # noqa: D301 - click wants the backspace character
    # Options that an application adds to every command (user_options["preload"]) arrive in _preload: not ours.
    app = getattr(ctx.obj, "app", None)
    named = ctx.parent is not None and ctx.parent.params.get("app")
    # Without -A, Celery's default application reads a celeryconfig module; with --dsn there is no need for it.
    set_target(ctx, Target(app=app if named or dsn is None else None, dsn=dsn, schema=schema, app_named=bool(named)))


@click.group(name="celery-syncguard", cls=Commands, commands=syncguard.commands)
@click.option("-A", "--app", help="The Celery application, as for `celery -A`: proj, or proj.celery:app.")
@click.option("--dsn", help=_DSN_HELP)
@click.option("--schema", help=_SCHEMA_HELP)
@click.version_option(package_name="celery-syncguard")
@click.pass_context
def main(ctx: click.Context, app: str | None, dsn: str | None, schema: str | None) -> None:
    """Locks: who holds what, is all well, and the schema they live in.

    The database is that of --app, of --dsn, or of SYNCGUARD_DSN in the environment.
    """
    set_target(ctx, Target(app=app, dsn=dsn, schema=schema, app_named=app is not None))


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
                f"{where}: {exc.diag.message_primary}: migrate as a role that may create tables in the schema and owns "
                f"those that are there (GRANT CREATE ON SCHEMA …), not as the workers' role"
            ) from exc
    for name in done:
        click.echo(f"applied {name}")
    if not done:
        click.echo(f"{where} is up to date")


@syncguard.command()
@click.argument("what", required=False, type=click.Choice(["revisions", "revisions-rename"]))
@click.option("--schema", help=_SCHEMA_HELP)
@click.pass_context
def sql(ctx: click.Context, what: str | None, schema: str | None) -> None:
    """Print the SQL of all migrations, for teams that run their own.

    Needs no server, and an application only for its syncguard_schema. The output belongs into one transaction (`psql -1 -v ON_ERROR_STOP=1`, an Alembic
    or Django migration); it records what it applied, so that `migrate` and the workers accept it.

    \b
    sql                    locks, claims, completions, beat
    sql revisions          the tables of per-owner revisions, which are your application's own
    sql revisions-rename   once, to rename user_id to owner_id in them
    """  # noqa: D301 - click wants the backspace character
    if what is not None:
        from celery_syncguard.revisions import copy_sql

        click.echo(copy_sql(what), nl=False)  # type: ignore[arg-type]  # click.Choice lets only these two pass
        return
    from celery_syncguard.postgres.migrate import copyable_sql

    chosen = target(ctx)
    if schema is None:
        schema = chosen.schema
    if schema is None and chosen.app_named:
        schema = chosen.settings().schema
    click.echo(copyable_sql(schema=schema), nl=False)


@syncguard.command()
@json_option
@click.pass_context
def status(ctx: click.Context, *, json_wanted: bool) -> None:
    """Which server, which schema, what is in it. Changes nothing."""
    facts = _status(target(ctx))
    if json_wanted:
        as_json(facts)
        return
    counts = facts["counts"]
    click.echo(f"server      PostgreSQL {facts['server_version']}, {facts['where']}, role {facts['role']}")
    click.echo(
        f"timeline    {facts['timeline'] or 'unknown'}{', in recovery (read-only)' if facts['in_recovery'] else ''}"
    )
    click.echo(f"schema      {printable(facts['schema'])}")
    click.echo(f"migrations  {len(facts['applied'])} applied, {len(facts['pending'])} pending")
    for name in facts["pending"]:
        click.echo(f"            pending: {name}")
    for name in facts["problems"]:
        click.echo(f"            {name}")
    if counts is not None:
        click.echo(
            f"live        {counts['locks']} locks, {counts['claims']} claims, {counts['completions']} completions"
        )
        click.echo(f"counters    {counts['counters']}")


def _status(chosen: Target) -> dict[str, Any]:
    import psycopg
    from psycopg import sql as compose

    from celery_syncguard.postgres.connection import describe_dsn
    from celery_syncguard.postgres.migrate import state

    settings = chosen.database()
    with chosen.connection() as conn:
        found = state(conn, schema=settings.schema)
        row = conn.execute("SELECT current_setting('server_version'), current_user, pg_is_in_recovery()").fetchone()
        assert row is not None
        version, role, in_recovery = row
        # A standby writes no WAL of its own; its last checkpoint tells the timeline that it follows.
        query = (
            "SELECT timeline_id FROM pg_control_checkpoint()"
            if in_recovery
            else "SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer"
        )
        try:
            timeline = conn.execute(query.encode()).fetchone()
        except psycopg.errors.InsufficientPrivilege:  # some hosted servers keep it to themselves
            timeline = None
        counts = None
        if found.ready and found.schema is not None:
            conn_schema = compose.Identifier(found.schema)
            row = conn.execute(
                compose.SQL(
                    "SELECT "
                    "(SELECT count(*) FROM {0}.syncguard_locks l WHERE l.expires_at_ms > t.now_ms), "
                    "(SELECT count(*) FROM {0}.syncguard_claims c WHERE c.expires_at_ms > t.now_ms), "
                    "(SELECT count(*) FROM {0}.syncguard_completions c WHERE c.expires_at_ms > t.now_ms), "
                    "(SELECT count(*) FROM {0}.syncguard_fence_counters) "
                    "FROM (SELECT {0}.syncguard_clock_ms() AS now_ms) t"
                ).format(conn_schema)
            ).fetchone()
            assert row is not None
            counts = dict(zip(("locks", "claims", "completions", "counters"), row, strict=True))
    return {
        "server_version": version,
        "where": describe_dsn(settings.dsn),
        "role": role,
        "schema": found.schema,
        "timeline": timeline[0] if timeline else None,
        "in_recovery": in_recovery,
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

    Oldest first; with KEY only the one on it.

    AGE is the time since the holder acquired; a lock that is renewed may be old and well. REMAINING is the time until it
    is free if its holder is dead. A lock with no holder was taken by another client of the same tables.
    """
    with target(ctx).guard() as guard:
        if key is None:
            rows = guard.locks(limit=limit)
        else:
            found = guard.inspect(key)
            rows = [found] if found is not None else []
    if json_wanted:
        as_json(
            [
                {
                    "key": row.key,
                    "lock_id": row.lock_id,
                    "fence": row.fence,
                    "holder": row.holder,
                    "task_id": row.task_id,
                    "attempt": row.attempt,
                    "acquired_at": row.acquired_at,
                    "expires_at": row.expires_at,
                    "age": row.since,
                    "remaining": row.remaining,
                }
                for row in rows
            ]
        )
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

    Rarely needed: the lock of a dead holder is free at its ttl. A holder that lives is NOT stopped by this; it notices at
    its next renewal, and until then two may work. Writes that are fenced stay safe. Exit code 1 if it was not there.
    """
    with target(ctx).guard() as guard:
        found = guard.inspect(key)
        if found is None:
            fail(f"nothing to release: {printable(key)} is free")
        if found.lock_id != lock_id:
            fail(f"nothing to release: {printable(key)} is held by another lease, {found.lock_id}")
        if not yes:
            click.echo(
                f"{printable(key)} is held by {printable(found.holder or 'somebody who left no name')}"
                f"{f' for task {printable(found.task_id)}' if found.task_id else ''}"
                f" since {duration(found.since)}, for {duration(found.remaining)} more unless renewed."
            )
            click.confirm("If that holder lives, it goes on working until its next renewal. Release?", abort=True)
        if not guard.release(key, lock_id=lock_id):
            fail(f"nothing to release: {printable(key)} changed hands in this moment")
    click.echo(f"released {printable(key)}")


def _older_than(_ctx: click.Context, _parameter: click.Parameter, value: str) -> float:
    return seconds_of(value)


@syncguard.command()
@click.option("--older-than", default="1d", show_default=True, callback=_older_than, help="30s, 15m, 12h, 7d.")
@click.option("--counters", is_flag=True, help="Idle fence counters too. Not on tables shared with another client.")
@json_option
@click.pass_context
def prune(ctx: click.Context, *, older_than: float, counters: bool, json_wanted: bool) -> None:
    """Delete rows that have been over for some time. Run it daily.

    Nothing needs it to be right: expired rows are ignored and taken over. It keeps the tables small. What is live is
    never touched, and it waits for nobody, so it may run at any time.
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
        if not json_wanted:  # shown as they come, since a slow one is an answer too
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

    Real servers, real workers, a kill, a freeze, and a history that is checked at the end. Needs no application and no
    server of yours: pip install celery-syncguard[demo].
    """
    try:
        run = import_module("celery_syncguard.demo").run
    except ModuleNotFoundError as exc:
        fail(f"the demo needs {exc.name}: pip install celery-syncguard[demo]")
    ctx.exit(run(json_path))


def _add_beat_commands() -> None:
    name = "celery_syncguard.cli.beat"
    try:
        commands = import_module(name).COMMANDS
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise
        return
    for command in commands:
        syncguard.add_command(command)


_add_beat_commands()
