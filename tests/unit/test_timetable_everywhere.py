"""The slots of a crontab, in every zone of the zone database and on every day, are those of a walk minute by minute; and a
look at an entry has a bound.
"""

import random
import sys
import zoneinfo
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise

import pytest
from celery import Celery
from celery.schedules import crontab, schedule, solar

from celery_syncguard.beat.timetable import MAX_MISSED, due_between, next_due

UTC = timezone.utc
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
ZONES = sorted(zoneinfo.available_timezones())
#: Changes that are not one hour, or not at night: half an hour, two hours, a day that is left out, one that comes twice.
ODD = {
    "Australia/Lord_Howe": (date(2026, 4, 4), date(2026, 10, 3)),
    "Antarctica/Troll": (date(2026, 3, 29), date(2026, 10, 25)),
    "Africa/Casablanca": (date(2026, 2, 15), date(2026, 3, 22)),
    "Pacific/Apia": (date(1892, 7, 4), date(2011, 12, 30)),
    "Pacific/Kwajalein": (date(1993, 8, 21),),
    "America/Juneau": (date(1867, 10, 19),),
    "Europe/Amsterdam": (date(1937, 5, 22),),
    "Africa/Monrovia": (date(1972, 1, 7),),
}


def app_in(zone):
    app = Celery(set_as_current=False)
    app.conf.timezone = zone
    return app


def walk(plan, zone, after, now, lead):
    """The slots by the rule of docs/beat.md, found by looking at every minute. `lead`: longer than any time is missing."""
    every_hour, slots, before = plan.hour == set(range(24)), set(), None
    instant = after.replace(second=0, microsecond=0) - lead
    while instant <= now + MINUTE:
        local = instant.astimezone(zone)
        whole = instant - timedelta(seconds=local.second)  # a historic offset has seconds
        for candidate in {whole, whole + MINUTE} if local.second else (instant,):
            wall = candidate.astimezone(zone) if local.second else local
            if wall.second == 0 and matches(plan, wall) and (every_hour or not wall.fold):
                slots.add(candidate)
        offset = local.utcoffset()
        if before is not None and offset > before:
            change = next(
                second
                for second in (instant - timedelta(seconds=number) for number in range(60, -1, -1))
                if second.astimezone(zone).utcoffset() == offset
            )
            wall, end = (change + before).replace(tzinfo=None), (change + offset).replace(tzinfo=None)
            wall += timedelta(seconds=-wall.second % 60)
            while wall < end:
                if matches(plan, wall):
                    slots.add(wall.replace(tzinfo=UTC) - before)
                wall += MINUTE
        before = offset
        instant += MINUTE
    return sorted(slot for slot in slots if after < slot <= now)


def matches(plan, wall):
    return (
        wall.minute in plan.minute
        and wall.hour in plan.hour
        and wall.isoweekday() % 7 in plan.day_of_week
        and wall.day in plan.day_of_month
        and wall.month in plan.month_of_year
    )


def some_crontab(dice, zone, near):
    def some(low, high, always=(), star=0.4):
        if dice.random() < star:
            return "*"
        return {*dice.sample(range(low, high), dice.randint(1, min(6, high - low))), *always}

    return crontab(
        minute=some(0, 60, star=0.15),
        hour=some(0, 24),
        day_of_week=some(0, 7, [near.isoweekday() % 7], star=0.6),
        day_of_month=some(1, 32, [near.day, (near + DAY).day], star=0.6),
        month_of_year=some(1, 13, [near.month], star=0.7),
        app=app_in(zone),
    )


def changes(zone, year):
    """The days of that year on which the clock of the zone changes."""
    midnights = [datetime(year, 1, 1, tzinfo=UTC) + DAY * number for number in range(366)]
    offsets = [midnight.astimezone(zone).utcoffset() for midnight in midnights]
    return [day.date() for day, (before, after) in zip(midnights, pairwise(offsets), strict=False) if before != after]


def compare(dice, zone_name, day, lead=3 * 60 * MINUTE):
    zone = zoneinfo.ZoneInfo(zone_name)
    after = datetime(day.year, day.month, day.day, tzinfo=UTC) - timedelta(minutes=dice.randint(0, 2000))
    now = after + timedelta(minutes=dice.randint(1500, 3000), seconds=dice.choice((0, 0, 17)))
    plan = some_crontab(dice, zone_name, day)
    expected = walk(plan, zone, after, now, lead)
    found, due = [], next_due(plan, after)
    while due is not None and due <= now:
        found.append(due)
        due = next_due(plan, due)
    case = f"{plan} in {zone_name} after {after}"
    assert found == expected, case
    assert due_between(plan, after=after, now=now) == (expected[-MAX_MISSED:], len(expected) > MAX_MISSED), case
    return len(expected)


@pytest.mark.parametrize("part", range(6))
def test_in_every_zone_the_slots_around_a_change_are_those_of_a_walk_minute_by_minute(part):
    compared = 0
    for number, zone in list(enumerate(ZONES))[part::6]:
        dice = random.Random(zone)
        year = dice.randint(1880, 2037)
        days = changes(zoneinfo.ZoneInfo(zone), year) or [date(year, 1, 1) + DAY * (number % 365)]
        compared += compare(dice, zone, dice.choice(days))
    assert compared > 1000


@pytest.mark.parametrize("zone", ODD)
def test_where_the_clock_changes_oddly_the_slots_are_those_of_a_walk_minute_by_minute(zone):
    dice = random.Random(zone)
    assert sum(compare(dice, zone, day, lead=DAY + MINUTE) for day in ODD[zone] for _ in range(8)) > 100


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize("hour", [0, 1, 2, 3, 23])
def test_a_daily_crontab_is_due_once_on_each_day_of_a_year_with_both_changes(zone, hour):
    plan = crontab(minute=30, hour=hour, app=app_in(zone))
    local = zoneinfo.ZoneInfo(zone)
    look, seen = datetime(2026, 1, 1, tzinfo=local).astimezone(UTC), []
    while look < datetime(2027, 1, 1, tzinfo=local).astimezone(UTC):
        slots, more = due_between(plan, after=look, now=look + timedelta(hours=5))
        assert not more
        seen += slots
        look += timedelta(hours=5)
    days = [slot.astimezone(local).date() for slot in seen if slot.astimezone(local).year == 2026]
    assert days == [date(2026, 1, 1) + DAY * number for number in range(365)]


#: Calls of functions in one look at an entry, for the slots that are due, and the next one. On an ordinary day they take 100 to 4,000.
BOUND = 6000
GAPS = [timedelta(minutes=1), timedelta(hours=9), timedelta(days=7), timedelta(days=3000)]


def cost(plan, after, now):
    """Calls of functions, which do not depend on the machine."""
    calls = 0

    def count(_frame, event, _what):
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        slots, _ = due_between(plan, after=after, now=now)
        next_due(plan, slots[-1] if slots else after)
    finally:
        sys.setprofile(None)
    return calls


CRONTABS = [
    {},
    {"minute": 30, "hour": 2},
    {"minute": 59, "hour": 23},
    {"minute": "*/20", "hour": "1-3"},
    {"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2},
    {"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2, "day_of_week": 1},
]


def test_a_look_at_a_crontab_is_bounded_around_every_change_and_after_every_gap():
    most = 0
    for number, zone in enumerate(ZONES):
        dice = random.Random(number)
        plan, gap = crontab(**dice.choice(CRONTABS), app=app_in(zone)), dice.choice(GAPS)
        assert plan.tz.key == zone  # and the application is configured
        days = changes(zoneinfo.ZoneInfo(zone), 2026) or [date(2026, 6, 1)]
        for day in days[:2]:
            now = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(minutes=dice.randint(0, 2880))
            most = max(most, cost(plan, now - gap, now))
    assert most < BOUND


def test_a_look_at_a_schedule_that_only_tells_its_next_slot_is_bounded_and_finds_the_latest():
    asked = 0

    class Odd(crontab):
        """Tells each whole minute or hour by itself. (Celery's own way, up to 5.4, depends on which day it is today.)"""

        def remaining_estimate(self, last_run_at, **_):
            nonlocal asked
            asked += 1
            step = MINUTE if len(self.minute) > 1 else 60 * MINUTE
            return last_run_at - (last_run_at - datetime(2000, 1, 1, tzinfo=UTC)) % step + step - self.now()

    class Grid(schedule):
        def remaining_estimate(self, last_run_at):
            nonlocal asked
            asked += 1
            return last_run_at + self.run_every - self.now()

    now = datetime(2026, 3, 29, 4, tzinfo=UTC)
    for gap in GAPS:
        for plan, every in (
            (Odd(app=app_in("UTC")), MINUTE),
            (Odd(minute=0, app=app_in("UTC")), 60 * MINUTE),
            (Grid(timedelta(seconds=1), app=app_in("UTC")), timedelta(seconds=1)),
        ):
            asked = 0
            slots, more = due_between(plan, after=now - gap, now=now)
            assert asked < 500
            assert more == (gap // every > len(slots))
            assert now - every < slots[-1] <= now if slots else gap < every
            assert len(slots) >= min(MAX_MISSED, gap // every)


def test_of_a_schedule_that_is_dense_at_times_only_a_look_finds_the_latest():
    asked = 0

    class Office(schedule):
        """Every second from nine to five."""

        def remaining_estimate(self, last_run_at):
            nonlocal asked
            asked += 1
            due = last_run_at.replace(microsecond=0) + self.run_every
            if not 9 <= due.hour < 17:
                due = (due + timedelta(hours=7)).replace(hour=9, minute=0, second=0)
            return due - self.now()

    plan = Office(timedelta(seconds=1), app=app_in("UTC"))
    after = datetime(2026, 6, 1, 10, tzinfo=UTC)
    for now in (datetime(2026, 6, 1, 18, tzinfo=UTC), datetime(2026, 6, 8, 3, tzinfo=UTC)):
        asked = 0
        slots, more = due_between(plan, after=after, now=now)
        assert more
        assert slots[-1] == (now - timedelta(hours=9)).replace(hour=16, minute=59, second=59)
        assert asked < 1100


def test_a_look_at_the_sun_is_bounded_and_finds_the_latest():
    now = datetime(2026, 7, 1, 12, tzinfo=UTC)
    plan = solar("sunset", 48.86, 2.35, app=app_in("UTC"))
    slots, more = due_between(plan, after=now - timedelta(days=3000), now=now)
    assert more
    assert len(slots) == MAX_MISSED
    assert timedelta() < now - slots[-1] < DAY
    assert due_between(plan, after=slots[-5], now=now) == (slots[-4:], False)
