"""A beat of which there may be many: `celery -A proj beat -S syncguard`.

Each runs a `LeaderScheduler`. One of them leads (`leadership`) and has a schedule; the others have none and send nothing.
Any class of scheduler can be the schedule inside: Celery's plain one with our state is the default, its persistent one,
django-celery-beat's, or a class of yours (`syncguard_beat_scheduler`). Which slots there are is ours to say in all of
them (`timetable`), so that every leader means the same slot by the same instant.

Invariants: a process that does not lead reads no schedule and sends nothing; not leading any more is no error and never
ends the process; constructing connects to nothing (Celery does it twice); `close` may be called at any time, also from a
signal handler, and again; any number of signals ends the process, and a beat inside a worker ends with that.

Not here: how the leader's schedule sends a slot (`sending`), the state (`slots`), when something is due (`timetable`), election
(`leadership`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from billiard import common as billiard_common
from billiard.process import current_process
from celery import beat
from celery.signals import beat_embedded_init, beat_init
from celery.utils.imports import load_extension_class_names, qualname, symbol_by_name
from kombu.exceptions import OperationalError

from celery_syncguard import signals
from celery_syncguard.beat.postgres_slots import open_slots
from celery_syncguard.beat.slot_sender import AGAIN, of_the_database, sending
from celery_syncguard.beat.slots import PRUNED_AT_MOST, Slots
from celery_syncguard.beat.timekeeper import Timekeeper
from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.leadership import Leadership
from celery_syncguard.core.lease import Lease
from celery_syncguard.errors import (
    ImproperlyConfigured,
    LeaseLost,
    NoLease,
    SyncGuardError,
)
from celery_syncguard.postgres.connection import describe_dsn
from celery_syncguard.tasks import app_state

__all__ = ["LeaderScheduler"]

#: Seconds between two looks at the leadership. A look costs no I/O.
_TURN = 0.2
#: Seconds without a tick, a look at an entry or a send after which a leader counts as hanging, and another beat may lead.
_PATIENCE = 60.0
#: How long slots and terms are kept, and how often the old ones are deleted, in seconds.
_KEPT, _PRUNE_EVERY = 7 * 86_400.0, 3600.0
#: A schedule that fails so often in a row is left to another beat.
_TOO_MANY_FAILURES = 3


class LeaderScheduler(beat.Scheduler):  # type: ignore[misc]
    """The scheduler of one beat among many. Settings: `syncguard_leader_key`, `syncguard_leader_ttl`,
    `syncguard_beat_scheduler`, `syncguard_catch_up`; per entry `options={"syncguard_catch_up": "all"}`.

    Raises:
        ImproperlyConfigured: a `syncguard_*` setting that cannot be meant, or no database.
    """

    _leadership: Leadership | None = None
    _busy = False  # a signal handler that runs now interrupts the schedule
    _ending = False  # a signal said so
    _closed = False
    _done = False  # closed, and nothing is left to be done

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self.take_signals()  # first: Celery's handler would make another scheduler, in the middle of this
        self._arguments = (args, {**kwargs, "lazy": False})
        super().__init__(app, *args, **{**kwargs, "lazy": True})
        app_state.attach(app)
        self._settings = app_state.settings_for(app)
        self._guard = app_state.guard_for(app)
        self._class = _inner_class(self._settings.beat_scheduler, app.conf.beat_scheduler)
        self._slots: Slots | None = None
        self._inner: Any = None
        self._term: Lease | None = None
        self._next_tick = self._next_report = self._next_prune = self._next_flush = 0.0
        self._failures = 0
        self._complained = False
        self._ticked_at = 0.0
        self._time = Timekeeper()
        self._told_late = False
        self._parent: int | None = None  # the worker that this beat ends with

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
        """One look; the seconds to sleep before the next one.

        Raises:
            SystemExit: this process was told to end, or the worker that it belongs to is gone.
        """
        if self._ending:
            raise SystemExit  # once more: a schedule, or a destructor, may have swallowed the first one
        if self._orphaned():
            logger.warning("the worker that this beat belongs to (pid %s) is gone, so it ends", self._parent)
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
            self._attempt(self._inner._do_sync, "could not write back its schedule")  # noqa: SLF001 - notes when it was
        finally:
            self._busy = False

    def close(self) -> None:
        """Hand the leadership over. At once and within a second, when called by a signal handler in the middle of a tick, of
        a `sync` or of itself; then the schedule is closed by the next call, which Celery makes once that is unwound.
        """
        self._closed = True
        if self._busy:
            # The schedule may hold locks of its own, a connection's above all, and must not be entered a second time.
            if self._leadership is not None:
                self._leadership.stop(timeout=1.0)
            return
        try:
            self._busy = True
            self._write_last()
            if self._leadership is not None:
                self._leadership.stop()
            self._tell_late()
            # Last, since a broker that hangs may take its time over a connection that is to be closed.
            self._retire()
            self._done = True
        finally:
            self._busy = False

    # How the process ends

    def take_signals(self) -> None:
        """Have SIGTERM and SIGINT end the process, if Celery's `celery beat` has handlers for them: whoever runs its service in
        a program of its own has handlers of its own.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                if getattr(signal.getsignal(signum), "__module__", None) in ("celery.apps.beat", __name__):
                    self.end_by(signum)

    def end_by(self, signum: int) -> None:
        """Have this signal end the process."""
        signal.signal(signum, self._on_signal)

    def end_with(self, parent: int) -> None:
        """End when the process with this pid is not the parent any more, however it went."""
        self._parent = parent

    def _on_signal(self, _signum: int, _frame: Any) -> None:
        # Sets flags and takes no lock: it may have interrupted whoever holds that, itself included. Celery's own handler
        # closes the scheduler and sets an event; here that is left to what its service does once it is unwound.
        if self._done:
            return  # what is left is Celery's and Python's own end, which an exception would only spoil
        again, self._ending = self._ending, True
        if (again or self._busy) and self._leadership is not None:
            # What was interrupted may hang, and what is to close it, too.
            self._leadership.stop(timeout=1.0)
        raise SystemExit

    def _orphaned(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

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
                alive=self._alive,
                holder=f"celery beat on {socket.gethostname()} pid {os.getpid()}",
                on_elected=lambda lease: signals.leader_elected.send(sender=key, term=lease.fence),
                on_lost=lambda lease: signals.leader_lost.send(sender=key, term=lease.fence),
            )
            self._leadership.start()
        return self._leadership

    def _alive(self) -> bool:
        patience = max(_PATIENCE, 4 * self._settings.leader_ttl)
        return clock.now() - self._moved_at() < patience and not self._orphaned()

    def _moved_at(self) -> float:
        # A tick may take long, for what it does: as long as entry after entry is looked at, nothing hangs.
        inner = self._inner
        return self._ticked_at if inner is None else max(self._ticked_at, inner.moved_at)

    def _leads(self) -> bool:
        return self._inner is not None and self._term is not None and self._term.remaining > 0

    def _take_over(self, lease: Lease) -> None:
        assert self._slots is not None
        self._inner = self._build(lease, self._slots)
        self._term = lease
        self._next_tick = self._next_report = 0.0
        self._tell_what_is_missing()

    def _tell_what_is_missing(self) -> None:
        """An entry that was put where this leader does not look is the same to it as one that nobody made."""
        if self._settings.beat_scheduler is None and self._class is beat.Scheduler and _has_django_celery_beat():
            logger.warning(
                'django_celery_beat is installed, and its table is not led: set syncguard_beat_scheduler = "django", or '
                '"celery.beat:Scheduler" if beat_schedule is meant'
            )
        elif _is_empty(self._inner):
            logger.warning(
                "leading an empty schedule, so nothing is sent: %s has no entries; if they are elsewhere, name the "
                "scheduler class that has them in syncguard_beat_scheduler",
                qualname(self._class),
            )

    def _build(self, lease: Lease, slots: Slots) -> Any:
        args, kwargs = self._arguments
        try:
            inner = sending(self._class)(self.app, *args, **kwargs)
        except Exception as exc:
            if not issubclass(self._class, beat.PersistentScheduler):
                raise
            logger.warning("the schedule file cannot be used, going on without (its state is in the database): %s", exc)
            inner = sending(beat.Scheduler)(self.app, *args, **kwargs)
        inner.lead(lease, slots, rule=self._settings.catch_up, leader_key=self._settings.leader_key, time=self._time)
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

    def _write_late(self) -> None:
        """As a standby too: what was sent and could not be recorded. While leading, every statement does that first."""
        now = clock.now()
        if self._slots is None or now < self._next_flush or not self._slots.unrecorded():
            return
        self._next_flush = now + 1.0
        with contextlib.suppress(SyncGuardError):
            self._slots.flush()

    def _tell_late(self) -> None:
        late = [] if self._slots is None or self._told_late else self._slots.unrecorded()
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
        inner, slots, term = self._inner, self._slots, int(self._term.fence)
        if inner.hear(lambda: slots.seen(term, failure=inner.failure, sent=inner.news())):
            self._next_tick = 0.0
        if now >= self._next_prune:
            self._next_prune = now + _PRUNE_EVERY
            if self._slots.prune(older=_KEPT) >= PRUNED_AT_MOST:
                self._next_prune = now  # there may be more, which would otherwise pile up: the next report goes on

    def _hold_back(self, exc: SyncGuardError) -> float:
        level = logger.debug if self._complained else logger.warning
        level("leading, but cannot ask the database, so nothing is sent now: %s", exc)
        self._complained = True
        self._forget_heap()
        return AGAIN[0]

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


def scheduler_class(wanted: str | type | None, *, setting: str = "syncguard_beat_scheduler") -> type:
    """The class of the schedule inside. `wanted`: the setting.

    Raises:
        ImproperlyConfigured: no scheduler, ours inside itself, or one that cannot be inside.
    """
    if wanted is None:
        return beat.Scheduler  # type: ignore[no-any-return]
    try:
        found = symbol_by_name(wanted, aliases=dict(load_extension_class_names("celery.beat_schedulers")))
    except Exception as exc:
        raise ImproperlyConfigured(f"{setting}: cannot load {wanted!r}: {exc}") from exc
    if not isinstance(found, type) or not issubclass(found, beat.Scheduler):
        raise ImproperlyConfigured(f"{setting} is a subclass of celery.beat.Scheduler, got {found!r}")
    if issubclass(found, LeaderScheduler) and setting == "syncguard_beat_scheduler":
        raise ImproperlyConfigured(
            "syncguard_beat_scheduler is the schedule inside the leader, it cannot be the leader"
        )
    if any(base.__module__.partition(".")[0] == "redbeat" for base in found.__mro__):
        raise ImproperlyConfigured(
            f"{setting} is {qualname(found)}, which has a lock of its own and sends entries that are Redis keys, not "
            'slots: move them to beat_schedule or django-celery-beat, and set syncguard_beat_scheduler to "django", or '
            'to "celery.beat:Scheduler" for beat_schedule'
        )
    return found


def _inner_class(wanted: str | type | None, configured: str | type | None) -> type:
    """The class of the schedule inside. Without a setting of ours it is the one that Celery's own setting names, which
    `-S syncguard` on the command line passes over.

    Raises:
        ImproperlyConfigured: as `scheduler_class`.
    """
    if wanted is None and configured is not None:
        found = scheduler_class(configured, setting="beat_scheduler")
        # Celery's default means `beat_schedule`, whose state is ours to keep.
        if found is not beat.PersistentScheduler and not issubclass(found, LeaderScheduler):
            return found
    return scheduler_class(wanted)


def _has_django_celery_beat() -> bool:
    registry = sys.modules.get("django.apps")  # not imported: not used
    return bool(registry and registry.apps.apps_ready and registry.apps.is_installed("django_celery_beat"))


def _is_empty(inner: Any) -> bool:
    """Whether a schedule has no entry besides the one that Celery adds."""
    is_empty = getattr(inner, "is_empty", None)
    return bool(is_empty()) if is_empty is not None else not set(inner.schedule) - {"celery.backend_cleanup"}


@beat_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _take_signals(sender: Any = None, **_: Any) -> None:
    scheduler = sender.scheduler
    if isinstance(scheduler, LeaderScheduler):
        scheduler.take_signals()
        # By Celery's own handler, whose exception something has swallowed.
        scheduler._ending = scheduler._ending or scheduler._closed  # noqa: SLF001


@beat_embedded_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _end_with_worker(sender: Any = None, **_: Any) -> None:
    # A worker ends its beat by one signal, sent once and not waited for; one that is killed sends none.
    if isinstance(sender.scheduler, LeaderScheduler):
        sender.scheduler.end_by(billiard_common.TERM_SIGNAL)
        # Noted before the fork: the worker may be gone by now. It is the only name that billiard has for it.
        sender.scheduler.end_with(getattr(current_process(), "_parent_pid", None) or os.getppid())
