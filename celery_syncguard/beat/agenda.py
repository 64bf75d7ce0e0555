"""What a leader has to send in its term: where each entry stands, and which of its slots are due.

Here the timetable (when is a slot due) meets the slots in the database (which of them were claimed and sent). One object lives
for one term. Not here: how a slot is sent (`slot_sender`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from celery.schedules import crontab

from celery_syncguard.beat.broker import Broker
from celery_syncguard.beat.postgres_slots import Slots
from celery_syncguard.beat.slots import Entered, EntryRow, Slot
from celery_syncguard.beat.timekeeper import JUMP, Timekeeper
from celery_syncguard.beat.timetable import choose, describe, due_between, grid_start, next_due, once_only
from celery_syncguard.core import clock
from celery_syncguard.core.config import CATCH_UP
from celery_syncguard.core.events import logger
from celery_syncguard.core.key import normalize_key
from celery_syncguard.core.lease import Lease
from celery_syncguard.errors import InvalidKey, LeaseLost

__all__ = ["CATCH_UP_OPTION", "Agenda", "Place"]

#: Of an entry: its own rule for missed slots. It never reaches the message.
CATCH_UP_OPTION = "syncguard_catch_up"


@dataclasses.dataclass(slots=True)
class Place:
    """Where one entry stands in this term."""

    text: str  # of its schedule
    runs: int
    counted: datetime  # slots up to here have been looked at
    since: datetime  # slots up to here are not to be sent
    claimed: datetime  # the latest slot that any leader claimed
    pending: list[datetime]  # due and to be sent, in order
    unsent: set[datetime]  # claimed and not sent
    knows_next: bool = False
    next_due: datetime | None = None
    refusals: int = 0
    quiet_until: float = 0.0

    def find_next(self, schedule: Any) -> None:
        """Find the next slot. Asks the schedule, which may be any class."""
        self.counted = grid_start(schedule, last_due_at=self.counted, since_at=self.since)
        instant = once_only(schedule)
        if instant is None:
            self.next_due = next_due(schedule, self.counted)
        else:
            # Another time under a name that ran before is another slot.
            self.next_due = instant if self.runs == 0 or instant != self.claimed else None
        self.knows_next = True

    def refused(self) -> float:
        """Seconds for which this entry is left alone."""
        self.refusals += 1
        pause = min(60.0, 2.0 ** min(self.refusals, 6))
        self.quiet_until = clock.now() + pause
        return pause


class Agenda:
    """The entries of one term. `rule`: for missed slots, of entries without a rule of their own."""

    def __init__(self, conf: Any, lease: Lease, slots: Slots, broker: Broker, *, rule: str, time: Timekeeper) -> None:
        self.lease = lease
        self.term = int(lease.fence)
        self.moved_at = 0.0  # the local clock when an entry was last looked at, or a slot sent or given up
        self.jumped = False  # time has jumped, perhaps in the middle of a slot: `count_anew` is due
        self._conf, self._slots, self._broker, self._rule, self._time = conf, slots, broker, rule, time
        self._begun = False
        self.places: dict[str, Place] = {}
        self._unsent: dict[str, set[datetime]] | None = None  # of entries that have no place; None: not read yet

    # Time

    def now(self) -> datetime:
        return self._time.now()

    def hear(self, ask: Callable[[], datetime]) -> bool:
        """Ask the database, which returns its time. Whether time has jumped, so that another tick should not wait."""
        asked_at = clock.now()
        self._heard(ask(), asked_at)
        return self.jumped

    def _heard(self, reading: datetime, asked_at: float) -> None:
        # The first reading that counts is that of the first look at the entries, which comes with the latest slot.
        if self._begun and self._time.hear(reading, asked_at=asked_at):
            self.jumped = True

    def count_anew(self) -> None:
        """Time has jumped: entries go on from where they are by now."""
        self.jumped = False
        for name in list(self.places):
            self._forget(name)

    def _forget(self, name: str) -> None:
        assert self._unsent is not None  # it is read before there are places
        self._unsent.setdefault(name, set()).update(self.places.pop(name).unsent)

    # Entries

    def enter(self, schedule: Mapping[str, Any]) -> None:
        """These are the entries now: tell the database, and find their places."""
        texts = {name: describe(entry.schedule) for name, entry in schedule.items() if _storable(name)}
        rows = self._standing(texts)
        first = self._unsent is None
        if self._unsent is None:
            unsent_before: dict[str, set[datetime]] = {}
            for slot in self._slots.unsent():
                unsent_before.setdefault(slot.entry, set()).add(slot.due_at)
            self._unsent = unsent_before  # not before all are read: a failure must not look as if there were none
        for name in [name for name in self.places if self.places[name].text != texts.get(name)]:
            self._forget(name)
        now = self.now()
        for name, row in rows.items():
            if name not in self.places:
                # What a leader claimed whose clock was ahead is claimed again when it is due.
                unsent = {due_at for due_at in self._unsent.pop(name, set()) if due_at <= now + JUMP}
                self.places[name] = Place(
                    text=row.schedule,
                    runs=row.runs,
                    counted=row.last_due_at,
                    since=row.since_at,
                    claimed=row.last_due_at,
                    pending=sorted(unsent),
                    unsent=unsent,
                )
        for name, instants in list(self._unsent.items()) if first else ():
            # Claimed by an earlier leader for an entry that this one does not have.
            for due_at in instants:
                self.moved_at = clock.now()
                logger.warning("the slot of %r at %s was not sent, and the schedule lacks that entry now", name, due_at)
                self._slots.drop(Slot(name, due_at), term=self.term)
            del self._unsent[name]

    def _standing(self, texts: Mapping[str, str]) -> Mapping[str, EntryRow]:
        """Where the entries stand, at the time by which this leader goes."""
        asked_at = clock.now()
        entered = self._entered(texts, self.now() if self._begun else None)
        rows = entered.entries
        if not self._begun:
            self._begun = True
            newest = max((row.last_due_at for row in rows.values()), default=None)
            self._time.begin(entered.now, asked_at=asked_at, newest=newest)
        else:
            self._heard(entered.now, asked_at)
        now = self.now()
        if all(max(row.last_due_at, row.since_at) <= now + JUMP for row in rows.values()):
            return rows
        if not self._slots.turn_back(self.lease, now=now):
            raise self._gone()
        return self._entered(texts, now).entries

    def _entered(self, texts: Mapping[str, str], now: datetime | None) -> Entered:
        entered = self._slots.enter(self.lease, texts, now=now)
        if entered is None:
            raise self._gone()
        return entered

    def _gone(self) -> LeaseLost:
        return self.lease.loss("the database says that it is gone")

    # Slots

    def look(self, entry: Any, place: Place, now: datetime) -> None:
        """Bring the pending slots of an entry up to date: add what came due, give up what is too late by now (because the
        broker was away, or the entry's class not willing).
        """
        schedule = entry.schedule
        if not place.knows_next:
            place.find_next(schedule)
        found: list[datetime] = []
        more = False
        came_due = place.next_due is not None and place.next_due <= now
        instant = once_only(schedule)
        if came_due:
            found, more = due_between(schedule, after=place.counted, now=now) if instant is None else ([instant], False)
        elif not place.pending:
            return
        due = sorted({*place.pending, *found})
        self._settle(entry, place, due, now)
        fewer = len(place.pending) < len(due)
        if more or fewer or (came_due and len(due) > 1):
            # While the broker is away this comes again with every attempt.
            level = logger.debug if came_due and self._broker.failures else logger.info
            count = f"{'more than ' if more else ''}{len(due)}"
            level("%r has %s slot(s) due, sending %d of them by its rule", entry.name, count, len(place.pending))
        if found:
            place.counted = found[-1]
        if came_due:
            place.next_due = next_due(schedule, place.counted) if instant is None else None
        elif fewer and not any(other.pending for other in self.places.values()):
            self._broker.works()  # nothing is left that cannot be sent; the next slot shows if it does

    def _settle(self, entry: Any, place: Place, due: list[datetime], now: datetime) -> None:
        """Of these slots keep what the rule says, and give up those that were claimed and are not among them."""
        within = self._conf.get("beat_cron_starting_deadline")
        if within is not None and isinstance(entry.schedule, crontab):
            due = [due_at for due_at in due if now - due_at <= timedelta(seconds=within)]
        place.pending = choose(due, now=now, rule=self._rule_of(entry))
        for due_at in place.unsent.difference(place.pending):
            self._slots.drop(Slot(entry.name, due_at), term=self.term)
            place.unsent.discard(due_at)

    def _rule_of(self, entry: Any) -> str:
        options = entry.options or {}
        rule = options.get(CATCH_UP_OPTION) or (options.get("headers") or {}).get(CATCH_UP_OPTION) or self._rule
        if rule not in CATCH_UP:
            logger.error("%r: %s is one of %s, got %r", entry.name, CATCH_UP_OPTION, ", ".join(CATCH_UP), rule)
            return self._rule
        return str(rule)

    def claim(self, name: str, place: Place) -> Slot | None:
        """Claim the first pending slot for sending. None: it was sent before.

        Raises:
            LeaseLost: the lease does not lead any more.
        """
        slot = Slot(name, place.pending[0])
        following = place.pending[1] if len(place.pending) > 1 else place.next_due
        asked_at = clock.now()
        claimed = self._slots.claim(self.lease, slot, schedule=place.text, next_due_at=following)
        self._heard(claimed.now, asked_at)
        if claimed.outcome == "lost":
            raise self._gone()
        if claimed.outcome == "taken":
            logger.info("the slot of %r at %s was sent before", name, slot.due_at.isoformat())
            place.pending = place.pending[1:]
            return None
        place.unsent.add(slot.due_at)
        return slot

    def finish(self, place: Place, slot: Slot, *, sent: bool) -> None:
        """A claimed slot was sent, or is given up."""
        place.pending = [due_at for due_at in place.pending if due_at != slot.due_at]
        place.unsent.discard(slot.due_at)
        place.runs += 1
        place.claimed = max(place.claimed, slot.due_at)
        place.refusals = 0
        (self._slots.sent if sent else self._slots.drop)(slot, term=self.term)


def _storable(name: str) -> bool:
    try:
        normalize_key(name, what="name of a beat entry")
    except InvalidKey as exc:
        logger.error("an entry is left out: %s", exc)
        return False
    return True
