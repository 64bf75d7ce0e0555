"""The commands about the leader: `leader`, `step-down` and `slots` of `celery syncguard`.

They ask the database only, so they work from any machine; a probe inside a beat's container works for a standby too. Not
here: the group that they belong to and what commands share (`cli`, `console`).
"""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from celery_syncguard.console import as_json, duration, fail, json_option, printable, table, target

if TYPE_CHECKING:
    from celery_syncguard.slots import TermRow
    from celery_syncguard.store import LockRow

__all__ = ["COMMANDS"]

#: Seconds for which a leader may fail to send before it counts as unhealthy.
_MAY_FAIL = 10.0


def _key_option(command: Any) -> Any:
    return click.option("--key", help="Leader key; instead of the application's syncguard_leader_key.")(command)


def _status(lock: LockRow | None, term: TermRow | None) -> dict[str, Any]:
    """Who leads and how it does. `problem` is None while all is well."""
    if lock is None:
        facts: dict[str, Any] = {"leading": False, "problem": "nobody leads"}
        if term is not None:
            facts["last"] = {"term": term.term, "holder": term.holder, "seen_at": term.seen_at}
        return facts
    facts = {
        "leading": True,
        "holder": lock.holder,
        "term": lock.fence,
        "lock_id": lock.lock_id,
        "since": lock.acquired_at,
        "until": lock.expires_at,
        "remaining": lock.remaining,
        "last_sent_at": None,
        "problem": None,
    }
    if term is None or term.term != lock.fence:
        if lock.since > _MAY_FAIL:
            facts["problem"] = f"elected {duration(lock.since)} ago, and has not opened its schedule"
        return facts
    facts["last_sent_at"] = term.last_sent_at
    silent = (term.now - term.seen_at).total_seconds()
    if lock.remaining < term.ttl / 2:
        # A renewal comes every third of the ttl.
        facts["problem"] = f"the leader could not renew its lease, which ends in {duration(lock.remaining)}"
    elif term.failing_since is not None:
        failing = (term.now - term.failing_since).total_seconds()
        if failing > _MAY_FAIL:
            facts["problem"] = f"the leader cannot send, since {duration(failing)}: {term.failure}"
    elif silent > max(60.0, 2 * term.ttl):
        facts["problem"] = f"the leader renews its lease, but its schedule has not moved for {duration(silent)}"
    return facts


@click.command()
@_key_option
@click.option(
    "--healthy", is_flag=True, help="For probes: exit code 0 if a leader leads, renews and sends; 1 with the reason."
)
@json_option
@click.pass_context
def leader(ctx: click.Context, *, key: str | None, healthy: bool, json_wanted: bool) -> None:
    """Which beat leads, since when, until when.

    Standbys are not listed: they write nothing, so nobody knows them. With --healthy a standby's container is as healthy
    as the leader that it stands by for, and a leader that claims to lead but could not renew is not.
    """
    from celery_syncguard.leadership import leader_lock_key
    from celery_syncguard.slots import open_slots

    with target(ctx).guard() as guard:
        key = key or guard.settings.leader_key
        lock = guard.inspect(leader_lock_key(key))
        terms = open_slots(guard.store, key).terms()
    facts = _status(lock, terms[0] if terms else None)
    if json_wanted:
        as_json({"key": key, **facts})
    elif lock is None:
        click.echo(f"nobody leads {printable(key)}")
        if "last" in facts:
            last = facts["last"]
            click.echo(f"last      {printable(last['holder'])}, term {last['term']}, seen {_instant(last['seen_at'])}")
    else:
        click.echo(f"leader    {printable(lock.holder)}")
        click.echo(f"term      {lock.fence}")
        click.echo(f"since     {_instant(lock.acquired_at)} ({duration(lock.since)} ago)")
        click.echo(f"until     {_instant(lock.expires_at)} (in {duration(lock.remaining)}, unless renewed)")
        click.echo(f"last sent {_instant(facts['last_sent_at'])}")
        if facts["problem"]:
            click.echo(f"problem   {printable(facts['problem'])}")
    if healthy and facts["problem"]:
        fail(facts["problem"])


@click.command("step-down")
@_key_option
@click.pass_context
def step_down(ctx: click.Context, *, key: str | None) -> None:
    """End the present term: another beat leads at once, if there is one.

    The leader notices before it sends anything more, and stands by.
    """
    from celery_syncguard.leadership import leader_lock_key

    with target(ctx).guard() as guard:
        key = key or guard.settings.leader_key
        lock = guard.inspect(leader_lock_key(key))
        if lock is None:
            fail(f"nobody leads {key}")
        if not guard.release(lock.key, lock_id=lock.lock_id):
            fail("the leader has just changed; try again")
    click.echo(f"ended term {lock.fence} of {printable(lock.holder)}")


@click.command()
@_key_option
@click.option("--entry", help="Of this entry only.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="At most so many.")
@json_option
@click.pass_context
def slots(ctx: click.Context, *, key: str | None, entry: str | None, limit: int, json_wanted: bool) -> None:
    """The latest slots: due when, sent when and by which term, how late."""
    from celery_syncguard.slots import open_slots

    with target(ctx).guard() as guard:
        rows = open_slots(guard.store, key or guard.settings.leader_key).recent(entry=entry, limit=limit)
    if json_wanted:
        as_json([{**dataclasses.asdict(row), "late": row.late} for row in rows])
        return
    if not rows:
        click.echo("no slots yet")
        return
    table(
        ("ENTRY", "DUE", "SENT", "LATE", "TERM", "TASK"),
        [
            (
                row.entry,
                _instant(row.due_at),
                "given up" if row.dropped_at is not None else _instant(row.sent_at),
                "-" if row.late is None else duration(max(0.0, row.late)),
                row.term,
                row.task_id,
            )
            for row in rows
        ],
    )


def _instant(instant: datetime | None) -> str:
    return "-" if instant is None else instant.isoformat(timespec="milliseconds")


COMMANDS = [leader, step_down, slots]
