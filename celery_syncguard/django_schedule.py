"""django-celery-beat's schedule, seen as it is now: also after edits that its own change flag does not tell of.

Its scheduler looks at a timestamp that Django's signals write. `QuerySet.update`, bulk operations, triggers and psql write
none, and their edits show after five minutes, or never. So the rows themselves are compared, every `max_interval` seconds.
"""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

from celery_syncguard import clock

__all__ = ["SeesEdits"]

#: Columns that beat itself writes.
_OURS = {"last_run_at", "total_run_count", "date_changed"}


class SeesEdits:
    """Put before `DatabaseScheduler`: reads the schedule again when a row of it has changed."""

    max_interval: float
    Model: Any
    _last_full_sync: Any

    _compared_at: float | None = None
    _print: str | None = None

    @property
    def schedule(self) -> Any:
        now = clock.now()
        if self._compared_at is not None and now - self._compared_at >= min(self.max_interval, 5.0):
            self._compared_at = now
            before, self._print = self._print, self._fingerprint()
            if self._print != before:
                self._last_full_sync = datetime.datetime.min  # noqa: DTZ901 - theirs is naive
        found = super().schedule  # type: ignore[misc]
        if self._compared_at is None:
            self._compared_at, self._print = now, self._fingerprint()
        return found

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        models = [self.Model]
        models += [field.related_model for field in self.Model._meta.fields if field.related_model is not None]  # noqa: SLF001 - Django's public name
        for model in models:
            names = [field.attname for field in model._meta.concrete_fields if field.attname not in _OURS]  # noqa: SLF001
            for row in model._default_manager.order_by("pk").values_list(*names):  # noqa: SLF001
                digest.update(repr(row).encode())
        return digest.hexdigest()
