"""What a message carries for us, in one header.

The keys are computed once, when the message is published, so that nothing that happens to the arguments on the way can
change them. A message without the header (sent by name, by another language) is completed by the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_syncguard.errors import ImproperlyConfigured, InvalidKey

__all__ = ["HEADER", "carried_options", "claim_of", "header_of"]

#: Its entries, each optional: `key`, `run`, `claim` (text); `claimed` (the publisher made the claim); `options`
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


def claim_of(ours: Any) -> str | None:
    """The claim that the publisher of a message made for it, or None."""
    if isinstance(ours, Mapping) and ours.get("claimed"):
        claim = ours.get("claim")
        return claim if isinstance(claim, str) else None
    return None
