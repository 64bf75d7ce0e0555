"""A hybrid logical clock: numbers that sort effects after causes, also when machines disagree about the time.

A stamp is ``wall_ms * 1000 + counter + 1``: milliseconds since 1970 in front, so that stamps of machines with good
clocks sort by time, and a counter behind, so that they still rise when a clock stalls or goes back. The format, the
range (1 to 2^53 - 1, exact in JSON numbers, JavaScript and a PostgreSQL ``bigint``) and the rules are those of
baukit-sync, so that services in Rust and TypeScript can stamp the same rows.

Invariants:

- Every stamp of one clock is higher than all its earlier ones and than every stamp it has observed.
- A call that raises leaves the clock as it was.
- No stamp runs ahead of the fastest physical clock by more than a millisecond for each 1000 events.
- A clock that is ahead of its own machine's time logs it. Only `reset` takes it back: stamps fall only by a decision.

Not here: Celery (`stamps`), storage (the caller keeps `HybridLogicalClock.to_json`), and any rule about which of two
concurrent writes wins: a clock orders, it does not merge.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import final, overload

from celery_syncguard.core import clock as local_clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.process import forget_in_children
from celery_syncguard.errors import SyncGuardError

__all__ = [
    "MAX_STAMP",
    "EmptyDeviceId",
    "ExceedsSafeInteger",
    "HlcError",
    "HybridLogicalClock",
    "InvalidComponent",
    "InvalidPhysicalClock",
    "InvalidTimestamp",
    "Timestamp",
    "TooFarAhead",
    "compare",
    "decode",
    "encode",
]

MAX_STAMP = 2**53 - 1
_COUNTERS = 1000  # stamps that one millisecond has room for
_TOLD_AHEAD = 60.0  # seconds, for a clock without max_drift


class HlcError(SyncGuardError, ValueError):
    """The root of this module's errors; the clock is unchanged by all of them."""


class InvalidComponent(HlcError):
    """A wall time below 0 or a counter outside 0..999. Attributes: `wall_ms`, `counter`."""

    wall_ms: object = None
    counter: object = None


class InvalidTimestamp(HlcError):
    """Not an integer from 1 to 2^53 - 1, so no stamp. Attribute: `value`."""

    value: object = None


class ExceedsSafeInteger(HlcError):
    """The stamp would be above 2^53 - 1, which is in the year 2255. Attributes: `wall_ms`, `counter`."""

    wall_ms: int = 0
    counter: int = 0


class InvalidPhysicalClock(HlcError):
    """The physical clock did not return an int of milliseconds from 0 to 2^53 - 1. Attribute: `value`."""

    value: object = None


class EmptyDeviceId(HlcError):
    """The device id is blank. It breaks ties between clocks."""


class TooFarAhead(HlcError):
    """A remote stamp is further in the future than `max_drift` allows.

    Attributes: `stamp`; `ahead` and `max_drift` in seconds.
    """

    stamp: int = 0
    ahead: float = 0.0
    max_drift: float = 0.0


@final
class Timestamp(int):
    """A valid stamp; an ``int`` everywhere else (JSON, ``bigint``, comparison)."""

    __slots__ = ()

    def __new__(cls, value: int) -> Timestamp:
        """``value``: an int from 1 to 2^53 - 1, or `InvalidTimestamp`."""
        if not _is_int(value) or not 1 <= value <= MAX_STAMP:
            raise InvalidTimestamp(f"a stamp is an int from 1 to {MAX_STAMP}, got {value!r:.80}", value=value)
        return super().__new__(cls, value)

    @property
    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return (int(self) - 1) // _COUNTERS

    @property
    def counter(self) -> int:
        """0 to 999 within that millisecond."""
        return (int(self) - 1) % _COUNTERS


def encode(wall_ms: int, counter: int) -> Timestamp:
    """Return the stamp of a wall time (milliseconds since 1970) and a counter (0 to 999).

    Raises `InvalidComponent` for parts out of range, `ExceedsSafeInteger` for a result above `MAX_STAMP`.
    """
    if not _is_int(wall_ms) or not _is_int(counter) or wall_ms < 0 or not 0 <= counter < _COUNTERS:
        raise InvalidComponent(
            f"wall_ms is an int >= 0 and counter one from 0 to 999, got {wall_ms!r} and {counter!r}",
            wall_ms=wall_ms,
            counter=counter,
        )
    stamp = wall_ms * _COUNTERS + counter + 1
    if stamp > MAX_STAMP:
        raise ExceedsSafeInteger(
            f"the stamp of {wall_ms} ms, counter {counter}, is above {MAX_STAMP}", wall_ms=wall_ms, counter=counter
        )
    return Timestamp(stamp)


def decode(stamp: int) -> tuple[int, int]:
    """Return ``(wall_ms, counter)`` of a stamp, or raise `InvalidTimestamp`."""
    valid = Timestamp(stamp)
    return valid.wall_ms, valid.counter


@overload
def compare(left: int, right: int) -> int: ...
@overload
def compare(left: tuple[int, str], right: tuple[int, str]) -> int: ...
def compare(left: int | tuple[int, str], right: int | tuple[int, str]) -> int:
    """Return -1, 0 or 1 as ``left`` sorts before, with or after ``right``.

    Both are stamps, or both are pairs ``(stamp, device_id)``. Pairs are a total order over all clocks: equal stamps
    of two clocks sort by device id, by code point. In SQL that is ``order by hlc, device_id collate "C"``.

    Raises `InvalidTimestamp` for what is no stamp, ``TypeError`` for a stamp beside a pair.
    """
    if isinstance(left, tuple) != isinstance(right, tuple):
        raise TypeError("compare two stamps or two (stamp, device_id) pairs, not one of each")
    first, second = _order(left), _order(right)
    return (first > second) - (first < second)


@dataclass(frozen=True, slots=True)
class _State:
    wall_ms: int = 0
    counter: int = 0


class HybridLogicalClock:
    """One clock of one process: `now` for what happens here, `observe` for what arrives.

    Safe to share between threads and greenlets. Not safe to call from a signal handler. After a fork the child's
    copy goes on from the parent's stamps with a device id of its own, so that two processes never stamp alike.
    """

    def __init__(
        self,
        device_id: str,
        *,
        max_drift: float | timedelta | None = None,
        physical: Callable[[], int] = local_clock.wall_ms,
    ) -> None:
        """``device_id``: names this clock, unique among all that stamp the same rows.

        ``max_drift``: seconds that an observed stamp may be ahead of this machine's clock; ``None``: any.
        ``physical``: returns milliseconds since 1970 as an int.

        Raises `EmptyDeviceId`, or ``ValueError`` for a ``max_drift`` that is not a number >= 0.
        """
        if not device_id.strip():
            raise EmptyDeviceId("device_id is blank: name this clock")
        seconds = max_drift.total_seconds() if isinstance(max_drift, timedelta) else max_drift
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"max_drift is seconds >= 0, got {max_drift!r}")
        self._origin = device_id
        self._device_id = device_id
        self._max_drift = seconds
        self._physical = physical
        self._lock = threading.Lock()
        self._state = _State()
        self._told_above = int((_TOLD_AHEAD if seconds is None else seconds) * 1000)
        self._told = False
        forget_in_children(self)

    @classmethod
    def from_json(
        cls,
        text: str | bytes | None,
        *,
        device_id: str,
        max_drift: float | timedelta | None = None,
        physical: Callable[[], int] = local_clock.wall_ms,
    ) -> HybridLogicalClock:
        """Return a clock that continues from what `to_json` returned; the other arguments as for the constructor.

        ``None``, corrupt text and the state of another device start from zero: a clock must come up, and the first
        physical reading or observed stamp moves it to the present.
        """
        clock = cls(device_id, max_drift=max_drift, physical=physical)
        clock._state = _parse(text, device_id)
        return clock

    def to_json(self) -> str:
        """Return the state as ``{"wallTimeMs": …, "counter": …, "deviceId": …}``, baukit's names."""
        with self._lock:
            state, device_id = self._state, self._device_id
        return json.dumps({"wallTimeMs": state.wall_ms, "counter": state.counter, "deviceId": device_id})

    @property
    def device_id(self) -> str:
        """Who stamps: as given, or after a fork with ``.pid-random`` added."""
        return self._device_id

    @property
    def ahead(self) -> float:
        """Seconds by which this clock is ahead of its machine's time now, or 0.0; or `InvalidPhysicalClock`.

        A little is usual: it follows the fastest clock whose stamps it observed. Much of it means that this machine's time,
        or a sender's, was far in the future for a moment; others may refuse its stamps. See `reset`.
        """
        return max(0, self._state.wall_ms - self._read_physical()) / 1000

    def reset(self) -> None:
        """Forget the state, so that the next stamp is that of the machine's time: for a clock that is far `ahead`.

        Its stamps may then be lower than its earlier ones. Rows that carry those must be stamped again, or they win over
        every later write (docs/hlc.md has the statement).
        """
        with self._lock:
            self._state = _State()
            self._told = False

    def now(self) -> Timestamp:
        """Return a stamp for an event here: higher than every one returned or observed before.

        Raises `InvalidPhysicalClock` or `ExceedsSafeInteger`.
        """
        physical = self._read_physical()
        with self._lock:
            last = self._state
            if physical > last.wall_ms:
                self._told = False
                return self._advance(physical, 0)
            stamp = self._advance(last.wall_ms, last.counter + 1)
        if last.wall_ms - physical > self._told_above:
            self._tell(last.wall_ms - physical)
        return stamp

    def observe(self, remote: int) -> Timestamp:
        """Take in the stamp of an event elsewhere and return one that is higher than it and than all before.

        Raises `InvalidTimestamp`, `TooFarAhead` (only with ``max_drift``), `InvalidPhysicalClock` or
        `ExceedsSafeInteger`.
        """
        remote_wall, remote_counter = decode(remote)
        physical = self._read_physical()
        if self._max_drift is not None and remote_wall - physical > self._max_drift * 1000:
            ahead = (remote_wall - physical) / 1000
            raise TooFarAhead(
                f"stamp {remote} is {ahead:.3f} s ahead of this machine's clock, at most {self._max_drift:g} s are allowed",
                stamp=remote,
                ahead=ahead,
                max_drift=self._max_drift,
            )
        with self._lock:
            last = self._state
            # A physical reading that is the highest starts its millisecond: counter -1 + 1.
            wall, counter = max((physical, -1), (last.wall_ms, last.counter), (remote_wall, remote_counter))
            stamp = self._advance(wall, counter + 1)
        if wall - physical > self._told_above:
            self._tell(wall - physical)
        return stamp

    def forget(self) -> None:
        """Become another clock than the parent's; called in a forked child, before any other thread runs there."""
        # A thread of the parent may have held the lock at the fork; in the child no thread would release it.
        self._lock = threading.Lock()
        self._device_id = f"{self._origin}.{os.getpid()}-{secrets.token_hex(4)}"

    def _tell(self, ahead_ms: int) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "the hybrid logical clock of %s is %.0f s ahead of this machine's time: others may refuse its stamps, and "
                "what it stamps wins over later writes (a clock was far in the future; see reset in docs/hlc.md)",
                self._device_id,
                ahead_ms / 1000,
            )

    def _read_physical(self) -> int:
        # Outside the lock: it is the caller's code. An old reading is only a lower bound.
        value = self._physical()
        if not _is_int(value) or not 0 <= value <= MAX_STAMP:
            raise InvalidPhysicalClock(
                f"a physical clock returns milliseconds since 1970 as an int, got {value!r}", value=value
            )
        return value

    def _advance(self, wall: int, counter: int) -> Timestamp:
        if counter >= _COUNTERS:
            wall, counter = wall + 1, 0
        stamp = encode(wall, counter)
        self._state = _State(wall, counter)  # last, so that an error has changed nothing
        return stamp


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _order(value: int | tuple[int, str]) -> tuple[int, str]:
    stamp, device_id = value if isinstance(value, tuple) else (value, "")
    return Timestamp(stamp), device_id


def _parse(text: str | bytes | None, device_id: str) -> _State:
    try:
        data = json.loads(text or "")
        if data["deviceId"] == device_id:
            return _State(*decode(encode(data["wallTimeMs"], data["counter"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return _State()
