"""The local time that decides something, and the wall clock for stamps.

Deadlines need a clock that never goes back, that NTP does not set, and that counts the time for which a laptop or a virtual
machine was suspended. On Linux that is CLOCK_BOOTTIME; elsewhere the monotonic clock is the nearest. The database's clock is
read only in the database.
"""

from __future__ import annotations

import time

__all__ = ["now", "wall_ms"]

_CLOCK_ID: int = getattr(time, "CLOCK_BOOTTIME", -1)


def now() -> float:
    """Seconds on the local deadline clock; only differences mean anything."""
    return time.clock_gettime(_CLOCK_ID) if _CLOCK_ID >= 0 else time.monotonic()


def wall_ms() -> int:
    """Milliseconds since 1970 on this machine's wall clock. For stamps and people, never for deadlines."""
    return time.time_ns() // 1_000_000
