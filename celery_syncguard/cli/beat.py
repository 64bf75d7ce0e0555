"""The commands about the leader: `leader`, `step-down`, `slots` and `entries` of `celery syncguard`.

They ask the database, so they work from any machine. Only of a leader that has not renewed they ask this machine too: the
database cannot know whether that process is dead. Not here: what all commands share (`console`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from celery_syncguard.cli.console import as_json, duration, fail, json_option, printable, table, target

if TYPE_CHECKING:
    from celery_syncguard.beat.postgres_slots import Slots
    from celery_syncguard.beat.slots import TermRow
    from celery_syncguard.core.store import LockRow
    from celery_syncguard.guard import SyncGuard

__all__ = ["COMMANDS"]

#: Seconds for which a leader may fail to send before it counts as unhealthy.
_MAY_FAIL = 10.0
#: Seconds without a leader, since the last lease ended, that count as healthy. Another beat leads within a second; the rest
#: is for one that has to be started first.
_MAY_BE_VACANT = 10.0


def _key_option(command: Any) -> Any:
    return click.option("--key", help="Leader key; instead of the application's syncguard_leader_key.")(command)


@contextlib.contextmanager
def _state(ctx: click.Context, key: str | None) -> Iterator[tuple[SyncGuard, str, Slots]]:
    """The guard, the leader key and its slots."""
    from celery_syncguard.beat.postgres_slots import open_slots

    with target(ctx).guard() as guard:
        key = key or guard.settings.leader_key
        yield guard, key, open_slots(guard.store, key)


def _runs_here(holder: str | None) -> bool:
    """Whether the process that names itself so runs on this machine, or in this container.

    Only for a probe: a wrong answer makes it too strict or too patient, for less than a ttl.
    """
    named = re.fullmatch(r".* on (\S+) pid (\d+)", holder or "", re.DOTALL)
    if named is None or named[1] != socket.gethostname():
        return False
    try:
        os.kill(int(named[2]), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _vacancy(term: TermRow | None) -> dict[str, Any]:
    """The facts while there is no leader. During a takeover that is so for a moment."""
    facts: dict[str, Any] = {"leading": False, "problem": "nobody leads", "takeover": False}
    if term is None:
        return facts  # there is no beat: the first one that reaches the database leads at once
    facts["last"] = {"term": term.term, "holder": term.holder, "seen_at": term.seen_at}
    # A leader reports and renews every third of the ttl, so its lease ended then at the latest.
    ended_at = term.ended_at or term.seen_at + timedelta(seconds=term.ttl * 4 / 3)
    if (term.now - ended_at).total_seconds() < _MAY_BE_VACANT:
        facts.update(problem=None, takeover=True)
    return facts


def _status(lock: LockRow | None, term: TermRow | None, *, here: bool) -> dict[str, Any]:
    """Who leads and how it does. `problem` is None while all is well; `takeover`: the leader seems to be gone, and another
    one leads soon. `here`: the leader's process runs on this machine.
    """
    if lock is None:
        return _vacancy(term)
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
        "takeover": False,
    }
    if term is None or term.term != lock.fence:
        if lock.since > _MAY_FAIL:
            facts["problem"] = f"elected {duration(lock.since)} ago, and has not opened its schedule"
        return facts
    facts["last_sent_at"] = term.last_sent_at
    silent = (term.now - term.seen_at).total_seconds()
    if lock.remaining < term.ttl / 2:
        # A renewal comes every third of the ttl. A process that runs here says that it leads, and could not renew. Another
        # one may be dead: its standbys wait until its lease ends, and a restart would only make them wait longer.
        if here:
            facts["problem"] = f"the leader could not renew its lease, which ends in {duration(lock.remaining)}"
        facts["takeover"] = not here
    elif term.failing_since is not None:
        failing = (term.now - term.failing_since).total_seconds()
        if failing > _MAY_FAIL:
            facts["problem"] = f"the leader has not been able to send for {duration(failing)}: {term.failure}"
    elif silent > max(60.0, 2 * term.ttl):
        facts["problem"] = f"the leader renews its lease, but its schedule has not moved for {duration(silent)}"
    return facts


@click.command()
@_key_option
@click.option(
    "--healthy",
    is_flag=True,
    help="For probes: exit code 0 if a leader leads, renews and sends, or another one takes over; 1 with the reason.",
)
@json_option
@click.pass_context
def leader(ctx: click.Context, *, key: str | None, healthy: bool, json_wanted: bool) -> None:
    """Which beat leads, since when, until when.

    Standbys are not listed: they write nothing. With --healthy a standby is as healthy as its leader, and healthy while it
    takes over from one that is gone. Where a leader runs that could not renew its lease, it is not healthy.
    """
    from celery_syncguard.core.leader_key import leader_lock_key

    with _state(ctx, key) as (guard, leader_key, state):
        lock = guard.inspect(leader_lock_key(leader_key))
        terms = state.terms()
    facts = _status(lock, terms[0] if terms else None, here=lock is not None and _runs_here(lock.holder))
    if json_wanted:
        as_json({"key": leader_key, **facts})
    elif lock is None:
        click.echo(f"nobody leads {printable(leader_key)}")
        if "last" in facts:
            last = facts["last"]
            click.echo(f"last      {printable(last['holder'])}, term {last['term']}, seen {_instant(last['seen_at'])}")
        if facts["takeover"]:
            click.echo("notice    its lease has just ended; another beat leads soon, if there is one")
    else:
        click.echo(f"leader    {printable(lock.holder)}")
        click.echo(f"term      {lock.fence}")
        click.echo(f"since     {_instant(lock.acquired_at)} ({duration(lock.since)} ago)")
        click.echo(f"until     {_instant(lock.expires_at)} (in {duration(lock.remaining)}, unless renewed)")
        click.echo(f"last sent {_instant(facts['last_sent_at'])}")
        if facts["problem"]:
            click.echo(f"problem   {printable(facts['problem'])}")
        if facts["takeover"]:
            click.echo("notice    it has not renewed; if it is dead, another beat leads when its lease ends")
    if healthy and facts["problem"]:
        fail(facts["problem"])


@click.command("step-down")
@_key_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def step_down(ctx: click.Context, *, key: str | None, yes: bool) -> None:
    """End the present term: another beat leads at once, if there is one.

    The leader notices before it sends anything more, and stands by. Without another one it leads again after about 2 s.
    """
    from celery_syncguard.core.leader_key import end_term, leader_lock_key

    with _state(ctx, key) as (guard, leader_key, _):
        lock = guard.inspect(leader_lock_key(leader_key))
        if lock is None:
            fail(f"nobody leads {leader_key}")
        if not yes:
            click.echo(
                f"{printable(lock.holder or 'an unnamed holder')} leads {printable(leader_key)}, term {lock.fence}, "
                f"for {duration(lock.since)} now."
            )
            click.confirm("End its term?", abort=True)
        if not end_term(guard, leader_key, lock_id=lock.lock_id, ttl=lock.remaining):
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
    with _state(ctx, key) as (_, _, state):
        rows = state.recent(entry=entry, limit=limit)
    if json_wanted:
        as_json([{**dataclasses.asdict(row), "late": row.late} for row in rows])
    elif not rows:
        click.echo("no slots yet")
    else:
        cells = []
        for row in rows:
            sent = "given up" if row.dropped_at is not None else _instant(row.sent_at)
            late = "-" if row.late is None else duration(max(0.0, row.late))
            cells.append((row.entry, _instant(row.due_at), sent, late, row.term, row.task_id))
        table(("ENTRY", "DUE", "SENT", "LATE", "TERM", "TASK"), cells)


@click.command()
@_key_option
@json_option
@click.pass_context
def entries(ctx: click.Context, *, key: str | None, json_wanted: bool) -> None:
    """Where each entry of the schedule stands: how often it was sent, its last slot and its next one.

    As of the leader's last claim: an entry that is new, or whose schedule has changed, has no next slot until it is sent.
    """
    with _state(ctx, key) as (_, _, state):
        rows = state.entries()
    if json_wanted:
        as_json([dataclasses.asdict(row) for row in rows])
    elif not rows:
        click.echo("no entries yet")
    else:
        cells = []
        for row in rows:
            following = "removed" if row.removed_at is not None else _instant(row.next_due_at)
            cells.append((row.entry, row.schedule, row.runs, _instant(row.last_due_at), following))
        table(("ENTRY", "SCHEDULE", "RUNS", "LAST DUE", "NEXT DUE"), cells)


def _instant(instant: datetime | None) -> str:
    return "-" if instant is None else instant.isoformat(timespec="milliseconds")


COMMANDS = [leader, step_down, slots, entries]
