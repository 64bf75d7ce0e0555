"""The schedule inside a leading beat: a scheduler class of anybody's, whose entries are due by slots and are sent as slots.

`sending(cls)` is `cls` with that put before it; one object of it lives for one term. Which slots there are is `timetable`'s
to say, their rows are `slots`'; when this schedule lives is `beat`'s.

A slot is sent like this:

    connect to the broker   before anything is claimed: what a claim is followed by must be quick
    claim                   one statement, which proves the lease in the database
    look at the deadline    by the local clock, which counts the time that this process was frozen
    publish                 at once, with the slot's own task id; once, without retries inside
    mark as sent

Whoever dies in between leaves a slot that is claimed and not marked; the next leader sends it, under the same id. SIGTERM
and SIGINT wait for the end of these few milliseconds (`undisturbed`), so a clean stop leaves no such slot.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import beat
from celery.schedules import crontab, schedstate
from kombu.exceptions import OperationalError
from kombu.utils.objects import cached_property

from celery_syncguard.beat.slots import EntryRow, Slot, Slots
from celery_syncguard.beat.timekeeper import JUMP, Timekeeper
from celery_syncguard.beat.timetable import choose, describe, due_between, grid_start, next_due, once_only
from celery_syncguard.core import clock
from celery_syncguard.core.config import CATCH_UP
from celery_syncguard.core.events import logger
from celery_syncguard.core.key import normalize_key
from celery_syncguard.core.lease import Lease
from celery_syncguard.errors import (
    DuplicateTask,
    InvalidKey,
    LeaseLost,
    NoLease,
    SchemaBehind,
    StoreUnavailable,
    SyncGuardError,
)

__all__ = ["AGAIN", "of_the_database", "sending", "undisturbed"]

#: Seconds after which the leader tries again what the database or the broker refused, at first and at most.
AGAIN = (0.2, 5.0)
#: Seconds without an answer after which a broker counts as down.
_BROKER_PATIENCE = 10.0

#: Seconds of looking at entries after which a tick returns, though not all have been looked at; and between two comparisons
#: of the whole schedule with what it was.
_LOOKING = 1.0

#: More than there is between two slots of any schedule: the longest are the years between two 29ths of February.
_LONG_AGO = timedelta(days=3000)

_OPTION = "syncguard_catch_up"


@dataclasses.dataclass(slots=True)
class _Place:
    """Where one entry stands in this term."""

    text: str
    runs: int
    counted: datetime  # slots up to here have been looked at
    since: datetime  # slots up to here are nobody's to send
    claimed: datetime  # the latest slot that anybody claimed
    planned: bool = False
    next_due: datetime | None = None
    pending: list[datetime] = dataclasses.field(default_factory=list)  # due and to be sent, in order
    unsent: set[datetime] = dataclasses.field(default_factory=set)  # claimed and not sent
    refusals: int = 0
    quiet_until: float = 0.0

    def refused(self) -> float:
        """Seconds for which this entry is left alone."""
        self.refusals += 1
        pause = min(60.0, 2.0 ** min(self.refusals, 6))
        self.quiet_until = clock.now() + pause
        return pause


_classes: dict[type, type] = {}


def sending(inner: type) -> type:
    """The class `inner`, sending slots."""
    found = _classes.get(inner)
    if found is None:
        bases = [_SlotSending, inner]
        if any(base.__module__.startswith("django_celery_beat.") for base in inner.__mro__):
            from celery_syncguard.beat.django_schedule import SeesEdits

            bases.insert(1, SeesEdits)
        found = _classes[inner] = type(f"Leading{inner.__name__}", tuple(bases), {})
    return found


class _SlotSending:
    """Put before a scheduler class: its entries are due by slots, and are sent as slots. One object per term."""

    # Of the scheduler class.
    app: Any
    schedule: Any
    max_interval: float
    Producer: Any

    failure: str | None = None
    moved_at = 0.0  # the local clock when it last got somewhere: looked at an entry, or sent a slot
    _in_slot = False
    _fresh = False  # the connection was made for this very attempt
    _at_broker = False  # the message is being published, or that failed
    _lease: Lease
    _slots: Slots
    _rule: str
    _leader_key: str
    _heap: Any = None
    old_schedulers: Any
    schedules_equal: Any
    reserve: Any
    sync: Any

    def lead(self, lease: Lease, slots: Slots, *, rule: str, leader_key: str, time: Timekeeper) -> None:
        """Begin a term. Called once, before the first tick."""
        self._lease, self._slots, self._rule, self._leader_key = lease, slots, rule, leader_key
        self._places: dict[str, _Place] = {}
        self._time = time
        self._begun = self._jumped = False
        self._compared, self._compare_at = None, 0.0
        self._problem: BaseException | None = None
        self._quiet_until = 0.0
        self._broker_failures = 0
        self._sent_something = False
        self._unsent: dict[str, set[datetime]] | None = None

    def news(self) -> bool:
        """Whether something was sent since the last call."""
        news, self._sent_something = self._sent_something, False
        return news

    def hear(self, ask: Callable[[], datetime]) -> bool:
        """Ask the database, which answers with its time. Whether time has jumped, so that another tick should not wait."""
        asked_at = clock.now()
        self._heard(ask(), asked_at)
        return self._jumped

    def _heard(self, reading: datetime, asked_at: float) -> None:
        # The first reading that counts is that of the first look at the entries, which comes with the latest slot.
        if self._begun and self._time.hear(reading, asked_at=asked_at):
            self._jumped = True  # in the middle of a slot, perhaps

    def _now(self) -> datetime:
        return self._time.now()

    def _when(self, _entry: Any, next_time_to_run: float | None, **_: Any) -> float:
        # The keys of Celery's heap. Wall clocks are set, and would leave entries waiting.
        delay = self.max_interval if next_time_to_run is None else next_time_to_run
        return clock.now() + max(0.0, min(delay, self.max_interval))

    # Which entries are due

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send one slot that is due. The seconds until the next one may be."""
        if super().tick.__func__ is not beat.Scheduler.tick:  # type: ignore[misc]  # a class of its own making
            return float(super().tick(*args, **kwargs))  # type: ignore[misc]
        if self._jumped:
            self._count_anew()
        # Celery's own, up to 5.6, lets an entry that is not due after all keep the others waiting.
        schedule = self.schedule
        if self._heap is None or self._is_another(schedule):
            self.old_schedulers = copy.copy(schedule)
            self.populate_heap()
        heap, until = self._heap, clock.now() + _LOOKING
        while heap and heap[0].time <= clock.now() < until:
            event = heapq.heappop(heap)
            entry, (due, delay) = event.entry, self._due(event.entry)
            if due:
                with self._uncounted_unless_done(entry):
                    following = self.reserve(entry)
                    self.apply_entry(entry, producer=self.producer)
                heapq.heappush(heap, beat.event_t(self._when(following, delay), event.priority, following))
                return 0.0
            heapq.heappush(heap, beat.event_t(self._when(entry, max(delay, 0.001)), event.priority, entry))
        if self._heap is None:
            return 0.0  # time has jumped meanwhile: this heap's is over
        return min(self.max_interval, max(0.0, heap[0].time - clock.now())) if heap else self.max_interval

    def _is_another(self, schedule: Any) -> bool:
        # Celery compares all entries in every tick, and so with every slot that is sent: 40 ms of 5,000 entries. A class
        # with `look_in` has its own bound.
        if schedule is self._compared and clock.now() < self._compare_at and not hasattr(self, "look_in"):
            return False
        self._compared, self._compare_at = schedule, clock.now() + _LOOKING
        return not self.schedules_equal(self.old_schedulers, schedule)

    @contextmanager
    def _uncounted_unless_done(self, entry: Any) -> Iterator[None]:
        """Take a reservation back if its slot is still to be sent afterwards.

        django-celery-beat counts the run when it reserves, in the row's object itself. A one-off row that counts a run is
        over, so it would end unsent.
        """
        place, model = self._places[entry.name], getattr(entry, "model", None)
        slot = place.pending[0]
        before = {name: getattr(model, name) for name in ("last_run_at", "total_run_count") if hasattr(model, name)}
        dirty: set[str] = getattr(self, "_dirty", set())
        to_be_written = entry.name in dirty  # for a run before this one
        try:
            yield
        finally:
            if slot in place.pending:
                for name, value in before.items():
                    setattr(model, name, value)
                if not to_be_written:
                    dirty.discard(entry.name)

    def populate_heap(self, *_: Any, **__: Any) -> None:
        schedule = dict(self.schedule)
        self._enter(schedule)
        heap, until = [], clock.now() + _LOOKING
        for entry in schedule.values():
            # What is not looked at now is the first that the next ticks look at.
            due, delay = self._due(entry) if clock.now() < until else (True, 0.0)
            heap.append(beat.event_t(self._when(entry, 0.0 if due else delay), 5, entry))
        heapq.heapify(heap)
        self._heap = heap

    def _due(self, entry: Any) -> tuple[bool, float]:
        try:
            return self.is_due(entry)
        except SyncGuardError:
            raise
        except Exception as exc:  # one entry that cannot be understood must not stop the others
            if of_the_database(exc):
                raise
            logger.exception("cannot tell when %r is due, trying again later", entry.name)
            return False, self.max_interval

    def _enter(self, schedule: Mapping[str, Any]) -> None:
        texts = {name: describe(entry.schedule) for name, entry in schedule.items() if _storable(name)}
        entries = self._standing(texts)
        first = self._unsent is None
        if self._unsent is None:
            unsent_before: dict[str, set[datetime]] = {}
            for slot in self._slots.unsent():
                unsent_before.setdefault(slot.entry, set()).add(slot.due_at)
            self._unsent = (
                unsent_before  # not before all are read: a failure must not make it look as if there were none
            )
        for name in [name for name in self._places if self._places[name].text != texts.get(name)]:
            self._unsent.setdefault(name, set()).update(self._places.pop(name).unsent)
        now = self._now()
        for name, row in entries.items():
            if name not in self._places:
                # What a leader claimed whose clock was ahead is claimed again when it is due.
                unsent = {due_at for due_at in self._unsent.pop(name, set()) if due_at <= now + JUMP}
                self._places[name] = _Place(
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
                self._slots.drop(Slot(name, due_at), term=int(self._lease.fence))
            del self._unsent[name]

    def _standing(self, texts: Mapping[str, str]) -> Mapping[str, EntryRow]:
        """Where the entries stand, at the time by which this leader goes."""
        asked_at = clock.now()
        entered = self._slots.enter(self._lease, texts, now=self._now() if self._begun else None)
        if entered is None:
            raise self._gone()
        rows = entered.entries
        if not self._begun:
            self._begun = True
            newest = max((row.last_due_at for row in rows.values()), default=None)
            self._time.begin(entered.now, asked_at=asked_at, newest=newest)
        else:
            self._heard(entered.now, asked_at)
        now = self._now()
        if all(max(row.last_due_at, row.since_at) <= now + JUMP for row in rows.values()):
            return rows
        if not self._slots.turn_back(self._lease, now=now):
            raise self._gone()
        entered = self._slots.enter(self._lease, texts, now=now)
        if entered is None:
            raise self._gone()
        return entered.entries

    def _gone(self) -> LeaseLost:
        return self._lease.loss("the database says that it is gone")

    def _count_anew(self) -> None:
        """Time has jumped: entries go on from where they are by now."""
        self._jumped = False
        for name, place in self._places.items():
            assert self._unsent is not None  # it is read before there are places
            self._unsent.setdefault(name, set()).update(place.unsent)
        self._places.clear()
        self._heap = None

    def _plan(self, plan: Any, place: _Place) -> None:
        """Find the next slot. Asks the schedule, which may be anybody's code."""
        place.counted = grid_start(plan, last_due_at=place.counted, since_at=place.since)
        instant = once_only(plan)
        if instant is None:
            place.next_due = next_due(plan, place.counted)
        else:
            # Another time under a name that ran before is another slot.
            place.next_due = instant if place.runs == 0 or instant != place.claimed else None
        place.planned = True

    def is_due(self, entry: Any) -> tuple[bool, float]:
        """As Celery's: whether to send it now, and the seconds after which to look again."""
        self.moved_at = clock.now()
        quiet = self._quiet_until - clock.now()
        if quiet > 0:
            return False, quiet
        place = self._place_of(entry)
        if place is None:
            return False, self.max_interval
        quiet = place.quiet_until - clock.now()
        if quiet > 0:
            return False, quiet
        now = self._now()
        if not place.planned:
            self._plan(entry.schedule, place)
        if place.next_due is not None and place.next_due <= now:
            self._refill(entry, place, now)
        elif place.pending:
            self._settle_again(entry, place, now)
        if place.pending:
            willing, delay = self._willing(entry, place)
            if not willing:
                # It says itself that it is not due: not started yet, disabled, expired. That is not missing a slot.
                place.pending = place.pending[-1:]
                return False, delay
        following = self.max_interval if place.next_due is None else (place.next_due - now).total_seconds()
        if not place.pending:
            if place.next_due is None:
                self._end_clocked(entry, place)
            return False, following
        return True, 0.0 if len(place.pending) > 1 else following

    def _place_of(self, entry: Any) -> _Place | None:
        if self._jumped:
            self._count_anew()
        place = self._places.get(entry.name)
        if place is None or place.text != describe(entry.schedule):
            self._enter(dict(self.schedule))
            place = self._places.get(entry.name)
        return place

    def _refill(self, entry: Any, place: _Place, now: datetime) -> None:
        plan = entry.schedule
        instant = once_only(plan)
        if instant is not None:
            slots, more = [instant], False
        else:
            slots, more = due_between(plan, after=place.counted, now=now)
        candidates = sorted({*place.pending, *slots})
        self._settle(entry, place, candidates, now)
        if len(candidates) > 1 or more or not place.pending:
            # While the broker is away this comes again with every attempt.
            level = logger.debug if self._broker_failures else logger.info
            counted = f"{'more than ' if more else ''}{len(candidates)}"
            level("%r has %s slot(s) due, sending %d of them by its rule", entry.name, counted, len(place.pending))
        if slots:
            place.counted = slots[-1]
        place.next_due = None if instant is not None else next_due(plan, place.counted)

    def _settle_again(self, entry: Any, place: _Place, now: datetime) -> None:
        # In time when they came due, they may be too late by now: the broker was away, or the entry's own class not willing.
        waiting = len(place.pending)
        self._settle(entry, place, place.pending, now)
        if len(place.pending) < waiting:
            logger.info(
                "%r has %s slot(s) due, sending %d of them by its rule", entry.name, waiting, len(place.pending)
            )
            if not any(other.pending for other in self._places.values()):
                # Nothing is left that cannot be sent. Whether the broker is back shows with the next slot.
                self._broker_failures, self.failure = 0, None

    def _settle(self, entry: Any, place: _Place, candidates: list[datetime], now: datetime) -> None:
        """Of these due slots send what the rule says, and give up those that were claimed and are not among them."""
        within = self.app.conf.get("beat_cron_starting_deadline")
        if within is not None and isinstance(entry.schedule, crontab):
            candidates = [due_at for due_at in candidates if now - due_at <= timedelta(seconds=within)]
        place.pending = choose(candidates, now=now, rule=self._rule_of(entry))
        for due_at in place.unsent.difference(place.pending):
            self._slots.drop(Slot(entry.name, due_at), term=int(self._lease.fence))
            place.unsent.discard(due_at)

    def _willing(self, entry: Any, place: _Place) -> tuple[bool, float]:
        """What the entry's own class says, where it has an opinion of its own."""
        every = getattr(entry.schedule, "run_every", None)
        # Seen from here, its schedule is due at the pending slot.
        entry.last_run_at = place.pending[0] - (every if isinstance(every, timedelta) else timedelta(seconds=1))
        if place.pending[0] > datetime.now(timezone.utc):
            # This machine's clock, by which a class of somebody's own judges, is behind the database's.
            entry.last_run_at -= _LONG_AGO
        model = getattr(entry, "model", None)
        if model is None:
            entry.total_run_count = place.runs
        elif once_only(entry.schedule) is None and self._ran_already(model, place):
            model.total_run_count = place.runs
        ours = type(entry).is_due is beat.ScheduleEntry.is_due
        own = not ours or super().is_due.__func__ is not beat.Scheduler.is_due  # type: ignore[misc]
        if not own:
            return True, 0.0
        plan, entry.schedule = entry.schedule, _due_now(entry.schedule)
        try:
            due, delay = super().is_due(entry)  # type: ignore[misc]
        finally:
            entry.schedule = plan
        return bool(due), self.max_interval if delay is None else float(delay)

    def _ran_already(self, model: Any, place: _Place) -> bool:
        """Whether a one-off entry was sent by a leader that died before the row said so. A row that was written since then
        is another wish: somebody wants it once more.
        """
        if not getattr(model, "one_off", False) or model.total_run_count or not place.runs:
            return False
        return bool(place.pending[0] > place.claimed >= model.date_changed)

    def _end_clocked(self, entry: Any, place: _Place) -> None:
        """Ask a clocked row whose slot is over once more, so that its own class switches it off."""
        model: Any = getattr(entry, "model", None)
        instant = once_only(entry.schedule)
        if model is None or instant is None or not (model.one_off and model.enabled):
            return
        if not model.total_run_count and place.runs and instant == place.claimed:
            # Its leader died before the row said so; or it is a new row, with the name and the time of an old one.
            logger.info("the slot of %r at %s was sent before", entry.name, instant.isoformat())
            model.total_run_count = place.runs
        if model.total_run_count:
            super().is_due(entry)  # type: ignore[misc]

    def _rule_of(self, entry: Any) -> str:
        options = entry.options or {}
        rule = options.get(_OPTION) or (options.get("headers") or {}).get(_OPTION) or self._rule
        if rule not in CATCH_UP:
            logger.error("%r: %s is one of %s, got %r", entry.name, _OPTION, ", ".join(CATCH_UP), rule)
            return self._rule
        return str(rule)

    # Sending

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        place = self._places.get(entry.name)
        if place is None or not place.pending:
            super().apply_entry(entry, producer=producer)  # type: ignore[misc]  # somebody else's call: not a slot
            return
        slot = Slot(entry.name, place.pending[0])
        try:
            self._fresh = not self.connection.connected
            self.connection.connect()
        except Exception as exc:  # a transport's own errors  # noqa: BLE001
            self._broker_failed(entry, exc)
            return
        with undisturbed():
            self._apply_slot(entry, place, slot)
        self.moved_at = clock.now()

    def _apply_slot(self, entry: Any, place: _Place, slot: Slot) -> None:
        rest, asked_at = place.pending[1:], clock.now()
        claimed = self._slots.claim(
            self._lease, slot, schedule=place.text, next_due_at=rest[0] if rest else place.next_due
        )
        self._heard(claimed.now, asked_at)
        if claimed.outcome == "lost":
            raise self._gone()
        if claimed.outcome == "taken":
            logger.info("the slot of %r at %s was sent before", entry.name, slot.due_at.isoformat())
            place.pending = rest
            return
        place.unsent.add(slot.due_at)
        options, entry.options = entry.options, self._options(entry, slot)
        self._in_slot, self._problem, self._at_broker = True, None, False
        try:
            super().apply_entry(entry, producer=self.producer)  # type: ignore[misc]
        finally:
            self._in_slot = False
            entry.options = options
        problem = self._take_problem()
        if problem is not None and not self._bearable(entry, slot, problem):
            return
        place.pending = rest
        place.unsent.discard(slot.due_at)
        place.runs += 1
        place.claimed = max(place.claimed, slot.due_at)
        place.refusals = 0
        if problem is not None:
            return
        if self._broker_failures:
            logger.info("sending again")
        self._broker_failures, self.failure, self._sent_something = 0, None, True
        self._slots.sent(slot, term=int(self._lease.fence))
        if getattr(getattr(entry, "model", None), "one_off", False):
            self.sync()  # its row says that it is done; the next leader must not do it again

    def _take_problem(self) -> BaseException | None:
        problem, self._problem = self._problem, None
        return problem

    def should_sync(self) -> bool:
        # Celery asks right after publishing. Nothing that takes time, or fails, may come between that and the mark.
        return not self._in_slot and bool(super().should_sync())  # type: ignore[misc]

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:  # noqa: FBT002
        if not self._in_slot:
            return super().apply_async(entry, producer=producer, advance=advance, **kwargs)  # type: ignore[misc]
        try:
            result = super().apply_async(entry, producer=producer, advance=advance, **kwargs)  # type: ignore[misc]
        except Exception as exc:  # Celery would log it with its stack and forget it  # noqa: BLE001
            self._problem = exc
            return None
        if getattr(result, "duplicate", False):
            logger.info("%r is a duplicate: task %s is queued or running", entry.name, result.id)
        return result

    def _options(self, entry: Any, slot: Slot) -> dict[str, Any]:
        options = dict(entry.options or {})
        options.pop(_OPTION, None)
        headers = dict(options.get("headers") or {})
        headers.pop(_OPTION, None)
        headers["syncguard_term"] = int(self._lease.fence)
        headers["syncguard_due_at"] = slot.due_at.isoformat()
        options["headers"] = headers
        options["task_id"] = slot.task_id(self._leader_key)
        # A retry inside would go on after the last look at the deadline. What fails is tried again as a whole.
        options.setdefault("retry", False)
        return options

    def _bearable(self, entry: Any, slot: Slot, problem: BaseException) -> bool:
        """Whether the slot is done with although its message was not published."""
        causes, place = list(_causes(problem)), self._places[entry.name]
        for cause in causes:
            if isinstance(cause, (LeaseLost, NoLease, StoreUnavailable, SchemaBehind)):
                raise cause
            if isinstance(cause, DuplicateTask):
                logger.info("%r is a duplicate: %s", entry.name, cause)
                self._slots.sent(slot, term=int(self._lease.fence))
                return True
        # A channel error comes wrapped like a connection error, so it is looked for first.
        if any(isinstance(cause, self.connection.channel_errors) for cause in causes):
            # The broker answers, and does not want this message: no such queue, no permission. The others may go on.
            pause = place.refused()
            logger.error("the broker refuses %r, trying again in %.0f s: %s", entry.name, pause, causes[-1])
            self._drop_connection()
            self._heap = None
            return False
        # Redis's transport counts a KeyError, which can as well come from the task's own code.
        gone = [kind for kind in self.connection.connection_errors if kind is not KeyError]
        found = [cause for cause in causes if isinstance(cause, (OperationalError, OSError, *gone))]
        if found and (self._at_broker or not (self._fresh or place.refusals)):
            self._broker_failed(entry, causes[-1])
            return False
        if found:
            # The broker was there a moment ago, and nothing was being published: it was a file or a server that arguments, a
            # router or the task's own `apply_async` asked for. The others may go on.
            pause = place.refused()
            logger.error("%r fails before it is published, trying again in %.0f s: %r", entry.name, pause, found[0])
            if self.failure is None:
                self._broker_failures = 0  # the attempt before, over an older connection, was no outage either
            self._heap = None
            return False
        logger.error("%r cannot be sent, its slot at %s is given up", entry.name, slot.due_at, exc_info=problem)
        self._slots.drop(slot, term=int(self._lease.fence))
        return True

    def _broker_failed(self, entry: Any, exc: BaseException) -> None:
        first = self._broker_failures == 0
        # A connection that the broker has closed meanwhile is no outage: the second attempt comes at once.
        pause = (
            0.0 if first else random.uniform(0.5, 1.0) * min(AGAIN[1], AGAIN[0] * 2 ** min(self._broker_failures, 8))
        )
        self._broker_failures += 1
        self._quiet_until = clock.now() + pause
        self._heap = None  # the entry was put back for its next slot
        if self._broker_failures == 2:
            self.failure = f"{type(exc).__name__}: {exc}"[:500]
            logger.warning("cannot send %r, the broker does not answer; trying again: %s", entry.name, self.failure)
        self._drop_connection()

    def _drop_connection(self) -> None:
        connection = self.__dict__.pop("connection", None)
        self.__dict__.pop("producer", None)
        if connection is not None:
            try:
                connection.collect()
            except Exception as problem:  # it is thrown away in any case  # noqa: BLE001
                logger.debug("a broken connection did not close: %s", problem)

    @cached_property
    def connection(self) -> Any:
        """To the broker: one that answers, or fails, in bounded time, and that says whether it has a message."""
        options = dict(self.app.conf.broker_transport_options or {})
        connection = self.app.connection_for_write()
        kind = connection.transport.driver_type
        if kind == "amqp":
            # Without confirms a message written to a dying connection is gone without an error.
            bounds = {"confirm_publish": True, "read_timeout": _BROKER_PATIENCE, "write_timeout": _BROKER_PATIENCE}
        elif kind == "redis":
            bounds = {"socket_timeout": _BROKER_PATIENCE, "socket_connect_timeout": _BROKER_PATIENCE}
        else:
            return connection
        return self.app.connection_for_write(transport_options={**bounds, **options})

    @cached_property
    def producer(self) -> Any:
        # Celery takes it for each entry, due or not: it connects only when something is sent.
        producer = self.Producer(self.connection, auto_declare=False)
        publish, lease = producer.publish, self._lease

        def publish_as_leader(*args: Any, **kwargs: Any) -> Any:
            # The last look before the message leaves: whoever was frozen since the claim is not the leader any more.
            lease.check()
            self._at_broker = True
            answer = publish(*args, **kwargs)
            self._at_broker = False
            return answer

        producer.publish = publish_as_leader
        return producer


def of_the_database(exc: BaseException) -> bool:
    """Whether a schedule in Django's database cannot be asked now, which is no fault of its code."""
    return type(exc).__module__.startswith("django.db")


def _due_now(plan: Any) -> Any:
    """The same schedule, saying that it is due; one whose class has an `is_due` of its own keeps that.

    That a slot is due is decided already. Celery's own and django-celery-beat's would judge again, by the host's clock and
    by the wall: in spring they see no 02:30 at the slot that takes its place, and call it due the next day.
    """
    if not type(plan).is_due.__module__.startswith(("celery.", "django_celery_beat.")):
        return plan
    twin = object.__new__(type(plan))
    twin.__dict__.update(plan.__dict__)
    twin.is_due = lambda _last_run_at: schedstate(is_due=True, next=0.0)
    return twin


def _storable(name: str) -> bool:
    try:
        normalize_key(name, what="name of a beat entry")
    except InvalidKey as exc:
        logger.error("an entry is left out: %s", exc)
        return False
    return True


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let SIGTERM and SIGINT wait until the block is done; a second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    handlers = {signum: handler for signum, handler in handlers.items() if handler is not None}
    waiting: list[int] = []

    def later(signum: int, frame: Any) -> None:
        waiting.append(signum)
        handler = handlers[signal.Signals(signum)]
        if len(waiting) > 1 and callable(handler):
            handler(signum, frame)

    for signum in handlers:
        signal.signal(signum, later)
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if waiting:
            os.kill(os.getpid(), waiting[0])
