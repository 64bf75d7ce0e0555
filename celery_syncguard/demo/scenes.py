"""The scenes. Each makes something happen to real processes, and answers with checks on what the bodies recorded."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from celery_syncguard.demo import Check
from celery_syncguard.demo.nodes import Node
from celery_syncguard.demo.servers import Postgres, Valkey
from celery_syncguard.demo.view import View
from celery_syncguard.postgres.migrate import migrate

__all__ = ["SCENES", "Stage"]

Row = tuple[int, float, str, str, str, int | None, str]


class Stage:
    """The servers, two workers, and the history. A context manager."""

    def __init__(self, folder: Path, view: View) -> None:
        self.folder = folder
        self.view = view
        self.postgres = Postgres(folder / "postgres")
        self.valkey = Valkey(folder / "valkey")
        self.nodes: list[Node] = []
        self._stopping = threading.Event()
        self._follower: threading.Thread | None = None
        self._seen = 0

    def __enter__(self) -> Stage:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        import os

        self.postgres.start()
        self.valkey.start()
        migrate(self.postgres.dsn)
        self.environment = {"SYNCGUARD_DSN": self.postgres.dsn, "SYNCGUARD_DEMO_REDIS": self.valkey.url}
        os.environ.update(self.environment)
        # Only now: the application reads its addresses when it is imported.
        from celery_syncguard.demo import app

        self.tasks = app
        self.conn = psycopg.connect(self.postgres.dsn, autocommit=True)
        self.conn.execute(app.SCHEMA.encode())
        self.a = self._worker("A")
        self.b = self._worker("B")
        for node in (self.a, self.b):
            node.start()
        for node in (self.a, self.b):
            self.wait_for(partial(_is_ready, node), f"worker {node.name} is ready")
        self._follower = threading.Thread(target=self._follow, name="demo-follower", daemon=True)
        self._follower.start()

    def _worker(self, name: str) -> Node:
        arguments = ["worker", "-n", f"{name}@demo", "-Q", f"any,{name}", "-c", "3", "-l", "INFO"]
        return self.node(name, [*arguments, "--without-gossip", "--without-mingle"])

    def node(self, name: str, arguments: list[str]) -> Node:
        node = Node(name, arguments, folder=self.folder, environment=self.environment)
        self.nodes.append(node)
        return node

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for node in self.nodes:
            node.kill()
        if self._follower is not None:
            self._follower.join(5)
        self.valkey.stop()
        self.postgres.stop()

    def waiting_messages(self) -> int:
        """Messages that are queued, or with a worker and not acknowledged."""
        import redis

        client = redis.Redis.from_url(self.valkey.url)
        return int(sum(client.llen(queue) for queue in ("any", "A", "B")) + client.hlen("unacked"))

    def history(self, **where: str) -> list[Row]:
        """Rows (id, epoch, event, key, task_id, fence, worker) in order, filtered by equal columns."""
        query = "SELECT id, extract(epoch FROM at)::float8, event, key, task_id, fence, worker FROM demo_history"
        conditions = " AND ".join(f"{column} = %s" for column in where)
        query += f" WHERE {conditions}" if conditions else ""
        return self.conn.execute(f"{query} ORDER BY id".encode(), list(where.values())).fetchall()

    def wait_for(self, condition: Callable[[], Any], what: str, *, timeout: float = 20.0) -> Any:
        """The condition's value, once it is true."""
        pause = threading.Event()
        until = time.monotonic() + timeout
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > until:
                raise TimeoutError(f"not within {timeout:g} s: {what}")
            pause.wait(0.05)

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
        history = self.history()
        if history:
            self.wait_for(lambda: self._seen >= history[-1][0], "the view has caught up")


def _is_ready(node: Node, times: int = 1) -> bool:
    return node.log.read_text().count("ready.") >= times


def _intervals(rows: list[Row]) -> dict[str, list[tuple[float, float, int]]]:
    """Per key the (start, end, fence) of its bodies, in order of starting."""
    started: dict[str, tuple[str, float, int]] = {}
    result: dict[str, list[tuple[float, float, int]]] = {}
    for _, at, event, key, task_id, fence, _ in rows:
        if event == "start":
            started[task_id] = (key, at, fence or 0)
        elif event == "end" and task_id in started:
            _, since, number = started.pop(task_id)
            result.setdefault(key, []).append((since, at, number))
    return {key: sorted(spans) for key, spans in result.items()}


def one_at_a_time(stage: Stage, title: str) -> list[Check]:
    """24 tasks over 4 keys, 2 workers: one at a time per key, keys side by side"""
    keys = [f"invoice:{number}" for number in range(1, 5)]
    jobs = [stage.tasks.charge.apply_async((key, 0.12)) for _ in range(6) for key in keys]
    stage.wait_for(
        lambda: sum(len(stage.history(event="end", key=key)) for key in keys) == len(jobs), "all tasks ended"
    )
    spans = _intervals(stage.history())
    overlaps = sum(
        later[0] < earlier[1] for key in keys for earlier, later in zip(spans[key], spans[key][1:], strict=False)
    )
    moments = sorted(moment for key in keys for since, until, _ in spans[key] for moment in ((since, 1), (until, -1)))
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    rising = all([one[2] for one in spans[key]] == sorted({one[2] for one in spans[key]}) for key in keys)
    return [
        Check(title, "no two bodies of one key overlapped", overlaps == 0, f"{overlaps} overlaps in {len(jobs)} runs"),
        Check(title, "bodies of different keys ran side by side", most >= 2, f"up to {most} at once"),
        Check(title, "every grant of a key had a higher fence", rising, "strictly rising" if rising else "not rising"),
    ]


def killed_in_mid_task(stage: Stage, title: str) -> list[Check]:
    """A worker is killed with SIGKILL in mid task: the lock is taken over with a higher fence"""
    key = "invoice:killed"
    stage.tasks.charge.apply_async((key, 60), queue="A")
    first = stage.wait_for(lambda: stage.history(event="start", key=key), "worker A started it")[0]
    stage.a.kill()
    killed_at = time.monotonic()
    stage.view.say("worker A is killed, with everything that it runs")
    stage.tasks.charge.apply_async((key, 0.1), queue="B")
    stage.wait_for(lambda: stage.history(event="end", key=key), "worker B took over")
    took = time.monotonic() - killed_at
    second = stage.history(event="start", key=key)[1]
    stage.a.start()
    limit = stage.tasks.TTL + 5
    fences = (first[5] or 0, second[5] or 0)
    return [
        Check(
            title,
            "another worker took the lock over soon after its ttl",
            took < limit,
            f"{took:.1f} s, ttl {stage.tasks.TTL:g} s",
        ),
        Check(title, "with a higher fence", fences[0] < fences[1], f"{fences[0]} then {fences[1]}"),
    ]


def frozen_past_its_ttl(stage: Stage, title: str) -> list[Check]:
    """A worker is frozen with SIGSTOP past its ttl and wakes up late: the database refuses its write"""
    key = "account:joint"
    stage.conn.execute("INSERT INTO demo_accounts VALUES ('joint', 'nobody', 0)")
    stage.wait_for(partial(_is_ready, stage.a, 2), "worker A is back")
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
    row = stage.conn.execute("SELECT owner FROM demo_accounts WHERE name = 'joint'").fetchone()
    owner = row[0] if row is not None else None
    return [
        Check(title, "its late write with the old fence was refused", len(refused) == 1, f"{len(refused)} refused"),
        Check(title, "its late fenced transaction did not commit", owner == "B!", f"the row is {owner!r}"),
    ]


def burst_of_duplicates(stage: Stage, title: str) -> list[Check]:
    """20 copies of one import are published at once: one is queued"""
    path = "prices.csv"
    results = [stage.tasks.import_file.delay(path) for _ in range(20)]
    stage.wait_for(lambda: stage.history(event="end", key=path), "the import ended")
    queued = [result for result in results if not result.duplicate]
    ids = {result.id for result in results}
    runs = len(stage.history(event="start", key=path))
    return [
        Check(
            title,
            "one copy was queued, the others got its id",
            len(queued) == 1 == len(ids),
            f"{len(queued)} queued, {len(ids)} id",
        ),
        Check(title, "the import ran once", runs == 1, f"{runs} runs"),
    ]


def delivered_twice(stage: Stage, title: str) -> list[Check]:
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
    return [Check(title, "every booking took effect exactly once", exact == len(names), f"{exact} of {len(names)}")]


def two_beats(stage: Stage, title: str) -> list[Check]:
    """Two beats run, the leader is killed: the other one leads within its ttl, and no slot is sent twice"""
    beats = [stage.node(f"beat-{name}", ["beat", "-S", "syncguard", "-l", "INFO", "--pidfile="]) for name in "XY"]
    for beat in beats:
        beat.start()
    stage.wait_for(lambda: len(stage.history(event="tick")) >= 3, "the leader sends")
    row = stage.conn.execute("SELECT holder FROM syncguard_locks WHERE key LIKE '%leader%'").fetchone()
    holder = row[0] if row is not None else ""
    standby, leader = sorted(beats, key=lambda beat: holder.endswith(f"pid {beat.pid}"))
    leader.kill()
    killed_at = time.monotonic()
    stage.view.say(f"{leader.name}, the leader, is killed")
    before = len(stage.history(event="tick"))
    stage.wait_for(lambda: len(stage.history(event="tick")) >= before + 3, "the other one leads and sends")
    took = time.monotonic() - killed_at
    standby.kill()
    sent = stage.conn.execute(
        "SELECT task_id, due_at FROM syncguard_beat_slots WHERE sent_at IS NOT NULL ORDER BY due_at"
    ).fetchall()
    terms = stage.conn.execute("SELECT term FROM syncguard_beat_terms ORDER BY elected_at").fetchall()
    ran = [row[4] for row in stage.history(event="tick")]
    limit = stage.tasks.TTL + 6
    return [
        Check(title, "no slot was sent twice", len(set(ran)) == len(ran), f"{len(ran)} ticks of {len(sent)} slots"),
        Check(
            title,
            "the other beat took over",
            took < limit,
            f"{took:.1f} s to its third tick, ttl {stage.tasks.TTL:g} s",
        ),
        Check(
            title,
            "every term has a higher number",
            terms == sorted(set(terms)) and len(terms) == 2,
            f"{len(terms)} terms",
        ),
    ]


SCENES = (one_at_a_time, killed_in_mid_task, frozen_past_its_ttl, burst_of_duplicates, delivered_twice, two_beats)
