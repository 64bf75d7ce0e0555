"""By which time slots are due, when a clock is wrong: the database's, this host's, or the leader's before this one."""

from datetime import datetime, timedelta, timezone

import pytest

from celery_syncguard.beat.timekeeper import Timekeeper
from celery_syncguard.core import clock

HOUR = 3600.0
START = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


class World:
    """True time, and how far the clocks are away from it. A reading every second."""

    def __init__(self, monkeypatch):
        self.true = self.database = self.wall = self.halted = 0.0
        self.took = 0.01
        self.keeper = None
        monkeypatch.setattr(clock, "now", lambda: 1000.0 + self.true - self.halted)
        monkeypatch.setattr(clock, "wall_ms", lambda: int((START.timestamp() + self.true + self.wall) * 1000))

    def reading(self):
        return START + timedelta(seconds=self.true + self.database)

    def elect(self, newest=None):
        self.keeper = self.keeper or Timekeeper()
        self.keeper.begin(self.reading(), asked_at=clock.now() - self.took, newest=newest)

    def hear(self, seconds):
        """Whether a jump was followed meanwhile."""
        followed = False
        for _ in range(seconds):
            self.true += 1
            followed |= self.keeper.hear(self.reading(), asked_at=clock.now() - self.took)
        return followed

    @property
    def error(self):
        """Seconds by which the leader's time is away from the true one."""
        return round((self.keeper.now() - START).total_seconds() - self.true)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.mark.parametrize("jump", [HOUR, -HOUR, 30.0, -30.0])
def test_a_database_whose_clock_jumps_for_a_moment_is_told_once_and_not_followed(world, caplog, jump):
    world.elect()
    world.hear(10)
    world.database = jump
    assert not world.hear(8)
    assert world.error == 0
    world.database = 0.0
    assert not world.hear(5)
    assert world.error == 0
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert f"jumped by {jump:+.0f} s" in texts[0]


def test_a_database_that_stays_behind_is_not_followed_while_this_hosts_clock_says_otherwise(world):
    """A standby of the database, whose clock is behind, has become its primary."""
    world.elect()
    world.hear(10)
    world.database = -HOUR
    assert not world.hear(2000)
    assert world.error == 0


def test_a_database_that_stays_ahead_is_followed_after_a_minute_and_at_once_when_it_is_right_again(world):
    world.elect()
    world.hear(10)
    world.database = HOUR
    assert not world.hear(59)
    assert world.hear(3)
    assert world.error == HOUR
    world.database = 0.0
    assert world.hear(1)
    assert world.error == 0


def test_who_was_elected_by_a_wrong_clock_follows_the_right_one_at_once(world, caplog):
    world.database = HOUR
    world.elect()
    assert world.error == HOUR
    assert "+3600 s away from this host's" in caplog.text
    world.hear(10)
    world.database = 0.0
    assert world.hear(1)
    assert world.error == 0


def test_who_is_elected_while_the_database_is_behind_the_latest_slot_goes_by_this_hosts_clock(world, caplog):
    world.database = -HOUR
    world.elect(newest=START - timedelta(seconds=5))
    assert world.error == 0
    assert not world.hear(500)
    assert world.error == 0
    world.database = 0.0
    world.hear(2)
    assert world.error == 0
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_who_is_elected_after_the_database_was_ahead_goes_by_its_clock(world, caplog):
    world.elect(newest=START + timedelta(seconds=HOUR))
    assert world.error == 0
    assert "none is sent again" in caplog.text


@pytest.mark.parametrize("wall", [-5 * HOUR, 5 * HOUR])
def test_a_host_whose_clock_is_wrong_goes_by_the_databases_and_says_so(world, caplog, wall):
    world.wall = wall
    world.elect(newest=START - timedelta(seconds=2))
    assert not world.hear(100)
    assert world.error == 0
    assert len(caplog.records) == 1


@pytest.mark.parametrize("wall", [HOUR, 5 * HOUR])
def test_a_host_whose_clock_is_ahead_is_no_witness_against_a_database_that_is_a_little_behind(world, wall):
    """A standby of the database, some seconds behind, has become its primary."""
    world.wall, world.database = wall, -8.0
    world.elect(newest=START - timedelta(seconds=1))
    assert not world.hear(100)
    assert world.error == -8


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_host_that_the_database_shares_its_clock_with_is_no_witness(world, jump):
    world.elect()
    world.hear(5)
    world.database = world.wall = jump
    assert not world.hear(8)
    assert world.error == 0
    world.database = world.wall = 0.0
    assert not world.hear(5)
    assert world.error == 0
    world.database = world.wall = jump
    assert world.hear(70)  # it stays: from now on this is the time
    assert world.error == jump


def test_a_host_that_was_halted_follows_the_database(world):
    """Its local clock and its wall clock have both stood still."""
    world.elect()
    world.hear(5)
    world.true += 600
    world.halted, world.wall = 600.0, -600.0
    assert world.error == -600
    assert world.hear(70)
    assert world.error == 0


def test_an_answer_that_was_read_late_is_no_jump(world, caplog):
    """The process was frozen after the database had answered."""
    world.elect()
    world.hear(5)
    late = world.reading()
    world.true += 30
    assert not world.keeper.hear(late, asked_at=clock.now() - 30)
    assert world.error == 0
    world.hear(5)
    assert not caplog.records


def test_a_first_answer_that_was_read_late_is_made_good_by_the_next_one(world, caplog):
    world.keeper = Timekeeper()
    late = world.reading()
    world.true += 30
    world.keeper.begin(late, asked_at=clock.now() - 30, newest=None)
    world.hear(1)
    assert world.error == 0
    assert not caplog.records


def test_who_is_elected_again_within_an_hour_knows_the_time_from_before(world, caplog):
    world.elect()
    world.hear(5)
    world.true += 600
    world.database = HOUR
    world.elect()
    world.hear(8)
    assert world.error == 0
    world.database = 0.0
    world.hear(1)
    assert len(caplog.records) == 1
    world.true += 2 * HOUR
    world.database = -30.0
    world.elect()
    assert world.error == -30


def test_clocks_that_drift_apart_are_followed_without_a_word(world, caplog):
    world.elect()
    for _ in range(100):
        world.database += 0.5
        world.hear(1)
    assert world.error == 50
    assert not caplog.records
