"""The schedule inside a leader: which scheduler class it is, and how one of it is opened and closed for a term."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from celery import beat

from celery_syncguard.beat.slot_sender import sends_slots
from celery_syncguard.core.events import logger
from celery_syncguard.errors import ImproperlyConfigured

__all__ = [
    "attempt",
    "close_schedule",
    "full_name",
    "inner_class",
    "open_schedule",
    "scheduler_class",
    "tell_what_is_missing",
]

_SETTING = "syncguard_beat_scheduler"


def scheduler_class(wanted: str | type | None, leader: type, *, setting: str = _SETTING) -> type:
    """The class that a setting names; without one Celery's plain scheduler. `leader`: the class that it is inside.

    Raises:
        ImproperlyConfigured: no scheduler, the leader inside itself, or a class that cannot be inside.
    """
    if wanted is None:
        return beat.Scheduler  # type: ignore[no-any-return]
    try:
        found = _loaded(wanted) if isinstance(wanted, str) else wanted
    except Exception as exc:
        raise ImproperlyConfigured(f"{setting}: cannot load {wanted!r}: {exc}") from exc
    if not isinstance(found, type) or not issubclass(found, beat.Scheduler):
        raise ImproperlyConfigured(f"{setting} is a subclass of celery.beat.Scheduler, got {found!r}")
    if issubclass(found, leader) and setting == _SETTING:
        raise ImproperlyConfigured(f"{_SETTING} is the schedule inside the leader, it cannot be the leader")
    if any(base.__module__.partition(".")[0] == "redbeat" for base in found.__mro__):
        raise ImproperlyConfigured(
            f"{setting} is {full_name(found)}, which has a lock of its own and sends entries that are Redis keys, not "
            'slots: move them to beat_schedule or django-celery-beat, and set syncguard_beat_scheduler to "django", or '
            'to "celery.beat:Scheduler" for beat_schedule'
        )
    return found


def _loaded(name: str) -> Any:
    """What a name means for Celery: an entry point, or a path."""
    found = entry_points(group="celery.beat_schedulers", name=name)
    return next(iter(found)).load() if found else resolve_name(name)


def inner_class(wanted: str | type | None, configured: str | type | None, leader: type) -> type:
    """The class inside. `wanted`: our setting. Without it, it is the class that `configured`, Celery's own setting, names:
    `-S syncguard` on the command line passes over that.

    Raises:
        ImproperlyConfigured: as `scheduler_class`.
    """
    if wanted is None and configured is not None:
        found = scheduler_class(configured, leader, setting="beat_scheduler")
        # Celery's default means `beat_schedule`, whose state is ours to keep.
        if found is not beat.PersistentScheduler and not issubclass(found, leader):
            return found
    return scheduler_class(wanted, leader)


def full_name(cls: type) -> str:
    """The name of a class, with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def open_schedule(cls: type, app: Any, *args: Any, **kwargs: Any) -> Any:
    """A scheduler of that class that sends slots."""
    try:
        return sends_slots(cls)(app, *args, **kwargs)
    except Exception as exc:
        if not issubclass(cls, beat.PersistentScheduler):
            raise
        logger.warning("the schedule file cannot be used, going on without (its state is in the database): %s", exc)
        return sends_slots(beat.Scheduler)(app, *args, **kwargs)


def close_schedule(inner: Any) -> None:
    """Close the scheduler of a term that is over.

    Relies on two attributes of django-celery-beat's. Without `_dirty` it may write times that are older than the next leader's;
    without `_finalize` it stays in memory until the process ends.
    """
    if hasattr(inner, "_dirty"):
        inner._dirty = set()  # noqa: SLF001 - it would write what the next leader has written since
    attempt(inner.close, "could not close its schedule")
    connection = inner.__dict__.pop("connection", None)  # Celery before 5.7 keeps it open
    if connection is not None:
        attempt(connection.release, "could not close its connection to the broker")
    finalizer = getattr(inner, "_finalize", None)
    if finalizer is not None:
        finalizer.cancel()


def attempt(action: Callable[[], object], failure: str) -> None:
    """Do something that is not worth ending the process for."""
    try:
        action()
    except Exception as exc:  # a schedule may be any class  # noqa: BLE001
        logger.warning("this beat %s: %s: %s", failure, type(exc).__name__, exc)


def tell_what_is_missing(inner: Any, cls: type, *, chosen: bool) -> None:
    """Log that entries may be where this leader does not look: it knows of none. `chosen`: our setting names the class."""
    if not chosen and cls is beat.Scheduler and _has_django_celery_beat():
        logger.warning(
            'django_celery_beat is installed, and its table is not led: set syncguard_beat_scheduler = "django", or '
            '"celery.beat:Scheduler" if beat_schedule is meant'
        )
    elif _is_empty(inner):
        logger.warning(
            "leading an empty schedule, so nothing is sent: %s has no entries; if they are elsewhere, name the "
            "scheduler class that has them in syncguard_beat_scheduler",
            full_name(cls),
        )


def _has_django_celery_beat() -> bool:
    registry = sys.modules.get("django.apps")  # not imported: not used
    return bool(registry and registry.apps.apps_ready and registry.apps.is_installed("django_celery_beat"))


def _is_empty(inner: Any) -> bool:
    """Whether a schedule has no entry besides the one that Celery adds."""
    is_empty = getattr(inner, "is_empty", None)
    return bool(is_empty()) if is_empty is not None else not set(inner.schedule) - {"celery.backend_cleanup"}
