"""Notes that people edit offline: tasks write them, every device keeps a copy and catches up by cursor.

Run it as the README says. Worth reading in this order: `write_note`, `pull`, `Device`.
"""

from __future__ import annotations

import os
import uuid

import psycopg
from celery import Celery

from celery_syncguard import LockedTask, revisions
from celery_syncguard.hlc import HybridLogicalClock, compare

DSN = os.environ.get("SYNCGUARD_DSN", "postgresql://localhost/offline_sync")

app = Celery(
    "offline_sync",
    broker=os.environ.get("BROKER_URL", "redis://localhost"),
    backend=os.environ.get("RESULT_BACKEND", "redis://localhost"),
)
app.conf.syncguard_dsn = DSN
app.conf.syncguard_hlc = True  # every message carries its sender's stamp, every worker observes it

# In your application this is a migration, and so is `celery syncguard sql revisions`.
NOTES = """
create table notes (
    id uuid primary key,
    owner_id uuid not null,
    updated_at timestamptz not null default now(),
    deleted_at timestamptz,
    revision bigint not null,  -- when it came to be, for readers: per owner, in the order of the commits
    hlc bigint not null,       -- when it was meant, for writers: the later edit wins
    device_id text not null,   -- between edits of the same instant
    body text not null
);
create index notes_owner_id_revision_idx on notes (owner_id, revision);
create index notes_deleted_at_idx on notes (deleted_at) where deleted_at is not null;
"""


def create_tables() -> None:
    with psycopg.connect(DSN) as connection:
        if connection.execute("select to_regclass('notes') is null").fetchone() == (
            True,
        ):  # else they are there already
            connection.execute(revisions.POSTGRES_MIGRATION_SQL)
            connection.execute(NOTES)


def create_owner(owner_id: str) -> None:
    with psycopg.connect(DSN) as connection:
        revisions.ensure_owner(connection, owner_id)


# --- what workers do ------------------------------------------------------------------------------------------------


@app.task(base=LockedTask, bind=True, lock_key="note:{note_id}")
def write_note(self, owner_id, note_id, body, stamp, device_id):  # noqa: PLR0917 - a message has one shape
    """Apply an edit made at `stamp` on some device; a body of None deletes. An older edit than the row's is ignored."""
    with psycopg.connect(DSN) as connection:
        self.lease.fenced(connection)
        row = connection.execute("select hlc, device_id from notes where id = %s", [note_id]).fetchone()
        if row is not None and compare((stamp, device_id), row) <= 0:
            return "older"
        # As late as possible: from here to the commit the owner's other writers wait.
        revision = revisions.next_revision(connection, owner_id)
        connection.execute(
            "insert into notes (id, owner_id, revision, hlc, device_id, body, deleted_at)"
            " values (%(id)s, %(owner_id)s, %(revision)s, %(hlc)s, %(device_id)s, coalesce(%(body)s, ''),"
            "         case when %(body)s::text is null then clock_timestamp() end)"
            " on conflict (id) do update set revision = excluded.revision, hlc = excluded.hlc,"
            "   device_id = excluded.device_id, body = excluded.body, deleted_at = excluded.deleted_at,"
            "   updated_at = clock_timestamp()",
            {
                "id": note_id,
                "owner_id": owner_id,
                "revision": revision,
                "hlc": stamp,
                "device_id": device_id,
                "body": body,
            },
        )
    return "written"


@app.task(base=LockedTask, bind=True, lock_key=None)
def announce(self, owner_ids, body):
    """Give several owners a note, all or none. No device stamps this one: the worker does."""
    stamp = self.hlc.now()
    with psycopg.connect(DSN) as connection:
        for owner_id, revision in revisions.next_revisions(connection, owner_ids).items():
            connection.execute(
                "insert into notes (id, owner_id, revision, hlc, device_id, body) values (%s, %s, %s, %s, %s, %s)"
                " on conflict (id) do nothing",  # a second delivery of this task has the same ids
                [uuid.uuid5(owner_id, self.request.id), owner_id, revision, stamp, self.hlc.device_id, body],
            )


@app.task
def purge(older_than):
    """Forget deletions older than this many seconds; in a real application, daily and after months."""
    removed = 0
    while True:
        with psycopg.connect(DSN) as connection:  # a transaction for each batch: pulls wait for no more than one
            batch = revisions.purge_tombstones(connection, "notes", older_than=older_than)
        removed += batch.rows
        if not batch.rows:
            return removed


# --- what the server answers to devices -----------------------------------------------------------------------------


def pull(owner_id, cursor):
    """Everything after `cursor`, and the next cursor. Raises `ResyncRequired` when deletions in between are forgotten."""
    with psycopg.connect(DSN) as connection:
        bound = revisions.guard_pull(connection, owner_id, cursor)
        rows = connection.execute(
            "select id::text, body, deleted_at is not null, hlc from notes"
            " where owner_id = %s and revision > %s and revision <= %s order by revision",
            [owner_id, cursor, bound],
        ).fetchall()
    return bound, rows


class Device:
    """A phone: a copy of the owner's notes, a cursor, a clock of its own, and edits that wait for the network."""

    def __init__(self, owner_id, device_id, **clock):
        self.owner_id = owner_id
        self.clock = HybridLogicalClock(device_id, **clock)
        self.notes = {}
        self.cursor = 0
        self.resyncs = 0
        self.waiting = []

    def edit(self, note_id, body):
        """Offline. Later than everything that this device has seen, even when its clock is behind."""
        self.waiting.append((self.owner_id, note_id, body, self.clock.now(), self.clock.device_id))

    def sync(self):
        """Online: hand over what waits, then catch up."""
        for edit in self.waiting:
            write_note.delay(*edit).get(timeout=60)
        self.waiting.clear()
        try:
            bound, rows = pull(self.owner_id, self.cursor)
        except revisions.ResyncRequired:
            self.notes, self.cursor, self.resyncs = {}, 0, self.resyncs + 1
            bound, rows = pull(self.owner_id, 0)
        for note_id, body, deleted, stamp in rows:
            self.clock.observe(stamp)
            if deleted:
                self.notes.pop(note_id, None)
            else:
                self.notes[note_id] = body
        self.cursor = bound
