"""Publisher confirms: a message that carries a claim counts as sent when the broker has confirmed that it has it.

Redis answers every publish. RabbitMQ answers only if it is asked to (publisher confirms), which Celery does not by itself:
a message written to a dying connection is gone without an error, and its claim would last for its whole life. So the
place where Celery hands a message to a producer is wrapped, and the first message with a claim makes its connection wait
for answers from then on.

Why here, and not by the setting (`broker_transport_options`): by the time of the first claim a pool may have connections,
a group has taken its producer, and a caller may bring a connection of his own. And an application without claims is to
see no change.
"""

from __future__ import annotations

from typing import Any

from celery_syncguard.core.events import logger
from celery_syncguard.tasks import kombu_internals
from celery_syncguard.tasks.celery_internals import wrap_sending
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.kombu_internals import OPTION, is_refusal

__all__ = ["PATIENCE", "ask_for_confirms", "is_refusal", "turned_off"]

#: Seconds to wait for an answer, at each attempt of a publish. By then a claim that is not confirmed has ended.
PATIENCE = 10.0


def ask_for_confirms(app: Any) -> None:
    """From now on, what the application publishes with a claim waits for the broker's answer. May be repeated."""
    wrap_sending(app, _Asking, wanted_by_all=_options(app).get(OPTION) is True)


def turned_off(app: Any) -> bool:
    """Whether the application has said that it does not want to wait, on a broker where that loses messages."""
    return kombu_internals.can_answer(app.connection_for_write()) and _options(app).get(OPTION, True) is not True


def _options(app: Any) -> dict[str, Any]:
    return app.conf.broker_transport_options or {}


class _Asking:
    """Celery's `send_task_message` of one application."""

    def __init__(self, hand_over: Any, *, wanted_by_all: bool) -> None:
        self._hand_over = hand_over
        self._wanted_by_all = wanted_by_all

    def __call__(self, producer: Any, name: str, message: Any, **options: Any) -> Any:
        connection = producer.connection
        wanted = Header.claim_in(options.get("headers")) is not None
        if not kombu_internals.answers(connection, wanted=wanted):
            return self._hand_over(producer, name, message, **options)
        if options.get("timeout") is None:
            options["timeout"] = PATIENCE
        try:
            return self._hand_over(producer, name, message, **options)
        except BaseException as exc:
            # An answer that comes late would be taken for the next message's.
            kombu_internals.discard(connection)
            if wanted or self._wanted_by_all or not is_refusal(exc):
                raise
            # This sender did not ask for confirms, and may be Celery's own code, which expects no refusal: that of a callback
            # would fail the task that has ended.
            logger.error("the broker refuses a message of %s: %r", name, exc.__cause__ or exc)
            return None
