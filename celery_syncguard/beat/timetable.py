"""When an entry of a schedule is due: instants in UTC that every beat computes alike.

Celery's schedules say whether they are due by this machine's clock, seen from their last run. A slot needs its exact instant,
the same one on every machine, however late it is noticed:

  * an interval is a grid: last slot + n * interval, in elapsed seconds, whatever a wall clock does;
  * a crontab is a wall time in its zone. When the clock is set forward, a time that does not exist is due at the instant at
    which it would have come without the change (02:30 of the missing hour is 03:30 of the new time). When it is set back,
    a time that comes twice is due the first time only; but an entry for every hour (`hour="*"`) follows real time and is
    due in both passes;
  * a solar event is found by iteration, which ends some hundredths of a second apart for different beginnings. So the
    beginning depends on the event alone, and the result is rounded up to a whole second;
  * any other schedule (relative, clocked, a class of a user's) is asked through its `remaining_estimate`.

Not here: the state of an entry (`agenda`, `slots`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from calendar import monthrange
from collections.abc import Iterator, Sequence
from datetime import MAXYEAR, MINYEAR, date, datetime, timedelta, timezone, tzinfo
from typing import Any

from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval

from celery_syncguard.tasks.celery_internals import altered, has_fields, is_system_zone

__all__ = ["LATE", "MAX_MISSED", "choose", "describe", "due_between", "grid_start", "next_due", "once_only"]

#: The most slots of one entry that are caught up under "all".
MAX_MISSED = 64

#: A slot is missed when the next one is due as well, or when it is this late.
LATE = timedelta(seconds=60)

_SHORTEST = timedelta(milliseconds=1)
_TICK = timedelta(microseconds=1)
_DAY = timedelta(days=1)
#: A 29th of February that is a given day of the week comes within so many years.
_YEARS = 41
#: The most steps of one walk along a schedule that is asked for one slot after the other, and the most walks of a look.
_STEPS, _WALKS = 100, 8
#: A solar event is computed from a full hour at least this long before it. Events of one kind are more than twice as far
#: apart.
_BEFORE_EVENT = timedelta(hours=6)
_HOUR, _SECOND = timedelta(hours=1), timedelta(seconds=1)


def describe(schedule: Any) -> str:
    """A schedule as text that is the same in every process and changes when the schedule does."""
    if _is_interval(schedule):
        return f"every {schedule.run_every.total_seconds():g} s"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(schedule))
    return f"{text} {schedule.tz}" if isinstance(schedule, crontab) else text


def choose(candidates: Sequence[datetime], *, now: datetime, rule: str) -> list[datetime]:
    """Which of these slots, all due and in order, are to be sent: the last one, unless it is late and the rule is "skip";
    under "all" the ones before it too.
    """
    if rule == "all":
        return list(candidates[-MAX_MISSED:])
    last = list(candidates[-1:])
    if rule == "skip" and last and now - last[0] > LATE:
        return []
    return last


def next_due(schedule: Any, after: datetime) -> datetime | None:
    """The first slot later than the instant `after`; None if there is none."""
    if _is_interval(schedule):
        return after + _every(schedule)
    if _is_crontab(schedule):
        return _next_of_crontab(schedule, after)
    if _is_solar(schedule):
        return _next_of_sun(schedule, after)
    due = _ask(schedule, after)
    return due if due > after else None


def due_between(schedule: Any, *, after: datetime, now: datetime) -> tuple[list[datetime], bool]:
    """The slots later than `after` and not later than `now`, in order: the latest `MAX_MISSED` of them. And whether there
    were more.

    It takes bounded time, however many lie in between. Of a schedule that only tells its next slot and that missed more than
    100, it may find fewer than `MAX_MISSED`; it always finds the latest.
    """
    if _is_interval(schedule):
        every = _every(schedule)
        count = max(0, (now - after) // every)
        first = max(1, count - MAX_MISSED + 1)
        return [after + every * number for number in range(first, count + 1)], first > 1
    if _is_crontab(schedule):
        latest = list(itertools.islice(_crontab_backwards(schedule, after, now), MAX_MISSED + 1))
        return latest[:MAX_MISSED][::-1], len(latest) > MAX_MISSED
    return _walk_back(schedule, after, now)


def grid_start(schedule: Any, *, last_due_at: datetime, since_at: datetime) -> datetime:
    """The instant to count slots from: none up to `since_at` is among them, and an interval keeps its grid."""
    if since_at <= last_due_at:
        return last_due_at
    if _is_interval(schedule):
        every = _every(schedule)
        return last_due_at + every * ((since_at - last_due_at) // every)
    return since_at


def once_only(schedule: Any) -> datetime | None:
    """The instant of a schedule that has only one, as django-celery-beat's clocked schedule does."""
    instant = getattr(schedule, "clocked_time", None)
    return instant.astimezone(timezone.utc) if isinstance(instant, datetime) else None


def _walk(schedule: Any, after: datetime, now: datetime) -> tuple[list[datetime], bool]:
    """The slots that `_STEPS` steps find, and whether these are all up to `now`."""
    slots: list[datetime] = []
    due = next_due(schedule, after)
    while due is not None and due <= now:
        slots.append(due)
        if len(slots) == _STEPS:
            return slots, False
        due = next_due(schedule, due)
    return slots, True


def _walk_back(schedule: Any, after: datetime, now: datetime) -> tuple[list[datetime], bool]:
    """As `due_between`, for a schedule that only tells its next slot: from `after` on; after a long gap from a later instant,
    so that it takes bounded time.
    """
    early, arrived = _walk(schedule, after, now)
    if arrived:
        return early, False
    latest: list[datetime] = []
    back = (early[-1] - after) * 0.9
    for _ in range(_WALKS):
        start = max(after, now - back)
        slots, arrived = _walk(schedule, start, now)
        if arrived:
            latest = slots
        if latest and (not arrived or len(latest) >= MAX_MISSED or start == after):
            break
        back = back * 2 if arrived else back / 4
    return (latest or _latest(schedule, early[-1], now))[-MAX_MISSED:], True


def _latest(schedule: Any, slot: datetime, now: datetime) -> list[datetime]:
    """The slots of the last second that has any, from that slot on: of a schedule whose slots lie close at times only."""
    end = now
    while end - slot > _SECOND:
        middle = slot + (end - slot) / 2
        due = next_due(schedule, middle)
        if due is not None and due <= now:
            slot = due
        else:
            end = middle
    return [slot, *_walk(schedule, slot, now)[0]]


def _every(schedule: interval) -> timedelta:
    every: timedelta = schedule.run_every
    return max(every, _SHORTEST)


def _is_interval(schedule: Any) -> bool:
    return (
        isinstance(schedule, interval)
        and not schedule.relative
        and type(schedule).remaining_estimate is interval.remaining_estimate  # a crontab is a schedule too, for Celery
        and not isinstance(schedule, crontab)
    )


def _is_crontab(schedule: Any) -> bool:
    return (
        isinstance(schedule, crontab)
        and type(schedule).remaining_estimate is crontab.remaining_estimate
        and type(schedule).remaining_delta is crontab.remaining_delta
        and has_fields(schedule)
    )


def _ask(schedule: BaseSchedule, after: datetime) -> datetime:
    now = datetime.now(timezone.utc)
    # It is to believe that it is exactly `now`: the estimate is a difference to that.
    left: timedelta = altered(schedule, nowfun=lambda: now).remaining_estimate(after)
    return (now + left).astimezone(timezone.utc)


def _is_solar(schedule: Any) -> bool:
    return isinstance(schedule, solar) and type(schedule).remaining_estimate is solar.remaining_estimate


def _next_of_sun(schedule: solar, after: datetime) -> datetime | None:
    due = _event(schedule, after)
    if due <= after:
        # `after` is that event itself, which was found once more.
        due = _event(schedule, after + _HOUR)
    return due if due > after else None


def _event(schedule: solar, after: datetime) -> datetime:
    """The event after that instant: the same one from every beginning."""
    beginning = _ask(schedule, after) - _BEFORE_EVENT
    exact = _ask(schedule, beginning.replace(minute=0, second=0, microsecond=0))
    whole = exact.replace(microsecond=0)
    return whole if whole == exact else whole + timedelta(seconds=1)


# A crontab. Between two changes of the clock, a wall time and its instant are the same distance apart. So the time is cut
# where the clock changes, and in each stretch only the crontab's fields count. Wall times are naive here.


def _next_of_crontab(schedule: crontab, after: datetime) -> datetime | None:
    start = after.astimezone(timezone.utc) + _TICK
    while True:
        # An offset is less than a day: days before this one are over, and no slot of this one is earlier than that.
        day = _matching_day(schedule, (start - _DAY).date())
        if day is None:
            return None
        start = max(start, _midnight(day) - _DAY)
        slot = next(_within(schedule, start, start + _DAY), None)
        if slot is not None:
            return slot
        start += _DAY


def _crontab_backwards(schedule: crontab, after: datetime, now: datetime) -> Iterator[datetime]:
    """The slots later than `after` and not later than `now`, the latest first."""
    after, end = after.astimezone(timezone.utc) + _TICK, now.astimezone(timezone.utc) + _TICK
    while after < end:
        day = _matching_day(schedule, (end + _DAY).date(), backwards=True)
        if day is None:
            return
        end = min(end, _midnight(day) + 2 * _DAY)
        start = max(after, end - _DAY)
        if start < end:
            yield from _within(schedule, start, end, backwards=True)
        end = start


def _within(schedule: crontab, start: datetime, end: datetime, *, backwards: bool = False) -> Iterator[datetime]:
    """The slots from `start` to before `end`, at most a day later; in order, or the latest first."""
    stretches = _stretches(schedule.tz, start, end, second_pass=len(schedule.hour) == 24)
    slots = [
        _instants(schedule, first, last, offset, backwards=backwards)
        for first, last, offset in stretches
        if first < last
    ]
    seen: datetime | None = None
    for slot in heapq.merge(*slots, reverse=backwards):
        if slot != seen:
            yield slot
        seen = slot


def _stretches(
    zone: tzinfo, start: datetime, end: datetime, *, second_pass: bool
) -> Iterator[tuple[datetime, datetime, timedelta]]:
    """Stretches (first instant, end, offset) in which every wall time counts. No zone changes its clock by more than a
    day, or twice in a day.
    """
    since, offset = start - _DAY, _offset(start - _DAY, zone)
    for looked, look in ((since, start), (start, end)):
        before, offset = offset, _offset(look, zone)
        if before == offset:
            continue
        change = _change(looked, look, zone)
        yield max(since, start), min(change, end), before
        since = change
        if before < offset:
            # The wall times that do not exist, where they would have come without the change.
            yield max(change, start), min(change + (offset - before), end), before
        elif not second_pass:
            since = change + (before - offset)
    yield max(since, start), end, offset


def _change(before: datetime, after: datetime, zone: tzinfo) -> datetime:
    """The first instant, in whole seconds, with the later one's offset."""
    old, since = _offset(before, zone), before.replace(microsecond=0)
    low, high = 0, math.ceil((after - since).total_seconds())
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(since + timedelta(seconds=middle), zone) == old:
            low = middle
        else:
            high = middle
    return since + timedelta(seconds=high)


def _instants(
    schedule: crontab, start: datetime, end: datetime, offset: timedelta, *, backwards: bool
) -> Iterator[datetime]:
    """The slots from `start` to before `end`, where the zone has that offset."""
    start, end = (start + offset).replace(tzinfo=None), (end + offset).replace(tzinfo=None)
    days = [start.date() + timedelta(days=number) for number in range((end.date() - start.date()).days + 1)]
    hours, minutes = sorted(schedule.hour, reverse=backwards), sorted(schedule.minute, reverse=backwards)
    for day in reversed(days) if backwards else days:
        if not _matches(schedule, day):
            continue
        for hour in hours:
            whole = datetime(day.year, day.month, day.day, hour)  # noqa: DTZ001 - a wall time
            if whole + _HOUR <= start or whole >= end:
                continue
            for minute in minutes:
                wall = whole.replace(minute=minute)
                if start <= wall < end:
                    yield (wall - offset).replace(tzinfo=timezone.utc)


def _matches(schedule: crontab, day: date) -> bool:
    weekday = day.isoweekday() % 7
    return day.month in schedule.month_of_year and day.day in schedule.day_of_month and weekday in schedule.day_of_week


def _matching_day(schedule: crontab, day: date, *, backwards: bool = False) -> date | None:
    """The first day that matches, from this one on; or the last one, up to this one."""
    if _matches(schedule, day):
        return day
    months, days = sorted(schedule.month_of_year, reverse=backwards), sorted(schedule.day_of_month, reverse=backwards)
    for years in range(_YEARS):
        year = day.year - years if backwards else day.year + years
        if not MINYEAR <= year <= MAXYEAR:
            return None
        for month in months:
            for number in days:
                if number > monthrange(year, month)[1]:
                    continue
                found = date(year, month, number)
                if (found <= day if backwards else found >= day) and _matches(schedule, found):
                    return found
    return None


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=timezone.utc)


def _offset(instant: datetime, zone: tzinfo) -> timedelta:
    there = instant.astimezone(None if is_system_zone(zone) else zone)
    return there.utcoffset() or timedelta()
