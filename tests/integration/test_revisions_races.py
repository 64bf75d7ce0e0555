"""Revisions under contention: order is commit order, so a reader with a cursor misses nothing."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_syncguard import revisions
from tests.fixtures import soak
from tests.fixtures.polling import poll

NOTES = """
create table notes (
    id uuid primary key,
    owner_id uuid not null,
    updated_at timestamptz not null default now(),
    deleted_at timestamptz,
    revision bigint not null
);
create index on notes (owner_id, revision);
create sequence plain_sequence;
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
    """Opens connections whose commits do not wait for the disk, and closes them."""
    opened: list[psycopg.Connection[Any]] = []

    def connect() -> psycopg.Connection[Any]:
        opened.append(psycopg.connect(dsn, options="-c synchronous_commit=off -c lock_timeout=20s"))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def new_owner(dsn: str) -> uuid.UUID:
    owner = uuid.uuid4()
    with psycopg.connect(dsn) as connection:
        revisions.ensure_owner(connection, owner)
    return owner


def waits_for_a_lock(dsn: str, pid: int) -> None:
    """Return once the server process `pid` is blocked by another."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        poll(lambda: connection.execute("select pg_blocking_pids(%s) <> '{}'", [pid]).fetchone() == (True,))


# --- one owner ------------------------------------------------------------------------------------------------------


def eight_writers(connect: Callable[[], Any], allocate: Callable[[Any], int]) -> list[int]:
    connections = [connect() for _ in range(8)]
    barrier = threading.Barrier(8)

    def write(connection: Any) -> int:
        barrier.wait()
        with connection.transaction():
            return allocate(connection)

    with ThreadPoolExecutor(8) as pool:
        return sorted(pool.map(write, connections))


def test_eight_writers_at_a_barrier_get_exactly_1_to_8(connect, dsn):
    for _ in range(20):
        owner = new_owner(dsn)
        assert eight_writers(connect, lambda connection: revisions.next_revision(connection, owner)) == [*range(1, 9)]


def test_eight_writers_that_read_and_then_write_get_the_same_number(connect, dsn):
    """The control of the test above: reading the counter without its lock hands out numbers twice."""

    def read_then_write(connection: Any) -> int:
        revision = revisions.current_revision(connection, owner) + 1
        barrier.wait()
        connection.execute("update sync_revisions set last_revision = %s where owner_id = %s", [revision, owner])
        return revision

    owner, barrier = new_owner(dsn), threading.Barrier(8)
    assert eight_writers(connect, read_then_write) == [1] * 8


def test_a_writer_waits_for_the_transaction_before_it_and_gets_the_next_number(connect, dsn, owner):
    first, second = connect(), connect()
    assert revisions.next_revision(first, owner) == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(revisions.next_revision, second, owner)
        waits_for_a_lock(dsn, second.info.backend_pid)
        first.commit()
        assert waiting.result(timeout=20) == 2


def test_a_writer_that_waited_for_a_rollback_gets_the_returned_number(connect, dsn, owner):
    first, second = connect(), connect()
    assert revisions.next_revision(first, owner) == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(revisions.next_revision, second, owner)
        waits_for_a_lock(dsn, second.info.backend_pid)
        first.rollback()
        assert waiting.result(timeout=20) == 1


def test_other_owners_are_not_blocked(connect, dsn, owner):
    writer, other = connect(), connect()
    revisions.next_revision(writer, owner)
    other.execute("set lock_timeout = '200ms'")
    other.commit()
    assert revisions.next_revision(other, new_owner(dsn)) == 1
    with pytest.raises(psycopg.errors.LockNotAvailable):  # the control: the same owner is
        revisions.next_revision(other, owner)


def test_reading_for_update_keeps_the_revision_until_the_end(connect, owner):
    reader, writer = connect(), connect()
    writer.execute("set lock_timeout = '200ms'")
    writer.commit()
    assert revisions.current_revision_for_update(reader, owner) == 0
    with pytest.raises(psycopg.errors.LockNotAvailable):
        revisions.next_revision(writer, owner)
    writer.rollback()
    assert revisions.guard_pull(writer, owner, 0) == 0  # a pull does not wait for it
    reader.rollback()
    assert revisions.current_revision(reader, owner) == 0
    assert revisions.next_revision(writer, owner) == 1  # the control: a plain read keeps nobody out


# --- several owners -------------------------------------------------------------------------------------------------


def test_several_owners_never_deadlock_in_whatever_order_they_are_asked_for(connect, dsn):
    owners = [new_owner(dsn) for _ in range(6)]

    def write(connection: Any) -> Counter[uuid.UUID]:
        mine: Counter[uuid.UUID] = Counter()
        for _ in range(60):
            wanted = random.sample(owners, 4)
            with connection.transaction():
                mine.update(revisions.next_revisions(connection, wanted).keys())
        return mine

    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(write, [connect() for _ in range(8)]), Counter())
    reader = connect()
    assert {owner: revisions.current_revision(reader, owner) for owner in owners} == total


def test_two_owners_taken_one_by_one_in_opposite_order_deadlock(connect, dsn):
    """The control of the test above, and why `next_revisions` exists."""
    one, other = new_owner(dsn), new_owner(dsn)
    first, second = connect(), connect()
    revisions.next_revision(first, one)
    revisions.next_revision(second, other)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(revisions.next_revision, first, other)
        waits_for_a_lock(dsn, first.info.backend_pid)
        with pytest.raises(psycopg.errors.DeadlockDetected):  # one of the two is chosen as the victim
            try:
                revisions.next_revision(second, one)
            finally:
                second.rollback()
            waiting.result(timeout=20)


# --- pulling by cursor ----------------------------------------------------------------------------------------------


def write_rows(connection: Any, owner: uuid.UUID, rows: int, allocate: Callable[..., int], seed: int) -> set[uuid.UUID]:
    """Commit `rows` rows, a few in each transaction, three of ten rolled back; return what was committed."""
    dice, committed = random.Random(seed), set()
    while len(committed) < rows:
        batch = {uuid.uuid4() for _ in range(min(dice.randint(1, 4), rows - len(committed)))}
        for row in batch:
            revision = allocate(connection, owner)
            connection.execute("insert into notes (id, owner_id, revision) values (%s, %s, %s)", [row, owner, revision])
        if dice.random() < 0.3:
            connection.rollback()
        else:
            connection.commit()
            committed |= batch
    return committed


def read_by_cursor(
    connection: Any, owner: uuid.UUID, bound: Callable[..., int], done: threading.Event
) -> Counter[uuid.UUID]:
    """Pull until the writers are done, and once more; return how often each row was seen."""
    seen: Counter[uuid.UUID] = Counter()
    cursor, last = 0, False
    while not last:
        last = done.is_set()
        with connection.transaction():
            upper = bound(connection, owner, cursor)
            found = connection.execute(
                "select id from notes where owner_id = %s and revision > %s and revision <= %s", [owner, cursor, upper]
            ).fetchall()
        seen.update(row for (row,) in found)
        cursor = upper
    return seen


def missed(
    connect: Callable[[], Any], owner: uuid.UUID, *, rows: int, allocate: Callable[..., int], bound: Callable[..., int]
) -> int:
    """Let 16 writers commit `rows` rows while 3 readers pull; return how many row-reader pairs were missed."""
    done = threading.Event()
    with ThreadPoolExecutor(19) as pool:
        readers = [pool.submit(read_by_cursor, connect(), owner, bound, done) for _ in range(3)]
        writers = [pool.submit(write_rows, connect(), owner, rows // 16, allocate, seed) for seed in range(16)]
        try:
            committed = set().union(*(writer.result(timeout=100) for writer in writers))
        finally:
            done.set()
        seen = [reader.result(timeout=20) for reader in readers]
    assert len(committed) == rows // 16 * 16
    assert all(set(rows_seen) <= committed for rows_seen in seen), "a reader saw a row that was rolled back"
    assert all(count == 1 for rows_seen in seen for count in rows_seen.values()), "a reader saw a row twice"
    return sum(len(committed - set(rows_seen)) for rows_seen in seen)


def from_sequence(connection: Any, owner: uuid.UUID) -> int:
    return connection.execute("select nextval('plain_sequence')").fetchone()[0]


def highest_in_table(connection: Any, owner: uuid.UUID, cursor: int) -> int:
    highest = connection.execute("select max(revision) from notes where owner_id = %s", [owner]).fetchone()[0]
    return max(cursor, highest or 0)


@pytest.mark.soak
@pytest.mark.slow
def test_no_reader_misses_a_row_while_16_writers_commit_and_roll_back(connect, owner):
    rows = soak.rounds(3_200, soak=10_000)
    assert missed(connect, owner, rows=rows, allocate=revisions.next_revision, bound=revisions.guard_pull) == 0


def test_readers_do_miss_rows_when_a_plain_sequence_numbers_them(connect, owner):
    """The control of the test above: the same writers and readers, but numbers in another order than the commits."""
    assert missed(connect, owner, rows=3_200, allocate=from_sequence, bound=highest_in_table) > 0


def test_gaps_do_not_matter_but_late_commits_do(connect, owner):
    """The fault of a sequence, step by step: a lower number that commits after a higher one was read."""
    slow, quick, reader = connect(), connect(), connect()

    def write(connection: Any, revision: int) -> None:
        connection.execute(
            "insert into notes (id, owner_id, revision) values (%s, %s, %s)", [uuid.uuid4(), owner, revision]
        )

    def pull(cursor: int) -> list[int]:
        rows = reader.execute("select revision from notes where owner_id = %s and revision > %s", [owner, cursor])
        found = sorted(revision for (revision,) in rows)
        reader.commit()
        return found

    write(slow, from_sequence(slow, owner))
    write(quick, from_sequence(quick, owner))
    quick.commit()
    assert pull(0) == [2]
    slow.commit()
    assert pull(2) == []  # revision 1 exists now, and this reader will never see it
    assert pull(0) == [1, 2]
