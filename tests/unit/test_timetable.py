"""Slots are the same instants on every machine, over both nights of a year on which the clock changes."""

from datetime import datetime, timedelta, timezone

import pytest
from celery import VERSION, Celery
from celery.schedules import crontab, schedule, solar

from celery_syncguard.beat.timetable import MAX_MISSED, choose, describe, due_between, grid_start, next_due

UTC = timezone.utc
NIGHTS = {
    "Europe/Paris": {"forward": datetime(2025, 3, 29, 12, tzinfo=UTC), "back": datetime(2025, 10, 25, 12, tzinfo=UTC)},
    "US/Eastern": {"forward": datetime(2025, 3, 8, 16, tzinfo=UTC), "back": datetime(2025, 11, 1, 16, tzinfo=UTC)},
}
#: The local hour that does not exist, and the one that comes twice.
MISSING = {"Europe/Paris": 2, "US/Eastern": 2}
DOUBLE = {"Europe/Paris": 2, "US/Eastern": 1}


def app_in(zone):
    app = Celery()
    app.conf.timezone = zone
    return app


def night(zone, which, **fields):
    """The slots of the 24 hours around the change, as local time with offset."""
    plan = crontab(app=app_in(zone), **fields)
    start = NIGHTS[zone][which]
    slots, due = [], next_due(plan, start)
    while due <= start + timedelta(hours=24):
        slots.append(due)
        due = next_due(plan, due)
    looked, more = due_between(plan, after=start, now=start + timedelta(hours=24))
    assert (looked, more) == (slots[-MAX_MISSED:], len(slots) > MAX_MISSED)
    assert len(slots) == len(set(slots))
    assert slots == sorted(slots)
    return [slot.astimezone(plan.tz) for slot in slots]


@pytest.mark.parametrize("zone", NIGHTS)
def test_a_time_that_does_not_exist_is_due_when_it_would_have_come_without_the_change(zone):
    (slot,) = night(zone, "forward", hour=MISSING[zone], minute=30)
    assert (slot.hour, slot.minute) == (MISSING[zone] + 1, 30)


@pytest.mark.parametrize("zone", NIGHTS)
def test_a_time_that_comes_twice_is_due_the_first_time_only(zone):
    (slot,) = night(zone, "back", hour=DOUBLE[zone], minute=30)
    assert (slot.hour, slot.minute, slot.dst() != timedelta()) == (DOUBLE[zone], 30, True)


@pytest.mark.parametrize("zone", NIGHTS)
@pytest.mark.parametrize("which", ["forward", "back"])
@pytest.mark.parametrize("minute,per_hour", [(15, 1), ("*/20", 3)])
def test_an_entry_for_every_hour_follows_real_time(zone, which, minute, per_hour):
    """Neither skipped in autumn nor doubled."""
    slots = night(zone, which, minute=minute)
    assert len(slots) == 24 * per_hour
    utc = [slot.astimezone(UTC) for slot in slots]
    assert {after - before for before, after in zip(utc, utc[1:], strict=False)} == {timedelta(minutes=60 // per_hour)}


@pytest.mark.parametrize("zone", NIGHTS)
@pytest.mark.parametrize("which", ["forward", "back"])
@pytest.mark.parametrize("hour", range(10))
def test_a_daily_entry_is_due_once_on_either_night(zone, which, hour):
    assert len(night(zone, which, hour=hour, minute=5)) == 1


@pytest.mark.parametrize("zone", NIGHTS)
@pytest.mark.parametrize("which", ["forward", "back"])
def test_an_interval_is_elapsed_time_whatever_the_wall_clock_does(zone, which):
    plan = schedule(timedelta(hours=1), app=app_in(zone))
    start = NIGHTS[zone][which]
    slots, _ = due_between(plan, after=start, now=start + timedelta(hours=24))
    assert slots == [start + timedelta(hours=number) for number in range(1, 25)]


def test_walking_slot_by_slot_and_looking_back_find_the_same_slots():
    """Also where a look back has to find its way without walking through all of them."""
    plan = crontab(minute="*/7", hour="1-20/3", day_of_week="mon-fri", app=app_in("Europe/Paris"))
    after = datetime(2025, 1, 1, tzinfo=UTC)
    now = datetime(2025, 12, 1, 10, 3, tzinfo=UTC)
    walked = []
    due = next_due(plan, after)
    while due <= now:
        walked.append(due)
        due = next_due(plan, due)
    looked, more = due_between(plan, after=after, now=now)
    assert more
    assert looked == walked[-len(looked) :]
    assert len(looked) >= MAX_MISSED


def test_an_interval_that_was_forgotten_for_years_costs_no_walk():
    plan = schedule(timedelta(seconds=1), app=Celery())
    now = datetime(2025, 1, 1, tzinfo=UTC)
    slots, more = due_between(plan, after=datetime(2015, 1, 1, tzinfo=UTC), now=now)
    assert more
    assert slots[-1] == now
    assert len(slots) == MAX_MISSED


@pytest.mark.parametrize("fields", [{"day_of_month": 29, "month_of_year": 2}, {"day_of_month": 31}, {"day_of_week": 0}])
def test_rare_days_are_found(fields):
    plan = crontab(minute=0, hour=0, app=Celery(), **fields)
    due = next_due(plan, datetime(2025, 3, 1, tzinfo=UTC))
    assert due > datetime(2025, 3, 1, tzinfo=UTC)
    assert due.day in plan.day_of_month
    assert due.isoweekday() % 7 in plan.day_of_week


#: Places, and how many days of 2025 have that event there.
#: Before 5.7 Celery's own search ends with a TypeError on a day without the event; see docs/beat.md.
circumpolar = pytest.mark.skipif(VERSION < (5, 7), reason="Celery's own search fails where an event is left out")
SUN = [
    ("sunrise", 48.86, 2.35, 365),
    ("sunset", 1.35, 103.8, 365),
    ("solar_noon", -0.18, -78.5, 365),
    ("dusk_civil", -33.87, 151.2, 365),
    pytest.param("dawn_astronomical", 60.17, 24.94, 242, marks=circumpolar),  # not in summer
    pytest.param("sunrise", 78.22, 15.65, 126, marks=circumpolar),  # neither in the polar night nor in the polar day
]


def year_of(plan):
    """Its slots, one after the other, each found from the last one."""
    slots, due = [], next_due(plan, datetime(2025, 1, 1, tzinfo=UTC))
    while due < datetime(2026, 1, 1, tzinfo=UTC):
        slots.append(due)
        due = next_due(plan, due)
    return slots


@pytest.mark.parametrize("event,latitude,longitude,days", SUN)
def test_a_solar_event_is_one_slot_a_day_all_year(event, latitude, longitude, days):
    slots = year_of(solar(event, latitude, longitude, app=Celery()))
    assert len(slots) == days
    assert min(after - before for before, after in zip(slots, slots[1:], strict=False)) > timedelta(hours=23)


@pytest.mark.parametrize("event,latitude,longitude,days", SUN)
def test_a_solar_event_is_the_same_slot_from_wherever_it_is_looked_for(event, latitude, longitude, days):
    """Machines begin to count at different instants. The search behind it ends some hundredths of a second apart for them."""
    plan = solar(event, latitude, longitude, app=Celery())
    slots = year_of(plan)
    apart = timedelta()
    for before, slot in list(zip(slots, slots[1:], strict=False))[::5]:
        looks = [before + timedelta(hours=hours, seconds=1) for hours in range(0, 23, 4)]
        assert {next_due(plan, look) for look in looks} == {slot}
        # The negative control: asked directly, as Celery does.
        exact = [look + estimate(plan, look) for look in looks]
        apart = max(apart, max(exact) - min(exact))
        assert timedelta(seconds=-0.2) < slot - exact[-1] < timedelta(seconds=1.2)
    assert apart > timedelta(milliseconds=10) or event == "solar_noon"  # which converges at once


def estimate(plan, look):
    asked = solar(plan.event, plan.lat, plan.lon, app=Celery(), nowfun=lambda: look)
    return asked.remaining_estimate(look)


def test_looking_back_over_solar_events_finds_each_of_them():
    plan = solar("sunset", 48.86, 2.35, app=Celery())
    slots = year_of(plan)
    looked, more = due_between(plan, after=slots[0], now=slots[40] + timedelta(hours=2))
    assert not more
    assert looked == slots[1:41]


def test_a_schedule_of_ones_own_is_asked_for_its_instants():
    """What is asked of it is `remaining_estimate`, as of any foreign class."""

    class Sunrise(schedule):
        def remaining_estimate(self, last_run_at):
            noon = last_run_at.replace(hour=6, minute=0, second=0, microsecond=0)
            following = noon if noon > last_run_at else noon + timedelta(days=1)
            return following - self.now()

    plan = Sunrise(timedelta(days=1), app=Celery())
    after = datetime(2025, 5, 1, 12, tzinfo=UTC)
    slots, _ = due_between(plan, after=after, now=after + timedelta(days=3))
    assert slots == [datetime(2025, 5, day, 6, tzinfo=UTC) for day in (2, 3, 4)]


def test_choose_sends_one_or_none_or_all_of_what_was_missed():
    now = datetime(2025, 1, 1, tzinfo=UTC)
    fresh = [now - timedelta(seconds=seconds) for seconds in (30, 20, 10)]
    stale = [now - timedelta(hours=hours) for hours in (3, 2, 1)]
    assert choose(fresh, now=now, rule="one") == fresh[-1:]
    assert choose(stale, now=now, rule="one") == stale[-1:]
    assert choose(fresh, now=now, rule="skip") == fresh[-1:]
    assert choose(stale, now=now, rule="skip") == []
    assert choose(stale, now=now, rule="all") == stale
    many = [now - timedelta(seconds=number) for number in range(1000, 0, -1)]
    assert choose(many, now=now, rule="all") == many[-64:]
    assert [choose([], now=now, rule=rule) for rule in ("one", "skip", "all")] == [[], [], []]


def test_a_changed_interval_keeps_its_grid_and_sends_nothing_of_the_past():
    plan = schedule(timedelta(seconds=10), app=Celery())
    last = datetime(2025, 1, 1, tzinfo=UTC)
    changed = last + timedelta(seconds=3605)
    start = grid_start(plan, last_due_at=last, since_at=changed)
    assert next_due(plan, start) == last + timedelta(seconds=3610)
    daily = crontab(minute=0, hour=0, app=Celery())
    assert grid_start(daily, last_due_at=last, since_at=changed) == changed


def test_the_text_of_a_schedule_is_the_same_in_every_process():
    class Odd:
        pass

    assert describe(Odd()) == describe(Odd())
    assert describe(schedule(timedelta(seconds=0.25))) != describe(schedule(timedelta(seconds=0.251)))
    assert describe(crontab(minute=5, app=app_in("Europe/Paris"))) != describe(crontab(minute=5, app=app_in("UTC")))
