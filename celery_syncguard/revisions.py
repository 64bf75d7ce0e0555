"""Revisions: a counter per owner that moves in the transaction of the row it stamps, for readers that pull by cursor.

The row lock of an allocation lasts until the end of the transaction, so the revisions of one owner become visible in their
order, without gaps that fill later: a reader that has seen revision 7 could see 1 to 6. A sequence does not promise that.
The price is that the writers of one owner take turns, each for a whole transaction.

In every function `conn` is the caller's connection (`adapters.adapter_for` says which kinds), an owner id is a UUID or the
text of one, and `NotInTransaction` is raised if the connection is in autocommit and no transaction is open.

Invariants:

- Everything happens in the caller's transaction; a rollback returns the number.
- The first revision is 1. Nothing here ever lowers a counter or a horizon.
- Counters are locked in one order (the owner id's), and a purge waits for no lock.

The tables are the application's: their SQL is for copying (`copy_sql`), and nothing here creates them. Not here: what a
pull looks like on the wire, and which of two writes wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

from psycopg import sql

from celery_syncguard.errors import SyncGuardError
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.adapters import Adapter, adapter_for

__all__ = [
    "POSTGRES_MIGRATION_SQL",
    "POSTGRES_RENAME_SQL",
    "PurgedBatch",
    "ResyncRequired",
    "UnknownOwner",
    "copy_sql",
    "current_revision",
    "current_revision_for_update",
    "ensure_owner",
    "guard_pull",
    "next_revision",
    "next_revisions",
    "purge_tombstones",
]

POSTGRES_MIGRATION_SQL: str
POSTGRES_RENAME_SQL: str

_COPIES = {"POSTGRES_MIGRATION_SQL": "revisions", "POSTGRES_RENAME_SQL": "revisions-rename"}


class UnknownOwner(SyncGuardError, LookupError):
    """An owner without a row in `sync_revisions`; `ensure_owner` makes it. Attribute: `owner_ids`."""

    owner_ids: tuple[UUID, ...] = ()


class ResyncRequired(SyncGuardError):
    """A cursor from which not every change can be told any more: the reader starts again from cursor 0.

    Attributes: `owner_id`; `cursor`; `horizon`, below which deletions are forgotten; `current`, the newest revision.
    """

    owner_id: UUID
    cursor: int = 0
    horizon: int = 0
    current: int = 0


@dataclass(frozen=True, slots=True)
class PurgedBatch:
    """What one `purge_tombstones` removed: how many `rows`, and the `horizons` of their owners afterwards."""

    rows: int
    horizons: dict[UUID, int]


def ensure_owner(conn: Any, owner_id: UUID | str) -> None:
    """Make the owner's counter, at 0; harmless if it exists."""
    _within(conn, "ensure_owner").rows(
        "insert into sync_revisions (owner_id) values (%s::uuid) on conflict (owner_id) do nothing",
        [str(_owner(owner_id))],
    )


def next_revision(conn: Any, owner_id: UUID | str) -> int:
    """Allocate the owner's next revision, for the row that this transaction writes.

    Other writers of the same owner wait until the transaction ends; those of other owners do not. For several owners
    in one transaction use `next_revisions`: two transactions that take two owners in opposite order deadlock. A rollback to
    a savepoint returns the numbers allocated in it: allocate again for a row that is written after that.

    Raises:
        UnknownOwner: the owner has no counter.
    """
    rows = _within(conn, "next_revision").rows(
        """
        update sync_revisions
        set last_revision = last_revision + 1
        where owner_id = %s::uuid
        returning last_revision
        """,
        [str(_owner(owner_id))],
    )
    if not rows:
        raise _unknown([_owner(owner_id)])
    return int(rows[0][0])


def next_revisions(conn: Any, owner_ids: Iterable[UUID | str]) -> dict[UUID, int]:
    """Allocate one revision for each of several owners, in one statement and in the order of their ids.

    Repeated owner ids count once.

    Raises:
        UnknownOwner: at least one owner has no counter; no revision was allocated for any.
    """
    session = _within(conn, "next_revisions")
    wanted = sorted({_owner(owner_id) for owner_id in owner_ids})
    texts = [str(owner) for owner in wanted]
    # An update alone would lock rows in the order of its plan; two of those can deadlock.
    rows = session.rows(
        """
        with locked as (
            select counters.owner_id
            from sync_revisions as counters
            where counters.owner_id = any(%s::uuid[])
            order by counters.owner_id
            for no key update
        )
        update sync_revisions as counters
        set last_revision = counters.last_revision + 1
        from locked
        where counters.owner_id = locked.owner_id
          and (select count(*) from locked) = %s
        returning counters.owner_id::text, counters.last_revision
        """,
        [texts, len(texts)],
    )
    revisions = {UUID(owner_id): int(revision) for owner_id, revision in rows}
    if len(revisions) < len(wanted):
        known = session.rows("select owner_id::text from sync_revisions where owner_id = any(%s::uuid[])", [texts])
        raise _unknown(sorted(set(wanted) - {UUID(owner_id) for (owner_id,) in known}))
    return {owner: revisions[owner] for owner in wanted}


def current_revision(conn: Any, owner_id: UUID | str) -> int | None:
    """Return the owner's newest revision, or `None` for an owner without a counter; takes no lock."""
    return _current(conn, owner_id, "current_revision")


def current_revision_for_update(conn: Any, owner_id: UUID | str) -> int | None:
    """Return the owner's newest revision, and let no other transaction allocate one before this transaction ends.

    For a write that depends on a read. `None`, and no lock, for an owner without a counter. Pulls do not wait for it. A
    rollback to a savepoint ends a lock that was taken inside it.
    """
    # The lock that an allocation takes, and no stronger one: foreign keys may be checked meanwhile.
    return _current(conn, owner_id, "current_revision_for_update", " for no key update")


def _current(conn: Any, owner_id: UUID | str, what: str, lock: str = "") -> int | None:
    rows = _within(conn, what).rows(
        f"select last_revision from sync_revisions where owner_id = %s::uuid{lock}", [str(_owner(owner_id))]
    )
    return int(rows[0][0]) if rows else None


def guard_pull(conn: Any, owner_id: UUID | str, cursor: int, *, bound: int | None = None) -> int:
    """Make sure that the rows after `cursor` tell everything, and return the cursor for after this pull.

    Call it first in the transaction that pulls, then read every synced table with
    `where owner_id = … and revision > cursor and revision <= bound`, where `bound` is what this returned: several
    tables, read by several statements, so agree with each other. Until the transaction ends no purge removes anything
    of this owner, unless by a rollback to a savepoint in which this was called; writers do not wait. The transaction may be
    read only, but not on a replica: the primary's purge does not see its lock.

    A pull in pages, each in a transaction of its own, keeps its cursor and its bound from the first page to the last, and
    continues behind the last row that it has read, by `(revision, id)`: see docs/revisions.md.

    Args:
        conn: the caller's connection.
        owner_id: whose rows.
        cursor: the bound of the reader's last whole pull; 0 for everything, which is always served. Never the revision of
            a page's last row.
        bound: for the second page and later ones, what the first one returned; it is returned again.

    Raises:
        ResyncRequired: deletions after the cursor have been purged, or the cursor is from a future that this database
            does not know (it was restored from a backup, or failed over and lost commits).
        UnknownOwner: the owner has no counter.
    """
    if not _is_int(cursor) or cursor < 0:
        raise ValueError(f"a cursor is an int >= 0, got {cursor!r}")
    if bound is not None and (not _is_int(bound) or bound < cursor):
        raise ValueError(f"a bound is what the first page returned, an int >= its cursor {cursor}, got {bound!r}")
    owner = _owner(owner_id)
    session = _within(conn, "guard_pull")
    # Two statements: the lock may wait for a purge to commit, and only a statement begun after that sees its horizon.
    session.rows(_PULL, [_PULL_LOCKS, str(owner)])
    rows = session.rows(
        """
        select counters.last_revision, coalesce(horizons.horizon_revision, 0)
        from sync_revisions as counters
        left join sync_purge_horizons as horizons on horizons.owner_id = counters.owner_id
        where counters.owner_id = %s::uuid
        """,
        [str(owner)],
    )
    if not rows:
        raise _unknown([owner])
    current, horizon = (int(value) for value in rows[0])
    newest = cursor if bound is None else bound
    if newest > current or 0 < cursor < horizon:
        named = f"cursor {cursor}" if newest == cursor else f"bound {bound} of cursor {cursor}"
        reason = f"is above the newest revision {current}" if newest > current else f"is below the horizon {horizon}"
        raise ResyncRequired(
            f"{named} of owner {owner} {reason}: start again from cursor 0",
            owner_id=owner,
            cursor=cursor,
            horizon=horizon,
            current=current,
        )
    return current if bound is None else bound


def purge_tombstones(
    conn: Any, table: str | tuple[str, str], *, older_than: float | timedelta, limit: int = 1000
) -> PurgedBatch:
    """Remove one batch of old tombstones from a synced table and raise the horizons of their owners.

    It waits for no lock: rows that a writer has locked, and owners with an open pull or another purge, are left for a later
    call. New pulls of the owners of removed rows wait until the transaction ends, so use one transaction per batch, and
    call again until `rows` is 0. Tombstones of an owner without a counter stay.

    Args:
        conn: the caller's connection.
        table: the name of a table with the columns id, owner_id, deleted_at and revision, or (schema, name). Quoted. Its
            primary key is id, or (owner_id, id) where rows move between owners.
        older_than: seconds (or a timedelta) since `deleted_at`, by the database's clock.
        limit: rows in one batch.

    Raises:
        ValueError: a negative age, or a limit below 1.
    """
    age = older_than.total_seconds() if isinstance(older_than, timedelta) else float(older_than)
    if not age >= 0 or limit < 1:
        raise ValueError(f"older_than is seconds >= 0 and limit at least 1, got {older_than!r} and {limit!r}")
    name = sql.Identifier(*([table] if isinstance(table, str) else table)).as_string(None).replace("%", "%%")
    rows = _within(conn, "purge_tombstones").rows(_PURGE.replace("{table}", name), [age, _PULL_LOCKS, limit])
    return PurgedBatch(
        rows=sum(int(count) for _, count, _ in rows),
        horizons={UUID(owner_id): int(horizon) for owner_id, _, horizon in rows},
    )


# A pull holds the advisory lock of its owner shared, a purge exclusively; two owners that hash alike only make a purge
# leave one of them for later. Not row locks on the counter: "for key share" there, beside writers that update and roll
# back, made PostgreSQL 18.6 fail a writer now and then ("new multixact has more than one updating member"), and it
# would need a transaction that may write.
_PULL_LOCKS = 0x73796E63

_PULL = "select pg_advisory_xact_lock_shared(%s, hashtext(%s))"

# The lock is tried row by row in the order of the inner select, until the limit is reached. So a batch locks no more
# owners than it has rows, and an owner whose pull is open does not use the batch up.
_PURGE = """
with cutoff as materialized (
    select clock_timestamp() - make_interval(secs => %s) as deleted_before
),
candidates as materialized (
    select oldest.id, oldest.owner_id
    from (
        select tombstones.id, tombstones.owner_id
        from {table} as tombstones
        where tombstones.deleted_at < (select cutoff.deleted_before from cutoff)
          and exists (select 1 from sync_revisions as counters where counters.owner_id = tombstones.owner_id)
        order by tombstones.deleted_at
        offset 0
    ) as oldest
    where pg_try_advisory_xact_lock(%s, hashtext(oldest.owner_id::text))
    limit %s
),
locked as materialized (
    select tombstones.id, tombstones.owner_id
    from {table} as tombstones
    join candidates on candidates.id = tombstones.id and candidates.owner_id = tombstones.owner_id
    where tombstones.deleted_at < (select cutoff.deleted_before from cutoff)
    for update of tombstones skip locked
),
purged as (
    delete from {table} as tombstones
    using locked
    where tombstones.id = locked.id and tombstones.owner_id = locked.owner_id
    returning tombstones.owner_id, tombstones.revision
),
batches as (
    select purged.owner_id, count(*) as purged_rows, max(purged.revision) as newest
    from purged
    group by purged.owner_id
),
raised as (
    insert into sync_purge_horizons as horizons (owner_id, horizon_revision)
    select batches.owner_id, greatest(batches.newest, 1)
    from batches
    on conflict (owner_id) do update
    set horizon_revision = greatest(horizons.horizon_revision, excluded.horizon_revision),
        updated_at = clock_timestamp()
    returning horizons.owner_id, horizons.horizon_revision
)
select batches.owner_id::text, batches.purged_rows, raised.horizon_revision
from batches
join raised on raised.owner_id = batches.owner_id
order by batches.owner_id
"""


def copy_sql(name: Literal["revisions", "revisions-rename"]) -> str:
    """Return SQL to copy into the application's own migrations.

    Args:
        name: "revisions", the tables and the convention for synced ones; "revisions-rename", once, from `user_id`.

    Raises:
        ValueError: another name.
    """
    if name not in _COPIES.values():
        raise ValueError(f"there is SQL to copy for 'revisions' and 'revisions-rename', not for {name!r}")
    return (migrate.folder() / "copy" / f"{name}.sql").read_text("utf-8")


def __getattr__(name: str) -> str:
    if name not in _COPIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return copy_sql(_COPIES[name])  # type: ignore[arg-type]


def _within(conn: Any, what: str) -> Adapter:
    session = adapter_for(conn)
    session.require_transaction(what)
    return session


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _owner(owner_id: UUID | str) -> UUID:
    if isinstance(owner_id, UUID):
        return owner_id
    if not isinstance(owner_id, str):
        raise TypeError(f"an owner id is a UUID or the text of one, got {type(owner_id).__name__}")
    try:
        return UUID(owner_id)
    except ValueError as exc:
        raise ValueError(f"an owner id is a UUID or the text of one, got {owner_id!r:.80}") from exc


def _unknown(owners: Iterable[UUID]) -> UnknownOwner:
    owner_ids = tuple(owners)
    names = ", ".join(map(str, owner_ids))
    message = f"no revision counter for {names}: call ensure_owner when the owner is created"
    return UnknownOwner(message, owner_ids=owner_ids)
