"""The arguments of a task: their names, the form in which a worker gets them, and the keys and fingerprints made of them.

Positional, keyword and default forms of a call make one key, and so do all attempts and all serializers' forms of a value.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import inspect
import json
import operator
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kombu import serialization
from kombu.exceptions import KombuError
from kombu.utils.json import dumps as json_dumps

from celery_syncguard.core.config import suggest
from celery_syncguard.core.key import task_key
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey

__all__ = ["Parameters", "Template", "arguments_key", "as_sent", "fingerprint"]

#: Types that every serializer hands on as they are.
_UNCHANGED = frozenset({str, int, float, bool, type(None)})


def as_sent(args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments as a worker gets them from this serializer: so the first attempt, a retry of it and a message that was
    sent by name have one form of them, and one key.
    """
    if serializer == "pickle" or all(type(one) in _UNCHANGED for one in (*args, *kwargs.values())):
        return args, kwargs
    try:
        content_type, encoding, data = serialization.dumps((args, kwargs), serializer)  # type: ignore[no-untyped-call]
        args, kwargs = serialization.loads(data, content_type, encoding, accept=[content_type])  # type: ignore[no-untyped-call]
    except KombuError:
        # The publish will raise this. An eager call sends nothing.
        return args, kwargs
    return tuple(args), kwargs


class _KeyFormatter(string.Formatter):
    """Formats arguments as they look after a serializer, so that all forms of a value make one key."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return cast("str", super().format_field(plain(value) if not format_spec else value, format_spec))


_formatter = _KeyFormatter()

_PLAIN = frozenset({str, int})
_SCALARS = (int, float, type(None))
_first = operator.itemgetter(0)


def plain(value: Any) -> Any:
    """A value in the form that JSON gives it, for the types that have one."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return dict(sorted(((_name(key), plain(one)) for key, one in value.items()), key=_first))
    if isinstance(value, (set, frozenset)):
        return sorted((plain(one) for one in value), key=repr)
    if not isinstance(value, (*_SCALARS, str, bytes)) and f"{id(value):x}" in str(value):
        # An equal value in another process would make another key, and nothing would be locked.
        raise InvalidKey(f"a {type(value).__name__} has no text but its address in memory: name what tells it apart")
    return value


def _name(key: Any) -> str:
    """The key of a dict as JSON makes it: text, whatever it was."""
    key = plain(key)
    return key if isinstance(key, str) else json.dumps(key) if isinstance(key, _SCALARS) else str(key)


class Template:
    """A key over the arguments of a task.

    Arguments:
        text: a format string with the names of the signature's parameters, such as `"invoice:{invoice_id}"`.
        parameters: of the task's function, without self.
        what: the option's name, for messages.

    Raises:
        ImproperlyConfigured: a name that the signature lacks, or no valid format string.
    """

    __slots__ = ("_names", "_parameters", "_parts", "_text", "_what")

    def __init__(self, text: str, parameters: Parameters, *, what: str) -> None:
        self._text = text
        self._parameters = parameters
        self._what = what
        signature = parameters.signature
        if not text:
            raise ImproperlyConfigured(f"{what} is empty")
        open_ended = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        try:
            parsed = list(_formatter.parse(text))
        except ValueError as exc:
            raise ImproperlyConfigured(f"{what} {text!r} is not a format string: {exc}") from exc
        fields = [field for _, field, _, _ in parsed if field is not None]
        # Most templates only name arguments. Joining their parts takes a tenth of the formatter's time.
        simple = all(field.isidentifier() for field in fields) and not any(spec or how for _, _, spec, how in parsed)
        self._parts = [(literal, field) for literal, field, _, _ in parsed] if simple else None
        self._names = [field.split(".")[0].split("[")[0] for field in fields]
        for name in self._names:
            if not name or name.isdigit():
                raise ImproperlyConfigured(f"{what} {text!r}: name the argument, as in '{{invoice_id}}'")
            if name not in signature.parameters and not open_ended:
                known = ", ".join(signature.parameters) or "no arguments"
                raise ImproperlyConfigured(
                    f"{what} {text!r} uses {name!r}, but the task takes {known}{suggest(name, signature.parameters)}"
                )

    def render(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The key for these arguments; positional, keyword and default forms make the same one.

        Raises:
            InvalidKey: the arguments do not fit the signature, or lack what the template names.
        """
        if not self._names:
            return task_key(self._format({}), what=self._what)
        try:
            return task_key(self._format(self._parameters.bind(args, kwargs)), what=self._what)
        except (LookupError, AttributeError, TypeError, ValueError) as exc:
            if isinstance(exc, InvalidKey):
                raise
            why = repr(exc)
            if isinstance(exc, KeyError) and args and self._parameters.hides_names:
                why = (
                    f"{exc} was not given by its name, and the task's function, perhaps a decorator's, takes *args: give it as a "
                    f"keyword argument, or make {self._what} a callable"
                )
            raise InvalidKey(f"{self._what} {self._text!r} cannot be made from these arguments: {why}") from exc

    def _format(self, named: Mapping[str, Any]) -> str:
        if self._parts is None:
            return _formatter.vformat(self._text, (), named)
        return "".join(
            literal if name is None else literal + format(plain(named[name])) for literal, name in self._parts
        )


class Parameters:
    """The parameters of a task, which give arguments their names."""

    __slots__ = ("_defaults", "_names", "_ordinary", "hides_names", "signature")

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        parameters = signature.parameters.values()
        self._ordinary = all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
        self._names = tuple(signature.parameters)
        #: Whether positional arguments have no names.
        self.hides_names = any(one.kind is one.VAR_POSITIONAL for one in parameters)
        self._defaults = {one.name: one.default for one in parameters if one.default is not one.empty}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults applied, those of `**kwargs` among them.

        Raises:
            TypeError: they do not fit.
        """
        if self._ordinary and not kwargs and len(args) == len(self._names):
            return dict(zip(self._names, args, strict=True))
        if self._ordinary and len(args) <= len(self._names):
            named = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
            # They fit if none is missing, unknown or given twice. If they do not, `inspect` raises below.
            if named.keys() == set(self._names) and kwargs.keys().isdisjoint(self._names[: len(args)]):
                return named
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(name))
        return named


def fingerprint(parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """A hash that differs where arguments with the same key differ. None if they have no known canonical form, or do not fit."""
    try:
        return _digest(parameters.bind(args, kwargs))
    except Exception:  # noqa: BLE001 - the arguments' own code runs here, and must not make a publish fail
        return None


def _digest(arguments: Mapping[str, Any]) -> str:
    encoded = json_dumps(plain(dict(arguments)))  # type: ignore[no-untyped-call]
    canonical = json.dumps(json.loads(encoded), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def arguments_key(name: str, serializer: str, arguments: Mapping[str, Any]) -> str:
    """`dedup_key=True`: the task's name and a hash of what the serializer makes of its arguments.

    Raises:
        kombu.exceptions.EncodeError: the serializer refuses an argument, as it would when publishing.
        InvalidKey: no canonical form is known for an argument that only pickle can carry.
    """
    serialization.dumps(dict(arguments), serializer=serializer)  # type: ignore[no-untyped-call]
    try:
        digest = _digest(arguments)
    except (TypeError, ValueError) as exc:
        raise InvalidKey(
            f"dedup_key=True cannot tell when two of these arguments are equal ({exc}): give a template or a callable"
        ) from exc
    # The label is for people and may be cut; the hash carries the difference.
    label = name.encode(errors="replace")[:200].decode(errors="ignore")
    return task_key(f"{label}:{digest}", what="dedup_key")
