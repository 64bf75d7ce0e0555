"""Slots, and the state of beat around them, as it stands in the database.

A slot is one due occurrence of one entry, (entry, due_at), and exists once. It is claimed, then sent or dropped. The
statement that claims it also proves that the claimer leads. The id of its task is derived from the slot, so a copy that has
to be sent is recognised as one.

All state belongs to one leader key, so several beats can share a database without sharing a schedule. Not here: how it is
kept (`postgres_slots`, `memory_slots`), when an entry is due (`timetable`), sending (`slot_sender`).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone

__all__ = [
    "PRUNED_AT_MOST",
    "Claimed",
    "Entered",
    "EntryRow",
    "EntryState",
    "Slot",
    "SlotRow",
    "TermRow",
]

_NAMESPACE = uuid.UUID("6f8f5c0e-3a0b-5d57-9a0c-0f6d2b1c7e55")

#: The most slots that one `prune` deletes in PostgreSQL (`p_limit` in `migrations/0003`), so that it is over soon.
PRUNED_AT_MOST = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One due occurrence of one entry."""

    entry: str
    due_at: datetime

    def task_id(self, leader_key: str) -> str:
        """The id of the task that this slot is: the same one each time it is sent, by any leader."""
        due_at = self.due_at.astimezone(timezone.utc).isoformat(timespec="microseconds")
        return str(uuid.uuid5(_NAMESPACE, f"{leader_key}\0{self.entry}\0{due_at}"))


@dataclasses.dataclass(frozen=True, slots=True)
class EntryRow:
    """Where an entry stands: slots are counted from `last_due_at`, and none up to `since_at` is to be sent."""

    schedule: str
    last_due_at: datetime
    since_at: datetime
    runs: int

    def state(self, entry: str, next_due_at: datetime | None, removed_at: datetime | None) -> EntryState:
        """The same for people, with the rest of the row."""
        last_due_at = self.last_due_at if self.runs else None
        # The next slot is written with a claim. A claim before a change says nothing about the new schedule.
        next_due_at = next_due_at if self.last_due_at > self.since_at else None
        return EntryState(entry, self.schedule, self.runs, last_due_at, next_due_at, removed_at)


@dataclasses.dataclass(frozen=True, slots=True)
class Entered:
    """What a leader that says which entries it has is told: their rows, and the store's clock."""

    now: datetime
    entries: Mapping[str, EntryRow]


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """`outcome` is "claimed" (send it), "taken" (it was sent or dropped) or "lost" (this process does not lead)."""

    outcome: str
    now: datetime


@dataclasses.dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot for people. `late`: seconds from due to sent, None if it was not sent."""

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

    @property
    def unsent(self) -> bool:
        return self.sent_at is None and self.dropped_at is None


@dataclasses.dataclass(frozen=True, slots=True)
class EntryState:
    """An entry for people. `last_due_at`: its latest claimed slot, None before the first one. `next_due_at`: the slot
    after that; None if it has none, or if its schedule has been changed since. `removed_at`: it left the schedule.
    """

    entry: str
    schedule: str
    runs: int
    last_due_at: datetime | None
    next_due_at: datetime | None
    removed_at: datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class TermRow:
    """One term. `now` is the store's clock."""

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
