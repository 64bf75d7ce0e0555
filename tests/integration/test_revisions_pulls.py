"""Pulls and purges: a reader learns of every deletion, or is told to start again."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from celery_syncguard import revisions
from tests.fixtures.polling import poll

NOTES = """
create table notes (
    id uuid primary key,
    owner_id uuid not null,
    deleted_at timestamptz,
    revision bigint not null
);
create index on notes (owner_id, revision);
create index on notes (deleted_at) where deleted_at is not null;
"""


@pytest.fixture
def dsn(empty_dsn: str) -> str:
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(revisions.POSTGRES_MIGRATION_SQL)
        connection.execute(NOTES)
    return empty_dsn


@pytest.fixture
def owner(dsn: str) -> uuid.UUID:
    return new_owner(dsn)


@pytest.fixture
def connect(dsn: str) -> Iterator[Callable[[], psycopg.Connection[Any]]]:
    opened: list[psycopg.Connection[Any]] = []

    def connect() -> psycopg.Connection[Any]:
        # Whoever has to wait for a lock longer than this is told so: nothing here may wait unless the test says so.
        opened.append(psycopg.connect(dsn, options="-c synchronous_commit=off -c lock_timeout=5s"))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def new_owner(dsn: str) -> uuid.UUID:
    owner = uuid.uuid4()
    with psycopg.connect(dsn) as connection:
        revisions.ensure_owner(connection, owner)
    return owner


def write(connection: Any, owner: uuid.UUID, note: uuid.UUID | None = None, *, deleted: bool = False) -> uuid.UUID:
    """Write or rewrite a note in its own transaction; a deleted one is an hour old."""
    note = note or uuid.uuid4()
    with connection.transaction():
        revision = revisions.next_revision(connection, owner)
        connection.execute(
            "insert into notes values (%s, %s, %s, %s) on conflict (id) do update"
            " set deleted_at = excluded.deleted_at, revision = excluded.revision",
            [note, owner, hour_ago(connection) if deleted else None, revision],
        )
    return note


def hour_ago(connection: Any) -> Any:
    return connection.execute("select clock_timestamp() - interval '1 hour'").fetchone()[0]


def purge(connection: Any, **options: Any) -> revisions.PurgedBatch:
    with connection.transaction():
        return revisions.purge_tombstones(connection, "notes", **{"older_than": 60, **options})


class Replica:
    """A client: what it has, and up to where."""

    def __init__(self, owner: uuid.UUID) -> None:
        self.owner, self.cursor, self.notes, self.resyncs = owner, 0, set(), 0

    def pull(self, connection: Any, guard: Callable[..., int] = revisions.guard_pull) -> None:
        with connection.transaction():
            try:
                bound = guard(connection, self.owner, self.cursor)
            except revisions.ResyncRequired:
                self.cursor, self.notes, self.resyncs = 0, set(), self.resyncs + 1
                bound = guard(connection, self.owner, 0)
            for note, deleted in connection.execute(
                "select id, deleted_at is not null from notes"
                " where owner_id = %s and revision > %s and revision <= %s order by revision",
                [self.owner, self.cursor, bound],
            ).fetchall():
                (self.notes.discard if deleted else self.notes.add)(note)
        self.cursor = bound


def live(connection: Any, owner: uuid.UUID) -> set[uuid.UUID]:
    rows = connection.execute("select id from notes where owner_id = %s and deleted_at is null", [owner]).fetchall()
    connection.commit()
    return {note for (note,) in rows}


# --- cursors and horizons -------------------------------------------------------------------------------------------


def test_a_pull_is_told_the_bound_that_is_its_next_cursor(connect, owner):
    connection = connect()
    assert revisions.guard_pull(connection, owner, 0) == 0
    write(connection, owner)
    write(connection, owner)
    assert [revisions.guard_pull(connection, owner, cursor) for cursor in (0, 1, 2)] == [2, 2, 2]


def test_a_cursor_behind_the_horizon_must_start_again_and_zero_never_must(connect, owner):
    connection = connect()
    for deleted in (False, True, True, False):
        write(connection, owner, deleted=deleted)
    assert purge(connection) == revisions.PurgedBatch(rows=2, horizons={owner: 3})
    for cursor in (1, 2):
        with pytest.raises(revisions.ResyncRequired) as caught:
            revisions.guard_pull(connection, owner, cursor)
        error = caught.value
        assert (error.owner_id, error.cursor, error.horizon, error.current) == (owner, cursor, 3, 4)
    assert [revisions.guard_pull(connection, owner, cursor) for cursor in (0, 3, 4)] == [4, 4, 4]


def test_a_cursor_from_a_lost_future_must_start_again(connect, owner):
    """A database restored from a backup, or failed over without its last commits, gives those numbers out again."""
    connection = connect()
    write(connection, owner)
    with pytest.raises(revisions.ResyncRequired) as caught:
        revisions.guard_pull(connection, owner, 2)
    assert (caught.value.cursor, caught.value.current) == (2, 1)


@pytest.mark.parametrize("cursor", [-1, 1.0, "1", None, True])
def test_what_is_no_cursor_is_refused(connect, owner, cursor):
    with pytest.raises(ValueError, match="cursor"):
        revisions.guard_pull(connect(), owner, cursor)


def test_the_horizon_only_rises(connect, owner):
    connection = connect()
    low = write(connection, owner)
    high = write(connection, owner, deleted=True)
    assert purge(connection).horizons == {owner: 2}
    with connection.transaction():  # a row that kept its old revision, as a table synced later may hold
        connection.execute("update notes set deleted_at = %s where id = %s", [hour_ago(connection), low])
    assert purge(connection) == revisions.PurgedBatch(rows=1, horizons={owner: 2})
    assert high != low


def test_only_tombstones_of_the_given_age_are_purged(connect, owner):
    connection = connect()
    kept = write(connection, owner)
    write(connection, owner, deleted=True)
    assert purge(connection, older_than=7200) == revisions.PurgedBatch(rows=0, horizons={})
    assert purge(connection, older_than=timedelta(minutes=59)).rows == 1
    assert live(connection, owner) == {kept}


def test_a_purge_works_in_batches_oldest_first(connect, owner):
    connection = connect()
    for _ in range(5):
        write(connection, owner, deleted=True)
    assert [purge(connection, limit=2) for _ in range(4)] == [
        revisions.PurgedBatch(2, {owner: 2}),
        revisions.PurgedBatch(2, {owner: 4}),
        revisions.PurgedBatch(1, {owner: 5}),
        revisions.PurgedBatch(0, {}),
    ]


def test_tombstones_of_an_owner_without_a_counter_stay_and_do_not_use_up_the_batch(connect, owner):
    connection = connect()
    stranger = uuid.uuid4()
    with connection.transaction():
        connection.execute("insert into notes values (%s, %s, now() - interval '1 day', 1)", [uuid.uuid4(), stranger])
    write(connection, owner, deleted=True)
    assert purge(connection, limit=1) == revisions.PurgedBatch(1, {owner: 1})
    assert purge(connection).rows == 0


def test_the_horizon_goes_with_its_owner(connect, owner):
    connection = connect()
    write(connection, owner, deleted=True)
    purge(connection)
    connection.execute("delete from sync_revisions where owner_id = %s", [owner])
    assert connection.execute("select count(*) from sync_purge_horizons").fetchone() == (0,)


@pytest.mark.parametrize("options", [{"older_than": -1}, {"older_than": float("nan")}, {"limit": 0}])
def test_an_age_or_a_limit_that_cannot_be_meant_is_refused(connect, options):
    with pytest.raises(ValueError, match="older_than"):
        purge(connect(), **options)


@pytest.mark.parametrize("table", ['od"d %s ta;ble', ("other schema", "notes")], ids=["odd name", "other schema"])
def test_table_names_are_quoted(connect, owner, table):
    connection = connect()
    name = psycopg.sql.Identifier(*([table] if isinstance(table, str) else table))
    connection.execute('create schema "other schema"')
    connection.execute(psycopg.sql.SQL("create table {} (like notes)").format(name))
    connection.execute(psycopg.sql.SQL("insert into {} values (gen_random_uuid(), {}, now(), 3)").format(name, owner))
    connection.commit()
    with connection.transaction():
        assert revisions.purge_tombstones(connection, table, older_than=0) == revisions.PurgedBatch(1, {owner: 3})


# --- who waits for whom ---------------------------------------------------------------------------------------------


def test_a_purge_never_removes_what_an_open_pull_may_still_read(connect, owner):
    writer, reader = connect(), connect()
    replica, note = Replica(owner), write(writer, owner)
    replica.pull(reader)
    assert replica.notes == {note}

    def purge_in_between(connection: Any, owner: uuid.UUID, cursor: int) -> int:
        bound = revisions.guard_pull(connection, owner, cursor)
        assert purge(writer).rows == 0
        return bound

    write(writer, owner, note, deleted=True)
    replica.pull(reader, guard=purge_in_between)
    assert replica.notes == set()
    assert purge(writer).rows == 1  # after the pull nothing keeps it


def test_without_the_guard_the_purge_does_remove_it_and_the_deletion_is_missed(connect, owner):
    """The control of the test above."""
    writer, reader = connect(), connect()
    replica, note = Replica(owner), write(writer, owner)
    replica.pull(reader)

    def purge_in_between(connection: Any, owner: uuid.UUID, cursor: int) -> int:
        bound = revisions.current_revision(connection, owner)
        assert purge(writer).rows == 1
        return bound

    write(writer, owner, note, deleted=True)
    replica.pull(reader, guard=purge_in_between)
    assert replica.notes == {note} != live(writer, owner)


def test_a_pull_may_be_read_only_and_repeatable(connect, owner):
    writer, reader = connect(), connect()
    replica, note = Replica(owner), write(writer, owner)
    reader.read_only, reader.isolation_level = True, psycopg.IsolationLevel.REPEATABLE_READ
    replica.pull(reader)
    write(writer, owner, note, deleted=True)
    purge(writer)
    replica.pull(reader)
    assert (replica.notes, replica.resyncs) == (set(), 1)


def test_an_old_snapshot_and_its_horizon_agree(connect, owner):
    """Repeatable read: the purge committed after the snapshot, so the tombstone is still there and so is the old horizon."""
    writer, reader = connect(), connect()
    replica, note = Replica(owner), write(writer, owner)
    replica.pull(reader)
    write(writer, owner, note, deleted=True)
    reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with reader.transaction():
        reader.execute("select 1")
        assert purge(writer).rows == 1
        replica.pull(reader)
    assert (replica.notes, replica.resyncs) == (set(), 0)


def test_a_pull_that_waited_for_a_purge_sees_its_horizon(connect, owner):
    writer, purger, reader = connect(), connect(), connect()
    write(writer, owner)
    write(writer, owner, deleted=True)
    assert revisions.purge_tombstones(purger, "notes", older_than=60).rows == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(revisions.guard_pull, reader, owner, 1)
        blocked = "select pg_blocking_pids(%s) <> '{}'"
        poll(lambda: writer.execute(blocked, [reader.info.backend_pid]).fetchone() == (True,))
        purger.commit()
        with pytest.raises(revisions.ResyncRequired):
            waiting.result(timeout=20)


def test_one_statement_that_locks_and_reads_would_not_see_it(connect, owner):
    """The control of the test above, and why the guard takes two: a statement's snapshot is older than its wait."""
    writer, purger, reader = connect(), connect(), connect()
    write(writer, owner)
    write(writer, owner, deleted=True)
    revisions.purge_tombstones(purger, "notes", older_than=60)
    both = (
        "select pg_advisory_xact_lock_shared(%s, hashtext(%s)),"
        " coalesce((select horizon_revision from sync_purge_horizons where owner_id = %s::uuid), 0)"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.execute, both, [revisions._PULL_LOCKS, str(owner), str(owner)])
        blocked = "select pg_blocking_pids(%s) <> '{}'"
        poll(lambda: writer.execute(blocked, [reader.info.backend_pid]).fetchone() == (True,))
        purger.commit()
        assert waiting.result(timeout=20).fetchone()[1] == 0


def test_a_purge_waits_for_nobody(connect, dsn, owner):
    writer, puller, other_purge, purger = (connect() for _ in range(4))
    purger.execute("set lock_timeout = '1ms'")  # any wait at all is an error
    purger.commit()
    busy = {name: new_owner(dsn) for name in ("written", "pulled", "purged")}
    notes = {name: write(writer, busy_owner, deleted=True) for name, busy_owner in busy.items()}
    write(writer, busy["purged"], deleted=True)
    write(writer, owner, deleted=True)

    writer.execute("update notes set deleted_at = null where id = %s", [notes["written"]])
    revisions.guard_pull(puller, busy["pulled"], 0)
    # Everything is an hour old and the oldest come first, so this batch takes the pair of "purged".
    other_purge.execute(
        "update notes set deleted_at = deleted_at - interval '1 day' where owner_id = %s", [busy["purged"]]
    )
    assert revisions.purge_tombstones(other_purge, "notes", older_than=60, limit=1).rows == 1

    # The batch has room for one: those whose owners are busy do not use it up.
    assert purge(purger, limit=2).horizons.keys() <= {owner, busy["written"]}
    assert live(purger, owner) == set()
    writer.commit()
    puller.commit()
    other_purge.commit()
    assert purge(purger).horizons.keys() == {busy["pulled"], busy["purged"]}
    assert live(purger, busy["written"]) == {notes["written"]}  # brought back to life meanwhile


def test_a_plain_delete_does_wait(connect, owner):
    """The control of the test above."""
    writer, purger = connect(), connect()
    note = write(writer, owner, deleted=True)
    purger.execute("set lock_timeout = '1ms'")
    purger.commit()
    writer.execute("update notes set deleted_at = null where id = %s", [note])
    with pytest.raises(psycopg.errors.LockNotAvailable):
        purger.execute("delete from notes where deleted_at < now()")


def test_a_purge_holds_up_no_writer(connect, owner):
    writer, purger = connect(), connect()
    write(writer, owner, deleted=True)
    assert revisions.purge_tombstones(purger, "notes", older_than=60).rows == 1
    writer.execute("set lock_timeout = '1ms'")
    writer.commit()
    write(writer, owner)
    purger.commit()


# --- all together ---------------------------------------------------------------------------------------------------


def replicas_after_a_storm(
    connect: Callable[[], Any], owner: uuid.UUID, guard: Callable[..., int]
) -> tuple[list[Replica], set[uuid.UUID]]:
    """Writers create, delete and revive notes, a purge runs all the time, replicas pull now and then."""
    done = threading.Event()

    def change(connection: Any, seed: int) -> None:
        dice, mine = random.Random(seed), []
        for _ in range(150):
            if mine and dice.random() < 0.6:
                write(connection, owner, dice.choice(mine), deleted=dice.random() < 0.8)
            else:
                mine.append(write(connection, owner))

    def purge_all_the_time(connection: Any) -> int:
        rows = 0
        while not done.is_set():
            rows += purge(connection, limit=5).rows
        return rows

    def follow(connection: Any, replica: Replica, seed: int) -> Replica:
        dice = random.Random(seed)
        while not done.wait(dice.random() * 0.1):
            replica.pull(connection, guard)
        replica.pull(connection, guard)
        return replica

    with ThreadPoolExecutor(12) as pool:
        purges = pool.submit(purge_all_the_time, connect())
        following = [pool.submit(follow, connect(), Replica(owner), seed) for seed in range(4)]
        writers = [pool.submit(change, connect(), seed) for seed in range(6)]
        try:
            for writer in writers:
                writer.result(timeout=60)
        finally:
            done.set()
        assert purges.result(timeout=20) > 0
        replicas = [replica.result(timeout=20) for replica in following]
    return replicas, live(connect(), owner)


def test_replicas_end_up_with_what_is_there_through_deletes_and_purges(connect, owner):
    replicas, there = replicas_after_a_storm(connect, owner, revisions.guard_pull)
    assert all(replica.notes == there for replica in replicas)
    assert any(replica.resyncs for replica in replicas)


def test_replicas_that_do_not_ask_for_the_horizon_keep_what_was_deleted(connect, owner):
    """The control of the test above."""
    bound = lambda connection, owner, cursor: revisions.current_revision(connection, owner)  # noqa: E731
    replicas, there = replicas_after_a_storm(connect, owner, bound)
    assert all(replica.notes > there for replica in replicas)


# --- pages ----------------------------------------------------------------------------------------------------------

LAST_ID = uuid.UUID(int=2**128 - 1)


def first_load(connection: Any, owner: uuid.UUID, between: Callable[[int], None], *, size: int = 10) -> tuple[Any, int]:
    """A whole pull from 0 in pages as the guide shows it, with something else between any two of them."""
    seen: dict[uuid.UUID, int] = {}
    bound, after, pages = None, (0, LAST_ID), 0
    while True:
        with connection.transaction():
            bound = revisions.guard_pull(connection, owner, 0, bound=bound)
            rows = connection.execute(
                "select id, revision from notes where owner_id = %s and (revision, id) > (%s, %s) and revision <= %s"
                " order by revision, id limit %s",
                [owner, *after, bound, size],
            ).fetchall()
        pages += 1
        assert pages < 100, "it does not end"
        seen.update(rows)
        if len(rows) < size:
            return seen, bound
        after = (rows[-1][1], rows[-1][0])
        between(pages)


def test_a_first_load_in_pages_ends_whatever_is_purged_between_them(connect, owner):
    connection, other = connect(), connect()
    notes = [write(connection, owner) for _ in range(35)]

    def between(page: int) -> None:
        write(other, owner, notes[34 - page], deleted=True)  # not reached yet, and now behind the bound
        write(other, owner, notes[page], deleted=True)  # read already
        assert purge(other).rows == 2

    seen, bound = first_load(connection, owner, between)
    assert bound == 35
    assert live(connection, owner) <= set(seen)
    # What was deleted meanwhile is forgotten already: the next pull says so, as it must.
    with pytest.raises(revisions.ResyncRequired):
        revisions.guard_pull(connection, owner, bound)


def test_pages_by_the_last_revision_as_cursor_never_end(connect, owner):
    """The negative control: a purged tombstone anywhere behind the first page sends the reader back each time."""
    connection = connect()
    for number in range(35):
        write(connection, owner, deleted=number == 25)
    purge(connection)
    assert revisions.guard_pull(connection, owner, 0) == 35
    with pytest.raises(revisions.ResyncRequired):
        revisions.guard_pull(connection, owner, 10)


def test_rows_under_one_revision_are_not_cut_in_two_by_a_page(connect, owner):
    connection = connect()
    with connection.transaction():
        revision = revisions.next_revision(connection, owner)
        connection.execute(
            "insert into notes select gen_random_uuid(), %s, null, %s from generate_series(1, 25)", [owner, revision]
        )
    seen, bound = first_load(connection, owner, lambda _: None)
    assert (len(seen), bound) == (25, 1)
    # The control: by the revision alone the second page has nothing.
    rows = connection.execute("select id from notes where owner_id = %s and revision > 1", [owner]).fetchall()
    assert rows == []


def test_what_is_written_between_pages_comes_with_the_next_pull(connect, owner):
    connection, other = connect(), connect()
    notes = [write(connection, owner) for _ in range(30)]
    seen, bound = first_load(connection, owner, lambda page: write(other, owner, notes[29 - page]) and None)
    later = connection.execute("select id from notes where owner_id = %s and revision > %s", [owner, bound]).fetchall()
    assert set(seen) | {note for (note,) in later} == set(notes)


@pytest.mark.parametrize("bound", [-1, True, "5", 2.0, 3])
def test_what_is_no_bound_of_this_pull_is_refused(connect, owner, bound):
    with pytest.raises(ValueError, match="bound"):
        revisions.guard_pull(connect(), owner, 4, bound=bound)


def test_a_bound_from_a_lost_future_must_start_again(connect, owner):
    connection = connect()
    write(connection, owner)
    with pytest.raises(revisions.ResyncRequired, match="bound 7 of cursor 0"):
        revisions.guard_pull(connection, owner, 0, bound=7)


# --- a row moves to another owner -----------------------------------------------------------------------------------


@pytest.fixture
def movable(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("alter table notes drop constraint notes_pkey, add primary key (owner_id, id)")


def move(connection: Any, note: uuid.UUID, old: uuid.UUID, new: uuid.UUID) -> None:
    with connection.transaction():
        numbers = revisions.next_revisions(connection, [old, new])
        connection.execute(
            "insert into notes select id, %s, null, %s from notes where owner_id = %s and id = %s"
            " on conflict (owner_id, id) do update set revision = excluded.revision, deleted_at = null",
            [new, numbers[new], old, note],
        )
        connection.execute(
            "update notes set deleted_at = %s, revision = %s where owner_id = %s and id = %s",
            [hour_ago(connection), numbers[old], old, note],
        )


def put(connection: Any, owner: uuid.UUID) -> uuid.UUID:
    note = uuid.uuid4()
    with connection.transaction():
        connection.execute(
            "insert into notes values (%s, %s, null, %s)", [note, owner, revisions.next_revision(connection, owner)]
        )
    return note


def test_readers_of_both_owners_see_a_row_move_there_and_back(connect, dsn, owner, movable):
    connection, other = connect(), new_owner(dsn)
    note = put(connection, owner)
    ours, theirs = Replica(owner), Replica(other)
    for old, new, at_ours in [(owner, other, False), (other, owner, True), (owner, other, False)]:
        move(connection, note, old, new)
        ours.pull(connection)
        theirs.pull(connection)
        assert (note in ours.notes, note in theirs.notes) == (at_ours, not at_ours)


def test_a_purge_of_the_tombstone_leaves_the_moved_row_alone(connect, dsn, owner, movable):
    connection, other = connect(), new_owner(dsn)
    note = put(connection, owner)
    move(connection, note, owner, other)
    batch = purge(connection)
    assert (batch.rows, set(batch.horizons)) == (1, {owner})
    assert live(connection, other) == {note}


def test_an_update_of_the_owner_leaves_the_row_with_the_old_owners_readers(connect, dsn, owner):
    """The negative control."""
    connection, other = connect(), new_owner(dsn)
    note = write(connection, owner)
    ours = Replica(owner)
    ours.pull(connection)
    with connection.transaction():
        numbers = revisions.next_revisions(connection, [owner, other])
        connection.execute("update notes set owner_id = %s, revision = %s where id = %s", [other, numbers[other], note])
    ours.pull(connection)
    assert note in ours.notes
