"""django-celery-beat's schedule, seen as it is now: also after edits that its own change flag does not tell of.

Its scheduler looks at a timestamp that Django's signals write. `QuerySet.update`, bulk operations, triggers and psql write
none, and their edits show after five minutes, or never. So the rows themselves are compared, every `max_interval` seconds.
"""

from __future__ import annotations

import hashlib
from typing import Any

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

    @property
    def schedule(self) -> Any:
        if self._compared_at is None:
            self._rows_changed()  # before the first read, so that no edit falls in between
        return super().schedule  # type: ignore[misc]

    def schedule_changed(self) -> bool:
        """As theirs, or a row differs from when they were last compared."""
        told = bool(super().schedule_changed())  # type: ignore[misc]
        return self._rows_changed() or told

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
        except Exception:  # whatever a broken row leads to  # noqa: BLE001
            found = {}
            for model in self.Model.objects.enabled():
                try:
                    found[model.name] = self.Entry(model, app=self.app)
                except Exception as exc:  # noqa: BLE001
                    logger.error(
                        "%r is not in the schedule: its row cannot be read: %s: %s", model.name, type(exc).__name__, exc
                    )
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
