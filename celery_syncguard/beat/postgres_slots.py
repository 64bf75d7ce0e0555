"""Slots in PostgreSQL, by the functions of `migrations/0003`, and which slots belong to which lock store."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery_syncguard.beat.memory_slots import MemorySlots
from celery_syncguard.beat.slots import Claimed, Entered, EntryRow, EntryState, Slot, SlotRow, TermRow
from celery_syncguard.core.events import logger
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.outbox import Letter, Outbox
from celery_syncguard.core.store import LockStore
from celery_syncguard.errors import StoreUnavailable
from celery_syncguard.postgres.store import PostgresStore

__all__ = ["PostgresSlots", "Slots", "open_slots"]


class PostgresSlots:
    """Slots in the database of a lock store."""

    def __init__(self, store: PostgresStore, leader_key: str) -> None:
        self._store = store
        self._key = leader_key
        # A % in the schema's name would be read as a placeholder.
        schema = store.schema
        self._prefix = "" if schema is None else '"' + schema.replace('"', '""').replace("%", "%%") + '".'
        # Marks that the database has not heard of yet. Written before whatever else it is told.
        self._marks = Outbox()

    def _call(self, function: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """The rows that this function of ours returns for the leader key and these arguments."""
        places = ", ".join(["%s"] * (1 + len(arguments)))
        return self._rows(f"SELECT * FROM {self._prefix}{function}({places})", (self._key, *arguments))

    def _rows(self, query: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        # In binary: the text of an instant depends on the role's DateStyle and TimeZone.
        rows = self._store.run(lambda conn: conn.execute(query.encode(), parameters, binary=True).fetchall())
        return [tuple(_utc(value) for value in row) for row in rows]

    def enter(self, lease: Lease, schedules: Mapping[str, str], *, now: datetime | None = None) -> Entered | None:
        """Say which entries (name -> text of its schedule) there are. `now`: the time by which the leader goes, if it
        knows one. None: the lease does not lead.
        """
        self.flush()
        names, texts = list(schedules), list(schedules.values())
        rows = self._call(
            "syncguard_beat_enter", *_proof(lease), lease.holder, round(lease.ttl * 1000), names, texts, now
        )
        if not rows:
            return None
        return Entered(now=rows[0][5], entries={entry: EntryRow(*row) for entry, *row, _ in rows[1:]})

    def turn_back(self, lease: Lease, *, now: datetime) -> bool:
        """The clock was ahead: entries that are ahead of `now` go back to where they were then, and what was sent stays
        sent. False: the lease does not lead.
        """
        return bool(self._call("syncguard_beat_turn_back", *_proof(lease), now)[0][0])

    def claim(self, lease: Lease, slot: Slot, *, schedule: str, next_due_at: datetime | None) -> Claimed:
        """Claim a slot for sending, if it is not sent and the lease still leads."""
        self.flush()
        task_id = slot.task_id(self._key)
        ((outcome, _, now_at),) = self._call(
            "syncguard_beat_claim", *_proof(lease), slot.entry, schedule, slot.due_at, next_due_at, task_id
        )
        return Claimed(outcome=outcome, now=now_at)

    def unsent(self) -> list[Slot]:
        """The slots that were claimed and never sent, oldest first."""
        found: list[Slot] = []
        page = self._call("syncguard_beat_unsent")
        while page:
            found += [Slot(entry, due_at) for entry, due_at, _ in page]
            page = self._call("syncguard_beat_unsent", found[-1].due_at, found[-1].entry)
        return found

    def sent(self, slot: Slot, *, term: int) -> None:
        """Record that the broker has it; later, if the database does not answer now."""
        self._mark(slot, term, dropped=False)

    def drop(self, slot: Slot, *, term: int) -> None:
        """Record that it is not to be sent any more; later, if the database does not answer now."""
        self._mark(slot, term, dropped=True)

    def _mark(self, slot: Slot, term: int, *, dropped: bool) -> None:
        arguments = (slot.entry, slot.due_at, term, dropped)
        self._marks.put(Letter(lambda: self._call("syncguard_beat_sent", *arguments), about=(slot, dropped)))
        try:
            self.flush()
        except StoreUnavailable as exc:
            # This process knows it; only a next leader would send the copy, under the same id.
            what = "given up" if dropped else "sent"
            logger.warning(
                "cannot record that the slot of %r at %s was %s, will do so: %s", slot.entry, slot.due_at, what, exc
            )

    def unrecorded(self) -> list[Slot]:
        """The slots that are sent or dropped, and not recorded as such yet."""
        return [letter.about[0] for letter in self._marks.waiting]

    def flush(self) -> None:
        """Record what could not be recorded before. Raises StoreUnavailable."""
        self._marks.deliver()

    def seen(self, term: int, *, failure: str | None, sent: bool, ended: bool = False) -> datetime:
        """Record that the leader lives. Returns the store's clock."""
        self.flush()
        now: datetime = self._call("syncguard_beat_seen", term, failure, sent, ended)[0][0]
        return now

    def recent(self, *, entry: str | None = None, limit: int = 20) -> list[SlotRow]:
        """The latest slots, newest first."""
        return [SlotRow(*row) for row in self._call("syncguard_beat_recent", entry, limit)]

    def entries(self) -> list[EntryState]:
        """Where every entry stands, by name."""
        query = (
            "SELECT e.entry, e.next_due_at, e.removed_at, e.schedule, e.last_due_at, e.since_at, e.runs "
            f"FROM {self._prefix}syncguard_beat_entries e WHERE e.leader_key = %s ORDER BY e.entry"
        )
        return [
            EntryRow(*row).state(name, following, removed)
            for name, following, removed, *row in self._rows(query, (self._key,))
        ]

    def terms(self, *, limit: int = 1) -> list[TermRow]:
        """The latest terms, newest first."""
        rows = self._call("syncguard_beat_history", limit)
        return [TermRow(term, holder, ttl_ms / 1000, *instants) for term, holder, ttl_ms, *instants in rows]

    def prune(self, *, older: float) -> int:
        """Delete what has been over for so many seconds. Returns how many slots were deleted."""
        return int(self._call("syncguard_beat_prune", round(older * 1000))[0][0])


#: The state of one leader key.
Slots = PostgresSlots | MemorySlots


def open_slots(store: LockStore, leader_key: str) -> Slots:
    """The slots in the database of a lock store.

    Raises:
        TypeError: a store of another kind.
    """
    if isinstance(store, PostgresStore):
        return PostgresSlots(store, leader_key)
    if isinstance(store, MemoryStore):
        return MemorySlots(store, leader_key)
    raise TypeError(f"beat keeps its slots in PostgreSQL or in memory, got the store {store!r}")


def _proof(lease: Lease) -> tuple[str, str, int]:
    """What a function that only a leader may call checks first."""
    return lease.key, lease.lock_id, int(lease.fence)


def _utc(value: Any) -> Any:
    return value.astimezone(timezone.utc) if isinstance(value, datetime) else value
