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
    """Our entries of one message. All are optional; `_ENTRIES` has their names and types on the wire.

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
        version = entries.get("v")
        # Before the other entries, whose types it may change.
        if type(version) is int and version > VERSION:
            raise ImproperlyConfigured(
                f"the header of a message has version {version}, and this process reads versions up to {VERSION}: upgrade "
                f"the workers before the publishers"
            )
        values: dict[str, Any] = {}
        unknown = {}
        for name, value in entries.items():
            if name not in _ENTRIES:
                unknown[name] = value
                continue
            attribute, fits, expected = _ENTRIES[name]
            if fits is None:
                values[attribute] = None if value is None else public_key(value, what=name + _IN)
            elif fits(value):
                values[attribute] = value
            else:
                raise ImproperlyConfigured(f"{name}{_IN} is {expected}, got {value!r:.80}")
        for name in ("lock_key", "dedup_key", "run_once") if "options" in values else ():
            # Templates are the task's: one from a message could make a text of any size, and read attributes of arguments.
            if isinstance(values["options"].get(name), str):
                raise InvalidKey(f"options{_IN} have a template for {name}: send the key itself, or leave it out")
        if "given" in values:
            values["given"] = tuple(values["given"])
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


_IN = " in the header of a message"

#: By name on the wire, in the order of the attributes: the attribute, and what its value has to be. None: a key, or null.
_ENTRIES: dict[str, tuple[str, Callable[[Any], bool] | None, str]] = {
    "key": ("lock_key", None, ""),
    "run": ("run_key", None, ""),
    "claim": ("claim_key", None, ""),
    "call": ("call_id", None, ""),
    "claimed": ("claimed", lambda value: type(value) is bool, "true or false"),
    "print": ("fingerprint", None, ""),
    "options": ("options", lambda value: isinstance(value, Mapping), "a mapping"),
    "held": ("held", lambda value: type(value) is int and value >= 0, "a whole number from 0"),
    "given": (
        "given",
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value),
        "a list of texts",
    ),
    "serializer": ("serializer", lambda value: value is None or isinstance(value, str), "text"),
    "v": ("version", lambda value: type(value) is int and value > 0, "a whole number from 1"),
}
