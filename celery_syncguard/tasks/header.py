"""What a message carries for us, in one header; what of its way it does not carry on; and which queue it came from.

The keys are computed once, when the message is published, so that nothing that happens to the arguments on the way can
change them. A message without the header (sent by name, by another language) is completed by the worker.

A message that is published again (it comes back, it is retried) begins a new way. What brokers note on the old one they
would take for the new one's: RabbitMQ drops what it thinks goes round in circles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery_syncguard.errors import ImproperlyConfigured, InvalidKey

__all__ = ["HEADER", "carried_options", "claim_of", "differ", "header_of", "is_broadcast", "queue_of", "without_way"]

#: Its entries, each optional: `key`, `run`, `claim` (text); `call` (text, new with each publish, kept by everything that
#: follows from it: copies, retries, what replaces it); `claimed` (the publisher made the claim); `print` (a
#: fingerprint of the arguments, where a key says what counts as the same work); `options`
#: (overrides of this call); `held` (how often the message came back because the lock was held); `given` (which of the
#: keys were given for this call, so that other arguments in a retry do not change them); `serializer` (of this call).
HEADER = "syncguard"


def header_of(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Our part of a message's headers, as a dict of its own; empty if there is none or it is none of ours."""
    ours = headers.get(HEADER) if headers else None
    # The exact type first: asking the abstract one takes a microsecond.
    return dict(ours) if type(ours) is dict or isinstance(ours, Mapping) else {}


def carried_options(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """The overrides of this call that a message carries, their values unchecked.

    Raises:
        ImproperlyConfigured: they are no mapping.
        InvalidKey: one of them is a template. Templates are the task's: one from a message could make a text of any size,
            and read attributes of arguments.
    """
    carried = header.get("options", {})
    if not isinstance(carried, Mapping):
        raise ImproperlyConfigured(f"the options in the header of a message are a mapping, got {carried!r:.80}")
    for name in ("lock_key", "dedup_key", "run_once"):
        if isinstance(carried.get(name), str):
            raise InvalidKey(
                f"the header of a message carries a template for {name}; a key comes ready-made, or not at all"
            )
    return carried


def differ(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints of arguments are known and not the same."""
    return one is not None and other is not None and one != other


def claim_of(ours: Any) -> str | None:
    """The claim that the publisher of a message made for it, or None."""
    if isinstance(ours, Mapping) and ours.get("claimed"):
        claim = ours.get("claim")
        return claim if isinstance(claim, str) else None
    return None


#: What RabbitMQ and its plugins note on a message: dead-lettering, redelivery, streams, federation and shovels.
_NOTED = re.compile(
    r"x-death|x-(?:first|last)-death-.*|x-delivery-count|x-acquired-count|x-stream-.*|x-received-from|x-shovelled.*"
)

#: By these its publisher had one message go to several queues. Each copy comes back to its own.
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
