"""Slots in the memory of this process, with the rules of the SQL functions (`migrations/0003`)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone

from celery_syncguard.beat.slots import Claimed, Entered, EntryRow, EntryState, Slot, SlotRow, TermRow
from celery_syncguard.core import clock
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.memory import MemoryStore

__all__ = ["MemorySlots"]

#: How long an entry that left the schedule keeps its place in it.
_KEEPS_ITS_PLACE = timedelta(hours=1)


@dataclasses.dataclass(slots=True)
class _Entry:
    row: EntryRow
    next_due_at: datetime | None = None
    removed_at: datetime | None = None


class MemorySlots:
    """As `PostgresSlots`."""

    def __init__(self, store: MemoryStore, leader_key: str) -> None:
        self._store = store
        self._key = leader_key
        self._mutex = threading.Lock()
        self._entries: dict[str, _Entry] = {}
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
            self._terms.setdefault(
                term, TermRow(term, lease.holder, lease.ttl, read, read, None, None, None, None, read)
            )
            for name, text in schedules.items():
                entry = self._entries.setdefault(name, _Entry(EntryRow(text, now.replace(microsecond=0), now, 0)))
                away = entry.removed_at is not None and entry.removed_at <= now - _KEEPS_ITS_PLACE
                if entry.row.schedule != text or away:
                    entry.row = dataclasses.replace(entry.row, schedule=text, since_at=now)
                entry.removed_at = None
            for name in self._entries.keys() - schedules.keys():
                self._entries[name].removed_at = self._entries[name].removed_at or now
            return Entered(now=read, entries={name: self._entries[name].row for name in schedules})

    def turn_back(self, lease: Lease, *, now: datetime) -> bool:
        with self._mutex:
            if not self._leads(lease):
                return False
            for name, entry in self._entries.items():
                last, since = entry.row.last_due_at, entry.row.since_at
                if max(last, since) <= now:
                    continue
                if last > now:
                    earlier = (slot.due_at for slot in self._slots if slot.entry == name and slot.due_at <= now)
                    last = max(earlier, default=now.replace(microsecond=0))
                entry.row = dataclasses.replace(entry.row, last_due_at=last, since_at=min(since, now))
                entry.next_due_at = None
            return True

    def claim(self, lease: Lease, slot: Slot, *, schedule: str, next_due_at: datetime | None) -> Claimed:
        with self._mutex:
            now = self._now()
            if not self._leads(lease):
                return Claimed("lost", now)
            row = self._slots.get(slot)
            if row is not None and not row.unsent:
                return Claimed("taken", now)
            task_id, term = slot.task_id(self._key), int(lease.fence)
            self._slots[slot] = SlotRow(slot.entry, slot.due_at, task_id, term, now, None, None)
            entry = self._entries.get(slot.entry)
            if entry is None:
                self._entries[slot.entry] = _Entry(EntryRow(schedule, slot.due_at, slot.due_at, 1))
            elif entry.row.last_due_at < slot.due_at:
                entry.row = dataclasses.replace(entry.row, last_due_at=slot.due_at, runs=entry.row.runs + 1)
                entry.next_due_at = next_due_at
            return Claimed("claimed", now)

    def unsent(self) -> list[Slot]:
        with self._mutex:
            found = [slot for slot, row in self._slots.items() if row.unsent]
        return sorted(found, key=lambda slot: (slot.due_at, slot.entry))

    def sent(self, slot: Slot, *, term: int) -> None:
        with self._mutex:
            row = self._slots[slot]
            if row.sent_at is None:
                self._slots[slot] = dataclasses.replace(row, sent_at=self._now(), term=term, dropped_at=None)

    def drop(self, slot: Slot, *, term: int) -> None:
        with self._mutex:
            row = self._slots[slot]
            if row.unsent:
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
                entry.row.state(name, entry.next_due_at, entry.removed_at)
                for name, entry in sorted(self._entries.items())
            ]

    def terms(self, *, limit: int = 1) -> list[TermRow]:
        with self._mutex:
            latest = sorted(self._terms.values(), key=lambda row: row.term, reverse=True)[:limit]
            return [dataclasses.replace(row, now=self._now()) for row in latest]

    def prune(self, *, older: float) -> int:
        with self._mutex:
            before = self._now() - timedelta(seconds=older)
            old = [slot for slot, row in self._slots.items() if row.claimed_at < before and slot.due_at < before]
            for slot in old:
                del self._slots[slot]
            return len(old)
