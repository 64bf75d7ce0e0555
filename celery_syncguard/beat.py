"""A beat of which there may be many: `celery -A proj beat -S syncguard`.

Each runs a `LeaderScheduler`. One of them leads (`leadership`) and has a schedule; the others have none and send nothing.
Any class of scheduler can be the schedule inside: Celery's plain one with our state is the default, its persistent one,
django-celery-beat's, or a class of yours (`syncguard_beat_scheduler`). Which slots there are is ours to say in all of
them (`timetable`), so that every leader means the same slot by the same instant.

A slot is sent like this:

    connect to the broker   before anything is claimed: what a claim is followed by must be quick
    claim                   one statement, which proves the lease in the database
    look at the deadline    by the local clock, which counts the time that this process was frozen
    publish                 at once, with the slot's own task id; once, without retries inside
    mark as sent

Whoever dies in between leaves a slot that is claimed and not marked; the next leader sends it, under the same id. SIGTERM
and SIGINT wait for the end of these few milliseconds, so a clean stop leaves no such slot.

Invariants: a process that does not lead reads no schedule and sends nothing; not leading any more is no error and never
ends the process; constructing connects to nothing (Celery does it twice); `close` may be called at any time, also from a
signal handler, and again.

Not here: the state (`slots`), when something is due (`timetable`), election (`leadership`).
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from celery import beat
from celery.schedules import crontab
from celery.signals import beat_embedded_init
from celery.utils.imports import load_extension_class_names, qualname, symbol_by_name
from kombu.exceptions import OperationalError
from kombu.utils.objects import cached_property

from celery_syncguard import binding, clock, signals
from celery_syncguard.config import CATCH_UP
from celery_syncguard.errors import (
    DuplicateTask,
    ImproperlyConfigured,
    InvalidKey,
    LeaseLost,
    NoLease,
    SchemaBehind,
    StoreUnavailable,
    SyncGuardError,
)
from celery_syncguard.events import logger
from celery_syncguard.key import normalize_key
from celery_syncguard.leadership import Leadership
from celery_syncguard.lease import Lease
from celery_syncguard.pool import describe_dsn
from celery_syncguard.slots import Slot, Slots, open_slots
from celery_syncguard.timetable import choose, describe, due_between, grid_start, next_due, once_only

__all__ = ["LeaderScheduler"]

#: Seconds between two looks at the leadership. A look costs no I/O.
_TURN = 0.2
#: Seconds after which the leader tries again what the database or the broker refused, at first and at most.
_AGAIN = (0.2, 5.0)
#: Seconds without an answer after which a broker counts as down.
_BROKER_PATIENCE = 10.0
#: Seconds without a tick after which a leader counts as hanging, and another beat may lead.
_PATIENCE = 60.0
#: How long slots and terms are kept, and how often the old ones are deleted, in seconds.
_KEPT, _PRUNE_EVERY = 7 * 86_400.0, 3600.0
#: A schedule that fails so often in a row is left to another beat.
_TOO_MANY_FAILURES = 3

_OPTION = "syncguard_catch_up"


class LeaderScheduler(beat.Scheduler):  # type: ignore[misc]
    """The scheduler of one beat among many. Settings: `syncguard_leader_key`, `syncguard_leader_ttl`,
    `syncguard_beat_scheduler`, `syncguard_catch_up`; per entry `options={"syncguard_catch_up": "all"}`.

    Raises:
        ImproperlyConfigured: a `syncguard_*` setting that cannot be meant, or no database.
    """

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._arguments = (args, {**kwargs, "lazy": False})
        super().__init__(app, *args, **{**kwargs, "lazy": True})
        binding.attach(app)
        self._settings = binding.settings_for(app)
        self._guard = binding.guard_for(app)
        self._class = scheduler_class(self._settings.beat_scheduler)
        self._leadership: Leadership | None = None
        self._slots: Slots | None = None
        self._inner: Any = None
        self._term: Lease | None = None
        self._next_tick = self._next_report = self._next_prune = 0.0
        self._failures = 0
        self._complained = False
        self._ticking = False
        self._ticked_at = 0.0
        self._closed = False

    @property
    def info(self) -> str:
        """For Celery's banner."""
        where = "memory" if self._settings.in_memory else describe_dsn(self._settings.dsn)
        return (
            f"    . leader key -> {self._settings.leader_key} (ttl {self._settings.leader_ttl:g} s)\n"
            f"    . state -> {where}\n"
            f"    . schedule of the leader -> {qualname(self._class)}"
        )

    @property
    def leadership(self) -> Leadership | None:
        """This beat's part in the leadership, once it ticks."""
        return self._leadership

    def get_schedule(self) -> Any:
        return {} if self._inner is None else self._inner.schedule

    def set_schedule(self, schedule: Any) -> None:
        if self._inner is not None:
            self._inner.schedule = schedule

    schedule = property(get_schedule, set_schedule)

    # What Celery's service calls

    def tick(self, *_: Any, **__: Any) -> float:
        """One look; the seconds to sleep before the next one."""
        if self._closed:
            return _TURN
        self._ticking, self._ticked_at = True, clock.now()
        try:
            return self._tick()
        finally:
            self._ticking = False

    def should_sync(self) -> bool:
        return self._leads() and bool(self._inner.should_sync())

    def sync(self) -> None:
        if self._leads():
            self._attempt(self._inner.sync, "could not write back its schedule")

    def close(self) -> None:
        """Hand the leadership over. At once and within a second, when called by a signal handler in mid tick; then the
        schedule is closed by the second call, which Celery makes once the tick is unwound.
        """
        self._closed = True
        if not self._ticking:
            self._write_last()
        if self._leadership is not None:
            self._leadership.stop(timeout=1.0 if self._ticking else 5.0)
        if not self._ticking:
            # Last, since a broker that hangs may take its time over a connection that is to be closed.
            self._retire()

    # The tick

    def _tick(self) -> float:
        lease = self._begin().lease
        if self._term is not None and self._term is not lease:
            self._retire()
        if lease is None:
            return _TURN
        try:
            if self._term is None:
                self._take_over(lease)
            self._report()
            left = self._next_tick - clock.now()
            if left <= 0:
                left = self._inner.tick()
                self._failures, self._complained = 0, False
        except LeaseLost as exc:
            # The database knows better than our clock: the row is gone, or somebody else's.
            lease.lose(exc.reason)
            return 0.0
        except NoLease:
            return 0.0  # it was released while the tick was under way
        except SyncGuardError as exc:
            left = self._hold_back(exc)
        except Exception as exc:  # the schedule inside is anybody's code  # noqa: BLE001
            left = self._trouble(exc)
        self._next_tick = clock.now() + left
        return max(0.0, min(left, _TURN))

    def _begin(self) -> Leadership:
        if self._leadership is None:
            self._slots = open_slots(self._guard.store, self._settings.leader_key)
            key = self._settings.leader_key
            self._leadership = Leadership(
                self._guard,
                key,
                ttl=self._settings.leader_ttl,
                alive=lambda: clock.now() - self._ticked_at < max(_PATIENCE, 4 * self._settings.leader_ttl),
                holder=f"celery beat on {socket.gethostname()} pid {os.getpid()}",
                on_elected=lambda lease: signals.leader_elected.send(sender=key, term=lease.fence),
                on_lost=lambda lease: signals.leader_lost.send(sender=key, term=lease.fence),
            )
            self._leadership.start()
        return self._leadership

    def _leads(self) -> bool:
        return self._inner is not None and self._term is not None and self._term.remaining > 0

    def _take_over(self, lease: Lease) -> None:
        assert self._slots is not None
        self._inner = self._build(lease, self._slots)
        self._term = lease
        self._next_tick = self._next_report = 0.0

    def _build(self, lease: Lease, slots: Slots) -> Any:
        args, kwargs = self._arguments
        try:
            inner = _sending(self._class)(self.app, *args, **kwargs)
        except Exception as exc:
            if not issubclass(self._class, beat.PersistentScheduler):
                raise
            logger.warning("the schedule file cannot be used, going on without (its state is in the database): %s", exc)
            inner = _sending(beat.Scheduler)(self.app, *args, **kwargs)
        inner.lead(lease, slots, rule=self._settings.catch_up, leader_key=self._settings.leader_key)
        return inner

    def _write_last(self) -> None:
        """What only a leader may write, at the end of its term."""
        slots, lease, inner = self._slots, self._term, self._inner
        if slots is None or lease is None or inner is None or lease.remaining <= 0:
            return
        self._attempt(inner.sync, "could not write back its schedule")
        self._attempt(
            lambda: slots.seen(int(lease.fence), failure=inner.failure, sent=inner.news(), ended=True),
            "could not record the end of its term",
        )

    def _retire(self) -> None:
        """Drop the schedule of a term that is over."""
        inner, self._inner = self._inner, None
        lease, self._term = self._term, None
        if inner is None or lease is None:
            return
        if hasattr(inner, "_dirty"):
            inner._dirty = set()  # noqa: SLF001 - django-celery-beat would write what the next leader has written since
        self._attempt(inner.close, "could not close its schedule")
        connection = inner.__dict__.pop("connection", None)  # Celery before 5.7 keeps it open
        if connection is not None:
            self._attempt(connection.release, "could not close its connection to the broker")
        finalizer = getattr(inner, "_finalize", None)
        if finalizer is not None:
            finalizer.cancel()  # or every term would stay in memory until the process ends

    def _report(self) -> None:
        """Tell the database now and then that this leader lives and how it does; delete what is old."""
        now = clock.now()
        if now < self._next_report or self._term is None or self._slots is None:
            return
        self._next_report = now + self._term.ttl / 3
        self._inner.set_clock(
            self._slots.seen(int(self._term.fence), failure=self._inner.failure, sent=self._inner.news())
        )
        if now >= self._next_prune:
            self._next_prune = now + _PRUNE_EVERY
            self._slots.prune(older=_KEPT)

    def _hold_back(self, exc: SyncGuardError) -> float:
        level = logger.debug if self._complained else logger.warning
        level("leading, but cannot ask the database, so nothing is sent now: %s", exc)
        self._complained = True
        self._forget_heap()
        return _AGAIN[0]

    def _trouble(self, exc: Exception) -> float:
        self._failures += 1
        expected = isinstance(exc, (OSError, OperationalError)) or type(exc).__module__.startswith("django.db")
        logger.error(
            "the schedule failed and will be tried again: %s: %s",
            type(exc).__name__,
            exc,
            exc_info=None if expected else exc,
        )
        self._forget_heap()
        if self._failures >= _TOO_MANY_FAILURES and self._leadership is not None:
            self._failures = 0
            logger.error("the schedule keeps failing, leaving it to another beat")
            self._leadership.step_down()
        return 1.0

    def _forget_heap(self) -> None:
        # An entry may have been taken out of it when the exception came.
        if self._inner is not None:
            self._inner._heap = None  # noqa: SLF001 - a class of ours

    def _attempt(self, action: Callable[[], object], failure: str) -> None:
        try:
            action()
        except Exception as exc:  # whatever a schedule does at its end, the process goes on  # noqa: BLE001
            logger.warning("this beat %s: %s: %s", failure, type(exc).__name__, exc)


def scheduler_class(wanted: str | type | None) -> type:
    """The class of the schedule inside. `wanted`: the setting.

    Raises:
        ImproperlyConfigured: no scheduler, or ours inside itself.
    """
    if wanted is None:
        return beat.Scheduler  # type: ignore[no-any-return]
    try:
        found = symbol_by_name(wanted, aliases=dict(load_extension_class_names("celery.beat_schedulers")))
    except Exception as exc:
        raise ImproperlyConfigured(f"syncguard_beat_scheduler: cannot load {wanted!r}: {exc}") from exc
    if not isinstance(found, type) or not issubclass(found, beat.Scheduler):
        raise ImproperlyConfigured(f"syncguard_beat_scheduler is a subclass of celery.beat.Scheduler, got {found!r}")
    if issubclass(found, LeaderScheduler):
        raise ImproperlyConfigured(
            "syncguard_beat_scheduler is the schedule inside the leader, it cannot be the leader"
        )
    return found


# The schedule inside


@dataclasses.dataclass(slots=True)
class _Place:
    """Where one entry stands in this term."""

    text: str
    runs: int
    counted: datetime  # slots up to here have been looked at
    since: datetime  # slots up to here are nobody's to send
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


def _sending(inner: type) -> type:
    """The class `inner`, sending slots."""
    found = _classes.get(inner)
    if found is None:
        bases = [_SlotSending, inner]
        if hasattr(inner, "all_as_schedule"):
            from celery_syncguard.django_schedule import SeesEdits

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
    _lease: Lease
    _slots: Slots
    _rule: str
    _leader_key: str
    _heap: Any = None
    old_schedulers: Any
    schedules_equal: Any
    reserve: Any
    sync: Any

    def lead(self, lease: Lease, slots: Slots, *, rule: str, leader_key: str) -> None:
        """Begin a term. Called once, before the first tick."""
        self._lease, self._slots, self._rule, self._leader_key = lease, slots, rule, leader_key
        self._places: dict[str, _Place] = {}
        self._clock: tuple[datetime, float] | None = None
        self._in_slot = False
        self._problem: BaseException | None = None
        self._quiet_until = 0.0
        self._broker_failures = 0
        self._sent_something = False
        self._unsent: dict[str, set[datetime]] | None = None

    def news(self) -> bool:
        """Whether something was sent since the last call."""
        news, self._sent_something = self._sent_something, False
        return news

    # Time is the database's, carried on by the local clock that nobody sets.

    def set_clock(self, now: datetime) -> None:
        self._clock = (now, clock.now())

    def _now(self) -> datetime:
        assert self._clock is not None
        there, here = self._clock
        return there + timedelta(seconds=clock.now() - here)

    def _when(self, _entry: Any, next_time_to_run: float | None, **_: Any) -> float:
        # The keys of Celery's heap. Wall clocks are set, and would leave entries waiting.
        delay = self.max_interval if next_time_to_run is None else next_time_to_run
        return clock.now() + max(0.0, min(delay, self.max_interval))

    # Which entries are due

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send one slot that is due. The seconds until the next one may be."""
        if super().tick.__func__ is not beat.Scheduler.tick:  # type: ignore[misc]  # a class of its own making
            return float(super().tick(*args, **kwargs))  # type: ignore[misc]
        # Celery's own, up to 5.6, lets an entry that is not due after all keep the others waiting.
        schedule = self.schedule
        if self._heap is None or not self.schedules_equal(self.old_schedulers, schedule):
            self.old_schedulers = copy.copy(schedule)
            self.populate_heap()
        heap = self._heap
        while heap and heap[0].time <= clock.now():
            event = heapq.heappop(heap)
            entry, (due, delay) = event.entry, self._due(event.entry)
            if due:
                following = self.reserve(entry)
                self.apply_entry(entry, producer=self.producer)
                heapq.heappush(heap, beat.event_t(self._when(following, delay), event.priority, following))
                return 0.0
            heapq.heappush(heap, beat.event_t(self._when(entry, max(delay, 0.001)), event.priority, entry))
        return min(self.max_interval, max(0.0, heap[0].time - clock.now())) if heap else self.max_interval

    def populate_heap(self, *_: Any, **__: Any) -> None:
        schedule = dict(self.schedule)
        self._enter(schedule)
        heap = []
        for entry in schedule.values():
            due, delay = self._due(entry)
            heap.append(beat.event_t(self._when(entry, 0.0 if due else delay), 5, entry))
        heapq.heapify(heap)
        self._heap = heap

    def _due(self, entry: Any) -> tuple[bool, float]:
        try:
            return self.is_due(entry)
        except SyncGuardError:
            raise
        except Exception:  # one entry that cannot be understood must not stop the others  # noqa: BLE001
            logger.exception("cannot tell when %r is due, trying again later", entry.name)
            return False, self.max_interval

    def _enter(self, schedule: Mapping[str, Any]) -> None:
        texts = {name: describe(entry.schedule) for name, entry in schedule.items() if _storable(name)}
        entered = self._slots.enter(self._lease, texts)
        if entered is None:
            raise self._lease.loss("the database says that it is gone")
        self.set_clock(entered.now)
        first = self._unsent is None
        if self._unsent is None:
            self._unsent = {}
            for slot in self._slots.unsent():
                self._unsent.setdefault(slot.entry, set()).add(slot.due_at)
        for name in [name for name in self._places if self._places[name].text != texts.get(name)]:
            self._unsent.setdefault(name, set()).update(self._places.pop(name).unsent)
        for name, row in entered.entries.items():
            if name not in self._places:
                unsent = self._unsent.pop(name, set())
                self._places[name] = _Place(
                    text=row.schedule,
                    runs=row.runs,
                    counted=row.last_due_at,
                    since=row.since_at,
                    pending=sorted(unsent),
                    unsent=unsent,
                )
        for name, instants in list(self._unsent.items()) if first else ():
            # Claimed by an earlier leader for an entry that this one does not have.
            for due_at in instants:
                logger.warning("the slot of %r at %s was not sent, and the schedule lacks that entry now", name, due_at)
                self._slots.drop(Slot(name, due_at), term=int(self._lease.fence))
            del self._unsent[name]

    def _plan(self, plan: Any, place: _Place) -> None:
        """Find the next slot. Asks the schedule, which may be anybody's code."""
        place.counted = grid_start(plan, last_due_at=place.counted, since_at=place.since)
        instant = once_only(plan)
        if instant is None:
            place.next_due = next_due(plan, place.counted)
        else:
            place.next_due = instant if place.runs == 0 else None
        place.planned = True

    def is_due(self, entry: Any) -> tuple[bool, float]:
        """As Celery's: whether to send it now, and the seconds after which to look again."""
        quiet = self._quiet_until - clock.now()
        if quiet > 0:
            return False, quiet
        place = self._places.get(entry.name)
        if place is None or place.text != describe(entry.schedule):
            self._enter(dict(self.schedule))
            place = self._places.get(entry.name)
            if place is None:
                return False, self.max_interval
        quiet = place.quiet_until - clock.now()
        if quiet > 0:
            return False, quiet
        now = self._now()
        if not place.planned:
            self._plan(entry.schedule, place)
            self._settle(entry, place, place.pending, now)
        if place.next_due is not None and place.next_due <= now:
            self._refill(entry, place, now)
        if place.pending:
            willing, delay = self._willing(entry, place)
            if not willing:
                # It says itself that it is not due: not started yet, disabled, expired. That is not missing a slot.
                place.pending = place.pending[-1:]
                return False, delay
        following = self.max_interval if place.next_due is None else (place.next_due - now).total_seconds()
        if not place.pending:
            return False, following
        return True, 0.0 if len(place.pending) > 1 else following

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
        if not hasattr(entry, "model"):
            entry.total_run_count = place.runs
        ours = type(entry).is_due is beat.ScheduleEntry.is_due
        own = not ours or super().is_due.__func__ is not beat.Scheduler.is_due  # type: ignore[misc]
        if not own:
            return True, 0.0
        due, delay = super().is_due(entry)  # type: ignore[misc]
        return bool(due), self.max_interval if delay is None else float(delay)

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
            self.connection.connect()
        except Exception as exc:  # a transport's own errors  # noqa: BLE001
            self._broker_failed(entry, exc)
            return
        with undisturbed():
            self._apply_slot(entry, place, slot)

    def _apply_slot(self, entry: Any, place: _Place, slot: Slot) -> None:
        rest = place.pending[1:]
        claimed = self._slots.claim(
            self._lease, slot, schedule=place.text, next_due_at=rest[0] if rest else place.next_due
        )
        self.set_clock(claimed.now)
        if claimed.outcome == "lost":
            raise self._lease.loss("the database says that it is gone")
        if claimed.outcome == "taken":
            logger.info("the slot of %r at %s was sent before", entry.name, slot.due_at.isoformat())
            place.pending = rest
            return
        place.unsent.add(slot.due_at)
        options, entry.options = entry.options, self._options(entry, slot)
        self._in_slot, self._problem = True, None
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
        causes = list(_causes(problem))
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
            pause = self._places[entry.name].refused()
            logger.error("the broker refuses %r, trying again in %.0f s: %s", entry.name, pause, causes[-1])
            self._drop_connection()
            self._heap = None
            return False
        # Redis's transport counts a KeyError, which can as well come from the task's own code.
        gone = [kind for kind in self.connection.connection_errors if kind is not KeyError]
        if any(isinstance(cause, (OperationalError, OSError, *gone)) for cause in causes):
            self._broker_failed(entry, causes[-1])
            return False
        logger.error("%r cannot be sent, its slot at %s is given up", entry.name, slot.due_at, exc_info=problem)
        self._slots.drop(slot, term=int(self._lease.fence))
        return True

    def _broker_failed(self, entry: Any, exc: BaseException) -> None:
        first = self._broker_failures == 0
        # A connection that the broker has closed meanwhile is no outage: the second attempt comes at once.
        pause = (
            0.0 if first else random.uniform(0.5, 1.0) * min(_AGAIN[1], _AGAIN[0] * 2 ** min(self._broker_failures, 8))
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
            return publish(*args, **kwargs)

        producer.publish = publish_as_leader
        return producer


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


@beat_embedded_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _stop_embedded(sender: Any = None, **_: Any) -> None:
    # `worker -B` ends its beat by SIGTERM, which Celery leaves at its default there: the end without a hand-over.
    if isinstance(sender.scheduler, LeaderScheduler):

        def stop(_signum: int, _frame: Any) -> None:
            sender.scheduler.close()
            raise SystemExit

        signal.signal(signal.SIGTERM, stop)
