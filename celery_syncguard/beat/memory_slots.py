"""Slots in the memory of this process, with the rules of the SQL functions (`migrations/0003`)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone

from celery_syncguard.beat.slots import (
    Claimed,
    Entered,
    EntryRow,
    EntryState,
    Slot,
    SlotRow,
    TermRow,
)
from celery_syncguard.core import clock
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.memory import MemoryStore

__all__ = ["MemorySlots"]

#: How long an entry that left the schedule keeps its place in it.
_KEEPS_ITS_PLACE = timedelta(hours=1)


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
                elif entry.schedule != text or (removed_at is not None and removed_at <= now - _KEEPS_ITS_PLACE):
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
                self._entries[name].state(name, self._next.get(name), self._removed.get(name))
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
