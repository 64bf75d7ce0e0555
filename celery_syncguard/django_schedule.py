"""django-celery-beat's schedule, seen as it is now: also after edits that its own change flag does not tell of.

Its scheduler looks at a timestamp that Django's signals write. `QuerySet.update`, bulk operations, triggers and psql write
none, and their edits show after five minutes, or never. So the rows themselves are compared, every `max_interval` seconds.

And while the database is in trouble nothing is forgotten: neither an edit that was seen and could not be read, nor what is to
be written into the rows. What beat writes there never overwrites what somebody else has just written.
"""

from __future__ import annotations

import hashlib
import logging
import math
from typing import Any

from django.core.exceptions import ObjectDoesNotExist
from django.db import DatabaseError, InterfaceError, close_old_connections, router, transaction
from django_celery_beat.schedulers import DatabaseScheduler
from django_celery_beat.schedulers import logger as their_logger

from celery_syncguard import clock
from celery_syncguard.events import logger

__all__ = ["SeesEdits"]

#: Seconds between two looks at the rows, at most.
_OFTEN_ENOUGH = 5.0

#: Columns that beat itself writes.
_OURS = {"last_run_at", "total_run_count", "date_changed"}


class SeesEdits:
    """Put before `DatabaseScheduler`: reads the schedule again when a row of it has changed."""

    max_interval: float
    Model: Any
    Entry: Any
    app: Any

    _compared_at: float | None = None
    _print: str | None = None
    _dirty: set[str]
    _schedule: Any

    @property
    def schedule(self) -> Any:
        if self._compared_at is None:
            close_old_connections()  # of an earlier term
            self._rows_changed()  # before the first read, so that no edit falls in between
        try:
            return super().schedule  # type: ignore[misc]
        except BaseException:
            # The rows differ, and could not be read: they differ still at the next look, which comes at once.
            self._print, self._compared_at = None, -math.inf
            raise

    def schedule_changed(self) -> bool:
        """As theirs, or a row differs from when they were last compared."""
        told = bool(super().schedule_changed())  # type: ignore[misc]
        return self._rows_changed() or told

    def is_empty(self) -> bool:
        """Whether no row is enabled besides the one that Celery adds. The schedule does not tell: it leaves out crontabs
        that are hours away.
        """
        return not self.Model.objects.enabled().exclude(name="celery.backend_cleanup").exists()

    def _rows_changed(self) -> bool:
        now = clock.now()
        if self._compared_at is not None and now - self._compared_at < min(self.max_interval, _OFTEN_ENOUGH):
            return False
        before, self._print, self._compared_at = self._print, self._fingerprint(), now
        return self._print != before

    def all_as_schedule(self) -> dict[str, Any]:
        """As theirs; but a row that cannot be read, with a schedule that is gone, does not hide all the others."""
        try:
            found: dict[str, Any] = super().all_as_schedule()  # type: ignore[misc]
        except (DatabaseError, InterfaceError):
            raise  # no row is at fault, and none must be left out
        except Exception:  # whatever a broken row leads to  # noqa: BLE001
            found = {}
            for model in self.Model.objects.enabled():
                try:
                    found[model.name] = self.Entry(model, app=self.app)
                except (DatabaseError, InterfaceError):
                    raise
                except Exception as exc:  # noqa: BLE001
                    logger.error(
                        "%r is not in the schedule: its row cannot be read: %s: %s", model.name, type(exc).__name__, exc
                    )
        return found

    def is_due(self, entry: Any) -> Any:
        """As theirs. But theirs ends a one-off entry by writing its whole row as it was when the schedule was read."""
        model = entry.model
        if not (model.one_off and model.enabled and model.total_run_count > 0):
            return super().is_due(entry)  # type: ignore[misc]
        ended = {"enabled": False, "total_run_count": 0, "last_run_at": None}
        row = self.Model._default_manager.filter(pk=model.pk)  # noqa: SLF001
        if getattr(model, "clocked", None) is not None:
            # Whoever has given it another time meanwhile, as its own task may, wants it once more.
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
        if super().sync.__func__ is not DatabaseScheduler.sync:  # type: ignore[misc]  # a class of its own making
            super().sync()  # type: ignore[misc]
            return
        gone = set()
        close_old_connections()
        while self._dirty:
            name = next(iter(self._dirty))
            try:
                self._save(self._schedule[name])
            except (KeyError, TypeError, ObjectDoesNotExist):
                gone.add(name)
            self._dirty.discard(name)
        self._dirty |= gone

    def _save(self, entry: Any) -> None:
        # Its `save` reads the row and writes all of it. The lock makes whoever edits it come before or after.
        database = router.db_for_write(self.Model)
        with transaction.atomic(using=database):
            self.Model._default_manager.using(database).select_for_update().get(pk=entry.model.pk)  # noqa: SLF001
            entry.save()

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        models = [self.Model]
        models += [field.related_model for field in self.Model._meta.fields if field.related_model is not None]  # noqa: SLF001 - Django's public name
        for model in models:
            names = [field.attname for field in model._meta.concrete_fields if field.attname not in _OURS]  # noqa: SLF001
            for row in model._default_manager.order_by("pk").values_list(*names):  # noqa: SLF001
                digest.update(repr(row).encode())
        return digest.hexdigest()


def _without_stack(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], (DatabaseError, InterfaceError)):
        record.exc_info = None
    return True


# A database that is away is no fault of the code: a line says so, and the next look asks again.
their_logger.addFilter(_without_stack)
