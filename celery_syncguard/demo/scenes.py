"""The scenes. Each makes something happen to real processes and returns what the bodies recorded, as checks."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import redis

from celery_syncguard.demo.processes import Node, Postgres, Valkey
from celery_syncguard.demo.view import View
from celery_syncguard.postgres.migrate import migrate

__all__ = ["SCENES", "Finding", "Stage"]

#: A statement, whether it held, what was found.
Finding = tuple[str, bool, str]
#: id, seconds since 1970, event, key, task_id, fence, worker
Row = tuple[int, float, str, str, str, Any, str]


class Stage:
    """The servers, two workers, and the history. A context manager."""

    def __init__(self, folder: Path, view: View) -> None:
        self.folder = folder
        self.view = view
        self.postgres = Postgres(folder / "postgres")
        self.valkey = Valkey(folder / "valkey")
        self.nodes: list[Node] = []
        self._stopping = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="demo-follower", daemon=True)
        self._seen = 0

    def __enter__(self) -> Stage:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        self.postgres.start()
        self.valkey.start()
        migrate(self.postgres.dsn)
        os.environ.update(SYNCGUARD_DSN=self.postgres.dsn, SYNCGUARD_DEMO_REDIS=self.valkey.url, PYTHONUNBUFFERED="1")
        # Only now: the application reads its addresses when it is imported.
        from celery_syncguard.demo import app

        self.tasks = app
        self.conn = psycopg.connect(self.postgres.dsn, autocommit=True)
        self.conn.execute(app.SCHEMA.encode())
        options = ["-c", "3", "-l", "INFO", "--without-gossip", "--without-mingle"]
        self.a, self.b = (
            self.start_node(name, ["worker", "-n", f"{name}@demo", "-Q", f"any,{name}", *options]) for name in "AB"
        )
        for node in (self.a, self.b):
            self.wait_for(node.is_ready, f"worker {node.name} is ready")
        self._follower.start()

    def start_node(self, name: str, arguments: list[str]) -> Node:
        node = Node(name, arguments, self.folder)
        self.nodes.append(node)
        node.start()
        return node

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for node in self.nodes:
            node.stop()
        if self._follower.ident is not None:
            self._follower.join(5)
        self.valkey.stop(signal.SIGINT)
        self.postgres.stop(signal.SIGINT)

    def waiting_messages(self) -> int:
        """Messages that are queued, or with a worker and not acknowledged."""
        client = redis.Redis.from_url(self.valkey.url)
        return int(sum(client.llen(queue) for queue in ("any", "A", "B")) + client.hlen("unacked"))

    def history(self, event: str | None = None, key: str | None = None, worker: str | None = None) -> list[Row]:
        """What the bodies recorded, in order."""
        return self.conn.execute(
            "SELECT id, extract(epoch FROM at)::float8, event, key, task_id, fence, worker FROM demo_history "
            "WHERE event = coalesce(%s, event) AND key = coalesce(%s, key) AND worker = coalesce(%s, worker) ORDER BY id",
            (event, key, worker),
        ).fetchall()

    def wait_for(self, condition: Callable[[], Any], what: str, *, timeout: float = 20.0) -> Any:
        """The condition's value, once it is true."""
        pause = threading.Event()
        until = time.monotonic() + timeout
        while not (value := condition()):
            if time.monotonic() > until:
                raise TimeoutError(f"not within {timeout:g} s: {what}")
            pause.wait(0.05)
        return value

    def _follow(self) -> None:
        with psycopg.connect(self.postgres.dsn, autocommit=True) as conn:
            while not self._stopping.wait(0.05):
                rows = conn.execute(
                    "SELECT id, worker, event, key, fence FROM demo_history WHERE id > %s ORDER BY id", (self._seen,)
                ).fetchall()
                for number, worker, event, key, fence in rows:
                    self.view.event(worker, event, key, fence)
                    self._seen = number

    def catch_up(self) -> None:
        """Wait until the audience has seen what has happened."""
        newest = max((row[0] for row in self.history()), default=0)
        self.wait_for(lambda: self._seen >= newest, "the view has caught up")

    def value(self, query: str) -> Any:
        """The first column of the query's first row; None without a row."""
        row = self.conn.execute(query.encode()).fetchone()
        return row[0] if row is not None else None


def _intervals(rows: list[Row]) -> list[tuple[float, float, int]]:
    """The (start, end, fence) of the bodies, in order of starting."""
    ends = {task_id: at for _, at, event, _, task_id, _, _ in rows if event == "end"}
    starts = [(task_id, at, fence) for _, at, event, _, task_id, fence, _ in rows if event == "start"]
    return sorted((at, ends[task_id], fence or 0) for task_id, at, fence in starts if task_id in ends)


def one_at_a_time(stage: Stage) -> list[Finding]:
    """24 tasks over 4 keys, 2 workers: one at a time per key, keys side by side"""
    keys = [f"invoice:{number}" for number in range(1, 5)]
    jobs = [stage.tasks.charge.apply_async((key, 0.12)) for _ in range(6) for key in keys]
    stage.wait_for(lambda: len(stage.history(event="end")) == len(jobs), "all tasks ended")
    spans = [_intervals(stage.history(key=key)) for key in keys]
    overlaps = sum(later[0] < earlier[1] for span in spans for earlier, later in pairwise(span))
    bodies = [body for span in spans for body in span]
    most = max((sum(since <= start < until for since, until, _ in bodies) for start, _, _ in bodies), default=0)
    rising = all([fence for *_, fence in span] == sorted({fence for *_, fence in span}) for span in spans)
    return [
        ("no two bodies of one key overlapped", overlaps == 0, f"{overlaps} overlaps in {len(jobs)} runs"),
        ("bodies of different keys ran side by side", most >= 2, f"up to {most} at once"),
        ("every grant of a key had a higher fence", rising, "strictly rising" if rising else "not rising"),
    ]


def killed_in_mid_task(stage: Stage) -> list[Finding]:
    """A worker is killed with SIGKILL in mid task: the lock is taken over with a higher fence"""
    key = "invoice:killed"
    stage.tasks.charge.apply_async((key, 60), queue="A")
    stage.wait_for(lambda: stage.history(event="start", key=key), "worker A started it")
    stage.a.stop()
    killed_at = time.monotonic()
    stage.view.say("worker A is killed, with everything that it runs")
    stage.tasks.charge.apply_async((key, 0.1), queue="B")
    stage.wait_for(lambda: stage.history(event="end", key=key), "worker B took over")
    took = time.monotonic() - killed_at
    stage.a.start()
    first, second = (row[5] or 0 for row in stage.history(event="start", key=key)[:2])
    ttl = stage.tasks.TTL
    return [
        ("another worker took the lock over soon after its ttl", took < ttl + 5, f"{took:.1f} s, ttl {ttl:g} s"),
        ("with a higher fence", first < second, f"{first} then {second}"),
    ]


def frozen_past_its_ttl(stage: Stage) -> list[Finding]:
    """A worker is frozen with SIGSTOP past its ttl and wakes up late: the database refuses its write"""
    key = "account:joint"
    stage.conn.execute("INSERT INTO demo_accounts VALUES ('joint', 'nobody', 0)")
    stage.wait_for(lambda: stage.a.is_ready(times=2), "worker A is back")
    stage.tasks.pay_out.apply_async(("joint", 1.0), queue="A")
    stage.wait_for(lambda: stage.history(event="start", key=key), "worker A started it")
    stage.a.signal(signal.SIGSTOP)
    stage.view.say("worker A is frozen")
    stage.tasks.pay_out.apply_async(("joint", 0.1), queue="B")
    stage.wait_for(lambda: stage.history(event="committed", key=key, worker="B"), "worker B took over and wrote")
    stage.a.signal(signal.SIGCONT)
    stage.view.say("worker A wakes up and goes on where it was")
    stage.wait_for(lambda: stage.history(event="lost", key=key, worker="A"), "worker A tried to write")
    refused = stage.history(event="refused", key=key, worker="A")
    owner = stage.value("SELECT owner FROM demo_accounts WHERE name = 'joint'")
    return [
        ("its late write with the old fence was refused", len(refused) == 1, f"{len(refused)} refused"),
        ("its late fenced transaction did not commit", owner == "B!", f"the row is {owner!r}"),
    ]


def burst_of_duplicates(stage: Stage) -> list[Finding]:
    """20 copies of one import are published at once: one is queued"""
    path = "prices.csv"
    results = [stage.tasks.import_file.delay(path) for _ in range(20)]
    stage.wait_for(lambda: stage.history(event="end", key=path), "the import ended")
    queued = sum(not result.duplicate for result in results)
    ids = len({result.id for result in results})
    runs = len(stage.history(event="start", key=path))
    return [
        ("one copy was queued, the others got its id", queued == 1 == ids, f"{queued} queued, {ids} id"),
        ("the import ran once", runs == 1, f"{runs} runs"),
    ]


def delivered_twice(stage: Stage) -> list[Finding]:
    """10 bookings, each message delivered twice: one effect each"""
    names = [f"booking:{number}" for number in range(10)]
    before = stage.waiting_messages()
    for name in names:
        task_id = str(uuid.uuid4())
        for _ in range(2):
            stage.tasks.book.apply_async((name,), task_id=task_id)
    stage.wait_for(lambda: len(stage.history(event="booked")) >= len(names), "everything was booked")
    stage.wait_for(lambda: stage.waiting_messages() <= before, "the second copies were consumed too")
    rows: dict[str, int] = dict(stage.conn.execute("SELECT name, count FROM demo_effects").fetchall())
    exact = sum(rows.get(name) == 1 for name in names)
    return [("every booking took effect exactly once", exact == len(names), f"{exact} of {len(names)}")]


def two_beats(stage: Stage) -> list[Finding]:
    """Two beats run, the leader is killed: the other one leads within its ttl, and no slot is sent twice"""
    options = ["beat", "-S", "syncguard", "-l", "INFO", "--pidfile="]
    beats = [stage.start_node(f"beat-{name}", options) for name in "XY"]
    stage.wait_for(lambda: len(stage.history(event="tick")) >= 3, "the leader sends")
    holder = stage.value("SELECT holder FROM syncguard_locks WHERE key LIKE '%leader%'") or ""
    standby, leader = sorted(beats, key=lambda beat: holder.endswith(f"pid {beat.pid}"))
    leader.stop()
    killed_at = time.monotonic()
    stage.view.say(f"{leader.name}, the leader, is killed")
    before = len(stage.history(event="tick"))
    stage.wait_for(lambda: len(stage.history(event="tick")) >= before + 3, "the other one leads and sends")
    took = time.monotonic() - killed_at
    standby.stop()
    sent = stage.value("SELECT count(*) FROM syncguard_beat_slots WHERE sent_at IS NOT NULL")
    terms = stage.conn.execute("SELECT term FROM syncguard_beat_terms ORDER BY elected_at").fetchall()
    ran = [row[4] for row in stage.history(event="tick")]
    ttl = stage.tasks.TTL
    return [
        ("no slot was sent twice", len(set(ran)) == len(ran), f"{len(ran)} ticks of {sent} slots"),
        ("the other beat took over", took < ttl + 6, f"{took:.1f} s to its third tick, ttl {ttl:g} s"),
        ("every term has a higher number", terms == sorted(set(terms)) and len(terms) == 2, f"{len(terms)} terms"),
    ]


SCENES = (one_at_a_time, killed_in_mid_task, frozen_past_its_ttl, burst_of_duplicates, delivered_twice, two_beats)
