"""What we keep for one Celery application (its guard and its settings), and what a worker does at its start and end with it.

A guard is made when it is first asked for, from the application's configuration, and lives as long as the application.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_process_shutdown, worker_shutdown

from celery_syncguard import signals, stamps
from celery_syncguard.core.config import Settings
from celery_syncguard.core.process import forget_in_children
from celery_syncguard.guard import SyncGuard, flush_all
from celery_syncguard.stamps import real_app
from celery_syncguard.tasks.celery_internals import pool_module

__all__ = ["AppState", "attach", "guard_for", "settings_for", "state_of"]


class AppState:
    """What one application has of ours."""

    def __init__(self, app: Celery) -> None:
        self._app = weakref.ref(app)
        self._settings: Settings | None = None
        self._guard: SyncGuard | None = None
        self.forget()
        forget_in_children(self)

    def forget(self) -> None:
        """After a fork (and at the start): a thread of the parent may have been in it."""
        self._mutex = threading.RLock()

    @property
    def settings(self) -> Settings:
        if self._settings is None:
            app = self._app()
            assert app is not None  # the caller has it
            self._settings = Settings.from_mapping(app.conf, namespace=app.namespace)
        return self._settings

    @property
    def guard(self) -> SyncGuard:
        if self._guard is None:
            with self._mutex:
                if self._guard is None:
                    guard = SyncGuard(settings=self.settings)
                    guard.events.subscribe(
                        "lease_lost", lambda lease: signals.lease_lost.send(sender=guard, lease=lease)
                    )
                    self._guard = guard
        return self._guard

    def close(self) -> None:
        """Flush and close; the next use starts afresh."""
        with self._mutex:
            guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()


_states: weakref.WeakKeyDictionary[Celery, AppState] = weakref.WeakKeyDictionary()
_mutex = threading.Lock()


def state_of(app: Celery) -> AppState:
    """What the application has of ours; made at the first call."""
    app = real_app(app)
    found = _states.get(app)
    if found is None:
        with _mutex:
            found = _states.setdefault(app, AppState(app))
    return found


def guard_for(app: Celery) -> SyncGuard:
    """The application's guard.

    Raises:
        ImproperlyConfigured: a `syncguard_*` setting is invalid, or there is no dsn.
    """
    return state_of(app).guard


def settings_for(app: Celery) -> Settings:
    """The application's settings, checked. Raises as `guard_for`."""
    return state_of(app).settings


def attach(app: Celery) -> None:
    """Make an application ready for our tasks. May be repeated."""
    app = real_app(app)
    if app in _states:
        return
    state_of(app)
    stamps.follow_setting(app)


@worker_init.connect(weak=False)  # type: ignore[untyped-decorator]
def _check_worker(sender: Any = None, **_: Any) -> None:
    from celery_syncguard.tasks import worker

    if sender.app in _states:
        _check_pool(sender)
        worker.start(sender, state_of(sender.app))


def _check_pool(worker: Any) -> None:
    if pool_module(worker).partition(".")[0] == "celery_aio_pool":
        sys.stderr.write(
            "celery-syncguard: celery-aio-pool calls bodies in other threads than Celery's tracer, where nothing could be locked: "
            "start this worker with another pool, and let bodies call asyncio.run(...)\n"
        )
        raise SystemExit(78)  # EX_CONFIG


@worker_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]
def _stop_worker(**_: Any) -> None:
    from celery_syncguard.tasks import worker

    worker.stop()
    flush_all()


worker_process_shutdown.connect(flush_all, weak=False)
