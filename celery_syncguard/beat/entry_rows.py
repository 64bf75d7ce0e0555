"""Entries that are rows of a database: `entry.model`, as django-celery-beat makes them, and schedulers modelled on it.

Such a row counts its runs itself, may be for one run only (`one_off`), and is written back at times of its own. Not here: the
reading and writing of django-celery-beat's rows (`django_schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery_syncguard.beat.agenda import Place
from celery_syncguard.beat.timetable import once_only
from celery_syncguard.core.events import logger

__all__ = ["count_runs", "end_clocked", "is_one_off", "of_the_database", "uncounted_unless_done"]


def of_the_database(exc: BaseException) -> bool:
    """Whether a schedule in Django's database cannot be asked now, which is no fault of its code."""
    return type(exc).__module__.startswith("django.db")


def is_one_off(entry: Any) -> bool:
    """Whether a row is over once it has run."""
    return bool(getattr(getattr(entry, "model", None), "one_off", False))


def count_runs(entry: Any, place: Place) -> None:
    """Have an entry know its runs. A one-off row that was sent by a leader that died before the row said so has run; but one
    that was written since then is to run once more.
    """
    model = getattr(entry, "model", None)
    if model is None:
        entry.total_run_count = place.runs
        return
    sent_before = is_one_off(entry) and not model.total_run_count and place.runs and once_only(entry.schedule) is None
    if sent_before and place.pending[0] > place.claimed >= model.date_changed:
        model.total_run_count = place.runs


def end_clocked(entry: Any, place: Place, is_due: Callable[[Any], object]) -> None:
    """Ask the class of a clocked row whose slot is over once more, so that it switches the row off."""
    model: Any = getattr(entry, "model", None)
    instant = once_only(entry.schedule)
    if model is None or instant is None or not (model.one_off and model.enabled):
        return
    if not model.total_run_count and place.runs and instant == place.claimed:
        # Its leader died before the row said so; or it is a new row, with the name and the time of an old one.
        logger.info("the slot of %r at %s was sent before", entry.name, instant.isoformat())
        model.total_run_count = place.runs
    if model.total_run_count:
        is_due(entry)


@contextmanager
def uncounted_unless_done(entry: Any, place: Place, dirty: set[str]) -> Iterator[None]:
    """Take a reservation back if its slot is still to be sent afterwards. `dirty`: names of rows to be written.

    django-celery-beat counts the run when it reserves, in the row's object itself. A one-off row that counts a run is
    over, so it would end unsent.
    """
    model, slot = getattr(entry, "model", None), place.pending[0]
    before = {name: getattr(model, name) for name in ("last_run_at", "total_run_count") if hasattr(model, name)}
    to_be_written = entry.name in dirty  # for a run before this one
    try:
        yield
    finally:
        if slot in place.pending:
            for name, value in before.items():
                setattr(model, name, value)
            if not to_be_written:
                dirty.discard(entry.name)
