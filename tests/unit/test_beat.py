"""The leader's scheduler without a server: state in memory, messages on Celery's memory transport."""

import contextlib
import dataclasses
import gc
import os
import signal
import threading
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from celery import Celery, beat
from celery.apps.beat import Beat
from celery.schedules import crontab
from kombu import Connection, Producer

from celery_syncguard import signals
from celery_syncguard.beat.inner_schedule import inner_class
from celery_syncguard.beat.memory_slots import MemorySlots
from celery_syncguard.beat.scheduler import LeaderScheduler
from celery_syncguard.beat.slot_sender import sends_slots
from celery_syncguard.beat.slots import PRUNED_AT_MOST, Slot
from celery_syncguard.beat.timekeeper import Timekeeper
from celery_syncguard.beat.undisturbed import undisturbed
from celery_syncguard.core import clock
from celery_syncguard.errors import ImproperlyConfigured, StoreUnavailable
from celery_syncguard.tasks import app_state
from tests.fixtures.interrupting import at_step
from tests.fixtures.polling import poll


class Clock:
    """A hand that moves both the local and the wall clock."""

    def __init__(self, monkeypatch):
        self.ahead = 0.0
        right_now, right_wall = clock.now, clock.wall_ms
        monkeypatch.setattr(clock, "now", lambda: right_now() + self.ahead)
        monkeypatch.setattr(clock, "wall_ms", lambda: right_wall() + int(self.ahead * 1000))


def make_app(schedule=None, **conf):
    app = Celery("beat", broker="memory://", set_as_current=False)
    app.conf.update({"syncguard_dsn": "memory://", "syncguard_leader_ttl": 30, "beat_schedule": schedule or {}, **conf})

    @app.task(name="note", shared=False)
    def note():
        """Never runs here."""

    return app


def every(seconds, **options):
    return {"task": "note", "schedule": timedelta(seconds=seconds), "options": options}


@pytest.fixture
def scheduler():
    made = []

    def make(app):
        made.append(LeaderScheduler(app=app, max_interval=None, lazy=False))
        return made[-1]

    yield make
    for one in made:
        one.close()


def lead(one):
    """Tick until it leads and has its schedule."""
    poll(lambda: one.tick() is not None and one._inner is not None and one._inner._heap is not None)
    return one


def sent(one):
    return [(row.entry, row.due_at) for row in reversed(one._slots.recent(limit=10_000)) if row.sent_at]


def test_constructing_connects_to_nothing_and_starts_nothing():
    """Celery builds it twice, once only for the banner."""
    app = make_app()
    app.conf.syncguard_dsn = "postgresql://nobody@127.0.0.1:1/nothing"
    app.conf.broker_url = "amqp://127.0.0.1:1//"
    before = set(threading.enumerate())
    one = LeaderScheduler(app=app, lazy=True)
    two = LeaderScheduler(app=app, lazy=False)
    assert set(threading.enumerate()) == before
    assert "leader key" in one.info
    assert "127.0.0.1:1" in one.info
    for _ in range(2):
        one.close()
        two.close()


@pytest.mark.parametrize(
    "conf",
    [
        {"syncguard_dsn": "mysql://x/y"},
        {"syncguard_leader_ttl": 1},
        {"syncguard_catch_up": "some"},
        {"syncguard_beat_scheduler": "no.such:Scheduler"},
        {"syncguard_beat_scheduler": "celery_syncguard.beat:LeaderScheduler"},
        {"syncguard_beat_scheduler": "celery:Celery"},
        {"syncguard_leader_tl": 3},
    ],
)
def test_a_setting_that_cannot_be_meant_ends_beat_at_its_start(conf):
    app = make_app(**conf)
    with pytest.raises(ImproperlyConfigured):
        LeaderScheduler(app=app, lazy=True)


def test_by_default_a_leadership_lasts_fifteen_seconds_and_is_renewed_every_five(scheduler, monkeypatch):
    app = make_app({"a": every(10)}, syncguard_leader_ttl=None)
    one = lead(scheduler(app))
    assert one.leadership.ttl == 15.0
    assert one._term.ttl == 15.0
    sent_at = []
    store = one._guard.store
    right = store.renew
    monkeypatch.setattr(store, "renew", lambda renewals: sent_at.append(clock.now()) or right(renewals))
    elected_at = clock.now()
    poll(lambda: len(sent_at) >= 2, timeout=15)
    pauses = [after - before for before, after in zip([elected_at, *sent_at], sent_at, strict=False)]
    assert all(3.5 < pause < 7 for pause in pauses), pauses  # with jitter, never later than 5 s but for a busy machine


def test_slots_lie_on_a_grid_whatever_the_ticks_do(scheduler, monkeypatch):
    hand = Clock(monkeypatch)
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_catch_up="all")))
    for step in (3.3, 10.0, 9.1, 31.0, 0.5, 12.2):
        hand.ahead += step
        one._guard._renewer.renew_now(one._term) if one._term and one._term.remaining else None
        for _ in range(6):
            one.tick()
        poll(lambda: one.tick() is not None and one._inner is not None)
    instants = [due for _, due in sent(one)]
    assert len(instants) >= 6
    assert {after - before for before, after in zip(instants, instants[1:], strict=False)} == {timedelta(seconds=10)}


def test_an_entry_that_cannot_be_understood_does_not_stop_the_others(scheduler, monkeypatch, caplog):
    hand = Clock(monkeypatch)

    class Broken(crontab):
        def remaining_estimate(self, last_run_at):
            raise LookupError("never")

    app = make_app({"bad": {"task": "note", "schedule": Broken()}, "good": every(10)})
    one = lead(scheduler(app))
    hand.ahead += 11
    poll(lambda: one.tick() is not None and ("good" in {entry for entry, _ in sent(one)}))
    assert "bad" in caplog.text


def slow_entries(hand, number, seconds, look=lambda: None, **fields):
    """Entries each of which takes so long to be looked at, and what each `look` returned."""
    looks = []

    class Slow(crontab):
        def remaining_estimate(self, last_run_at):
            looks.append(look())
            hand.ahead += seconds
            return super().remaining_estimate(last_run_at)

    return {f"slow {number}": {"task": "note", "schedule": Slow(**fields)} for number in range(number)}, looks


def test_a_tick_ends_in_a_second_or_two_however_many_entries_there_are_to_look_at(scheduler, monkeypatch):
    hand = Clock(monkeypatch)
    schedule, looks = slow_entries(hand, 40, 0.3)
    one = lead(scheduler(make_app(schedule, syncguard_leader_ttl=3600)))
    most = 0
    while len({entry for entry, _ in sent(one)}) < 40:
        before = len(looks)
        one.tick()
        hand.ahead += 0.2
        most = max(most, len(looks) - before)
        assert len(looks) < 2000
    assert most <= 8


def test_a_slot_that_is_sent_costs_no_comparison_of_the_whole_schedule(scheduler, monkeypatch):
    """A change is seen within a second nevertheless."""
    hand = Clock(monkeypatch)
    app = make_app({f"{number}": every(10) for number in range(200)}, syncguard_leader_ttl=3600)
    one = lead(scheduler(app))
    compared = []
    right = one._inner.schedules_equal
    monkeypatch.setattr(one._inner, "schedules_equal", lambda *args: compared.append(args) or right(*args))
    hand.ahead += 11
    for _ in range(300):
        one.tick()
    assert len(sent(one)) >= 200
    assert len(compared) < 40
    del one._inner.schedule["7"]
    hand.ahead += 1.1
    one._next_tick = 0.0
    one.tick()
    assert "7" not in {event.entry.name for event in one._inner._heap}


class AllInOneTick(beat.Scheduler):
    """A class with a tick of its own, which returns when all has been looked at."""

    def tick(self, *_, **__):
        for entry in list(self.schedule.values()):
            if self.is_due(entry)[0]:
                self.apply_entry(entry, producer=self.producer)
        self._heap = []
        return 1.0


@pytest.mark.parametrize("protection", ["by progress", "by ticks"])
def test_a_leader_that_works_for_long_is_not_one_that_hangs(scheduler, monkeypatch, protection):
    """A tick of minutes, in which entry after entry is looked at. The negative control goes by whole ticks."""
    hand = Clock(monkeypatch)
    if protection == "by ticks":
        monkeypatch.setattr(LeaderScheduler, "_moved_at", lambda self: self._ticked_at)
    far = datetime.now(timezone.utc) + timedelta(days=10)
    schedule, alive = slow_entries(hand, 30, 7.0, lambda: one.leadership._alive(), day_of_month=far.day)
    app = make_app(schedule, syncguard_beat_scheduler=AllInOneTick, syncguard_leader_ttl=3600)
    one = scheduler(app)
    one._begin()
    one._settings = dataclasses.replace(one._settings, leader_ttl=3)  # so that its patience is a minute
    poll(lambda: one.tick() is not None and alive)
    assert len(alive) >= 30  # all of that was one tick
    assert all(alive) == (protection == "by progress")


def test_a_name_that_cannot_be_stored_leaves_out_its_entry_alone(scheduler, monkeypatch, caplog):
    hand = Clock(monkeypatch)
    one = lead(scheduler(make_app({"a\0b": every(10), "good": every(10)})))
    hand.ahead += 11
    poll(lambda: one.tick() is not None and "good" in {entry for entry, _ in sent(one)})
    assert "an entry is left out" in caplog.text


def test_a_message_that_the_broker_refuses_keeps_its_entry_back_alone(scheduler, monkeypatch, caplog):
    hand = Clock(monkeypatch)

    app = make_app({"bad": every(10, queue="bad"), "good": every(10)})
    one = lead(scheduler(app))
    refused = one._inner.connection.channel_errors[0]
    right = one._inner.producer.publish

    def publish(*args, **kwargs):
        if kwargs["routing_key"] == "bad":
            raise refused("no queue 'bad'")
        return right(*args, **kwargs)

    one._inner.producer.publish = publish
    hand.ahead += 11
    poll(lambda: one.tick() is not None and "the broker refuses 'bad'" in caplog.text)
    poll(lambda: one.tick() is not None and "good" in {entry for entry, _ in sent(one)})
    assert "bad" not in {entry for entry, _ in sent(one)}


def test_a_message_that_can_never_be_sent_is_given_up_loudly_and_alone(scheduler, monkeypatch, caplog):
    hand = Clock(monkeypatch)
    bad = every(10)
    bad["args"] = (object(),)
    one = lead(scheduler(make_app({"bad": bad, "good": every(10)})))
    hand.ahead += 11
    poll(lambda: one.tick() is not None and "good" in {entry for entry, _ in sent(one)})
    poll(lambda: one.tick() is not None and "'bad' cannot be sent" in caplog.text)
    (row,) = one._slots.recent(entry="bad")
    assert row.dropped_at is not None


def test_an_entry_whose_own_code_misses_a_file_keeps_nobody_else_waiting_and_no_connection_from_working(
    scheduler, monkeypatch, caplog
):
    """An OSError like a broker's, and no outage."""
    hand = Clock(monkeypatch)
    missing = threading.Event()
    missing.set()

    def read():
        if missing.is_set():
            raise FileNotFoundError("no such file: report.csv")
        return "read"

    app = make_app(
        {"good": every(10), "bad": {**every(25), "task": "elsewhere", "args": (beat.BeatLazyFunc(read),)}},
        syncguard_leader_ttl=3600,
    )
    one = lead(scheduler(app))
    hand.ahead += 11
    poll(lambda: one.tick() is not None and sent(one))
    hand.ahead += 15
    poll(lambda: one.tick() is not None and caplog.text.count("'bad' fails before it is published") == 1)
    connection = one._inner.connection
    for times in (2, 3):
        hand.ahead += 10
        count = len(sent(one))
        poll(lambda times=times: one.tick() is not None and caplog.text.count("before it is published") == times)
        assert one._broker.quiet_until <= clock.now(), "nobody waits for it"
        poll(lambda count=count: one.tick() is not None and len(sent(one)) > count)
        assert (one._broker.failure, one._broker.failures) == (None, 0)
        assert one._inner.connection is connection
    assert {entry for entry, _ in sent(one)} == {"good"}
    missing.clear()
    hand.ahead += 60
    poll(lambda: one.tick() is not None and "bad" in {entry for entry, _ in sent(one)})
    assert one._slots.unsent() == []


def test_a_broker_that_takes_connections_and_no_messages_is_an_outage(scheduler, monkeypatch, caplog):
    """A RabbitMQ whose disk is full, say: it concerns all entries alike."""
    hand = Clock(monkeypatch)
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=3600)))

    def publish(*_, **__):
        raise TimeoutError("no confirmation")

    with monkeypatch.context() as blocked:
        blocked.setattr(Producer, "publish", publish)
        hand.ahead += 11
        poll(lambda: one.tick() is not None and one._broker.failures > 2)
    assert one._broker.failure == "TimeoutError: no confirmation"
    assert "before it is published" not in caplog.text
    poll(lambda: one.tick() is not None and sent(one))
    assert one._broker.failure is None


class CannotWrite(beat.Scheduler):
    """Its disk is full."""

    def sync(self):
        raise OSError("no space left")


def test_a_schedule_that_cannot_be_written_back_costs_no_slot_and_makes_no_copy(scheduler, monkeypatch, caplog):
    """Celery writes it right after publishing, where a failure looks as if the message had not gone out."""
    hand = Clock(monkeypatch)
    app = make_app({"a": every(10)}, syncguard_beat_scheduler=CannotWrite, syncguard_leader_ttl=3600, beat_sync_every=1)
    one = lead(scheduler(app))
    published = []
    right = one._inner.producer.publish

    def publish(*args, **kwargs):
        published.append(kwargs["headers"]["id"])
        return right(*args, **kwargs)

    one._inner.producer.publish = publish
    for _ in range(3):
        hand.ahead += 10
        count = len(sent(one))
        poll(lambda count=count: one.tick() is not None and len(sent(one)) > count)
        assert one.should_sync()
        one.sync()
        assert not one.should_sync()
    assert len(published) == len(set(published)) == len(sent(one)) == 3
    assert "could not write back its schedule: OSError" in caplog.text
    assert "does not answer" not in caplog.text


@pytest.mark.parametrize("within,hours", [(None, 3), (3700, 1), (30, 0)])
def test_celerys_deadline_for_crontabs_holds_under_every_rule(scheduler, monkeypatch, within, hours):
    hand = Clock(monkeypatch)
    app = make_app(
        {"hourly": {"task": "note", "schedule": crontab(minute=0)}, "fast": every(10)},
        syncguard_catch_up="all",
        syncguard_leader_ttl=3600,
        beat_cron_starting_deadline=within,
    )
    # Begin ten minutes past the hour, so that three and a half hours later three slots were missed.
    hand.ahead = (70 * 60 - clock.wall_ms() / 1000 % 3600) % 3600
    one = lead(scheduler(app))
    one._retire()
    hand.ahead += 3600 * 3.0
    poll(lambda: one.tick() is not None and "fast" in {entry for entry, _ in sent(one)}, timeout=40)
    poll(lambda: one.tick() > 0, timeout=40)
    assert len([entry for entry, _ in sent(one) if entry == "hourly"]) == hours


RULES_OF_LATE_SLOTS = {
    "one": ({}, {}, True),
    "skip": ({"options": {"syncguard_catch_up": "skip"}}, {}, False),
    "crontab": ({"schedule": crontab(minute="*/10")}, {"beat_cron_starting_deadline": 60}, False),
}


@pytest.mark.parametrize("rule", RULES_OF_LATE_SLOTS)
def test_a_slot_that_came_due_while_the_broker_was_away_is_sent_by_its_rule_and_not_later(scheduler, monkeypatch, rule):
    """The broker is back before the next slot is due."""
    options, settings, sends = RULES_OF_LATE_SLOTS[rule]
    hand = Clock(monkeypatch)
    hand.ahead = 601 - clock.wall_ms() / 1000 % 600  # a slot of the crontab is ten minutes away
    entry = {**every(600), **options}
    away = threading.Event()
    connect = Connection.connect

    def connect_if_there(connection):
        if away.is_set():
            raise ConnectionRefusedError("the broker is away")
        return connect(connection)

    monkeypatch.setattr(Connection, "connect", connect_if_there)
    one = lead(scheduler(make_app({"late": entry}, syncguard_leader_ttl=3600, **settings)))
    away.set()
    hand.ahead += 601
    poll(lambda: one.tick() is not None and one._broker.failure is not None)
    hand.ahead += 90
    away.clear()
    poll(lambda: one.tick() > 0 and one._broker.failure is None)
    assert [name for name, _ in sent(one)] == ["late"] * sends
    hand.ahead += 520
    poll(lambda: one.tick() is not None and len(sent(one)) == sends + 1)


@pytest.mark.parametrize("rule", RULES_OF_LATE_SLOTS)
def test_a_slot_that_its_own_class_holds_back_is_sent_by_its_rule_and_not_later(scheduler, monkeypatch, rule):
    options, settings, sends = RULES_OF_LATE_SLOTS[rule]
    hand = Clock(monkeypatch)
    hand.ahead = 601 - clock.wall_ms() / 1000 % 600
    asked = []

    class NotYet(beat.Scheduler):
        willing = False

        def is_due(self, entry):
            asked.append(entry.name)
            return self.willing, 0.05

    app = make_app(
        {"late": {**every(600), **options}}, syncguard_leader_ttl=3600, syncguard_beat_scheduler=NotYet, **settings
    )
    one = lead(scheduler(app))
    hand.ahead += 601
    poll(lambda: one.tick() is not None and asked)
    hand.ahead += 90
    monkeypatch.setattr(NotYet, "willing", True)
    if sends:
        poll(lambda: one.tick() is not None and sent(one))
    else:
        poll(lambda: one.tick() is not None and not one._agenda.places["late"].pending)
        assert sent(one) == []


def test_the_option_for_catching_up_does_not_reach_the_message(scheduler, monkeypatch):
    hand = Clock(monkeypatch)
    app = make_app({"a": every(10, syncguard_catch_up="all", priority=3)})
    seen = []
    right = app.send_task
    monkeypatch.setattr(app, "send_task", lambda *args, **kwargs: seen.append(kwargs) or right(*args, **kwargs))
    del app.tasks["note"]  # so that beat sends by name
    one = lead(scheduler(app))
    hand.ahead += 11
    poll(lambda: one.tick() is not None and seen)
    assert seen[0]["priority"] == 3
    assert "syncguard_catch_up" not in seen[0]
    assert set(seen[0]["headers"]) - {"celery_beat_task"} == {
        "syncguard_term",
        "syncguard_due_at",
    }  # Celery's own, from 5.5 on
    assert app.conf.beat_schedule["a"]["options"] == {"syncguard_catch_up": "all", "priority": 3}


class Elsewhere(beat.Scheduler):
    """Has its entries from somewhere."""

    def setup_schedule(self):
        self.merge_inplace({"a": every(10)})


@pytest.mark.parametrize(
    "configured,ours,inside",
    [
        (Elsewhere, None, Elsewhere),
        ("tests.unit.test_beat:Elsewhere", None, Elsewhere),
        (Elsewhere, beat.Scheduler, beat.Scheduler),
        ("celery.beat:PersistentScheduler", None, beat.Scheduler),
        ("syncguard", None, beat.Scheduler),
        (LeaderScheduler, None, beat.Scheduler),
        (LeaderScheduler, "tests.unit.test_beat:Elsewhere", Elsewhere),
    ],
)
def test_the_schedule_that_celery_is_configured_for_is_the_one_inside_unless_ours_names_another(
    scheduler, configured, ours, inside
):
    one = scheduler(make_app(beat_scheduler=configured, syncguard_beat_scheduler=ours))
    assert one._class.__name__ == inside.__name__
    assert issubclass(one._class, inside) or one._class.__qualname__ == inside.__qualname__
    assert inside.__name__ in one.info


def test_a_configured_scheduler_that_cannot_be_inside_ends_beat_at_its_start():
    class RedBeatScheduler(beat.Scheduler):
        __module__ = "redbeat.schedulers"

    with pytest.raises(ImproperlyConfigured, match="^beat_scheduler is .*RedBeatScheduler.*a lock of its own"):
        LeaderScheduler(app=make_app(beat_scheduler=RedBeatScheduler), lazy=True)
    with pytest.raises(ImproperlyConfigured, match="^beat_scheduler: cannot load 'no.such:Scheduler'"):
        LeaderScheduler(app=make_app(beat_scheduler="no.such:Scheduler"), lazy=True)
    LeaderScheduler(app=make_app(beat_scheduler=RedBeatScheduler, syncguard_beat_scheduler=beat.Scheduler), lazy=True)


@pytest.mark.parametrize("schedule,told", [({}, 1), ({"a": every(10)}, 0)])
def test_a_leader_with_nothing_to_send_says_so_once(scheduler, caplog, schedule, told):
    one = lead(scheduler(make_app(schedule, result_backend="cache+memory://")))
    one.tick()
    assert (
        caplog.text.count("leading an empty schedule, so nothing is sent: celery.beat.Scheduler has no entries") == told
    )


def test_a_beat_ends_with_the_process_that_it_belongs_to_and_a_hanging_one_leads_no_more(scheduler, caplog):
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=300)))
    one.worker = os.getppid()
    one.tick()
    assert one.leadership.leading
    one.worker = 2**30  # not the parent, any more
    assert one.leadership.lost(timeout=5), "although nobody ticks"
    for _ in range(2):
        with pytest.raises(SystemExit):
            one.tick()
    assert caplog.text.count("the worker that this beat belongs to (pid 1073741824) is gone") == 1


class Signalled(LeaderScheduler):
    """Gets a SIGTERM once it leads, and the next ones while the handler of the first runs, before that step of it."""

    where = "tick"
    step = 0
    signals = 0
    more = False  # the handler has that step

    def _report(self):
        super()._report()
        self._get("tick")

    def should_sync(self):
        self._get("between ticks")
        return super().should_sync()

    def _get(self, where):
        if self._leads() and (where == self.where or (where, self.where) == ("between ticks", "while it closes")):
            signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, number, frame):
        self.signals += 1
        if self.signals > 1 or self.where == "while it closes":
            super()._on_signal(number, frame)
            return
        at_step(self.step, lambda: super(Signalled, self)._on_signal(number, frame), self._signal_again)
        raise SystemExit

    def _signal_again(self):
        self.more = True
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)

    def close(self):
        if self.where != "while it closes":
            super().close()
        elif at_step(self.step, super().close, self._signal_again):
            raise SystemExit


@pytest.mark.parametrize("where", ["tick", "between ticks", "while it closes"])
def test_any_number_of_signals_ends_beat_and_gives_its_lease_back(monkeypatch, where):
    """The negative control is that of the leadership alone."""
    monkeypatch.setattr("celery_syncguard.beat.scheduler._TURN", 0.005)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    ended = 0
    try:
        for step in range(0, 100_000, 101 if where == "while it closes" else 7):
            app = make_app({"a": every(0.01)}, syncguard_leader_ttl=300)
            service = beat.Service(app, scheduler_cls=Signalled)
            Beat(app=app, quiet=True).install_sync_handler(service)
            service.scheduler.where, service.scheduler.step = where, step
            with contextlib.suppress(SystemExit):
                service.start()
            poll(lambda service=service: service.scheduler._guard.store.locks() == [])
            assert not service.scheduler.leadership.leading
            ended += 1
            if not service.scheduler.more:
                break
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert ended > 3


@pytest.mark.parametrize("where", ["tick", "between ticks"])
def test_the_end_of_a_term_is_recorded_wherever_a_signal_comes(monkeypatch, where):
    """Without it the health check takes the vacancy for a takeover until the lease would have ended."""
    monkeypatch.setattr("celery_syncguard.beat.scheduler._TURN", 0.005)

    class SignalledOnce(LeaderScheduler):
        def _get_signal(self, here):
            if here == where and self._slots.terms() and not self._ending:
                signal.raise_signal(signal.SIGTERM)

        def _report(self):
            super()._report()
            self._get_signal("tick")

        def should_sync(self):
            self._get_signal("between ticks")
            return super().should_sync()

    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        service = beat.Service(make_app({"a": every(0.01)}, syncguard_leader_ttl=300), scheduler_cls=SignalledOnce)
        Beat(app=service.app, quiet=True).install_sync_handler(service)
        service.start()
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    (term,) = service.scheduler._slots.terms()
    assert term.ended_at is not None


@pytest.mark.timeout(30)
def test_a_signal_that_came_before_beat_began_ends_it_whatever_became_of_its_exception():
    """Celery's handler has closed the scheduler, and an import or a destructor has swallowed what it raised."""
    service = beat.Service(make_app({"a": every(10)}), scheduler_cls=LeaderScheduler)
    service.sync()
    service.start()
    assert service.scheduler.leadership is None


def test_signals_tell_when_a_term_begins_and_ends(scheduler):
    heard = []

    def elected(sender, term, **_):
        heard.append(("elected", sender, term))

    def lost(sender, term, **_):
        heard.append(("lost", sender, term))

    signals.leader_elected.connect(elected)
    signals.leader_lost.connect(lost)
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_key="mine")))
    term = one.leadership.term
    one.close()
    poll(lambda: len(heard) == 2)
    assert heard == [("elected", "mine", term), ("lost", "mine", term)]


def test_memory_stays_flat_over_many_ticks_and_terms(scheduler, monkeypatch):
    """Slots, changes of the schedule, and terms that come and go."""
    hand = Clock(monkeypatch)
    app = make_app({"a": every(1), "b": every(7)}, syncguard_leader_ttl=3600)
    one = lead(scheduler(app))

    def work(rounds):
        for number in range(rounds):
            hand.ahead += 1
            one.tick()
            one.tick()
            if number % 50 == 0 and one._inner is not None:
                one._inner.schedule["b"] = one._inner.Entry(
                    name="b", task="note", schedule=timedelta(seconds=7 + number % 3), app=app
                )
            if number % 150 == 0:
                one._retire()
            if number % 100 == 0:
                one._slots.prune(older=5.0)
                app.connection_for_write().default_channel.queue_purge("celery")
        gc.collect()
        return len(gc.get_objects())

    work(200)
    before = work(200)
    after = work(1000)
    assert after < before * 1.03 + 2000


def test_old_slots_are_deleted_once_an_hour_and_on_and_on_while_there_are_more(scheduler, monkeypatch):
    """However many there are in an hour: one call of the database's function deletes no more than so many."""
    hand = Clock(monkeypatch)
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=3600)))
    left = [PRUNED_AT_MOST, PRUNED_AT_MOST, 7]
    monkeypatch.setattr(one._slots, "prune", lambda older: left.pop(0))

    def report():
        one._next_report = 0.0
        one._report()
        return len(left)

    assert report() == 3, "it has done so at the beginning of its term"
    hand.ahead += 3601
    assert [report() for _ in range(5)] == [2, 1, 0, 0, 0]


def test_close_in_mid_tick_hands_over_and_leaves_the_rest_to_the_second_call(scheduler):
    """Celery calls it in its signal handler, and again when the tick is unwound."""
    one = lead(scheduler(make_app({"a": every(10)})))
    inner = one._inner
    closed = []
    inner.close = lambda: closed.append(1)
    one._busy = True
    one.close()
    assert not one.leadership.leading
    assert closed == []
    one._busy = False
    one.close()
    one.close()
    assert closed == [1]
    assert one.tick() > 0


@pytest.mark.parametrize("where", ["sync", "close"])
def test_close_in_the_middle_of_writing_back_hands_over_and_does_not_enter_the_schedule_again(scheduler, where):
    """It may hold a lock there, as of a connection: entered again it would wait for itself, and lead on."""
    one = lead(scheduler(make_app({"a": every(10)})))
    inner = one._inner
    inside, entered_again, led, closed = [], [], [], []

    def interrupted():
        entered_again.extend(inside)
        inside.append(1)
        if len(inside) == 1:
            # As Celery's handler of SIGTERM.
            one.close()
            led.append(one.leadership.leading)
            raise SystemExit

    inner.sync, inner.close = interrupted, lambda: closed.append(1)
    with pytest.raises(SystemExit):
        getattr(one, where)()
    assert (entered_again, led, closed) == ([], [False], [])
    one.close()
    assert (entered_again, closed) == ([], [1])


class Database:
    """The clock of the database that beat's state is in: apart from this host's."""

    def __init__(self, monkeypatch):
        self.ahead = 0.0
        right = MemorySlots._now
        monkeypatch.setattr(MemorySlots, "_now", lambda slots: right(slots) + timedelta(seconds=self.ahead))


def go_on(one, hand, seconds, step=1.0):
    """Let time pass, with ticks in between."""
    for _ in range(int(seconds / step)):
        hand.ahead += step
        for _ in range(3):
            one.tick()


def true_now():
    return datetime.fromtimestamp(clock.wall_ms() / 1000, tz=timezone.utc)


def of_real_time(one, since):
    """The slots of the entry "a", every 10 s, that were sent for an instant after that, up to now; all of them, and once."""
    now = true_now()
    slots = [due_at for _, due_at in sorted(sent(one), key=lambda row: row[1]) if since < due_at <= now]
    assert {later - earlier for earlier, later in pairwise(slots)} <= {timedelta(seconds=10)}
    return len(slots)


@pytest.mark.parametrize("protection", ["judged", "followed"])
@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_database_whose_clock_is_wrong_for_a_moment_costs_no_slot(scheduler, monkeypatch, caplog, jump, protection):
    """The negative control takes every reading for the time."""
    hand, database = Clock(monkeypatch), Database(monkeypatch)
    if protection == "followed":
        monkeypatch.setattr(Timekeeper, "hear", lambda self, reading, asked_at: self._take(reading, asked_at))
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=3600)))
    monkeypatch.setattr(one, "_next_report", 0.0)
    since = true_now()
    for ahead in (0, jump, 0):
        database.ahead = ahead
        go_on(one, hand, 15)
        one._next_report = 0.0  # it would ask after a third of its ttl
        go_on(one, hand, 5)
    assert (of_real_time(one, since) >= 5 and len(sent(one)) <= 7) == (protection == "judged")
    assert f"jumped by {jump:+d} s" in caplog.text or protection == "followed"


def test_who_leads_again_while_the_clock_is_wrong_knows_the_time_from_before(scheduler, monkeypatch):
    """Its lease has expired by that clock; so it was told that it leads no more, and is elected once more."""
    hand, database = Clock(monkeypatch), Database(monkeypatch)
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=3600)))
    since = true_now()
    for ahead in (0, 3600, 0):
        database.ahead = ahead
        one._retire()
        go_on(one, hand, 20)
    assert of_real_time(one, since) >= 5
    assert all(due_at <= true_now() for _, due_at in sent(one))


def test_slots_that_were_sent_too_early_are_not_sent_again_and_those_of_real_time_go_on(scheduler, monkeypatch, caplog):
    """A leader was elected while the database's clock was ahead, and is still there when it is right again."""
    hand, database = Clock(monkeypatch), Database(monkeypatch)
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=3600, syncguard_catch_up="all")))
    since = true_now()
    go_on(one, hand, 30)
    one._retire()
    one._time = Timekeeper()  # another process leads from now on
    database.ahead = 1800
    go_on(one, hand, 30)
    early = [due_at for _, due_at in sent(one) if due_at > true_now()]
    assert len(early) >= 64
    database.ahead = 0.0
    one._next_report = 0.0
    go_on(one, hand, 60)
    assert of_real_time(one, since) >= 11  # also those of the time in which the clock was ahead
    go_on(one, hand, 1800, step=10)
    slots = sent(one)
    assert len(slots) == len(set(slots))
    assert of_real_time(one, since) >= 11 + 179
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize("before,after", [(3600, 0), (0, -3600)], ids=["was ahead", "is behind"])
def test_a_leader_elected_after_the_clock_went_back_goes_on_with_the_slots_of_real_time(
    scheduler, monkeypatch, caplog, before, after
):
    hand, database = Clock(monkeypatch), Database(monkeypatch)
    database.ahead = before
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=3600)))
    go_on(one, hand, 30)
    one._retire()
    one._time = Timekeeper()  # another process leads from now on
    database.ahead = after
    since = true_now()
    go_on(one, hand, 100)
    assert of_real_time(one, since) >= 9
    slots = sent(one)
    assert len(slots) == len(set(slots))
    assert "the latest slot" in caplog.text
    assert "ERROR" not in caplog.text


def test_unsent_slots_that_could_not_be_read_are_read_again(scheduler, monkeypatch):
    hand = Clock(monkeypatch)
    one = lead(scheduler(make_app({"a": every(10)}, syncguard_leader_ttl=3600)))
    slot = Slot("a", true_now().replace(microsecond=0) - timedelta(seconds=5))
    one._slots.claim(one._term, slot, schedule="every 10 s", next_due_at=None)
    one._retire()
    right, failures = one._slots.unsent, iter([StoreUnavailable("by a test")])

    def unsent():
        for failure in failures:
            raise failure
        return right()

    monkeypatch.setattr(one._slots, "unsent", unsent)
    go_on(one, hand, 5)
    assert ("a", slot.due_at) in sent(one)


def test_a_slot_that_is_claimed_and_not_sent_outlives_a_jump_of_the_clock(scheduler, monkeypatch):
    hand = Clock(monkeypatch)
    app = make_app({"a": every(600)}, syncguard_leader_ttl=3600)
    one = lead(scheduler(app))
    monkeypatch.setattr(one._inner, "producer", None)
    monkeypatch.setattr(Connection, "connect", fail_to_connect)
    hand.ahead += 601
    slot = Slot("a", one._agenda.places["a"].next_due)
    one._slots.claim(one._term, slot, schedule="every 600 s", next_due_at=None)
    one._agenda.places["a"].unsent.add(slot.due_at)
    one._agenda.jumped = True
    one.tick()
    assert one._agenda.places["a"].unsent == {slot.due_at}
    assert one._agenda.places["a"].pending == [slot.due_at]


def test_after_a_jump_that_shows_in_the_middle_of_a_tick_the_next_tick_comes_at_once(scheduler, monkeypatch):
    """Not when the next entry would have been due by the time from before."""
    inner = lead(scheduler(make_app({"a": every(100)}, syncguard_leader_ttl=3600)))._inner
    jumps, right = [True], inner._due

    def due(entry):
        inner._agenda.jumped = bool(jumps and jumps.pop())
        return right(entry)

    monkeypatch.setattr(inner, "_due", due)
    inner._heap = [event._replace(time=0.0) for event in inner._heap]
    assert inner.tick() == 0.0
    assert inner.tick() > 1


def fail_to_connect(_connection):
    raise ConnectionResetError("by a test")


class LateSlots:
    """Slots of which the store has not heard what became of one, as long as it is away."""

    def __init__(self, slots):
        self._slots, self.away, self.late = slots, True, [Slot("a", datetime(2025, 6, 1, tzinfo=timezone.utc))]

    def __getattr__(self, name):
        return getattr(self._slots, name)

    def unrecorded(self):
        return self.late

    def flush(self):
        if self.away:
            raise StoreUnavailable("by a test")
        self.late = []


def test_what_could_not_be_recorded_as_sent_is_written_by_a_standby_too(scheduler, monkeypatch, caplog):
    hand = Clock(monkeypatch)
    one = lead(scheduler(make_app({"a": every(10)})))
    slots = one._slots = LateSlots(one._slots)
    monkeypatch.setattr(type(one.leadership), "lease", None)  # another one leads
    for _ in range(3):
        hand.ahead += 1.1
        one.tick()
    assert slots.late
    slots.away = False
    hand.ahead += 1.1
    one.tick()
    assert not slots.late
    one.close()
    assert "could not record" not in caplog.text


def test_what_could_not_be_recorded_as_sent_is_told_once_at_the_end(scheduler, caplog):
    one = lead(scheduler(make_app({"a": every(10)})))
    one._slots = LateSlots(one._slots)
    one.close()
    one.close()
    (line,) = [record.getMessage() for record in caplog.records if "could not record what" in record.getMessage()]
    assert "1 slot(s)" in line
    assert "'a' at 2025-06-01" in line


def test_a_signal_waits_for_the_end_of_a_send_and_a_second_one_does_not():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))
    try:
        with undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == []
        poll(lambda: heard == ["TERM"])
        with undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == ["TERM"]
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == ["TERM", "TERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_a_signal_at_any_step_ends_the_process_and_the_next_one_does_not_wait(first, second):
    """Also between the two handlers, when the first signal's own handler has raised."""

    def end(*_):
        raise SystemExit

    def send():
        with undisturbed():
            pass

    numbers = signal.Signals[first], signal.Signals[second]
    before = {number: signal.getsignal(number) for number in numbers}
    step = 0
    try:
        while True:
            for number in numbers:
                signal.signal(number, end)
            interrupted = at_step(step, send, lambda: signal.raise_signal(numbers[0]))
            with pytest.raises(SystemExit):
                signal.raise_signal(numbers[1])
            if not interrupted:
                break
            step += 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert step > 50


def test_a_standby_has_no_schedule_and_looks_often():
    app = make_app({"a": every(1)})
    one = LeaderScheduler(app=app, lazy=False)
    guard = app_state.guard_for(app)
    from celery_syncguard.core.leader_key import leader_lock_key
    from celery_syncguard.core.store import Acquire

    held = guard.acquire(Acquire(key=leader_lock_key("beat"), lock_id="x" * 22, ttl=60, holder="another"))
    try:
        assert 0 < one.tick() < 1
        poll(lambda: one.tick() and one.leadership.leader is not None)
        assert one.schedule == {}
        assert not one.should_sync()
        assert one._slots.recent() == []
    finally:
        held.release()
        one.close()


def test_the_plain_scheduler_is_the_schedule_inside_unless_another_is_named():
    assert inner_class(None, None, LeaderScheduler) is beat.Scheduler
    assert inner_class("celery.beat:PersistentScheduler", None, LeaderScheduler) is beat.PersistentScheduler
    assert inner_class(beat.PersistentScheduler, None, LeaderScheduler) is beat.PersistentScheduler


def test_a_database_scheduler_that_is_not_django_celery_beats_is_taken_as_it_is():
    class Foreign(beat.Scheduler):
        def all_as_schedule(self):
            return {}

    assert [base.__name__ for base in sends_slots(Foreign).__mro__[:3]] == ["LeadingForeign", "SendsSlots", "Foreign"]
