"""Receipts: a message that carries a claim counts as sent when the broker has said that it has it.

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

from amqp.exceptions import ChannelError, MessageNacked

from celery_syncguard.core.events import logger
from celery_syncguard.tasks.header import Header

__all__ = ["PATIENCE", "ask_for_confirms", "is_refusal", "turned_off"]

#: Seconds to wait for an answer, at each attempt of a publish. By then a claim that is not confirmed has ended.
PATIENCE = 10.0

#: Only this driver has an answer to ask for; the option's name is its own.
_DRIVER = "py-amqp"
_OPTION = "confirm_publish"


def ask_for_confirms(app: Any) -> None:
    """From now on, what the application publishes with a claim waits for the broker's answer. May be repeated."""
    amqp = app.amqp
    hand_over = amqp.send_task_message
    if not isinstance(hand_over, _Asking):
        wanted_by_all = (app.conf.broker_transport_options or {}).get(_OPTION) is True
        amqp.send_task_message = _Asking(hand_over, wanted_by_all=wanted_by_all)


def turned_off(app: Any) -> bool:
    """Whether the application has said that it does not want to wait, on a broker where that loses messages."""
    return (
        app.connection_for_write().transport.driver_name == _DRIVER
        and (app.conf.broker_transport_options or {}).get(_OPTION, True) is not True
    )


class _Asking:
    """Celery's `send_task_message` of one application."""

    def __init__(self, hand_over: Any, *, wanted_by_all: bool) -> None:
        self._hand_over = hand_over
        self._wanted_by_all = wanted_by_all

    def __call__(self, producer: Any, name: str, message: Any, **options: Any) -> Any:
        connection = producer.connection
        wanted = Header.claim_in(options.get("headers")) is not None
        if not _answers(connection, wanted=wanted):
            return self._hand_over(producer, name, message, **options)
        if options.get("timeout") is None:
            options["timeout"] = PATIENCE
        try:
            return self._hand_over(producer, name, message, **options)
        except BaseException as exc:
            # An answer that comes late would be taken for the next message's.
            connection.collect()
            if wanted or self._wanted_by_all or not is_refusal(exc):
                raise
            # Whoever sent it has not asked, and might be Celery's own code that a refusal has never reached: for a callback it
            # would fail the task that has ended.
            logger.error("the broker refuses a message of %s: %r", name, exc.__cause__ or exc)
            return None


def is_refusal(exc: BaseException) -> bool:
    """Whether the broker's answer was no. Without answers nobody would know."""
    # Kombu makes an error of its own of it.
    return any(isinstance(one, (ChannelError, MessageNacked)) for one in (exc, exc.__cause__))


def _answers(connection: Any, *, wanted: bool) -> bool:
    """Whether a publish on this connection waits for the broker's answer; made so if that is wanted. No I/O."""
    if connection is None or connection.transport.driver_name != _DRIVER:
        return False
    options = connection.transport_options
    if not wanted:
        return bool(options.get(_OPTION))
    if not options.setdefault(_OPTION, True):
        return False  # the application has turned it off
    # The option is for connections to come, such as that of a second attempt. The one that is open is told itself, as the
    # driver does when it opens a channel.
    if connection.connected:
        live = connection.connection
        if not live.confirm_publish:
            live.confirm_publish = True
            for number, channel in list(live.channels.items()):
                if number != 0:  # which is the connection
                    channel.basic_publish = channel.basic_publish_confirm
    return True
