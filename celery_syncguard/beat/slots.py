"""The state of beat: entries, slots and terms, in PostgreSQL (`migrations/0002`), or in memory for tests.

A slot is one due occurrence of one entry, (entry, due_at), and exists once. Its life is claimed, sent; or claimed,
dropped. What happens to it is decided by the database in the statement that claims it, which also proves that the
claimer leads. The id of its task is derived from the slot, so a slot that has to be sent again is recognised.

Everything here is keyed by the leader key, so several beats can share a database without sharing a schedule. Not here:
when an entry is due (`timetable`), sending (`beat`).
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.outbox import Letter, Outbox
from celery_syncguard.core.store import LockStore
from celery_syncguard.errors import StoreUnavailable
from celery_syncguard.postgres.store import PostgresStore

__all__ = [
    "PRUNED_AT_MOST",
    "Claimed",
    "Entered",
    "EntryRow",
    "EntryState",
    "MemorySlots",
    "PostgresSlots",
    "Slot",
    "SlotRow",
    "Slots",
    "TermRow",
]

_NAMESPACE = uuid.UUID("6f8f5c0e-3a0b-5d57-9a0c-0f6d2b1c7e55")

#: How long an entry that left the schedule keeps its place in it.
KEEPS_ITS_PLACE = timedelta(hours=1)

#: The most slots that one `prune` deletes in PostgreSQL (`p_limit` in `migrations/0002`), so that it is over soon.
PRUNED_AT_MOST = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One due occurrence of one entry."""

    entry: str
    due_at: datetime

    def task_id(self, leader_key: str) -> str:
        """The id of the task that this slot is: the same, whoever sends it, however often."""
        due_at = self.due_at.astimezone(timezone.utc).isoformat(timespec="microseconds")
        return str(uuid.uuid5(_NAMESPACE, f"{leader_key}\0{self.entry}\0{due_at}"))


@dataclasses.dataclass(frozen=True, slots=True)
class EntryRow:
    """Where an entry stands: slots are counted from `last_due_at`, and none up to `since_at` is to be sent."""

    schedule: str
    last_due_at: datetime
    since_at: datetime
    runs: int


@dataclasses.dataclass(frozen=True, slots=True)
class Entered:
    """The answer to a leader that says which entries it has. `now` is the store's clock."""

    now: datetime
    entries: Mapping[str, EntryRow]


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """`outcome` is "claimed" (send it), "taken" (it was sent or given up) or "lost" (you do not lead)."""

    outcome: str
    now: datetime


@dataclasses.dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot as anybody sees it. `late`: seconds from due to sent, None if it was not sent."""

    entry: str
    due_at: datetime
    task_id: str
    term: int
    claimed_at: datetime
    sent_at: datetime | None
    dropped_at: datetime | None

    @property
    def late(self) -> float | None:
        return None if self.sent_at is None else (self.sent_at - self.due_at).total_seconds()


@dataclasses.dataclass(frozen=True, slots=True)
class EntryState:
    """An entry as anybody sees it. `last_due_at`: its latest claimed slot, None before the first one. `next_due_at`: the
    slot after that; None if it has none, or if its schedule has been changed since. `removed_at`: it left the schedule.
    """

    entry: str
    schedule: str
    runs: int
    last_due_at: datetime | None
    next_due_at: datetime | None
    removed_at: datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class TermRow:
    """One term as anybody sees it. `now` is the store's clock."""

    term: int
    holder: str
    ttl: float
    elected_at: datetime
    seen_at: datetime
    ended_at: datetime | None
    last_sent_at: datetime | None
    failing_since: datetime | None
    failure: str | None
    now: datetime


class Slots(Protocol):
    """The state of one leader key."""

    def enter(self, lease: Lease, schedules: Mapping[str, str], *, now: datetime | None = None) -> Entered | None:
        """Say which entries (name -> text of its schedule) there are. `now`: the time by which the leader goes, if it
        knows one. None: the lease is not the leader's.
        """

    def turn_back(self, lease: Lease, *, now: datetime) -> bool:
        """The clock was ahead: entries that are ahead of `now` go back to where they were then, and what was sent stays
        sent. False: the lease is not the leader's.
        """

    def claim(self, lease: Lease, slot: Slot, *, schedule: str, next_due_at: datetime | None) -> Claimed:
        """Claim a slot for sending, if it is not sent and the lease still leads."""

    def unsent(self) -> list[Slot]:
        """What was claimed and never sent, oldest first."""

    def sent(self, slot: Slot, *, term: int) -> None:
        """The broker has it. Remembered until the store has heard of it."""

    def drop(self, slot: Slot, *, term: int) -> None:
        """It is not to be sent any more."""

    def flush(self) -> None:
        """Tell the store what it has not heard of yet. Raises StoreUnavailable."""

    def unrecorded(self) -> list[Slot]:
        """Of which slots the store has not heard yet what became of them."""

    def seen(self, term: int, *, failure: str | None, sent: bool, ended: bool = False) -> datetime:
        """A sign of life of the leader. Answers with the store's clock."""

    def recent(self, *, entry: str | None = None, limit: int = 20) -> list[SlotRow]:
        """The latest slots, newest first."""

    def entries(self) -> list[EntryState]:
        """Where every entry stands, by name."""

    def terms(self, *, limit: int = 1) -> list[TermRow]:
        """The latest terms, newest first."""

    def prune(self, *, older: float) -> int:
        """Delete what has been over for so many seconds. How many slots went."""


def open_slots(store: LockStore, leader_key: str) -> Slots:
    """The slots that go with a lock store."""
    if isinstance(store, PostgresStore):
        return PostgresSlots(store, leader_key)
    if isinstance(store, MemoryStore):
        return MemorySlots(store, leader_key)
    raise TypeError(f"beat keeps its state in PostgreSQL, or in memory; it cannot in {store!r}")


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

    def _rows(self, call: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        # In binary: the text of an instant depends on the role's DateStyle and TimeZone.
        query = f"SELECT * FROM {self._prefix}{call}".encode()
        return self._store.run(lambda conn: conn.execute(query, parameters, binary=True).fetchall())

    def enter(self, lease: Lease, schedules: Mapping[str, str], *, now: datetime | None = None) -> Entered | None:
        self.flush()
        rows = self._rows(
            "syncguard_beat_enter(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (
                self._key,
                lease.key,
                lease.lock_id,
                int(lease.fence),
                lease.holder,
                round(lease.ttl * 1000),
                list(schedules),
                list(schedules.values()),
                now,
            ),
        )
        if not rows:
            return None
        entries = {
            entry: EntryRow(schedule=schedule, last_due_at=_utc(last), since_at=_utc(since), runs=runs)
            for entry, schedule, last, since, runs, _ in rows[1:]
        }
        return Entered(now=_utc(rows[0][5]), entries=entries)

    def turn_back(self, lease: Lease, *, now: datetime) -> bool:
        parameters = (self._key, lease.key, lease.lock_id, int(lease.fence), now)
        return bool(self._rows("syncguard_beat_turn_back(%s, %s, %s, %s, %s)", parameters)[0][0])

    def claim(self, lease: Lease, slot: Slot, *, schedule: str, next_due_at: datetime | None) -> Claimed:
        self.flush()
        ((outcome, _, now_at),) = self._rows(
            "syncguard_beat_claim(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (
                self._key,
                lease.key,
                lease.lock_id,
                int(lease.fence),
                slot.entry,
                schedule,
                slot.due_at,
                next_due_at,
                slot.task_id(self._key),
            ),
        )
        return Claimed(outcome=outcome, now=_utc(now_at))

    def unsent(self) -> list[Slot]:
        found: list[Slot] = []
        page = self._rows("syncguard_beat_unsent(%s)", (self._key,))
        while page:
            found += [Slot(entry, _utc(due_at)) for entry, due_at, _ in page]
            page = self._rows("syncguard_beat_unsent(%s, %s, %s)", (self._key, found[-1].due_at, found[-1].entry))
        return found

    def sent(self, slot: Slot, *, term: int) -> None:
        self._mark(slot, term, dropped=False)

    def drop(self, slot: Slot, *, term: int) -> None:
        self._mark(slot, term, dropped=True)

    def _mark(self, slot: Slot, term: int, *, dropped: bool) -> None:
        parameters = (self._key, slot.entry, slot.due_at, term, dropped)
        self._marks.put(
            Letter(lambda: self._rows("syncguard_beat_sent(%s, %s, %s, %s, %s)", parameters), about=(slot, dropped))
        )
        try:
            self.flush()
        except StoreUnavailable as exc:
            # This process knows it; only a next leader would send the copy, under the same id.
            what = "given up" if dropped else "sent"
            logger.warning(
                "cannot record that the slot of %r at %s was %s, will do so: %s", slot.entry, slot.due_at, what, exc
            )

    def unrecorded(self) -> list[Slot]:
        return [letter.about[0] for letter in self._marks.waiting]

    def flush(self) -> None:
        self._marks.deliver()

    def seen(self, term: int, *, failure: str | None, sent: bool, ended: bool = False) -> datetime:
        self.flush()
        rows = self._rows("syncguard_beat_seen(%s, %s, %s, %s, %s)", (self._key, term, failure, sent, ended))
        return _utc(rows[0][0])

    def recent(self, *, entry: str | None = None, limit: int = 20) -> list[SlotRow]:
        rows = self._rows("syncguard_beat_recent(%s, %s, %s)", (self._key, entry, limit))
        return [
            SlotRow(name, _utc(due), task_id, term, _utc(claimed), _maybe_utc(sent), _maybe_utc(dropped))
            for name, due, task_id, term, claimed, sent, dropped in rows
        ]

    def entries(self) -> list[EntryState]:
        query = (
            "SELECT e.entry, e.schedule, e.runs, e.last_due_at, e.since_at, e.next_due_at, e.removed_at "
            f"FROM {self._prefix}syncguard_beat_entries e WHERE e.leader_key = %s ORDER BY e.entry"
        ).encode()
        rows = self._store.run(lambda conn: conn.execute(query, (self._key,), binary=True).fetchall())
        return [
            _state(name, EntryRow(schedule, _utc(last), _utc(since), runs), _maybe_utc(following), _maybe_utc(removed))
            for name, schedule, runs, last, since, following, removed in rows
        ]

    def terms(self, *, limit: int = 1) -> list[TermRow]:
        rows = self._rows("syncguard_beat_history(%s, %s)", (self._key, limit))
        return [
            TermRow(
                term=term,
                holder=holder,
                ttl=ttl_ms / 1000,
                elected_at=_utc(elected),
                seen_at=_utc(seen),
                ended_at=_maybe_utc(ended),
                last_sent_at=_maybe_utc(last_sent),
                failing_since=_maybe_utc(failing),
                failure=failure,
                now=_utc(now),
            )
            for term, holder, ttl_ms, elected, seen, ended, last_sent, failing, failure, now in rows
        ]

    def prune(self, *, older: float) -> int:
        return int(self._rows("syncguard_beat_prune(%s, %s)", (self._key, round(older * 1000)))[0][0])


def _state(name: str, row: EntryRow, next_due_at: datetime | None, removed_at: datetime | None) -> EntryState:
    return EntryState(
        entry=name,
        schedule=row.schedule,
        runs=row.runs,
        last_due_at=row.last_due_at if row.runs else None,
        # The next slot is written with a claim. What was claimed before a change says nothing about the new schedule.
        next_due_at=next_due_at if row.last_due_at > row.since_at else None,
        removed_at=removed_at,
    )


def _utc(instant: datetime) -> datetime:
    return instant.astimezone(timezone.utc)


def _maybe_utc(instant: datetime | None) -> datetime | None:
    return None if instant is None else _utc(instant)


class MemorySlots:
    """Slots in this process, with the rules of the SQL functions."""

    def __init__(self, store: MemoryStore, leader_key: str) -> None:
        self._store = store
        self._key = leader_key
        self._mutex = threading.Lock()
        self._entries: dict[str, EntryRow] = {}
        self._next: dict[str, datetime | None] = {}
        self._removed: dict[str, datetime] = {}
        self._slots: dict[Slot, SlotRow] = {}
        self._terms: dict[int, TermRow] = {}

    def _now(self) -> datetime:
        return datetime.fromtimestamp(clock.wall_ms() / 1000, tz=timezone.utc)

    def _leads(self, lease: Lease) -> bool:
        return self._store.fenced(None, key=lease.key, lock_id=lease.lock_id, fence=int(lease.fence))

    def enter(self, lease: Lease, schedules: Mapping[str, str], *, now: datetime | None = None) -> Entered | None:
        with self._mutex:
            if not self._leads(lease):
                return None
            read = self._now()
            now = now or read
            term = int(lease.fence)
            row = TermRow(term, lease.holder, lease.ttl, read, read, None, None, None, None, read)
            self._terms.setdefault(term, row)
            for name, text in schedules.items():
                entry = self._entries.get(name)
                removed_at = self._removed.pop(name, None)
                if entry is None:
                    self._entries[name] = EntryRow(text, now.replace(microsecond=0), now, 0)
                elif entry.schedule != text or (removed_at is not None and removed_at <= now - KEEPS_ITS_PLACE):
                    self._entries[name] = dataclasses.replace(entry, schedule=text, since_at=now)
            for name in self._entries.keys() - schedules.keys():
                self._removed.setdefault(name, now)
            return Entered(now=read, entries={name: self._entries[name] for name in schedules})

    def turn_back(self, lease: Lease, *, now: datetime) -> bool:
        with self._mutex:
            if not self._leads(lease):
                return False
            for name, entry in self._entries.items():
                if entry.last_due_at <= now and entry.since_at <= now:
                    continue
                earlier = (slot.due_at for slot in self._slots if slot.entry == name and slot.due_at <= now)
                last = (
                    entry.last_due_at if entry.last_due_at <= now else max(earlier, default=now.replace(microsecond=0))
                )
                self._entries[name] = dataclasses.replace(entry, last_due_at=last, since_at=min(entry.since_at, now))
                self._next[name] = None
            return True

    def claim(self, lease: Lease, slot: Slot, *, schedule: str, next_due_at: datetime | None) -> Claimed:
        with self._mutex:
            now = self._now()
            if not self._leads(lease):
                return Claimed("lost", now)
            row = self._slots.get(slot)
            if row is not None and (row.sent_at is not None or row.dropped_at is not None):
                return Claimed("taken", now)
            self._slots[slot] = SlotRow(
                slot.entry, slot.due_at, slot.task_id(self._key), int(lease.fence), now, None, None
            )
            entry = self._entries.get(slot.entry) or EntryRow(schedule, slot.due_at, slot.due_at, 1)
            if entry.last_due_at < slot.due_at:
                entry = dataclasses.replace(entry, last_due_at=slot.due_at, runs=entry.runs + 1)
                self._next[slot.entry] = next_due_at
            self._entries[slot.entry] = entry
            return Claimed("claimed", now)

    def unsent(self) -> list[Slot]:
        with self._mutex:
            return sorted(
                (slot for slot, row in self._slots.items() if row.sent_at is None and row.dropped_at is None),
                key=lambda slot: (slot.due_at, slot.entry),
            )

    def sent(self, slot: Slot, *, term: int) -> None:
        with self._mutex:
            row = self._slots[slot]
            if row.sent_at is None:
                self._slots[slot] = dataclasses.replace(row, sent_at=self._now(), term=term, dropped_at=None)

    def drop(self, slot: Slot, *, term: int) -> None:
        with self._mutex:
            row = self._slots[slot]
            if row.sent_at is None and row.dropped_at is None:
                self._slots[slot] = dataclasses.replace(row, dropped_at=self._now())

    def flush(self) -> None:
        """Nothing is ever late here."""

    def unrecorded(self) -> list[Slot]:
        return []

    def seen(self, term: int, *, failure: str | None, sent: bool, ended: bool = False) -> datetime:
        with self._mutex:
            now = self._now()
            row = self._terms.get(term)
            if row is not None:
                self._terms[term] = dataclasses.replace(
                    row,
                    seen_at=now,
                    last_sent_at=now if sent else row.last_sent_at,
                    failing_since=None if failure is None else row.failing_since or now,
                    failure=failure,
                    ended_at=now if ended else row.ended_at,
                )
            return now

    def recent(self, *, entry: str | None = None, limit: int = 20) -> list[SlotRow]:
        with self._mutex:
            rows = [row for row in self._slots.values() if entry in (None, row.entry)]
        return sorted(rows, key=lambda row: (row.claimed_at, row.due_at), reverse=True)[:limit]

    def entries(self) -> list[EntryState]:
        with self._mutex:
            return [
                _state(name, self._entries[name], self._next.get(name), self._removed.get(name))
                for name in sorted(self._entries)
            ]

    def terms(self, *, limit: int = 1) -> list[TermRow]:
        with self._mutex:
            now = self._now()
            return [dataclasses.replace(self._terms[term], now=now) for term in sorted(self._terms, reverse=True)][
                :limit
            ]

    def prune(self, *, older: float) -> int:
        with self._mutex:
            before = self._now() - timedelta(seconds=older)
            old = [slot for slot, row in self._slots.items() if row.claimed_at < before and slot.due_at < before]
            for slot in old:
                del self._slots[slot]
            return len(old)
