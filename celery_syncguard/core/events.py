"""What happens to leases, told to listeners, and the one logger.

Celery's signals are in `signals` and are sent by listeners here. A listener must be quick and must not raise; if it does,
the error is logged and the lease is not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery_syncguard.errors import one_line

__all__ = ["Events", "logger"]

logger = logging.getLogger("celery_syncguard")


def _escape(record: logging.LogRecord) -> bool:
    """Make the message one line: it may quote a task id or a holder's name that was written to forge a line."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 - the handler reports it, as for any record
        return True
    if not message.isprintable():
        record.msg, record.args = one_line(message), None
    return True


logger.addFilter(_escape)

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
