"""The time by which slots are due: the database's clock, carried on by the local monotonic one.

A reading of the database's clock that lies where it is expected is taken over, so drift does not add up. Another one is a
jump: the clock was set, another server answers now, or this machine stood still. It is logged at once, and not followed as
long as it may be over in a moment:

  * this machine's wall clock agrees with the reading: the term began on a wrong clock. It is followed at once;
  * the reading is behind, and the wall clock agrees with the time that was carried on: the database is behind. It is not
    followed as long as that is so;
  * otherwise it is followed after a minute. The wall clock says nothing about a reading that is ahead: this machine may have
    been halted, and its own clocks with it.

Not here: what becomes of slots when time goes back (`agenda`), and deadlines of leases, which do not depend on this.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger

__all__ = ["JUMP", "Timekeeper"]

#: A clock that is further away than this from where it is expected has jumped.
JUMP = timedelta(seconds=5)
#: Seconds for which a jump is not followed.
_LASTS = 60.0
#: A reading that took longer than this many seconds says little.
_SLOW = 1.0
#: Seconds for which time is carried on without a reading, from one term to the next.
_FRESH = 3600.0
#: A wall clock that is further ahead of the latest slot is no witness: a wrong time zone puts it an hour ahead, or more.
_CLOSE = timedelta(seconds=3600)


class Timekeeper:
    """The time of one process, from its first reading on."""

    def __init__(self) -> None:
        self._there: datetime | None = None
        self._here = self._doubt = 0.0
        self._wall = _wall()
        self._away_since: float | None = None

    def now(self) -> datetime:
        """The time. Only after the first reading."""
        assert self._there is not None
        return self._there + timedelta(seconds=clock.now() - self._here)

    def begin(self, reading: datetime, *, asked_at: float, newest: datetime | None) -> None:
        """The first reading of a term. `asked_at`: the local instant before the database was asked; `newest`: the latest
        slot that any leader claimed.
        """
        if self._there is not None and clock.now() - self._here < _FRESH:
            self.hear(reading, asked_at=asked_at)
            return
        self._away_since = None
        wall = _wall()
        self._take(reading, asked_at)
        if newest is not None and newest > reading + JUMP:
            if newest - JUMP <= wall <= newest + _CLOSE:
                # Earlier readings and this machine agree, against one reading.
                self._there, self._away_since = wall, self._here
                logger.warning(
                    "the database's clock is %.0f s behind the latest slot; slots go by this host's clock, until it is right",
                    (newest - reading).total_seconds(),
                )
                return
            logger.warning(
                "the latest slot lies %.0f s ahead of the database's clock, which was ahead then; slots go on from now, and "
                "none is sent again",
                (newest - reading).total_seconds(),
            )
        elif abs(reading - wall) > JUMP + timedelta(seconds=self._doubt):
            logger.warning(
                "the database's clock is %s s away from this host's; slots follow the database's",
                _signed(reading - wall),
            )

    def hear(self, reading: datetime, *, asked_at: float) -> bool:
        """A later reading. Whether a jump is followed now."""
        here, carried = clock.now(), self.now()
        away = reading - carried
        if away < timedelta():
            # The reading may have been taken at any time since it was asked for.
            away = min(timedelta(), away + timedelta(seconds=here - asked_at))
        if abs(away) <= JUMP + timedelta(seconds=self._doubt):
            if here - asked_at <= max(_SLOW, self._doubt):
                self._take(reading, asked_at)
            if self._away_since is not None:
                self._away_since = None
                logger.info("the database's clock is back where it is expected")
            return False
        if self._away_since is None:
            self._away_since = here
            logger.warning(
                "the database's clock jumped by %s s; slots go on by the time from before for now: synchronise the clock "
                "of the database's host",
                _signed(away),
            )
        if not self._followed(reading, carried):
            return False
        logger.warning("slots follow the database's clock, which is %s s away from before", _signed(away))
        self._away_since = None
        self._take(reading, asked_at)
        return True

    def _followed(self, reading: datetime, carried: datetime) -> bool:
        wall = _wall()
        # A wall clock that was set as well is no witness.
        was_set = abs((wall - self._wall) - timedelta(seconds=clock.now() - self._here)) > JUMP
        if abs(reading - wall) <= JUMP and not was_set:
            return True
        if reading < carried and abs(carried - wall) <= JUMP:
            return False
        return self._away_since is not None and clock.now() - self._away_since >= _LASTS

    def _take(self, reading: datetime, asked_at: float) -> None:
        self._there, self._here, self._wall = reading, clock.now(), _wall()
        self._doubt = self._here - asked_at


def _signed(away: timedelta) -> str:
    return f"{away.total_seconds():+.0f}"


def _wall() -> datetime:
    return datetime.fromtimestamp(clock.wall_ms() / 1000, tz=timezone.utc)
