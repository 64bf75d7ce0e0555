"""The options of one task, checked when the task is registered, and the keys that they make.

An option is a class attribute of the task, or given per call (`apply_async(lock_ttl=5)`, `sig.set(lock_ttl=5)`) and then
carried in the message. Not here: what is done with them (`task`, `dedup`).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import hashlib
import inspect
import json
import operator
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from kombu import serialization
from kombu.exceptions import KombuError
from kombu.utils.json import dumps as json_dumps

from celery_syncguard.core.config import DEFAULT_TTL, suggest
from celery_syncguard.core.key import task_key
from celery_syncguard.core.lease import seconds, ttl_seconds
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey

__all__ = ["OPTIONS", "KeySource", "Parameters", "TaskOptions", "Template"]

_YEAR = 366 * 86_400.0

KeySource = str | Callable[..., str] | None


def _choice(*allowed: str) -> Callable[[Any, str], Any]:
    def check(value: Any, name: str) -> Any:
        if value not in allowed:
            raise ImproperlyConfigured(f"{name} is one of {', '.join(map(repr, allowed))}, got {value!r:.80}")
        return value

    return check


def _seconds(minimum: float, maximum: float) -> Callable[[Any, str], float]:
    return lambda value, name: seconds(value, what=name, minimum=minimum, maximum=maximum)


def _bounds(value: Any, name: str) -> tuple[float, float]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        low = seconds(value[0], what=f"{name}[0]", minimum=0.01, maximum=86_400.0)
        return low, seconds(value[1], what=f"{name}[1]", minimum=low, maximum=86_400.0)
    low = seconds(value, what=name, minimum=0.01, maximum=86_400.0)
    return low, max(low, 60.0)


def _deaths(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise ImproperlyConfigured(f"{name} is a whole number from 1, got {value!r:.80}")
    return value


def _key(value: Any, name: str) -> Any:
    if value is None or isinstance(value, str) or callable(value):
        return value
    raise ImproperlyConfigured(f"{name} is a template, a callable or None, got {type(value).__name__}")


def _key_or_true(value: Any, name: str) -> Any:
    return value if value is True else _key(None if value is False else value, name)


def _run_once(value: Any, name: str) -> Any:
    return value if isinstance(value, bool) else _key(value, name) or False


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "lock_key": _key,
    "lock_ttl": lambda value, name: ttl_seconds(value, what=name),
    "lock_wait": _seconds(0.0, 86_400.0),
    "lock_on_held": _choice("retry", "skip", "raise"),
    "lock_retry_delay": _bounds,
    "lock_on_lost": _choice("interrupt", "continue"),
    "lock_on_unavailable": _choice("retry", "raise", "run"),
    "lock_min_hold": _seconds(0.0, 86_400.0),
    "lock_max_deaths": _deaths,
    "dedup_key": _key_or_true,
    "dedup_until": _choice("start", "done", "ttl"),
    "dedup_ttl": _seconds(1.0, _YEAR),
    "dedup_on_duplicate": _choice("return", "raise"),
    "run_once": _run_once,
    "run_once_ttl": _seconds(1.0, 10 * _YEAR),
}

#: Seconds.
DEFAULT_DEDUP_TTL = 3600.0

OPTIONS = frozenset(_CHECKS)
_PREFIXES = ("lock_", "dedup_", "run_once")


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOptions:
    """All options of a task, checked. Seconds are floats."""

    lock_key: Any = None
    lock_ttl: float = DEFAULT_TTL
    lock_wait: float = 0.0
    lock_on_held: str = "retry"
    lock_retry_delay: tuple[float, float] = (1.0, 60.0)
    lock_on_lost: str = "interrupt"
    lock_on_unavailable: str = "retry"
    lock_min_hold: float = 0.0
    lock_max_deaths: int = 5
    dedup_key: Any = None
    dedup_until: Literal["start", "done", "ttl"] = "done"
    dedup_ttl: float = DEFAULT_DEDUP_TTL
    dedup_on_duplicate: str = "return"
    run_once: Any = False
    run_once_ttl: float = 7 * 86_400.0

    @classmethod
    def of_class(cls, task: type, *, lock_ttl: float) -> TaskOptions:
        """What the class and its bases say; `lock_ttl` is the default for that option.

        Raises:
            ImproperlyConfigured: an unknown name that looks like an option, or a value that cannot be meant.
        """
        given: dict[str, Any] = {"lock_ttl": lock_ttl}
        for base in reversed(task.__mro__):
            for name, value in vars(base).items():
                if name in OPTIONS:
                    # A plain function in a class is a method: called as lock_key(task, args, kwargs).
                    given[name] = value.__func__ if isinstance(value, staticmethod) else value
                elif name.startswith(_PREFIXES) and not (callable(value) or hasattr(value, "__get__")):
                    raise ImproperlyConfigured(f"{task.__name__}: unknown option {name}{suggest(name, OPTIONS)}")
        if given.get("lock_key", ...) is ...:
            if not given.get("dedup_key") and not given.get("run_once"):
                raise ImproperlyConfigured(
                    f"{task.__name__} needs lock_key, such as lock_key='report:{{report_id}}'; lock_key=None runs it "
                    f"without a lock"
                )
            given["lock_key"] = None
        options = cls().checked(given, owner=task.__name__)
        for contradicts, sentence in _CONTRADICTIONS:
            if contradicts(options):
                raise ImproperlyConfigured(f"{task.__name__}: {sentence}")
        if "lock_max_deaths" in given and not options.lock_key and not options.run_once:
            raise ImproperlyConfigured(
                f"{task.__name__}: lock_max_deaths needs a lock_key or run_once, as deaths are counted by the lock that the "
                f"process held"
            )
        return options

    def replace(self, overrides: Mapping[str, Any]) -> TaskOptions:
        """These options with some given per call.

        Raises:
            ImproperlyConfigured: as `of_class`.
        """
        return self.checked(overrides, owner="apply_async") if overrides else self

    def checked(self, given: Mapping[str, Any], *, owner: str) -> TaskOptions:
        """`replace`, with a name for the messages."""
        values = {}
        for name, value in given.items():
            check = _CHECKS.get(name)
            if check is None:
                raise ImproperlyConfigured(f"{owner}: unknown option {name}{suggest(name, OPTIONS)}")
            values[name] = check(value, f"{owner}: {name}")
        return dataclasses.replace(self, **values)


#: What cannot be meant together, and what to do. docs/dedup.md lists them.
_CONTRADICTIONS: tuple[tuple[Callable[[TaskOptions], bool], str], ...] = (
    (lambda options: bool(options.lock_min_hold and not options.lock_key), "lock_min_hold needs a lock_key"),
    (
        lambda options: bool(
            options.dedup_key and options.dedup_until == "start" and options.lock_key and options.lock_on_held == "skip"
        ),
        (
            'dedup_until="start" with lock_on_held="skip" would skip the very run that is to see what changed after the start of '
            'the one before: use lock_on_held="retry", or dedup_until="done"'
        ),
    ),
    (
        lambda options: bool(
            options.dedup_key and options.dedup_until == "start" and options.run_once not in (False, True)
        ),
        (
            'dedup_until="start" with a key for run_once would answer the run that is to see what changed with the result of the '
            'one before: use run_once=True, or dedup_until="done"'
        ),
    ),
)


def take_overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Remove our options from the keyword arguments of a call and return them.

    Raises:
        ImproperlyConfigured: a name that looks like one of ours, but is not.
    """
    ours = {}
    for name in [name for name in options if name.startswith(_PREFIXES)]:
        if name not in OPTIONS:
            raise ImproperlyConfigured(f"apply_async: unknown option {name}{suggest(name, OPTIONS)}")
        ours[name] = options.pop(name)
    return ours


def portable(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as a message can carry them: keys are sent as text apart from this, durations as numbers."""
    return {
        name: value.total_seconds() if isinstance(value, dt.timedelta) else value
        for name, value in overrides.items()
        if not callable(value)
    }


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
        # What is wrong with them is for the publish to say. An eager call sends nothing.
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
        # Most templates only name arguments. Those are put together here, at a tenth of what the formatter costs.
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
            # They fit if none is missing, none is unknown and none is given twice. If not, `inspect` says what is wrong.
            if named.keys() == set(self._names) and kwargs.keys().isdisjoint(self._names[: len(args)]):
                return named
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(name))
        return named


def fingerprint(arguments: Mapping[str, Any]) -> str | None:
    """Tells arguments apart where a key calls them the same work. None if no canonical form of them is known."""
    try:
        return _digest(arguments)
    except Exception:  # noqa: BLE001 - their own code makes text of them, and no publish fails for this
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
