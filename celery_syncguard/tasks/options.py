"""The options of a task: their names, types and defaults, and the checks.

An option is a class attribute of the task, checked when the task is registered, or is given for one call
(`apply_async(lock_ttl=5)`, `sig.set(lock_ttl=5)`), checked before anything is sent, and then carried in the message.

To add one: a row in `OptionDefaults`, in `LockOptions`, in `TaskOptions` and in `_CHECKS`, and in the README's table. Tests compare
them. Not here: what is done with an option (`delivery`, `publishing`), and the keys (`keys`).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, TypedDict, get_args

from celery_syncguard.core.config import DEFAULT_TTL, suggest
from celery_syncguard.core.lease import seconds, ttl_seconds
from celery_syncguard.errors import ImproperlyConfigured

__all__ = [
    "DEFAULTS",
    "OPTIONS",
    "CallOptions",
    "LockOptions",
    "OptionDefaults",
    "TaskOptions",
    "portable",
    "take_overrides",
]

_DAY = 86_400.0
_YEAR = 366 * _DAY

Key = str | Callable[..., str] | None
Seconds = float | dt.timedelta
RetryDelay = Seconds | tuple[Seconds, Seconds] | list[Seconds]
OnHeld = Literal["retry", "skip", "raise"]
OnLost = Literal["interrupt", "continue"]
OnUnavailable = Literal["retry", "raise", "run"]
Until = Literal["start", "done", "ttl"]
OnDuplicate = Literal["return", "raise"]


class OptionDefaults:
    """Every option, its type and its default. Durations are seconds or a `timedelta`; the README's table says more."""

    lock_key: Key = ...  # type: ignore[assignment]  # required
    """Required: a template ("invoice:{invoice_id}"), a callable (task, args, kwargs) -> str, or None for no lock."""
    lock_ttl: ClassVar[Seconds] = DEFAULT_TTL
    """Seconds that a dead holder blocks others; not how long work may take. The setting `syncguard_lock_ttl` is its default."""
    lock_wait: ClassVar[Seconds] = 0.0
    """Seconds to wait in the worker for a held lock, before `lock_on_held` applies."""
    lock_on_held: ClassVar[OnHeld] = "retry"
    """When the lock is held: "retry" comes back later, "skip" ends as SKIPPED, "raise" fails with LockHeld."""
    lock_retry_delay: ClassVar[RetryDelay] = (1.0, 60.0)
    """Lower and upper bound, in seconds, of the random wait before a task comes back; or the lower one only."""
    lock_on_lost: ClassVar[OnLost] = "interrupt"
    """When the lease is lost: "interrupt" raises LeaseLost inside the body; "continue" leaves it to `self.lease.check()`."""
    lock_on_unavailable: ClassVar[OnUnavailable] = "retry"
    """When PostgreSQL does not answer: "retry" comes back later, "raise" fails, "run" runs unlocked."""
    lock_min_hold: ClassVar[Seconds] = 0.0
    """Seconds, from the acquire, for which the key stays taken after a shorter task."""
    lock_max_deaths: ClassVar[int] = 5
    """After so many deaths in a row of the process that ran it under its lock, a task fails with TooManyDeaths."""
    dedup_key: Key | bool = None
    """A template, a callable, or True for the task's name and arguments: work that is queued or running is not queued again."""
    dedup_until: ClassVar[Until] = "done"
    """A duplicate is one until the task starts ("start"), has ended ("done"), or `dedup_ttl` is over ("ttl")."""
    dedup_ttl: ClassVar[Seconds] = 3600.0
    """Seconds that a claim lasts at most, also when its message is lost."""
    dedup_on_duplicate: ClassVar[OnDuplicate] = "return"
    """For a duplicate: "return" the existing task's result, whose `.duplicate` is true, or "raise" DuplicateTask."""
    run_once: Key | bool = False
    """True (per task id), a template or a callable: completed work is remembered and not repeated."""
    run_once_ttl: ClassVar[Seconds] = 7 * _DAY
    """Seconds for which completed work is remembered."""

    def __setattr__(self, name: str, value: Any) -> None:
        # A dataclass sets what its class has.
        if name in OPTIONS and value != getattr(type(self), name):
            raise ImproperlyConfigured(
                f"{name} cannot be set on a task that exists, as options are read from its class when it is registered: set it in "
                f"the class or the decorator, or for one call with apply_async({name}=...)"
            )
        super().__setattr__(name, value)


class LockOptions(TypedDict, total=False):
    """The options that one call may override: `task.apply_async(args, lock_ttl=5)`. Their meaning is `OptionDefaults`'s."""

    lock_key: Key
    lock_ttl: Seconds
    lock_wait: Seconds
    lock_on_held: OnHeld
    lock_retry_delay: RetryDelay
    lock_on_lost: OnLost
    lock_on_unavailable: OnUnavailable
    lock_min_hold: Seconds
    lock_max_deaths: int
    dedup_key: Key | bool
    dedup_until: Until
    dedup_ttl: Seconds
    dedup_on_duplicate: OnDuplicate
    run_once: Key | bool
    run_once_ttl: Seconds


class CeleryOptions(TypedDict, total=False):
    """What the documents of Celery's `apply_async` and kombu's `Producer.publish` name, beside what has a parameter of its own."""

    countdown: float | None
    eta: dt.datetime | None
    expires: float | dt.datetime | None
    queue: Any
    exchange: Any
    exchange_type: str | None
    routing_key: str | None
    priority: int | None
    serializer: str | None
    compression: str | None
    headers: Mapping[str, Any] | None
    retry: bool | None
    retry_policy: Mapping[str, Any] | None
    time_limit: float | None
    soft_time_limit: float | None
    ignore_result: bool | None
    add_to_parent: bool
    connection: Any
    publisher: Any
    reply_to: str | None
    delivery_mode: int | str | None
    mandatory: bool
    immediate: bool
    content_type: str | None
    content_encoding: str | None
    expiration: float | None
    declare: Sequence[Any] | None
    timeout: float | None
    confirm_timeout: float | None


class CallOptions(LockOptions, CeleryOptions, total=False):
    """The keyword arguments of `LockedTask.apply_async`."""


class SignatureOptions(CallOptions, total=False):
    """The keyword arguments of a signature's `set` and `apply_async`."""

    task_id: str | None
    producer: Any
    link: Any
    link_error: Any
    shadow: str | None


def _choice(literal: Any) -> Callable[[Any, str], Any]:
    allowed = get_args(literal)

    def check(value: Any, name: str) -> Any:
        if value not in allowed:
            raise ImproperlyConfigured(f"{name} is one of {', '.join(map(repr, allowed))}, got {value!r:.80}")
        return value

    return check


def _seconds(minimum: float, maximum: float) -> Callable[[Any, str], float]:
    return lambda value, name: seconds(value, what=name, minimum=minimum, maximum=maximum)


def _bounds(value: Any, name: str) -> tuple[float, float]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        low = seconds(value[0], what=f"{name}[0]", minimum=0.01, maximum=_DAY)
        return low, seconds(value[1], what=f"{name}[1]", minimum=low, maximum=_DAY)
    low = seconds(value, what=name, minimum=0.01, maximum=_DAY)
    return low, max(low, 60.0)


def _deaths(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise ImproperlyConfigured(f"{name} is a whole number from 1, got {value!r:.80}")
    return value


def _key(value: Any, name: str) -> Any:
    if value is None or isinstance(value, str) or callable(value):
        return value
    raise ImproperlyConfigured(f"{name} is a template, a callable or None, got {type(value).__name__}")


def _key_or_bool(value: Any, name: str) -> Any:
    return value if isinstance(value, bool) else _key(value, name)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "lock_key": _key,
    "lock_ttl": lambda value, name: ttl_seconds(value, what=name),
    "lock_wait": _seconds(0.0, _DAY),
    "lock_on_held": _choice(OnHeld),
    "lock_retry_delay": _bounds,
    "lock_on_lost": _choice(OnLost),
    "lock_on_unavailable": _choice(OnUnavailable),
    "lock_min_hold": _seconds(0.0, _DAY),
    "lock_max_deaths": _deaths,
    "dedup_key": _key_or_bool,
    "dedup_until": _choice(Until),
    "dedup_ttl": _seconds(1.0, _YEAR),
    "dedup_on_duplicate": _choice(OnDuplicate),
    "run_once": _key_or_bool,
    "run_once_ttl": _seconds(1.0, 10 * _YEAR),
}

OPTIONS = frozenset(_CHECKS)
_PREFIXES = ("lock_", "dedup_", "run_once")
#: The options that may be a function.
_KEYS = ("lock_key", "dedup_key", "run_once")


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOptions:
    """All options of a task, checked. Durations are floats, in seconds."""

    lock_key: Any
    lock_ttl: float
    lock_wait: float
    lock_on_held: OnHeld
    lock_retry_delay: tuple[float, float]
    lock_on_lost: OnLost
    lock_on_unavailable: OnUnavailable
    lock_min_hold: float
    lock_max_deaths: int
    dedup_key: Any
    dedup_until: Until
    dedup_ttl: float
    dedup_on_duplicate: OnDuplicate
    run_once: Any
    run_once_ttl: float

    @classmethod
    def of_class(cls, task: type, *, lock_ttl: float = DEFAULT_TTL) -> TaskOptions:
        """What the class and its bases say; `lock_ttl` is the default for that option.

        Raises:
            ImproperlyConfigured: an unknown name that looks like an option, or an invalid value.
        """
        given: dict[str, Any] = {}
        for base in reversed(task.__mro__):
            for name, value in vars(base).items() if base is not OptionDefaults else ():
                if name in OPTIONS:
                    # A plain function in a class is a method: called as lock_key(task, args, kwargs).
                    given[name] = value.__func__ if isinstance(value, staticmethod) else value
                elif _is_misspelt(name, is_code=callable(value) or hasattr(value, "__get__")):
                    raise _unknown(task.__name__, name)
        if "lock_key" not in given and not given.get("dedup_key") and not given.get("run_once"):
            raise ImproperlyConfigured(
                f"{task.__name__} needs lock_key, such as lock_key='report:{{report_id}}'; lock_key=None runs it without a lock"
            )
        options = DEFAULTS.replace({"lock_ttl": lock_ttl, **given}, owner=task.__name__)
        if contradiction := options.contradiction(deaths_given="lock_max_deaths" in given):
            raise ImproperlyConfigured(f"{task.__name__}: {contradiction}")
        return options

    def replace(self, given: Mapping[str, Any], *, owner: str = "apply_async") -> TaskOptions:
        """These options with some others, checked; `owner` begins the error's text.

        Raises:
            ImproperlyConfigured: as `of_class`.
        """
        if not given:
            return self
        for name in given:
            if name not in OPTIONS:
                raise _unknown(owner, name)
        return dataclasses.replace(
            self, **{name: _CHECKS[name](value, f"{owner}: {name}") for name, value in given.items()}
        )

    def contradiction(self, *, deaths_given: bool) -> str | None:
        """Which options exclude each other, and what to do. docs/dedup.md lists them."""
        if self.lock_min_hold and not self.lock_key:
            return "lock_min_hold needs a lock_key"
        if self.dedup_key and self.dedup_until == "start":
            if self.lock_key and self.lock_on_held == "skip":
                return (
                    'dedup_until="start" with lock_on_held="skip" would skip the run that has to see what changed since the '
                    'previous run started: use lock_on_held="retry", or dedup_until="done"'
                )
            if self.run_once not in (None, False, True):
                return (
                    'dedup_until="start" with a key for run_once would answer the run that has to see what changed with the '
                    'result of the previous run: use run_once=True, or dedup_until="done"'
                )
        if deaths_given and not self.lock_key and not self.run_once:
            return (
                "lock_max_deaths needs a lock_key or run_once, as deaths are counted by the lock that the process held"
            )
        return None


#: `lock_key` has no default: `of_class` asks for it.
DEFAULTS = TaskOptions(
    **{name: check(vars(OptionDefaults)[name] if name != "lock_key" else None, name) for name, check in _CHECKS.items()}
)


def _is_misspelt(name: str, *, is_code: bool = False) -> bool:
    """Whether an unknown name is meant as an option: it begins like one, or almost is one.

    Arguments:
        is_code: it names a method or a property, which are the task's own unless they almost have an option's name.
    """
    if not is_code and name.startswith(_PREFIXES):
        return True
    return name[:1] in ("l", "d", "r") and bool(
        get_close_matches(name, _KEYS if is_code else OPTIONS, n=1, cutoff=0.85)
    )


def _unknown(owner: str, name: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"{owner}: unknown option {name}{suggest(name, OPTIONS)}")


def take_overrides(options: dict[str, Any], *, owner: str = "apply_async") -> dict[str, Any]:
    """Remove our options from the keyword arguments of a call and return them.

    Raises:
        ImproperlyConfigured: an unknown name that looks like one of ours.
    """
    for name in options:
        if name not in CallOptions.__optional_keys__ and _is_misspelt(name):
            raise _unknown(owner, name)
    return {name: options.pop(name) for name in list(options) if name in OPTIONS}


def portable(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as a message can carry them: keys are sent as text apart from this, durations as numbers."""
    return {
        name: value.total_seconds() if isinstance(value, dt.timedelta) else value
        for name, value in overrides.items()
        if not callable(value)
    }
