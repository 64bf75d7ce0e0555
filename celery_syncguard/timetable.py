"""When an entry of a schedule is due: instants in UTC that every beat computes alike.

Celery's schedules answer "is it due, seen from when it last ran, by this machine's clock". A slot needs more: its very
instant, the same on every machine, however late it is noticed. So:

  * an interval is a grid: last slot + n * interval, in elapsed seconds, whatever a wall clock does;
  * a crontab is a wall time in its zone. On the night when the clock is set forward, a time that does not exist is due
    at the instant at which it would have come without the change (02:30 of the missing hour is 03:30 of the new time).
    When it is set back, a time that comes twice is due the first time only; but an entry for every hour (`hour="*"`)
    follows real time and is due in both passes;
  * a solar event is found by iteration, which ends some hundredths of a second apart for different beginnings. So it is
    computed from a beginning that depends on the event alone, and rounded up to a whole second;
  * any other schedule (relative, clocked, a class of yours) is asked through its `remaining_estimate`.

Not here: state (`slots`), and what to do about slots that were missed (`beat` asks `choose`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from datetime import time as time_of_day
from typing import Any

from celery.schedules import BaseSchedule, crontab, schedule, solar

__all__ = ["LATE", "MAX_MISSED", "choose", "describe", "due_between", "grid_start", "next_due"]

#: The most slots of one entry that are caught up under "all".
MAX_MISSED = 64

#: A slot is missed when the next one is due as well, or when it is this late.
LATE = timedelta(seconds=60)

_HOURS_OF_CHANGE = timedelta(hours=3)
_DAYS_AHEAD = 41 * 366
_SHORTEST = timedelta(milliseconds=1)
_LOOK_BACK = tuple(timedelta(hours=hours) for hours in (1, 8, 72, 24 * 24, 200 * 24, 1600 * 24))
_MANY = 10_000
#: A solar event is computed from a full hour at least this long before it. Events of one kind are more than twice as far
#: apart.
_BEFORE_EVENT = timedelta(hours=6)
_HOUR = timedelta(hours=1)


def describe(plan: Any) -> str:
    """A schedule as text that is the same in every process and changes when the schedule does."""
    if _is_interval(plan):
        return f"every {plan.run_every.total_seconds():g} s"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(plan))
    return f"{text} {plan.tz}" if isinstance(plan, crontab) else text


def choose(candidates: Sequence[datetime], *, now: datetime, rule: str) -> list[datetime]:
    """Which of these slots, all due and in order, are to be sent: the last one, unless it is late and missed slots are
    to be skipped; and under "all" the ones before it.
    """
    if rule == "all":
        return list(candidates[-MAX_MISSED:])
    last = list(candidates[-1:])
    if rule == "skip" and last and now - last[0] > LATE:
        return []
    return last


def next_due(plan: Any, after: datetime) -> datetime | None:
    """The first slot later than the instant `after`; None if there is none."""
    if _is_interval(plan):
        return after + _every(plan)
    if _is_crontab(plan):
        return _next_of_crontab(plan, after)
    if _is_solar(plan):
        return _next_of_sun(plan, after)
    due = _ask(plan, after)
    return due if due > after else None


def due_between(plan: Any, *, after: datetime, now: datetime) -> tuple[list[datetime], bool]:
    """The slots later than `after` and not later than `now`, in order: the latest of them, at least `MAX_MISSED` where
    there are so many. And whether there were more.
    """
    if _is_interval(plan):
        every = _every(plan)
        count = max(0, (now - after) // every)
        first = max(1, count - MAX_MISSED + 1)
        return [after + every * number for number in range(first, count + 1)], first > 1
    if _is_crontab(plan):
        for window in _LOOK_BACK:
            start = max(after, now - window)
            slots = _chain(plan, start, now)
            if start == after or len(slots) > MAX_MISSED:
                return slots, start != after
        return slots, True
    slots = _chain(plan, after, now)
    if len(slots) < _MANY:
        return slots, False
    return _chain(plan, now - _LOOK_BACK[0], now), True


def grid_start(plan: Any, *, last_due_at: datetime, since_at: datetime) -> datetime:
    """The instant to count slots from, such that none up to `since_at` is among them and an interval keeps its grid."""
    if since_at <= last_due_at:
        return last_due_at
    if _is_interval(plan):
        every = _every(plan)
        return last_due_at + every * ((since_at - last_due_at) // every)
    return since_at


def once_only(plan: Any) -> datetime | None:
    """The instant of a schedule that has only one, as django-celery-beat's clocked schedule does."""
    instant = getattr(plan, "clocked_time", None)
    return instant.astimezone(timezone.utc) if isinstance(instant, datetime) else None


def _chain(plan: Any, after: datetime, now: datetime) -> list[datetime]:
    slots: list[datetime] = []
    due = next_due(plan, after)
    while due is not None and due <= now and len(slots) < _MANY:
        slots.append(due)
        due = next_due(plan, due)
    return slots


def _every(plan: schedule) -> timedelta:
    every: timedelta = plan.run_every
    return max(every, _SHORTEST)


def _is_interval(plan: Any) -> bool:
    return (
        isinstance(plan, schedule)
        and not plan.relative
        and type(plan).remaining_estimate is schedule.remaining_estimate  # a crontab is a schedule too, for Celery
        and not isinstance(plan, crontab)
    )


def _is_crontab(plan: Any) -> bool:
    return (
        isinstance(plan, crontab)
        and type(plan).remaining_estimate is crontab.remaining_estimate
        and type(plan).remaining_delta is crontab.remaining_delta
    )


def _ask(plan: BaseSchedule, after: datetime) -> datetime:
    now = datetime.now(timezone.utc)
    # A copy that believes it is exactly `now`: the estimate is a difference to that.
    probe = object.__new__(type(plan))
    probe.__dict__.update(plan.__dict__)
    probe.nowfun = lambda: now
    left: timedelta = probe.remaining_estimate(after)
    return (now + left).astimezone(timezone.utc)


def _is_solar(plan: Any) -> bool:
    return isinstance(plan, solar) and type(plan).remaining_estimate is solar.remaining_estimate


def _next_of_sun(plan: solar, after: datetime) -> datetime | None:
    due = _event(plan, after)
    if due <= after:
        # The one that `after` is already; it was found once more, by a hair.
        due = _event(plan, after + _HOUR)
    return due if due > after else None


def _event(plan: solar, after: datetime) -> datetime:
    """The event after that instant, the same one however near the beginning is."""
    beginning = _ask(plan, after) - _BEFORE_EVENT
    exact = _ask(plan, beginning.replace(minute=0, second=0, microsecond=0))
    whole = exact.replace(microsecond=0)
    return whole if whole == exact else whole + timedelta(seconds=1)


def _next_of_crontab(plan: crontab, after: datetime) -> datetime | None:
    zone = plan.tz
    local = after.astimezone(zone).replace(tzinfo=None)
    before, behind = (after - _HOURS_OF_CHANGE).astimezone(zone), (after + _HOURS_OF_CHANGE).astimezone(zone)
    # Near a change of the clock wall times do not come in the order of instants: look at all around.
    start = local if before.utcoffset() == behind.utcoffset() else local - _HOURS_OF_CHANGE
    hours, minutes = sorted(plan.hour), sorted(plan.minute)
    every_hour = len(hours) == 24
    best: datetime | None = None
    best_local = start
    for days in range(_DAYS_AHEAD):
        day = start.date() + timedelta(days=days)
        if best is not None and datetime.combine(day, time_of_day()) > best_local + _HOURS_OF_CHANGE:
            return best
        if (
            day.month not in plan.month_of_year
            or day.day not in plan.day_of_month
            or day.isoweekday() % 7 not in plan.day_of_week
        ):
            continue
        for hour in hours:
            if days == 0 and hour < start.hour:
                continue
            for minute in minutes:
                wall = datetime.combine(day, time_of_day(hour, minute))
                if wall < start:
                    continue
                if best is not None and wall > best_local + _HOURS_OF_CHANGE:
                    return best
                for instant in _instants(wall, zone, both=every_hour):
                    if instant > after and (best is None or instant < best):
                        best, best_local = instant, wall
                if best is not None and best_local == wall and start == local and _calm(best, zone):
                    return best
    return best


def _instants(wall: datetime, zone: Any, *, both: bool) -> list[datetime]:
    # Of a time that does not exist, fold 0 means: counted with the offset from before the change.
    first = wall.replace(tzinfo=zone, fold=0)
    second = wall.replace(tzinfo=zone, fold=1)
    instants = [first.astimezone(timezone.utc)]
    if both and _offset(first) > _offset(second):
        instants.append(second.astimezone(timezone.utc))
    return instants


def _calm(instant: datetime, zone: Any) -> bool:
    around = [(instant + shift).astimezone(zone) for shift in (-_HOURS_OF_CHANGE, _HOURS_OF_CHANGE)]
    return _offset(around[0]) == _offset(around[1])


def _offset(instant: datetime) -> timedelta:
    return instant.utcoffset() or timedelta()
