"""Sends the due slots of a leading beat: what any scheduler class gets so that its entries are due and sent as slots.

`sends_slots(cls)` is `cls` with `SendsSlots` put before it; one object of it lives for one term. Not here: which slots are due
(`agenda`), whether the broker works (`broker`), when a term begins and ends (`scheduler`).

A slot is sent like this:

    connect to the broker   before anything is claimed: what a claim is followed by must be quick
    claim                   one statement, which proves the lease in the database
    look at the deadline    by the local clock, which counts the time that this process was frozen
    publish                 at once, with the slot's own task id; once, without retries inside
    mark as sent

A leader that dies in between leaves a slot that is claimed and not marked; the next one sends it, under the same id. SIGTERM
and SIGINT wait for the end of these few milliseconds (`undisturbed`), so a clean stop leaves no such slot.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import heapq
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import beat
from kombu.exceptions import OperationalError

from celery_syncguard.beat.agenda import CATCH_UP_OPTION, Agenda, Place
from celery_syncguard.beat.broker import Broker, bounded_connection, discard
from celery_syncguard.beat.entry_rows import count_runs, end_clocked, is_one_off, of_the_database, uncounted_unless_done
from celery_syncguard.beat.slots import Slot
from celery_syncguard.beat.timetable import describe
from celery_syncguard.beat.undisturbed import undisturbed
from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.errors import DuplicateTask, LeaseLost, NoLease, SchemaBehind, StoreUnavailable, SyncGuardError
from celery_syncguard.tasks.celery_internals import due_now, heap_event

__all__ = ["SendsSlots", "sends_slots"]

#: Seconds after which a tick stops looking at entries; and between two comparisons of the whole schedule with what it was.
_LOOKING = 1.0

#: More than there is between two slots of any schedule: the longest are the years between two 29ths of February.
_LONG_AGO = timedelta(days=3000)

HeapEvent = heap_event()


@functools.cache
def sends_slots(inner: type) -> type:
    """The class `inner`, sending slots.

    Raises:
        ImproperlyConfigured: it is django-celery-beat's, of a version that does not fit.
    """
    bases: list[type] = [SendsSlots, inner]
    if any(base.__module__.startswith("django_celery_beat.") for base in inner.__mro__):
        from celery_syncguard.beat.django_schedule import SeesEdits, refuse_unfit

        refuse_unfit()
        bases.insert(1, SeesEdits)
    return type(f"Leading{inner.__name__}", tuple(bases), {})


@dataclasses.dataclass(slots=True)
class _Attempt:
    """To send one slot."""

    fresh: bool  # the connection was made for it
    at_broker: bool = False  # the message is being published, or that failed
    problem: BaseException | None = None  # why it was not published


class SendsSlots:
    """Put before a scheduler class: its entries are due by slots, and are sent as slots. One object per term."""

    # Of the scheduler class.
    app: Any
    schedule: Any
    max_interval: float
    Producer: Any
    old_schedulers: Any
    schedules_equal: Any
    reserve: Any
    sync: Any

    _agenda: Agenda
    _broker: Broker
    _leader_key: str
    _attempt: _Attempt | None = None  # while a slot is being sent
    _heap: Any = None
    _compared: Any = None
    _compare_at = 0.0

    def lead(self, agenda: Agenda, broker: Broker, *, leader_key: str) -> None:
        """Begin a term. Called once, before the first tick."""
        self._agenda, self._broker, self._leader_key = agenda, broker, leader_key

    # Which entries are due

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send one slot that is due. The seconds until the next one may be."""
        if super().tick.__func__ is not beat.Scheduler.tick:  # type: ignore[misc]  # overridden by a user's class
            return float(super().tick(*args, **kwargs))  # type: ignore[misc]
        self._follow_jump()
        # In Celery's own, up to 5.6, an entry that is not due after all keeps the others waiting.
        schedule = self.schedule
        if self._heap is None or self._is_another(schedule):
            self.old_schedulers = copy.copy(schedule)
            self.populate_heap()
        heap, until = self._heap, clock.now() + _LOOKING
        while heap and heap[0].time <= clock.now() < until:
            event = heapq.heappop(heap)
            entry, (due, delay) = event.entry, self._due(event.entry)
            if due:
                with uncounted_unless_done(entry, self._agenda.places[entry.name], getattr(self, "_dirty", set())):
                    following = self.reserve(entry)
                    self.apply_entry(entry, producer=self.producer)
                heapq.heappush(heap, HeapEvent(self._when(following, delay), event.priority, following))
                return 0.0
            heapq.heappush(heap, HeapEvent(self._when(entry, max(delay, 0.001)), event.priority, entry))
        if self._heap is None:
            return 0.0  # time has jumped meanwhile: this heap's is over
        return min(self.max_interval, max(0.0, heap[0].time - clock.now())) if heap else self.max_interval

    def populate_heap(self, *_: Any, **__: Any) -> None:
        schedule = dict(self.schedule)
        self._agenda.enter(schedule)
        heap, until = [], clock.now() + _LOOKING
        for entry in schedule.values():
            # What is not looked at now is the first that the next ticks look at.
            due, delay = self._due(entry) if clock.now() < until else (True, 0.0)
            heap.append(HeapEvent(self._when(entry, 0.0 if due else delay), 5, entry))
        heapq.heapify(heap)
        self._heap = heap

    def _is_another(self, schedule: Any) -> bool:
        # Celery compares all entries in every tick, so for every slot that is sent: 40 ms for 5,000 entries. A class with
        # `look_in` has its own bound.
        if schedule is self._compared and clock.now() < self._compare_at and not hasattr(self, "look_in"):
            return False
        self._compared, self._compare_at = schedule, clock.now() + _LOOKING
        return not self.schedules_equal(self.old_schedulers, schedule)

    def _when(self, _entry: Any, next_time_to_run: float | None, **_: Any) -> float:
        # The keys of Celery's heap, by the monotonic clock: a wall clock that is set would leave entries waiting.
        delay = self.max_interval if next_time_to_run is None else next_time_to_run
        return clock.now() + max(0.0, min(delay, self.max_interval))

    def _follow_jump(self) -> None:
        if self._agenda.jumped:
            self._agenda.count_anew()
            self._heap = None

    def _due(self, entry: Any) -> tuple[bool, float]:
        try:
            return self.is_due(entry)
        except SyncGuardError:
            raise
        except Exception as exc:  # one invalid entry must not stop the others
            if of_the_database(exc):
                raise
            logger.exception("cannot tell when %r is due, trying again later", entry.name)
            return False, self.max_interval

    def is_due(self, entry: Any) -> tuple[bool, float]:
        """As Celery's: whether to send it now, and the seconds after which to look again."""
        self._agenda.moved_at = clock.now()
        if self._broker.quiet_until > clock.now():
            return False, self._broker.quiet_until - clock.now()
        self._follow_jump()
        place = self._agenda.places.get(entry.name)
        if place is None or place.text != describe(entry.schedule):
            self._agenda.enter(dict(self.schedule))
            place = self._agenda.places.get(entry.name)
        if place is None:
            return False, self.max_interval
        if place.quiet_until > clock.now():
            return False, place.quiet_until - clock.now()
        now = self._agenda.now()
        self._agenda.look(entry, place, now)
        if place.pending:
            willing, delay = self._willing(entry, place)
            if not willing:
                # It says itself that it is not due: not started yet, disabled, expired. That is not missing a slot.
                place.pending = place.pending[-1:]
                return False, delay
        elif place.next_due is None:
            end_clocked(entry, place, super().is_due)  # type: ignore[misc]
        following = self.max_interval if place.next_due is None else (place.next_due - now).total_seconds()
        return bool(place.pending), 0.0 if len(place.pending) > 1 else following

    def _willing(self, entry: Any, place: Place) -> tuple[bool, float]:
        """Whether the entry's own class agrees, if it overrides `is_due`; and when to ask again."""
        every = getattr(entry.schedule, "run_every", None)
        # Seen from here, its schedule is due at the pending slot.
        entry.last_run_at = place.pending[0] - (every if isinstance(every, timedelta) else timedelta(seconds=1))
        if place.pending[0] > datetime.now(timezone.utc):
            # This machine's clock, by which a user's class decides, is behind the database's.
            entry.last_run_at -= _LONG_AGO
        count_runs(entry, place)
        ours = type(entry).is_due is beat.ScheduleEntry.is_due
        if ours and super().is_due.__func__ is beat.Scheduler.is_due:  # type: ignore[misc]
            return True, 0.0
        schedule, entry.schedule = entry.schedule, _due_now(entry.schedule)
        try:
            due, delay = super().is_due(entry)  # type: ignore[misc]
        finally:
            entry.schedule = schedule
        return bool(due), self.max_interval if delay is None else float(delay)

    # Sending

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        place = self._agenda.places.get(entry.name)
        if place is None or not place.pending:
            super().apply_entry(entry, producer=producer)  # type: ignore[misc]  # a user's call: not a slot
            return
        try:
            fresh = not self.connection.connected
            self.connection.connect()
        except Exception as exc:  # a transport's own errors  # noqa: BLE001
            self._broker_failed(entry, exc)
            return
        with undisturbed():
            slot = self._agenda.claim(entry.name, place)
            if slot is not None:
                self._send(entry, place, slot, _Attempt(fresh))
        self._agenda.moved_at = clock.now()

    def _send(self, entry: Any, place: Place, slot: Slot, attempt: _Attempt) -> None:
        options, entry.options = entry.options, self._options(entry, slot)
        self._attempt = attempt
        try:
            super().apply_entry(entry, producer=self.producer)  # type: ignore[misc]
        finally:
            self._attempt = None
            entry.options = options
        if attempt.problem is None:
            self._broker.took()
            self._agenda.finish(place, slot, sent=True)
            if is_one_off(entry):
                self.sync()  # its row says that it is done; the next leader must not do it again
        else:
            self._not_published(entry, place, slot, attempt, attempt.problem)

    def should_sync(self) -> bool:
        # Celery asks right after publishing. Nothing that takes time, or fails, may come between that and the mark.
        return self._attempt is None and bool(super().should_sync())  # type: ignore[misc]

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:  # noqa: FBT002
        try:
            result = super().apply_async(entry, producer=producer, advance=advance, **kwargs)  # type: ignore[misc]
        except Exception as exc:
            if self._attempt is None:
                raise
            self._attempt.problem = exc  # Celery would log it with its stack and forget it
            return None
        if self._attempt is not None and getattr(result, "duplicate", False):
            logger.info("%r is a duplicate: task %s is queued or running", entry.name, result.id)
        return result

    def _options(self, entry: Any, slot: Slot) -> dict[str, Any]:
        options = dict(entry.options or {})
        options.pop(CATCH_UP_OPTION, None)
        headers = dict(options.get("headers") or {})
        headers.pop(CATCH_UP_OPTION, None)
        headers["syncguard_term"] = self._agenda.term
        headers["syncguard_due_at"] = slot.due_at.isoformat()
        options["headers"] = headers
        options["task_id"] = slot.task_id(self._leader_key)
        # A retry inside would go on after the last look at the deadline. What fails is tried again as a whole.
        options.setdefault("retry", False)
        return options

    def _not_published(self, entry: Any, place: Place, slot: Slot, attempt: _Attempt, problem: BaseException) -> None:
        """Leave the slot for another attempt, or finish it: as a duplicate, or given up."""
        causes = list(_causes(problem))
        for cause in causes:
            if isinstance(cause, (LeaseLost, NoLease, StoreUnavailable, SchemaBehind)):
                raise cause
            if isinstance(cause, DuplicateTask):
                logger.info("%r is a duplicate: %s", entry.name, cause)
                self._agenda.finish(place, slot, sent=True)
                return
        # A channel error comes wrapped like a connection error, so it is looked for first.
        if any(isinstance(cause, self.connection.channel_errors) for cause in causes):
            # The broker answers, and refuses this message: no such queue, no permission. The others may go on.
            pause = place.refused()
            logger.error("the broker refuses %r, trying again in %.0f s: %s", entry.name, pause, causes[-1])
            self._drop_connection()
            self._heap = None
            return
        # Redis's transport counts a KeyError among these, which may also come from the task's own code.
        gone = [kind for kind in self.connection.connection_errors if kind is not KeyError]
        found = [cause for cause in causes if isinstance(cause, (OperationalError, OSError, *gone))]
        if not found:
            logger.error("%r cannot be sent, its slot at %s is given up", entry.name, slot.due_at, exc_info=problem)
            self._agenda.finish(place, slot, sent=False)
        elif attempt.at_broker or not (attempt.fresh or place.refusals):
            self._broker_failed(entry, causes[-1])
        else:
            # The broker was there a moment ago, and nothing was being published: it was a file or a server that the arguments,
            # a router or the task's own `apply_async` needs. The others may go on.
            pause = place.refused()
            logger.error("%r fails before it is published, trying again in %.0f s: %r", entry.name, pause, found[0])
            if self._broker.failure is None:
                self._broker.works()  # the attempt before, over an older connection, was no outage either
            self._heap = None

    def _broker_failed(self, entry: Any, exc: BaseException) -> None:
        self._broker.failed(entry.name, exc)
        self._heap = None  # the entry was put back for its next slot
        self._drop_connection()

    def _drop_connection(self) -> None:
        connection = self.__dict__.pop("connection", None)
        self.__dict__.pop("producer", None)
        if connection is not None:
            discard(connection)

    @functools.cached_property
    def connection(self) -> Any:
        return bounded_connection(self.app)

    @functools.cached_property
    def producer(self) -> Any:
        # Celery takes it for each entry, due or not: it connects only when something is sent.
        producer = self.Producer(self.connection, auto_declare=False)
        publish, lease = producer.publish, self._agenda.lease

        def publish_as_leader(*args: Any, **kwargs: Any) -> Any:
            # The last look before the message leaves: a process that was frozen since the claim does not lead any more.
            lease.check()
            attempt = self._attempt or _Attempt(fresh=False)
            attempt.at_broker = True
            answer = publish(*args, **kwargs)
            attempt.at_broker = False
            return answer

        producer.publish = publish_as_leader
        return producer


def _due_now(schedule: Any) -> Any:
    """The same schedule, saying that it is due; one whose class has an `is_due` of its own keeps that.

    Celery's own and django-celery-beat's would decide once more, by the host's clock and by the wall: in spring they see no
    02:30 at the slot that takes its place, and call it due the next day.
    """
    if not type(schedule).is_due.__module__.startswith(("celery.", "django_celery_beat.")):
        return schedule
    return due_now(schedule)


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__
