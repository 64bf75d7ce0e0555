"""django-celery-beat's schedule, with edits that its own change flag does not tell.

Its scheduler looks at a timestamp that Django's signals write. `QuerySet.update`, bulk operations, triggers and psql write
none, and their edits are seen after five minutes, or never. So the rows themselves are compared, every `max_interval` seconds.

Only rows that differ are read again, and put where they belong; its own scheduler reads the whole table for each edit, and asks
every entry when it is due, before it sends another slot. Due slots are sent first: edits are looked for between them, at most
once a second.

While the database is in trouble nothing is forgotten: no edit that was seen and could not be read, and nothing that is to be
written into the rows. What beat writes there never overwrites an edit.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from celery import beat
from django.core.exceptions import ObjectDoesNotExist
from django.db import DatabaseError, InterfaceError, close_old_connections, router, transaction
from django_celery_beat.schedulers import DatabaseScheduler
from django_celery_beat.schedulers import logger as their_logger

from celery_syncguard.beat.agenda import Agenda
from celery_syncguard.core import clock
from celery_syncguard.core.events import logger

__all__ = ["SeesEdits"]

#: The longest time between two looks at the rows, in seconds, and the shortest one (or ten times as long as a look takes).
_OFTEN_ENOUGH, _OFTEN = 5.0, 1.0

#: Columns that beat itself writes.
_OURS = {"last_run_at", "total_run_count", "date_changed"}

#: What a class must not override for a row to be read alone: a user's class may read the table in its own way.
_READING = {
    "all_as_schedule",
    "enabled_models",
    "enabled_models_qs",
    "populate_heap",
    "schedule",
    "schedule_changed",
    "schedules_equal",
    "sync",
    "tick",
}
#: If more rows than these have changed, the whole table is read.
_MANY = 300


class SeesEdits:
    """Put before `DatabaseScheduler`: reads a row of the schedule again when it has changed."""

    max_interval: float
    Model: Any
    Entry: Any
    app: Any

    _looked_at = -math.inf  # at the rows themselves, though that may have failed
    _look_at = -math.inf  # not before that
    _compared_at = -math.inf
    _unread = False  # what has changed could not be read
    _prints: dict[Any, tuple[str, str]] | None = None  # by primary key: of a row and what it refers to, and its name
    _dirty: set[str]
    _heap: Any
    _heap_invalidated: bool
    _schedule: Any
    _agenda: Agenda

    @property
    def schedule(self) -> Any:
        if self._prints is None:
            close_old_connections()  # of an earlier term
            self._changed_rows()  # before the first read, so that no edit falls in between
        try:
            found = super().schedule  # type: ignore[misc]
        except BaseException:
            self._unread = True
            raise
        self._unread = False
        return found

    def schedule_changed(self) -> bool:
        """Whether to read the whole table: what changed could not be read; or, for a class with its own way to read it, its
        own change flag says so or a row differs.
        """
        if self._unread:
            return True
        if self._reads_as_theirs or not self._may_look():
            return False
        told = bool(super().schedule_changed())  # type: ignore[misc]
        return bool(self._compare(told)) or told

    def schedules_equal(self, *args: Any, **kwargs: Any) -> bool:
        """Called at the beginning of a tick: puts in what has changed. Whether the heap is that of the schedule."""
        if self._heap_invalidated or not self._reads_as_theirs:
            return bool(super().schedules_equal(*args, **kwargs))  # type: ignore[misc]
        if not self._may_look():
            return True
        changed = self._compare(bool(super().schedule_changed()))  # type: ignore[misc]
        if not changed:
            return True
        self._unread = True
        if len(changed) <= _MANY:
            self._read(changed)
            self._unread = False
        return not self._unread

    @property
    def look_in(self) -> float:
        """Seconds after which the rows are to be looked at again. A class with its own way to read looks when it is asked."""
        if not self._reads_as_theirs:
            return math.inf
        return max(0.0, max(self._look_at, self._looked_at + self._often_enough()) - clock.now())

    def _often_enough(self) -> float:
        return min(self.max_interval, _OFTEN_ENOUGH)

    @cached_property
    def _reads_as_theirs(self) -> bool:
        mro = type(self).__mro__
        theirs = mro[mro.index(SeesEdits) + 1 :]
        found = [next((one for one in theirs if name in one.__dict__), DatabaseScheduler) for name in _READING]
        return set(found) <= {DatabaseScheduler, beat.Scheduler}

    def _may_look(self) -> bool:
        now = clock.now()
        due = bool(self._heap) and self._heap[0].time <= now
        if now < self._look_at or (due and now < self._looked_at + 0.8 * self._often_enough()):
            return False
        self._look_at = now + min(self._often_enough(), _OFTEN)
        return True

    def _compare(self, told: bool) -> dict[Any, str | None]:
        """The rows that differ since the last comparison, by key, with the name that they had then. Compares if that is due,
        or if `told`: the change flag says so.
        """
        now = clock.now()
        if told:
            self._compared_at = -math.inf  # also if it fails now
        if now - self._compared_at < self._often_enough() - _OFTEN:  # if it can wait for the next look
            return {}
        self._looked_at = now
        changed = self._changed_rows()
        self._compared_at = now
        # However many rows there are, most of the time is for sending.
        self._look_at = max(self._look_at, now + min(self._often_enough(), 10 * (clock.now() - now)))
        return changed

    def _changed_rows(self) -> dict[Any, str | None]:
        before, self._prints = self._prints or {}, self._print_rows()
        keys = {key for key in before.keys() | self._prints.keys() if before.get(key) != self._prints.get(key)}
        return {key: before[key][1] if key in before else None for key in keys}

    def _print_rows(self) -> dict[Any, tuple[str, str]]:
        columns = _columns(self.Model)
        referred = [
            (columns.index(field.attname), {row[0]: repr(row) for row in _rows(field.related_model)})
            for field in self.Model._meta.fields  # noqa: SLF001 - Django's public name
            if field.related_model is not None
        ]
        prints = {}
        for key, name, *row in self.Model._default_manager.values_list("pk", "name", *columns):  # noqa: SLF001
            text = repr([row, *(rows.get(row[place]) for place, rows in referred)])
            prints[key] = (hashlib.sha256(text.encode()).hexdigest(), name)
        return prints

    def _read(self, changed: dict[Any, str | None]) -> None:
        """Read these rows again, and put them into the schedule and its heap. The rest stays as it is."""
        before = {name for name in changed.values() if name is not None}
        for name in before & self._dirty:
            self._write(name)
        self._dirty -= before
        enabled = getattr(self, "enabled_models_qs", self.Model.objects.enabled)()
        found = self._made_from(enabled.filter(pk__in=list(changed)))
        for name in before:
            self._schedule.pop(name, None)
        self._schedule.update(found)
        touched = before | found.keys()
        heap = [event for event in self._heap if event.entry.name not in touched]
        heap += [beat.event_t(clock.now(), 5, entry) for entry in found.values()]
        heapq.heapify(heap)
        self._heap = heap
        if before - found.keys():
            self._agenda.enter(dict(self._schedule))  # that they are gone

    def _made_from(self, rows: Iterable[Any]) -> dict[str, Any]:
        found = {}
        for model in rows:
            try:
                found[model.name] = self.Entry(model, app=self.app)
            except (DatabaseError, InterfaceError):
                raise
            except Exception as exc:  # a broken row may raise anything  # noqa: BLE001
                logger.error(
                    "%r is not in the schedule: its row cannot be read: %s: %s", model.name, type(exc).__name__, exc
                )
        return found

    def is_empty(self) -> bool:
        """Whether no row is enabled besides the one that Celery adds. Its schedule leaves out crontabs that are hours away."""
        return not self.Model.objects.enabled().exclude(name="celery.backend_cleanup").exists()

    def all_as_schedule(self) -> dict[str, Any]:
        """As theirs; but one row that cannot be read (its schedule is gone, say) does not hide all the others."""
        try:
            found: dict[str, Any] = super().all_as_schedule()  # type: ignore[misc]
        except (DatabaseError, InterfaceError):
            raise  # no row is at fault, and none must be left out
        except Exception:  # a broken row may raise anything  # noqa: BLE001
            found = self._made_from(self.Model.objects.enabled())
        return found

    def is_due(self, entry: Any) -> Any:
        """As theirs. But theirs ends a one-off entry by writing its whole row as it was when the schedule was read."""
        model = entry.model
        if not (model.one_off and model.enabled and model.total_run_count > 0):
            return super().is_due(entry)  # type: ignore[misc]
        ended = {"enabled": False, "total_run_count": 0, "last_run_at": None}
        row = self.Model._default_manager.filter(pk=model.pk)  # noqa: SLF001
        if getattr(model, "clocked", None) is not None:
            # A row with another time by now is to run once more: its own task may have changed it.
            row = row.filter(clocked__clocked_time=model.clocked.clocked_time)
        row.update(**ended)
        model.enabled, model.total_run_count = False, 0
        self._dirty.discard(entry.name)
        return False, self.max_interval

    def sync(self) -> None:
        """As theirs; but what the database does not take now is kept for the next time. Theirs forgets it, and a one-off
        entry whose row does not say that it ran would run again.

        Raises:
            DatabaseError, InterfaceError: of Django.
        """
        if super().sync.__func__ is not DatabaseScheduler.sync:  # type: ignore[misc]  # overridden by a user's class
            super().sync()  # type: ignore[misc]
            return
        close_old_connections()
        for name in list(self._dirty):
            self._write(name)

    def _write(self, name: str) -> None:
        """Write back the row of that name, if there is one."""
        try:
            self._save(self._schedule[name])
        except (KeyError, TypeError, ObjectDoesNotExist):
            return
        self._dirty.discard(name)

    def _save(self, entry: Any) -> None:
        # Its `save` reads the row and writes all of it. The lock makes an edit come before or after.
        database = router.db_for_write(self.Model)
        with transaction.atomic(using=database):
            self.Model._default_manager.using(database).select_for_update().get(pk=entry.model.pk)  # noqa: SLF001
            entry.save()


def _columns(model: Any) -> list[str]:
    return [field.attname for field in model._meta.concrete_fields if field.attname not in _OURS]  # noqa: SLF001


def _rows(model: Any) -> Iterable[tuple[Any, ...]]:
    """Each begins with its key."""
    rows: Iterable[tuple[Any, ...]] = model._default_manager.values_list("pk", *_columns(model))  # noqa: SLF001
    return rows


def _without_stack(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], (DatabaseError, InterfaceError)):
        record.exc_info = None
    return True


# A database that is down is no fault of the code: one line without a stack says so, and the next look asks again.
their_logger.addFilter(_without_stack)
