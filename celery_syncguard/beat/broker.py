"""The broker of a leading beat: how it is connected to, and whether it takes messages.

Not here: what to do about a message that it did not take (`slot_sender`).
"""

from __future__ import annotations

import random
from typing import Any

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger

__all__ = ["Broker", "bounded_connection", "discard"]

#: Seconds after which a slot is tried again that the broker did not take, at first and at most.
_AGAIN = (0.2, 5.0)
#: Seconds without an answer after which a broker counts as down.
_PATIENCE = 10.0


class Broker:
    """Whether the broker takes messages, and until when it is left alone. One object per term.

    `failures`: attempts in a row that failed. `failure`: why nothing can be sent, from the second one on.
    `quiet_until`: no attempt before that local instant.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.failure: str | None = None
        self.quiet_until = 0.0
        self._sent_something = False

    def failed(self, entry: str, exc: BaseException) -> None:
        """It did not take the message of this entry, nor would it take another."""
        # A connection that the broker has closed meanwhile is no outage: the second attempt comes at once.
        pause = min(_AGAIN[1], _AGAIN[0] * 2 ** min(self.failures, 8)) if self.failures else 0.0
        self.quiet_until = clock.now() + random.uniform(0.5, 1.0) * pause
        self.failures += 1
        if self.failures == 2:
            self.failure = f"{type(exc).__name__}: {exc}"[:500]
            logger.warning("cannot send %r, the broker does not answer; trying again: %s", entry, self.failure)

    def took(self) -> None:
        """It took a message."""
        if self.failures:
            logger.info("sending again")
        self.works()
        self._sent_something = True

    def works(self) -> None:
        """Nothing is known against it."""
        self.failures, self.failure = 0, None

    def news(self) -> bool:
        """Whether it took something since the last call."""
        news, self._sent_something = self._sent_something, False
        return news


def bounded_connection(app: Any) -> Any:
    """A connection that answers, or fails, in bounded time, and that says whether the broker has a message."""
    connection = app.connection_for_write()
    kind = connection.transport.driver_type
    if kind == "amqp":
        # Without confirms a message written to a dying connection is gone without an error.
        bounds = {"confirm_publish": True, "read_timeout": _PATIENCE, "write_timeout": _PATIENCE}
    elif kind == "redis":
        bounds = {"socket_timeout": _PATIENCE, "socket_connect_timeout": _PATIENCE}
    else:
        return connection
    return app.connection_for_write(transport_options={**bounds, **(app.conf.broker_transport_options or {})})


def discard(connection: Any) -> None:
    """Close a connection that is broken, perhaps."""
    try:
        connection.collect()
    except Exception as exc:  # it is thrown away in any case  # noqa: BLE001
        logger.debug("a broken connection did not close: %s", exc)
