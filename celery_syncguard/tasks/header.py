"""What a message carries for us: one header, with one reader (`Header.of`) and one writer (`Header.into`).

The keys are computed once, when the message is published, so that nothing that happens to the arguments on the way can
change them. A message without the header (sent by name, by another language) is completed by the worker.

Versions. A new entry needs no new version: a reader that does not know an entry keeps it and writes it again. A change
that an older reader would misunderstand gets a higher version, which older readers refuse. A message keeps the version
of its first publisher, so that workers that are not upgraded yet can read it when a newer one publishes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from celery_syncguard.core.key import public_key
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey

__all__ = ["HEADER", "VERSION", "Header"]

#: The header's name.
HEADER = "syncguard"

#: The highest version that is understood here. A header without one has version 1.
VERSION = 1


_NONE: Mapping[str, Any] = MappingProxyType({})


class Header(NamedTuple):
    """Our entries of one message. All are optional; `_ENTRIES` has their names on the wire.

    A named tuple, as each publish and each delivery makes some: a frozen dataclass takes four times as long.
    """

    lock_key: str | None = None
    run_key: str | None = None
    claim_key: str | None = None
    #: New with each publish, kept by all that follows from it: copies, retries, what replaces it.
    call_id: str | None = None
    #: Whether the publisher has made the claim.
    claimed: bool = False
    #: Tells arguments apart where a key says that they are the same work.
    fingerprint: str | None = None
    #: Overrides of this call. No key of them is a template; else their values are unchecked.
    options: Mapping[str, Any] = _NONE
    #: How often the message came back because the lock was held.
    held: int = 0
    #: The entries whose keys were given for this call: other arguments in a retry do not change them.
    given: tuple[str, ...] = ()
    #: The serializer of this call.
    serializer: str | None = None
    version: int = VERSION
    #: The entries of a newer publisher.
    unknown: Mapping[str, Any] = _NONE

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None) -> Header:
        """The header among a message's headers, which may come from any sender; an empty one if there is none.

        Raises:
            InvalidKey: an entry is no valid key, or an option is a template.
            ImproperlyConfigured: an entry has a wrong type, or the version is a higher one.
        """
        entries = headers.get(HEADER) if headers else None
        if entries is None:
            return cls()
        # The exact type first: asking the abstract one takes a microsecond.
        if type(entries) is not dict and not isinstance(entries, Mapping):
            raise ImproperlyConfigured(f"the header {HEADER!r} of a message is a mapping, got {entries!r:.80}")
        if "v" in entries:
            _version(entries["v"], "v in the header of a message")  # before the entries, whose types it may change
        values: dict[str, Any] = {}
        unknown = {}
        for name, value in entries.items():
            if (entry := _ENTRIES.get(name)) is None:
                unknown[name] = value
            else:
                attribute, read, what = entry
                values[attribute] = read(value, what)
        if unknown:
            values["unknown"] = unknown
        return cls(**values)

    @staticmethod
    def claim_in(headers: Mapping[str, Any] | None) -> str | None:
        """The claim that the publisher of a message made for it, or None. Raises nothing, whatever the header is like: for
        messages that are not run, whose claim ends all the same.
        """
        entries = headers.get(HEADER) if headers else None
        if isinstance(entries, Mapping) and entries.get("claimed"):
            claim = entries.get("claim")
            return claim if isinstance(claim, str) else None
        return None

    def into(self, headers: Mapping[str, Any] | None) -> dict[str, Any]:
        """The headers to publish with: these, and our entries, in place of any that they have."""
        ours: dict[str, Any] = {name: value for name, value in zip(_ENTRIES, self, strict=False) if value}
        if self.given:
            ours["given"] = list(self.given)
        return {**(headers or {}), HEADER: {**self.unknown, **ours} if self.unknown else ours}

    def for_other_arguments(self) -> Header:
        """What of it stays for an attempt with other arguments: not the keys that were made from these."""
        made = {_ENTRIES[name][0]: None for name in ("key", "run", "claim") if name not in self.given}
        return self._replace(**made, fingerprint=None, claimed=False)  # type: ignore[arg-type]

    def differs(self, fingerprint: str | None) -> bool:
        """Whether this message's arguments are known to be others than those with this fingerprint."""
        return fingerprint is not None and self.fingerprint is not None and fingerprint != self.fingerprint


def _refusal(what: str, expected: str, value: Any) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"{what} is {expected}, got {value!r:.80}")


def _key(value: Any, what: str) -> str | None:
    return None if value is None else public_key(value, what=what)


def _bool(value: Any, what: str) -> bool:
    if value is True or value is False:
        return value
    raise _refusal(what, "true or false", value)


def _count(value: Any, what: str) -> int:
    if type(value) is int and value >= 0:
        return value
    raise _refusal(what, "a whole number from 0", value)


def _text(value: Any, what: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _refusal(what, "text", value)


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise _refusal(what, "a list of texts", value)


def _options(value: Any, what: str) -> Mapping[str, Any]:
    """Templates are the task's: one from a message could make a text of any size, and read attributes of arguments."""
    if not isinstance(value, Mapping):
        raise _refusal(what, "a mapping", value)
    for name in ("lock_key", "dedup_key", "run_once"):
        if isinstance(value.get(name), str):
            raise InvalidKey(
                f"the header of a message carries a template for {name}: send the key itself, or leave it out"
            )
    return value


def _version(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise _refusal(what, "a whole number from 1", value)
    if value > VERSION:
        raise ImproperlyConfigured(
            f"the header of a message has version {value}, and this process reads versions up to {VERSION}: upgrade the "
            f"workers before the publishers"
        )
    return value


#: Name on the wire, attribute, reader; in the order of the attributes. The reader says which type the entry has; null
#: stands for a missing text.
_ENTRIES: dict[str, tuple[str, Callable[[Any, str], Any], str]] = {
    name: (attribute, read, f"{name} in the header of a message")
    for name, attribute, read in (
        ("key", "lock_key", _key),
        ("run", "run_key", _key),
        ("claim", "claim_key", _key),
        ("call", "call_id", _key),
        ("claimed", "claimed", _bool),
        ("print", "fingerprint", _key),
        ("options", "options", _options),
        ("held", "held", _count),
        ("given", "given", _texts),
        ("serializer", "serializer", _text),
        ("v", "version", _version),
    )
}
