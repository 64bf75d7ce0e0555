"""The way of a message through queues: the headers that brokers add to it, and the queue that it came from.

A message that is published again (it comes back, it is retried) begins a new way, without those headers: by the old ones
RabbitMQ would drop it, as it seems to go round in circles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["is_broadcast", "queue_of", "without_way"]

#: What RabbitMQ and its plugins note on a message: dead-lettering, redelivery, streams, federation and shovels.
_NOTED = re.compile(
    r"x-death|x-(?:first|last)-death-.*|x-delivery-count|x-acquired-count|x-stream-.*|x-received-from|x-shovelled.*"
)

#: With these headers a publisher has one message go to several queues. Each copy comes back to its own queue, without them.
_SPREAD = frozenset({"CC", "BCC"})

#: Where Celery's native delayed delivery hands a message over, under the routing key that it had with 28 bits in front.
_DELAYED = "celery_delayed_delivery"
_DELAY_BITS = re.compile(r"(?:[01]\.){28}")


def without_way(headers: Mapping[str, Any] | None, *, again: bool) -> dict[str, Any]:
    """The headers to publish with, of those that a message was given or arrived with.

    Arguments:
        again: whether the message was published before; its first publisher may have it go to several queues.
    """
    return {
        name: value
        for name, value in (headers or {}).items()
        if not (_NOTED.fullmatch(name) or (again and name in _SPREAD))
    }


def queue_of(app: Any, delivery_info: Mapping[str, Any] | None) -> Any:
    """The queue of the application from which a message came, by exchange and routing key; None if that is not clear."""
    exchange = (delivery_info or {}).get("exchange")
    routing_key = (delivery_info or {}).get("routing_key") or ""
    queues = app.amqp.queues
    if not exchange:
        # Not by [], which would make one.
        return queues.get(routing_key)
    delayed = exchange == _DELAYED
    if delayed:
        routing_key = _DELAY_BITS.sub("", routing_key, count=1)
    found = [
        queue
        for queue in queues.values()
        if queue.exchange
        and queue.exchange.type != "fanout"
        and (delayed or queue.exchange.name == exchange)
        and queue.routing_key == routing_key
    ]
    return found[0] if len(found) == 1 else None


def is_broadcast(app: Any, delivery_info: Mapping[str, Any] | None) -> bool:
    """Whether every worker gets what is sent where a message came from: a fanout exchange hands it to each of its queues, a
    stream queue to each of its consumers.
    """
    exchange = (delivery_info or {}).get("exchange") or ""
    routing_key = (delivery_info or {}).get("routing_key")
    for queue in app.amqp.queues.values():
        if queue.exchange and queue.exchange.type == "fanout" and queue.exchange.name == exchange:
            return True
        if (queue.queue_arguments or {}).get("x-queue-type") == "stream":
            direct = queue.name == routing_key if not exchange else queue.routing_key == routing_key
            if direct and (not exchange or queue.exchange.name == exchange):
                return True
    return False
