"""The only door to local time.

Deadlines need a clock that never goes back, that does not care for NTP, and that counts the time that a laptop or a
virtual machine was suspended. CLOCK_BOOTTIME is that clock on Linux; macOS's CLOCK_MONOTONIC_RAW and the plain monotonic
clock elsewhere are the nearest. The database's clock is not here: it stays in the database.
"""

from __future__ import annotations

import time

__all__ = ["now", "wall_ms"]

_CLOCK_ID: int = getattr(time, "CLOCK_BOOTTIME", -1)

if _CLOCK_ID < 0:  # pragma: no cover - not Linux

    def now() -> float:
        """Seconds on the local deadline clock; only differences mean anything."""
        return time.monotonic()

else:

    def now() -> float:
        """Seconds on the local deadline clock; only differences mean anything."""
        return time.clock_gettime(_CLOCK_ID)


def wall_ms() -> int:
    """Milliseconds since 1970 on this machine's wall clock. For stamps and people, never for deadlines."""
    return time.time_ns() // 1_000_000
