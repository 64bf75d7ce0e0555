"""Beat's scheduler ticks in one process, with time that passes as fast as it can. Run as a program by tests.

    python -m tests.integration.beat_ticks memory {plain,django} TICKS
    python -m tests.integration.beat_ticks edits ROUNDS {locked,unlocked}
    python -m tests.integration.beat_ticks cuts ROUNDS {kept,forgotten}
    python -m tests.integration.beat_ticks reads ROUNDS {kept,forgotten}
    python -m tests.integration.beat_ticks stops SECONDS {apart,entered}
    python -m tests.integration.beat_ticks failures {connect,publish,refused,claim}
    python -m tests.integration.beat_ticks spring ZONE
    python -m tests.integration.beat_ticks clocked {again,switched,moved,raced,earlier,same,dead,late}
    python -m tests.integration.beat_ticks inside
    python -m tests.integration.beat_ticks saves ROUNDS {row,table}
    python -m tests.integration.beat_ticks untold SECONDS

"memory" counts objects and bytes while slots are sent and the schedule changes. "edits" changes a row of the schedule
between the claim of a slot and the writing of that row, and once more while it is being written; "unlocked" takes our lock
of the row away, and has to show the fault. "cuts" ends the connection over which the row is about to be written; "forgotten"
does without our way of writing it, and has to show the fault. "reads" ends it when an edit was noticed and is about to be
read. "stops" ends beat by SIGTERM while a row is being written, and gives it so many seconds; "entered" lets the handler
write as well, and has to show the fault. "failures" fails the first attempt to send each of three rows, in one place.
"spring" sends a row for 02:30 through the night that has no 02:30. "clocked" sends a clocked row, and asks for it once more in
one way or leaves it as a leader does that died. "inside" leads with some settings each, first without and then with a row in
the table. "saves" saves one row of a hundred so often, twenty times a second, while all are sent every 20 s; "table" reads all of them
then, as theirs does, and has to show the fault. "untold" changes a row right after each look at the rows, while another one is sent
every 4 s. Prints what happened as JSON. A program of its own, since Django is set up
once per process, and since the memory of a process that has run other tests says little.
"""

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from zoneinfo import ZoneInfo

import psutil
import psycopg
from celery import Celery
from celery.signals import before_task_publish
from django_celery_beat import tzcrontab
from kombu import Connection, Producer

from celery_syncguard.beat import slot_sender
from celery_syncguard.beat.scheduler import LeaderScheduler
from celery_syncguard.core import clock
from celery_syncguard.errors import StoreUnavailable
from tests.fixtures.polling import poll


class Hand:
    """Moves the local clock and the store's. The machine's own, which django-celery-beat looks at, stays behind."""

    def __init__(self):
        self.ahead = 0.0
        right_now, right_wall = clock.now, clock.wall_ms
        clock.now = lambda: right_now() + self.ahead
        clock.wall_ms = lambda: right_wall() + int(self.ahead * 1000)

    def stop_the_clock(self):
        """From now on no time passes but by this hand."""
        now, wall, ahead = clock.now(), clock.wall_ms(), self.ahead
        clock.now = lambda: now + self.ahead - ahead
        clock.wall_ms = lambda: wall + int((self.ahead - ahead) * 1000)


def set_up_django(database):
    import django
    from django.conf import settings
    from django.core.management import call_command

    settings.configure(
        DATABASES={"default": database},
        INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        USE_TZ=True,
    )
    django.setup()
    call_command("migrate", verbosity=0)


def add_row(name, seconds, **columns):
    from django_celery_beat.models import IntervalSchedule, PeriodicTask

    every, _ = IntervalSchedule.objects.get_or_create(every=seconds, period="seconds")
    PeriodicTask.objects.create(name=name, task="note", args=json.dumps([name]), interval=every, **columns)


def make_app(**conf):
    app = Celery("beat", broker="memory://", set_as_current=False)
    app.conf.update({"syncguard_dsn": "memory://", "syncguard_leader_ttl": 3600, **conf})

    @app.task(name="note", shared=False)
    def note(*_):
        """Never runs here."""

    return app


def lead(app):
    one = LeaderScheduler(app=app, max_interval=None, lazy=False)
    poll(lambda: one.tick() is not None and one._inner is not None and one._inner._heap is not None)
    return one


# Memory


def tick_many(inside, ticks):
    hand = Hand()
    if inside == "django":
        set_up_django({"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"})
        add_row("a", 1)
        add_row("b", 7)
        app = make_app(syncguard_beat_scheduler="django")
    else:
        schedule = {
            name: {"task": "note", "schedule": timedelta(seconds=every)} for name, every in (("a", 1), ("b", 7))
        }
        app = make_app(beat_schedule=schedule)
    one = lead(app)
    changes = 0

    def change(number):
        """The interval of one entry is changed, and another entry comes and goes."""
        nonlocal changes
        changes += 1
        if inside == "django":
            from django_celery_beat.models import IntervalSchedule, PeriodicTask

            every, _ = IntervalSchedule.objects.get_or_create(every=7 + number % 3, period="seconds")
            PeriodicTask.objects.filter(name="b").update(interval=every)
            if number % 2:
                add_row("c", 11)
            else:
                PeriodicTask.objects.filter(name="c").delete()
            return
        schedule = one._inner.schedule
        schedule["b"] = one._inner.Entry(name="b", task="note", schedule=timedelta(seconds=7 + number % 3), app=app)
        if number % 2:
            schedule["c"] = one._inner.Entry(name="c", task="note", schedule=timedelta(seconds=11), app=app)
        else:
            schedule.pop("c", None)

    def work(count):
        """So many ticks; afterwards, objects and megabytes."""
        for number in range(count):
            hand.ahead += 0.5
            one.tick()
            if number % 100 == 0 and one._inner is not None:
                change(number // 100)
            if number % 1000 == 0:
                one._retire()  # the end of a term
            if number % 200 == 0:
                one._slots.prune(older=5.0)
                app.connection_for_write().default_channel.queue_purge("celery")
            if number % 500 == 0 and one._term is not None:
                one._guard._renewer.renew_now(one._term)
        gc.collect()
        return len(gc.get_objects()), psutil.Process().memory_info().rss / 2**20

    work(ticks // 10)
    before = work(ticks // 10)
    half = work(ticks * 4 // 10)
    after = work(ticks * 4 // 10)
    sent = one._slots.entries()
    one.close()
    return {
        "objects": [before[0], half[0], after[0]],
        "megabytes": [before[1], half[1], after[1]],
        "changes": changes,
        "runs": {row.entry: row.runs for row in sent},
    }


# Edits and cuts


def lead_busy(dsn, scheduler="django"):
    """A beat that leads and has an entry with a slot in every tick, all in PostgreSQL."""
    from psycopg.conninfo import conninfo_to_dict

    facts = conninfo_to_dict(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        # Nothing here is about a crash, and half of the time would be waiting for the disk.
        conn.execute(f"alter database {facts['dbname']} set synchronous_commit to off")
    set_up_django(
        {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": facts["dbname"],
            "USER": facts["user"],
            "HOST": facts["host"],
            "PORT": facts["port"],
            "CONN_MAX_AGE": None,  # or a new connection would take most of the time
        }
    )
    from django_celery_beat.models import IntervalSchedule, PeriodicTask

    every = IntervalSchedule.objects.create(every=1000, period="microseconds")
    PeriodicTask.objects.create(name="busy", task="note", interval=every)
    app = make_app(
        syncguard_dsn=dsn, syncguard_beat_scheduler=scheduler, syncguard_leader_ttl=60, beat_max_loop_interval=1
    )
    return lead(app)


def send_one(one, ids):
    count = len(ids)
    poll(lambda: one.tick() is not None and len(ids) > count, interval=0.0005)


def edit_while_saving(dsn, rounds, protection):
    one = lead_busy(dsn)
    from django.db.models import signals
    from django_celery_beat.models import PeriodicTask

    from celery_syncguard.beat.django_schedule import SeesEdits

    if protection == "unlocked":
        SeesEdits._save = lambda self, entry: entry.save()
    editor = psycopg.connect(dsn, autocommit=True)
    watcher = psycopg.connect(dsn, autocommit=True)
    editor_pid = editor.info.backend_pid
    number = 0
    ids, writers = [], []

    def edit(column, value):
        editor.execute(
            f"update django_celery_beat_periodictask set {column} = %s where name = 'busy'", (json.dumps([value]),)
        )

    def waits():
        query = "select wait_event_type from pg_stat_activity where pid = %s"
        return watcher.execute(query, (editor_pid,)).fetchone() == ("Lock",)

    def published(headers=None, **_):
        ids.append(headers["id"])
        edit("args", number)  # between the claim and the mark

    def saving(instance=None, **_):
        if instance.name != "busy" or writers:
            return
        # Between the reading of the row and its writing: done at once, or waiting until it is written.
        writers.append(threading.Thread(target=edit, args=("description", number)))
        writers[0].start()
        poll(lambda: not writers[0].is_alive() or waits(), interval=0.001)

    before_task_publish.connect(published, weak=False)
    signals.pre_save.connect(saving, sender=PeriodicTask, weak=False)
    lost = {"args": 0, "description": 0}
    for number in range(1, rounds + 1):
        send_one(one, ids)
        one.sync()
        assert writers, "the row was not saved"
        writers.pop().join(10)
        row = watcher.execute("select args, description from django_celery_beat_periodictask where name = 'busy'")
        for column, value in zip(lost, row.fetchone(), strict=True):
            lost[column] += json.loads(value or "[0]") != [number]
    signals.pre_save.disconnect(saving, sender=PeriodicTask)
    poll(lambda: one.tick() is not None and one._inner.schedule["busy"].args == [rounds], timeout=5)
    slots = watcher.execute("select count(*), count(distinct due_at) from syncguard_beat_slots").fetchone()
    one.close()
    return {"lost": lost, "messages": len(ids), "tasks": len(set(ids)), "slots": slots}


def cut_while_saving(dsn, rounds, protection):
    one = lead_busy(dsn)
    from django.db import connection

    from celery_syncguard.beat.django_schedule import SeesEdits

    if protection == "forgotten":
        del SeesEdits.sync
    watcher = psycopg.connect(dsn, autocommit=True)
    ids = []
    before_task_publish.connect(lambda headers=None, **_: ids.append(headers["id"]), weak=False)

    def runs():
        row = watcher.execute("select total_run_count from django_celery_beat_periodictask where name = 'busy'")
        return row.fetchone()[0]

    one.sync()
    before = runs()
    seen = {"cuts": 0, "not written": 0}
    for _ in range(rounds):
        send_one(one, ids)
        connection.ensure_connection()
        pid = connection.connection.info.backend_pid
        seen["cuts"] += watcher.execute("select pg_terminate_backend(%s, 5000)", (pid,)).fetchone() == (True,)
        one.sync()  # which finds that out
        one.sync()
        seen["not written"] += runs() != before + len(ids)
    one.close()
    return seen


def cut_while_reading(dsn, rounds, protection):
    one = lead_busy(dsn)
    from django.db import connection

    from celery_syncguard.beat.django_schedule import SeesEdits

    if protection == "forgotten":
        SeesEdits._unread = property(lambda self: False, lambda self, value: None)
    watcher = psycopg.connect(dsn, autocommit=True)
    seen = {"cuts": 0, "never seen": 0}
    armed = False

    def cut(execute, sql, *rest):
        nonlocal armed
        if armed and '"django_celery_beat_periodictask"."enabled" AND' in sql:
            armed = False
            pid = connection.connection.info.backend_pid
            seen["cuts"] += watcher.execute("select pg_terminate_backend(%s, 5000)", (pid,)).fetchone() == (True,)
        return execute(sql, *rest)

    def has(number):
        one.tick()
        return one._inner is not None and one._inner._schedule["busy"].args == [number]

    with connection.execute_wrapper(cut):
        for number in range(1, rounds + 1):
            armed = True
            watcher.execute("update django_celery_beat_periodictask set args = %s", (json.dumps([number]),))
            try:
                poll(lambda number=number: has(number), timeout=6)
            except AssertionError:
                seen["never seen"] += 1
    one.close()
    return seen


def stop_while_saving(dsn, seconds, protection):
    one = lead_busy(dsn, "tests.integration.django_own_sync:OwnSync")
    from django.db import connection

    add_row("second", 1)
    if protection == "entered":
        LeaderScheduler.sync = lambda self: self._inner._do_sync()
    watcher = psycopg.connect(dsn, autocommit=True)
    locker = psycopg.connect(dsn)
    poll(lambda: one.tick() is not None and one._inner._dirty == {"busy", "second"}, interval=0.0005)
    locker.execute("select from django_celery_beat_periodictask for update")
    connection.ensure_connection()
    pid = connection.connection.info.backend_pid
    closed = threading.Event()

    def handler(*_):
        one.close()
        raise SystemExit

    def stop():
        query = "select wait_event_type from pg_stat_activity where pid = %s"
        poll(lambda: watcher.execute(query, (pid,)).fetchone() == ("Lock",))
        os.kill(os.getpid(), signal.SIGTERM)
        hands_over = one.leadership.lost(timeout=seconds)
        locker.rollback()
        print(json.dumps({"hands over": hands_over, "ends": closed.wait(seconds)}), flush=True)
        os._exit(0)  # a main thread that waits for itself ends by nothing else

    signal.signal(signal.SIGTERM, handler)
    stopper = threading.Thread(target=stop)
    stopper.start()
    with contextlib.suppress(SystemExit):
        one.sync()
    one.close()
    closed.set()
    stopper.join()


# Single rows

SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}


class Broker:
    """Notes the ids of the tasks that are published for each row, which has its name as its argument, and fails where it is told to, until it is healed."""

    def __init__(self, failing=None):
        self.failing = failing
        self.published = {}
        right_connect, right_publish = Connection.connect, Producer.publish

        def connect(connection):
            if self.failing == "connect":
                raise ConnectionResetError("by a test")
            return right_connect(connection)

        def publish(producer, body, *args, headers, **kwargs):
            if self.failing == "publish":
                raise ConnectionResetError("by a test")
            if self.failing == "refused":
                raise producer.connection.channel_errors[0]("by a test")
            self.published.setdefault("".join(body[0]), []).append(headers["id"])
            return right_publish(producer, body, *args, headers=headers, **kwargs)

        Connection.connect, Producer.publish = connect, publish


def lead_rows(**conf):
    """A beat that leads and has django-celery-beat's tables, in memory."""
    set_up_django({"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"})
    return lead(make_app(syncguard_beat_scheduler="django", beat_max_loop_interval=1, **conf))


def add_clocked(instant):
    from django_celery_beat.models import ClockedSchedule, PeriodicTask

    clocked = ClockedSchedule.objects.create(clocked_time=instant)
    PeriodicTask.objects.create(name="clocked", task="note", args='["clocked"]', clocked=clocked, one_off=True)


def rows():
    from django_celery_beat.models import PeriodicTask

    # Whether it is enabled, its count of runs, and whether it has a last one.
    found = PeriodicTask.objects.exclude(name="celery.backend_cleanup")
    return {row.name: [row.enabled, row.total_run_count, row.last_run_at is not None] for row in found}


def pass_time(one, hand, seconds, step=0.5):
    for _ in range(int(seconds / step)):
        hand.ahead += step
        for _ in range(3):
            one.tick()


def fail_at_first(where):
    hand, broker = Hand(), Broker(failing=where)
    one = lead_rows()
    slots = one._slots
    right_claim = slots.claim

    def claim(*args, **kwargs):
        if broker.failing == "claim":
            raise StoreUnavailable("by a test")
        return right_claim(*args, **kwargs)

    slots.claim = claim
    add_row("often", 10)
    add_row("single", 10, one_off=True)
    add_clocked(datetime.now(timezone.utc))
    before = rows()
    pass_time(one, hand, 15)
    one.sync()
    seen = {"while it fails": rows() == before}
    broker.failing = None
    pass_time(one, hand, 70)
    one.sync()
    seen["single"], seen["clocked"] = rows()["single"], rows()["clocked"]
    seen["published"] = {name: len(set(ids)) for name, ids in broker.published.items()}
    seen["counted too often"] = rows()["often"][1] - seen["published"].pop("often")
    one.close()
    return seen


def send_in_spring(zone):
    """The local times at which a row for 02:30 is due from ten minutes before the missing hour on, for 50 minutes."""
    now = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    hours = [(now + timedelta(hours=hour)).astimezone(ZoneInfo(zone)) for hour in range(1, 366 * 24)]
    change = next(after for before, after in pairwise(hours) if after.utcoffset() > before.utcoffset())
    assert change.hour == 3
    hand, broker = Hand(), Broker()
    hand.ahead = change.timestamp() - 600 - time.time()

    class WallClock(datetime):
        """The machine's, as far as it is asked here: it agrees with the database's."""

        @classmethod
        def now(cls, tz=None):
            return (datetime.now(timezone.utc) + timedelta(seconds=hand.ahead)).astimezone(tz)

    tzcrontab.datetime = slot_sender.datetime = WallClock
    one = lead_rows(beat_cron_starting_deadline=120)
    from django_celery_beat.models import CrontabSchedule, PeriodicTask

    # Not "2", which its scheduler hides at other hours of the day.
    at = CrontabSchedule.objects.create(minute="30", hour="2-2", timezone=zone)
    for name, start_time in {"night": None, "not started": now + timedelta(days=1000)}.items():
        PeriodicTask.objects.create(name=name, task="note", args=json.dumps([name]), crontab=at, start_time=start_time)
    pass_time(one, hand, 3000, step=10)
    due = [row.due_at.astimezone(ZoneInfo(zone)).strftime("%H:%M:%S") for row in one._slots.recent(entry="night")]
    one.close()
    return {"due": due, "published": {name: len(ids) for name, ids in broker.published.items()}}


def send_clocked(way):
    """What is published for a clocked row and how it is, once it was sent, and after something was done to it."""
    hand, broker = Hand(), Broker()
    one = lead_rows()
    from django_celery_beat.models import ClockedSchedule, PeriodicTask

    from celery_syncguard.beat.django_schedule import SeesEdits

    def soon():
        return datetime.now(timezone.utc) + timedelta(seconds=hand.ahead + 10)

    def seen():
        row = PeriodicTask.objects.get(name="clocked")
        return [len(set(broker.published.get("clocked", ()))), row.enabled, row.total_run_count]

    def as_it_was():
        """The row as a leader leaves it that dies before it writes there."""
        stale = datetime.now(timezone.utc) - timedelta(days=1)
        PeriodicTask.objects.filter(name="clocked").update(
            enabled=True, total_run_count=0, last_run_at=None, date_changed=stale
        )

    def move(instant):
        """As a bulk edit does it: no signal, and no `date_changed`."""
        clocked = ClockedSchedule.objects.create(clocked_time=instant)
        PeriodicTask.objects.filter(name="clocked").update(enabled=True, total_run_count=0, clocked=clocked)

    first = soon() - timedelta(seconds=60 if way == "late" else 0)
    add_clocked(first)
    right_is_due = SeesEdits.is_due

    def is_due(self, entry):
        if entry.name == "clocked" and entry.model.total_run_count:
            SeesEdits.is_due = right_is_due
            move(soon())
        return right_is_due(self, entry)

    if way == "raced":
        SeesEdits.is_due = is_due
    pass_time(one, hand, 15)
    once_sent = seen()
    row = PeriodicTask.objects.get(name="clocked")
    if way == "again":
        row.delete()
        add_clocked(soon())
    elif way == "switched":
        row.clocked, row.enabled = ClockedSchedule.objects.create(clocked_time=soon()), True
        row.save()
    elif way == "earlier":
        row.delete()
        add_clocked(first - timedelta(seconds=5))
    elif way == "moved":
        as_it_was()
        move(soon())
    elif way == "same":
        row.delete()
        add_clocked(first)
    elif way in ("dead", "late"):
        one._retire()
        as_it_was()
    pass_time(one, hand, 20)
    one.sync()
    afterwards = seen()
    one.close()
    return {"once sent": once_sent, "afterwards": afterwards}


def lead_by_settings():
    """What is said at the election, and which rows are in the schedule, by settings."""
    set_up_django(SQLITE)
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("celery_syncguard").addHandler(handler)
    settings = {
        "none": {},
        "beat_schedule is meant": {"syncguard_beat_scheduler": "celery.beat:Scheduler"},
        "Celery's own": {"beat_scheduler": "django_celery_beat.schedulers:DatabaseScheduler"},
    }
    seen = {}
    for rows_there in (False, True):
        if rows_there:
            add_row("row", 10)
        for name, conf in settings.items():
            lines.clear()
            one = lead(
                make_app(**conf, beat_schedule={"entry": {"task": "note", "schedule": 10.0}} if rows_there else {})
            )
            seen[f"{name}, {'some' if rows_there else 'nothing'}"] = [list(lines), sorted(one._inner.schedule)]
            one.close()
    from celery_syncguard.beat.django_schedule import SeesEdits

    both = vars(slot_sender.SendsSlots).keys() & vars(SeesEdits).keys()
    seen["names of both"] = [name for name in both if not name.startswith("__")]
    return seen


def edit_untold(seconds):
    """After how many seconds an edit is seen that no signal of Django's tells of, at most; and how many edits there were."""
    hand = Hand()
    set_up_django(SQLITE)
    from django_celery_beat.models import PeriodicTask

    add_row("often", 4)
    add_row("row", 1000)
    one = lead(make_app(syncguard_beat_scheduler="django", result_expires=None))
    hand.stop_the_clock()
    number, lag, edited_at, seen_at = 0, 0.0, clock.now(), None
    for _ in range(seconds * 10):
        hand.ahead += 0.1
        poll(lambda: one.tick() > 0, interval=0)
        if one._inner._schedule["row"].args in ([number], ["row"]) and one._inner._compared_at != seen_at:
            lag, edited_at, seen_at = max(lag, clock.now() - edited_at), clock.now(), one._inner._compared_at
            number += 1
            PeriodicTask.objects.filter(name="row").update(args=json.dumps([number]))
    one.close()
    return {"lag": lag, "edits": number}


def save_while_sending(rounds, protection):
    """How late slots are sent and edits are seen, in seconds, and how many rows are read for each look at the table."""
    hand = Hand()
    set_up_django(SQLITE)
    from django_celery_beat.models import IntervalSchedule, PeriodicTask
    from django_celery_beat.schedulers import ModelEntry

    from celery_syncguard.beat.django_schedule import SeesEdits

    if protection == "table":
        SeesEdits._reads_as_theirs = False

        def look(self):
            self._looked_at = clock.now()
            return True

        SeesEdits._may_look = look
    every = IntervalSchedule.objects.create(every=20, period="seconds")
    PeriodicTask.objects.bulk_create(PeriodicTask(name=f"row {n}", task="note", interval=every) for n in range(100))
    one = lead(make_app(syncguard_beat_scheduler="django", result_expires=None))
    hand.stop_the_clock()
    slots = one._slots
    number, lag, read = 0, 0.0, 0
    right_init = ModelEntry.__init__

    def init(self, model, app=None):
        nonlocal read
        read += app is not None  # else it is what follows a run
        right_init(self, model, app=app)

    ModelEntry.__init__ = init
    row = PeriodicTask.objects.get(name="row 50")
    for number in range(1, rounds + 1):
        hand.ahead += 0.05
        row.args = json.dumps([number])
        row.save()
        if number % 90 == 45:  # one comes and one goes, and the schedule of one is another
            add_row(f"new {number}", 1)
            PeriodicTask.objects.filter(name=f"row {number // 90}").delete()
            PeriodicTask.objects.filter(name="row 51").update(
                interval=IntervalSchedule.objects.create(every=number, period="days")
            )
        poll(lambda: one.tick() > 0, interval=0)
        args = one._inner._schedule["row 50"].args
        lag = max(lag, 0.05 * (number - (args[0] if args else 0)))
    sent = [slot for slot in slots.recent(limit=10_000) if slot.sent_at is not None]
    seen = {
        "late": max((slot.late for slot in sent), default=0),
        "lag": lag,
        "read": read,
        "sent": len([slot for slot in sent if slot.entry.startswith("row")]),
        "new": sorted({slot.entry for slot in sent if slot.entry.startswith("new")}),
        "changed": str(one._inner._schedule["row 51"].schedule),
        "gone": [f"row {n}" for n in range(rounds // 90) if f"row {n}" in one._inner._schedule],
        "removed": len([entry for entry in slots.entries() if entry.removed_at is not None]),
        "heap": len(one._inner._heap) - len(one._inner._schedule),
    }
    one.close()
    return seen


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    what, *arguments = sys.argv[1:]
    if what == "memory":
        seen = tick_many(arguments[0], int(arguments[1]))
    elif what == "failures":
        seen = fail_at_first(arguments[0])
    elif what == "spring":
        seen = send_in_spring(arguments[0])
    elif what == "clocked":
        seen = send_clocked(arguments[0])
    elif what == "inside":
        seen = lead_by_settings()
    elif what == "untold":
        seen = edit_untold(int(arguments[0]))
    elif what == "saves":
        seen = save_while_sending(int(arguments[0]), arguments[1])
    else:
        acts = {
            "edits": edit_while_saving,
            "cuts": cut_while_saving,
            "reads": cut_while_reading,
            "stops": stop_while_saving,
        }
        seen = acts[what](os.environ["SYNCGUARD_DSN"], int(arguments[0]), arguments[1])
    print(json.dumps(seen))
