"""Who leads, and when it acts: `celery -A proj beat -S syncguard`, on as many hosts as you like.

Each beat runs a `LeaderScheduler`. One of them leads (`core.leadership`) and has a schedule inside; the others have none and
send nothing. Any scheduler class can be inside: Celery's plain one is the default (`syncguard_beat_scheduler`). Which slots
there are, the timetable says for all of them, so that every leader means the same instant by the same slot.

Invariants: a process that does not lead reads no schedule and sends nothing; to lose the leadership is no error and never ends
the process; constructing connects to nothing (Celery does it twice); `close` may be called at any time, also from a signal
handler, and again; any number of signals ends the process, and a beat inside a worker ends with that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from datetime import datetime
from typing import Any

from celery import beat
from celery.signals import beat_embedded_init, beat_init
from kombu.exceptions import OperationalError

from celery_syncguard import signals
from celery_syncguard.beat.agenda import Agenda
from celery_syncguard.beat.broker import Broker
from celery_syncguard.beat.entry_rows import of_the_database
from celery_syncguard.beat.inner_schedule import (
    attempt,
    close_schedule,
    full_name,
    inner_class,
    open_schedule,
    tell_what_is_missing,
)
from celery_syncguard.beat.postgres_slots import open_slots
from celery_syncguard.beat.slot_sender import sends_slots
from celery_syncguard.beat.slots import PRUNED_AT_MOST
from celery_syncguard.beat.timekeeper import Timekeeper
from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.leadership import Leadership
from celery_syncguard.core.lease import Lease
from celery_syncguard.errors import LeaseLost, NoLease, SyncGuardError
from celery_syncguard.postgres.connection import describe_dsn
from celery_syncguard.tasks import app_state
from celery_syncguard.tasks.billiard_internals import parent_pid, term_signal
from celery_syncguard.tasks.celery_internals import is_of_beat, refuse_unfit_beat, sync_noting

__all__ = ["LeaderScheduler"]

#: Seconds between two looks at the leadership. A look costs no I/O.
_TURN = 0.2
#: Seconds without a tick, a look at an entry or a send after which a leader counts as hanging, and another beat may lead.
_PATIENCE = 60.0
#: How long slots and terms are kept, and how often the old ones are deleted, in seconds.
_KEPT, _PRUNE_EVERY = 7 * 86_400.0, 3600.0
#: Seconds after which a leader tries again that could not ask the database.
_AGAIN = 0.2
#: A schedule that fails so often in a row is left to another beat.
_TOO_MANY_FAILURES = 3


class LeaderScheduler(beat.Scheduler):  # type: ignore[misc]
    """The scheduler of one beat among many. Settings: `syncguard_leader_key`, `syncguard_leader_ttl`,
    `syncguard_beat_scheduler`, `syncguard_catch_up`; per entry `options={"syncguard_catch_up": "all"}`.

    Raises:
        ImproperlyConfigured: an invalid `syncguard_*` setting, or no database.
    """

    #: This beat's part in the leadership, once it ticks.
    leadership: Leadership | None = None
    #: The pid of the worker that this beat ends with, however that ended.
    worker: int | None = None
    _busy = False  # a signal handler that runs now interrupts the schedule
    _ending = False  # a signal said so
    _closed = False
    _done = False  # closed, and nothing is left to be done
    _told_late = False

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self.take_signals()  # first: Celery's handler would make another scheduler, in the middle of this
        refuse_unfit_beat()
        self._arguments = (args, {**kwargs, "lazy": False})
        super().__init__(app, *args, **{**kwargs, "lazy": True})
        app_state.attach(app)
        self._settings = app_state.settings_for(app)
        self._guard = app_state.guard_for(app)
        self._class = inner_class(self._settings.beat_scheduler, app.conf.beat_scheduler, LeaderScheduler)
        sends_slots(self._class)  # refuses a class that it does not fit
        self._slots = open_slots(self._guard.store, self._settings.leader_key)
        self._inner: Any = None
        self._agenda: Agenda | None = None
        self._broker = Broker()
        self._term: Lease | None = None
        self._next_tick = self._next_report = self._next_prune = self._next_flush = 0.0
        self._failures = 0
        self._complained = False
        self._ticked_at = 0.0
        self._time = Timekeeper()

    @property
    def info(self) -> str:
        """For Celery's banner."""
        where = "memory" if self._settings.in_memory else describe_dsn(self._settings.dsn)
        return (
            f"    . leader key -> {self._settings.leader_key} (ttl {self._settings.leader_ttl:g} s)\n"
            f"    . state -> {where}\n"
            f"    . schedule of the leader -> {full_name(self._class)}"
        )

    def get_schedule(self) -> Any:
        return {} if self._inner is None else self._inner.schedule

    def set_schedule(self, schedule: Any) -> None:
        if self._inner is not None:
            self._inner.schedule = schedule

    schedule = property(get_schedule, set_schedule)

    # What Celery's service calls

    def tick(self, *_: Any, **__: Any) -> float:
        """One look; the seconds to sleep before the next one.

        Raises:
            SystemExit: this process was told to end, or the worker that it belongs to is gone.
        """
        if self._ending:
            raise SystemExit  # once more: a schedule, or a destructor, may have swallowed the first one
        if self._orphaned():
            logger.warning("the worker that this beat belongs to (pid %s) is gone, so it ends", self.worker)
            self._ending = True
            raise SystemExit
        if self._closed:
            return _TURN
        self._ticked_at = clock.now()
        try:
            self._busy = True
            return self._tick()
        finally:
            self._busy = False

    def should_sync(self) -> bool:
        return self._leads() and bool(self._inner.should_sync())

    def sync(self) -> None:
        if not self._leads():
            return
        try:
            self._busy = True
            attempt(lambda: sync_noting(self._inner), "could not write back its schedule")
        finally:
            self._busy = False

    def close(self) -> None:
        """Hand the leadership over. A signal handler may call it in the middle of a tick, of a `sync` or of itself: then it
        returns within a second, and the next call, which Celery makes once that is unwound, closes the schedule.
        """
        self._closed = True
        if self._done:
            return
        if self._busy:
            # The schedule may hold locks of its own, a connection's above all, and must not be entered a second time.
            if self.leadership is not None:
                self.leadership.stop(timeout=1.0)
            return
        try:
            self._busy = True
            self._write_last()
            if self.leadership is not None:
                self.leadership.stop()
            self._tell_late()
            # Last, since a broker that hangs may take its time over a connection that is to be closed.
            self._retire()
            self._done = True
        finally:
            self._busy = False

    # How the process ends

    def take_signals(self) -> None:
        """Have SIGTERM and SIGINT end the process, if `celery beat` has handlers for them. A program that runs Celery's
        service itself has handlers of its own.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(signum)
                if is_of_beat(handler) or getattr(handler, "__module__", None) == __name__:
                    signal.signal(signum, self._on_signal)

    def _on_signal(self, _signum: int, _frame: Any) -> None:
        # Sets flags and takes no lock: it may have interrupted the code that holds that lock, itself included. Celery's own
        # handler closes the scheduler and sets an event; here its service does both once it is unwound.
        if self._done:
            return  # what is left is Celery's and Python's own end, which an exception would only disturb
        again, self._ending = self._ending, True
        if (again or self._busy) and self.leadership is not None:
            # What was interrupted may hang, and what is to close it, too.
            self.leadership.stop(timeout=1.0)
        raise SystemExit

    def _orphaned(self) -> bool:
        return self.worker is not None and os.getppid() != self.worker

    # The tick

    def _tick(self) -> float:
        lease = self._begin().lease
        if self._term is not None and self._term is not lease:
            self._retire()
        if lease is None:
            self._write_late()
            return _TURN
        try:
            if self._term is None:
                self._take_over(lease)
            self._report()
            left = self._next_tick - clock.now()
            if left <= 0:
                left = self._inner.tick()
                left = min(left, getattr(self._inner, "look_in", left))
                self._failures, self._complained = 0, False
        except LeaseLost as exc:
            # The database knows better than our clock: the row is gone, or another process's.
            lease.lose(exc.reason)
            return 0.0
        except NoLease:
            return 0.0  # it was released during the tick
        except SyncGuardError as exc:
            left = self._hold_back(exc)
        except Exception as exc:  # the schedule inside may be any class  # noqa: BLE001
            left = self._trouble(exc)
        self._next_tick = clock.now() + left
        return max(0.0, min(left, _TURN))

    def _begin(self) -> Leadership:
        if self.leadership is None:
            key = self._settings.leader_key
            self.leadership = Leadership(
                self._guard,
                key,
                ttl=self._settings.leader_ttl,
                alive=self._alive,
                holder=f"celery beat on {socket.gethostname()} pid {os.getpid()}",
                on_elected=lambda lease: signals.leader_elected.send(sender=key, term=lease.fence),
                on_lost=lambda lease: signals.leader_lost.send(sender=key, term=lease.fence),
            )
            self.leadership.start()
        return self.leadership

    def _alive(self) -> bool:
        patience = max(_PATIENCE, 4 * self._settings.leader_ttl)
        return clock.now() - self._moved_at() < patience and not self._orphaned()

    def _moved_at(self) -> float:
        # A tick may take long: as long as it looks at entry after entry, nothing hangs.
        agenda = self._agenda
        return self._ticked_at if agenda is None else max(self._ticked_at, agenda.moved_at)

    def _leads(self) -> bool:
        return self._inner is not None and self._term is not None and self._term.remaining > 0

    def _take_over(self, lease: Lease) -> None:
        settings, (args, kwargs) = self._settings, self._arguments
        inner = open_schedule(self._class, self.app, *args, **kwargs)
        broker = Broker()
        agenda = Agenda(self.app.conf, lease, self._slots, broker, rule=settings.catch_up, time=self._time)
        inner.lead(agenda, broker, leader_key=settings.leader_key)
        self._inner, self._agenda, self._broker, self._term = inner, agenda, broker, lease
        self._next_tick = self._next_report = 0.0
        tell_what_is_missing(inner, self._class, chosen=settings.beat_scheduler is not None)

    def _write_last(self) -> None:
        """What is left to be written at the end of a term."""
        if self._leads():
            attempt(self._inner.sync, "could not write back its schedule")
        elif self._term is None or not self._term.released:
            return
        # Also after a signal in the middle of a tick: its handler has released the lease already.
        attempt(lambda: self._seen(ended=True), "could not record the end of its term")

    def _seen(self, *, ended: bool = False) -> datetime:
        assert self._term is not None
        broker = self._broker
        return self._slots.seen(int(self._term.fence), failure=broker.failure, sent=broker.news(), ended=ended)

    def _write_late(self) -> None:
        """As a standby: record what could not be recorded. While leading, every statement does that first."""
        now = clock.now()
        if now < self._next_flush or not self._slots.unrecorded():
            return
        self._next_flush = now + 1.0
        with contextlib.suppress(SyncGuardError):
            self._slots.flush()

    def _tell_late(self) -> None:
        late = [] if self._told_late else self._slots.unrecorded()
        if late:
            self._told_late = True
            logger.warning(
                "this beat ends and could not record what became of %d slot(s); the next leader sends them once more, with "
                "the same task ids: %s",
                len(late),
                ", ".join(f"{slot.entry!r} at {slot.due_at.isoformat()}" for slot in late[:10]),
            )

    def _retire(self) -> None:
        """Drop the schedule of a term that is over."""
        inner, self._inner, self._agenda, self._term = self._inner, None, None, None
        if inner is not None:
            close_schedule(inner)

    def _report(self) -> None:
        """Tell the database, every third of the ttl, that this leader lives and whether it sends; delete what is old."""
        now = clock.now()
        if now < self._next_report or self._term is None or self._agenda is None:
            return
        self._next_report = now + self._term.ttl / 3
        if self._agenda.hear(self._seen):
            self._next_tick = 0.0
        if now >= self._next_prune:
            self._next_prune = now + _PRUNE_EVERY
            if self._slots.prune(older=_KEPT) >= PRUNED_AT_MOST:
                self._next_prune = now  # there may be more: the next report goes on, so that it does not pile up

    def _hold_back(self, exc: SyncGuardError) -> float:
        level = logger.debug if self._complained else logger.warning
        level("leading, but cannot ask the database, so nothing is sent now: %s", exc)
        self._complained = True
        self._forget_heap()
        return _AGAIN

    def _trouble(self, exc: Exception) -> float:
        self._failures += 1
        expected = isinstance(exc, (OSError, OperationalError)) or of_the_database(exc)
        logger.error(
            "the schedule failed and will be tried again: %s: %s",
            type(exc).__name__,
            exc,
            exc_info=None if expected else exc,
        )
        self._forget_heap()
        if self._failures >= _TOO_MANY_FAILURES and self.leadership is not None:
            self._failures = 0
            logger.error("the schedule keeps failing, leaving it to another beat")
            self.leadership.step_down()
        return 1.0

    def _forget_heap(self) -> None:
        # An entry may have been taken out of it when the exception came.
        if self._inner is not None:
            self._inner._heap = None  # noqa: SLF001 - a class of ours


@beat_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _take_signals(sender: Any = None, **_: Any) -> None:
    scheduler = sender.scheduler
    if isinstance(scheduler, LeaderScheduler):
        scheduler.take_signals()
        # By Celery's own handler, whose exception something has swallowed.
        scheduler._ending = scheduler._ending or scheduler._closed  # noqa: SLF001


@beat_embedded_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _end_with_worker(sender: Any = None, **_: Any) -> None:
    # A worker ends its beat by one signal, sent once and not waited for; a worker that is killed sends none.
    scheduler = sender.scheduler
    if isinstance(scheduler, LeaderScheduler):
        signal.signal(term_signal(), scheduler._on_signal)  # noqa: SLF001
        scheduler.worker = parent_pid()
