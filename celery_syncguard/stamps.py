"""Stamps on messages: every message carries a stamp of its sender's clock, and the worker's clock overtakes it.

A published message carries the stamp in the header `syncguard_hlc`. The worker observes it before the body runs, so what
the body stamps (`clock_for(self.app).now()`, or `self.hlc.now()` in a LockedTask) sorts after all that its sender had
stamped, and so on down a chain, whatever the clocks of the machines say. Celery's canvas stamping is another thing.

Invariants:

- A message without a stamp, with a malformed one or with one from the far future runs like any other.
- Publishing never fails because of a stamp.

Not here: the clock itself (`hlc`).
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import MutableMapping
from typing import Any

from celery import signals

from celery_syncguard.core.events import logger
from celery_syncguard.hlc import HlcError, HybridLogicalClock

__all__ = ["HEADER", "MAX_DRIFT", "clock_for", "follow_setting", "install_stamps", "real_app"]

HEADER = "syncguard_hlc"
# Seconds. Machines without NTP are hours off at worst, a stamp in the wrong unit or from a broken battery clock years.
MAX_DRIFT = 24 * 3600.0

_ATTRIBUTE = "_syncguard_stamps"


def clock_for(app: Any) -> HybridLogicalClock:
    """Return the clock of this process for an application; made at the first call, with `MAX_DRIFT`.

    Args:
        app: a Celery application.
    """
    return _stamps_of(app).clock


def install_stamps(app: Any, clock: HybridLogicalClock | None = None) -> HybridLogicalClock:
    """Stamp what this process publishes, observe what it runs for `app`, and return the clock that does it.

    May be repeated. It works for every task of the application, of any class.

    Args:
        app: a Celery application.
        clock: used from now on instead of `clock_for`'s own.
    """
    stamps = _stamps_of(app)
    if clock is not None:
        stamps.clock = clock
    stamps.wanted = True
    return stamps.clock


def follow_setting(app: Any) -> None:
    """As `install_stamps`, if the application's configuration says `syncguard_hlc = True`.

    Reads the setting when the first message is published or run, never earlier: asking an application for its
    configuration makes it load that, perhaps before it is complete.
    """
    _stamps_of(app)


class _Stamps:
    """An application's clock; lives in the application, so that it dies with it."""

    def __init__(self, app: Any) -> None:
        self._app = weakref.ref(app)
        self.wanted: bool | None = None  # not known before the application is configured
        self.clock = HybridLogicalClock(
            f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}", max_drift=MAX_DRIFT
        )

    def _is_wanted(self) -> bool:
        if self.wanted is None:
            app = self._app()
            if app is not None and app.configured:
                # Once: looking up a setting costs as much as the rest of a stamp, and every message asks.
                self.wanted = bool(app.conf.get("syncguard_hlc"))
        return bool(self.wanted)

    def stamp(self, headers: MutableMapping[str, Any]) -> None:
        if not self._is_wanted():
            return
        earlier = headers.get(HEADER)  # another application's, or a retry's own from its first sending
        try:
            stamp = self.clock.now() if earlier is None else self._overtake(earlier)
        except HlcError as exc:
            # The earlier stamp stays.
            logger.warning("message sent without a stamp: %s", exc, extra={"event": "stamp_failed"})
            return
        headers[HEADER] = int(stamp)

    def _overtake(self, earlier: Any) -> int:
        try:
            return self.clock.observe(earlier)
        except HlcError as exc:
            _ignored(earlier, exc)
            return self.clock.now()

    def observe(self, request: Any, task_id: str | None) -> None:
        if not self._is_wanted():
            return
        stamp = request.get(HEADER) or (request.headers or {}).get(HEADER)
        if stamp is None:
            return  # sent by a producer without this library
        try:
            self.clock.observe(stamp)
        except HlcError as exc:
            _ignored(stamp, exc, task_id=task_id)


# Of every application in this process. One handler per signal serves all of them: Celery 5.4 treats the same method of
# two objects as one receiver and would connect the first only.
_all: weakref.WeakSet[_Stamps] = weakref.WeakSet()


@signals.before_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
def _on_publish(headers: MutableMapping[str, Any] | None = None, **_: Any) -> None:
    # The signal does not say which application publishes. So every installed one in this process stamps, each overtaking
    # the one before: the message comes after all that any of them has stamped.
    if headers is not None:
        for stamps in list(_all):
            if stamps.wanted is not False:
                stamps.stamp(headers)


@signals.task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def _on_prerun(sender: Any = None, task_id: str | None = None, **_: Any) -> None:
    # Through a proxy, too, which shows the __dict__ of what it stands for.
    stamps = sender.app.__dict__.get(_ATTRIBUTE)
    if stamps is not None and stamps.wanted is not False:
        stamps.observe(sender.request, task_id)


def _stamps_of(app: Any) -> _Stamps:
    real = real_app(app)
    found: _Stamps | None = real.__dict__.get(_ATTRIBUTE)
    if found is None:
        # setdefault, because two threads may be the first to ask.
        found = real.__dict__.setdefault(_ATTRIBUTE, _Stamps(real))
        _all.add(found)
    return found


def real_app(app: Any) -> Any:
    """The application itself where `celery.current_app` or another proxy stands for it.

    Relies on `_get_current_object` of Celery's proxies. Without it: the proxy, which has settings and a guard of its own.
    """
    current = getattr(app, "_get_current_object", None)
    return app if current is None else current()


def _ignored(stamp: Any, exc: HlcError, *, task_id: str | None = None) -> None:
    logger.warning(
        "ignored the stamp of a message%s: %s",
        f" (task {task_id})" if task_id else "",
        exc,
        extra={"event": "stamp_ignored", "task_id": task_id, "stamp": repr(stamp)[:80]},
    )
