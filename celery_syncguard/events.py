"""What happens to leases, told to whoever listens, and the one logger.

This is not Celery's signals: those are in `signals` and are fed from here. A listener must be quick and must not raise;
if it does, the error is logged and the lease is not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Events", "logger"]

logger = logging.getLogger("celery_syncguard")

Listener = Callable[..., None]


class Events:
    """Named events with listeners. `emit` calls them in the emitting thread, in order of subscription."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: dict[str, list[Listener]] = {}

    def subscribe(self, name: str, listener: Listener) -> None:
        self._listeners.setdefault(name, []).append(listener)

    def emit(self, name: str, **facts: Any) -> None:
        for listener in self._listeners.get(name, ()):
            try:
                listener(**facts)
            except Exception:
                logger.exception("a listener for %s failed", name)
