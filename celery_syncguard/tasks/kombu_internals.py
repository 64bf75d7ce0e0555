"""What we use of kombu and its driver for RabbitMQ, amqp, that they do not document, and nothing else."""

from __future__ import annotations

from typing import Any

from celery_syncguard.core.events import logger
from celery_syncguard.core.libraries import find, unfit

__all__ = ["OPTION", "answers", "can_answer", "discard", "is_refusal"]

#: Only this driver has an answer to ask for; the option's name is its own.
_DRIVER = "py-amqp"
OPTION = "confirm_publish"

_told: set[str] = set()


def can_answer(connection: Any) -> bool:
    """Whether a connection is to RabbitMQ, which answers a publish only if it is asked to.

    Relies on the name of the transport's driver. If it has another: no, as with every broker that answers by itself.
    """
    return connection is not None and getattr(connection.transport, "driver_name", None) == _DRIVER


def answers(connection: Any, *, wanted: bool) -> bool:
    """Whether a publish on this connection waits for the broker's answer; made so if that is wanted. No I/O.

    Relies on what amqp does when it opens a channel. If that has changed, a connection that is open already is not asked, and
    a warning says so once; later ones are, by the documented option.
    """
    if not can_answer(connection):
        return False
    options = connection.transport_options
    if not wanted:
        return bool(options.get(OPTION))
    if not options.setdefault(OPTION, True):
        return False  # the application has turned it off
    # The option is for connections to come, such as that of a second attempt. The one that is open is told itself.
    if connection.connected:
        try:
            _ask(connection.connection)
        except AttributeError as exc:
            if str(exc) not in _told:
                _told.add(str(exc))
                logger.warning(
                    "connections that are open do not wait for the broker's answer: %s", unfit("amqp", str(exc))
                )
            return False
    return True


def _ask(live: Any) -> None:
    if not live.confirm_publish:
        live.confirm_publish = True  # first: for channels that are opened meanwhile
        try:
            for number, channel in list(live.channels.items()):
                if number != 0:  # which is the connection
                    channel.basic_publish = channel.basic_publish_confirm
        except AttributeError:
            live.confirm_publish = False
            raise


def is_refusal(exc: BaseException) -> bool:
    """Whether the broker's answer was no. Kombu makes an error of its own of it.

    Relies on two classes of `amqp.exceptions`. Without them: no, so that a refusal counts as trouble with the broker.
    """
    kinds = tuple(filter(None, map(find, ("amqp.exceptions:ChannelError", "amqp.exceptions:MessageNacked"))))
    return any(isinstance(one, kinds) for one in (exc, exc.__cause__))


def discard(connection: Any) -> None:
    """Close a connection without a word to the broker. It may be used again, and connects anew.

    Relies on `Connection.collect` of kombu. Without it: closed, which a broker that hangs may delay.
    """
    getattr(connection, "collect", connection.release)()
