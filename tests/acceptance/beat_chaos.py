"""Chaos for beats: three of them, killed, frozen, stopped and cut off from their database at random.

Every message is read straight from the queue, so what is counted is what was sent. Used by the acceptance test, and for
longer by `scripts/beat-chaos`; with `plain=True` against beats without us, to show that the counting finds doubles.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from datetime import datetime, timedelta
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import psycopg

from tests.acceptance.inbox import Inbox, Message
from tests.fixtures.cluster import CeleryNode, CeleryTestSetup
from tests.fixtures.polling import poll

ENTRIES = {"fast": 1.0, "slow": 5.0}
TTL = 3.0


@dataclasses.dataclass
class Report:
    seconds: float
    deeds: collections.Counter[str]
    messages: int
    two_ids: list[str]  # slots that were sent as two different tasks
    copies: list[str]  # slots of which the same message was sent again, after a death between sending and marking
    missed: list[str]
    backwards: list[str]  # a message of an earlier term after one of a later term
    terms: int
    terms_in_order: bool
    exits: list[str]  # processes that ended although nobody ended them
    tracebacks: list[str]
    longest_gap: float  # between two messages of the fast entry
    longest_without_leader: float  # from a leader's last sign of life to the next election
    doubles: int  # messages of one entry that came sooner than half its interval after another

    def __str__(self) -> str:
        deeds = ", ".join(f"{count} {deed}" for deed, count in sorted(self.deeds.items()))
        return "\n".join(
            [
                f"{self.seconds:.0f} s of chaos: {deeds}",
                f"messages                        {self.messages}",
                f"slots sent as two tasks         {len(self.two_ids)} {self.two_ids[:5] or ''}",
                f"slots sent again, the same task {len(self.copies)} {self.copies[:5] or ''}",
                f"slots missed                    {len(self.missed)} {self.missed[:5] or ''}",
                f"terms                           {self.terms}, strictly increasing: {self.terms_in_order}",
                f"messages of an older term       {len(self.backwards)} {self.backwards[:5] or ''}",
                f"exits not caused by us          {len(self.exits)} {self.exits or ''}",
                f"tracebacks                      {len(self.tracebacks)}",
                f"longest time without a send     {self.longest_gap:.1f} s (ttl {TTL:g} s)",
                f"longest time without a leader   {self.longest_without_leader:.1f} s",
                f"messages too close together     {self.doubles} (caught up; without a leader: doubles)",
            ]
        )

    def wrong(self) -> list[str]:
        """What may never be; empty if all is well."""
        return [
            *(f"sent as two tasks: {slot}" for slot in self.two_ids),
            *(f"missed: {slot}" for slot in self.missed),
            *(f"went back: {message}" for message in self.backwards),
            *(f"ended by itself: {node}" for node in self.exits),
            *(f"traceback in the log of {node}" for node in self.tracebacks),
            *([] if self.terms_in_order else ["terms do not increase"]),
        ]


class Chaos:
    """One run. `pg` is a server that may be restarted, or None to leave the database alone."""

    def __init__(self, setup: CeleryTestSetup, *, pg: Any, dsn: str, beats: int = 3, plain: bool = False) -> None:
        self.setup = setup
        self.pg = pg
        self.dsn = dsn
        self.plain = plain
        self.beats = beats
        self.messages: list[Message] = []
        self.deeds: collections.Counter[str] = collections.Counter()
        self.exits: list[str] = []

    def run(self, seconds: float, *, seed: int = 0) -> Report:
        chance = random.Random(seed)
        with Inbox(self.setup) as inbox:
            self.messages = inbox.messages
            nodes = [self._start() for _ in range(self.beats)]
            poll(lambda: self.messages, timeout=30)
            started = time.monotonic()
            while time.monotonic() < started + seconds:
                self._misdeed(chance, nodes)
                self._look(nodes)
            self._calm_down(nodes)
            inbox.drain()
            spent = time.monotonic() - started
        return self._judge(spent)

    # What is done to them

    def _start(self) -> CeleryNode:
        return self.setup.start_beat(*(() if self.plain else ("-S", "syncguard")), wait=False)

    def _misdeed(self, chance: random.Random, nodes: list[CeleryNode]) -> None:
        choices = ["kill", "stop", "freeze"]
        if self.pg is not None and not self.plain:
            choices += ["terminate backends", "terminate backends", "restart the database", "crash the database"]
        # The first one ends a term for certain; afterwards every other one is aimed at whoever leads.
        first = not self.deeds and not self.plain
        deed = "kill" if first else chance.choice(choices)
        node = chance.choice(nodes)
        if first or chance.random() < 0.5:
            node = self._leader(nodes) or node
        self.deeds[deed] += 1
        if deed == "kill":
            node.kill()
            node.start(wait=False)
        elif deed == "stop":
            node.signal(SIGTERM)
            node.wait_exit(timeout=20)
            node.start(wait=False)
        elif deed == "freeze":
            node.freeze()
            time.sleep(chance.uniform(0.5, 2 * TTL))  # how long it is frozen is the misdeed
            node.thaw()
        elif deed == "terminate backends":
            self.pg.terminate_backends(self.dsn.rpartition("/")[2])
        else:
            self.pg.restart(mode="fast" if deed.startswith("restart") else "immediate")
        time.sleep(chance.uniform(0.5, 4.0))  # so that the next one comes at any moment, also in mid recovery

    def _leader(self, nodes: list[CeleryNode]) -> CeleryNode | None:
        if self.plain:
            return None
        try:
            with psycopg.connect(self.dsn, connect_timeout=3) as connection:
                row = connection.execute(
                    "select holder from syncguard_locks where starts_with(key, '__syncguard_leader:')"
                ).fetchone()
        except psycopg.OperationalError:
            return None  # it is just being restarted
        return next((node for node in nodes if row and row[0].endswith(f"pid {node.pid}")), None)

    def _look(self, nodes: list[CeleryNode]) -> None:
        for node in nodes:
            if not node.alive:
                self.exits.append(f"{node.name}: {node.returncode}")
                node.start(wait=False)

    def _calm_down(self, nodes: list[CeleryNode]) -> None:
        count = len(self.messages)
        poll(lambda: len(self.messages) >= count + 2 * len(ENTRIES) + 3, timeout=60)
        self._look(nodes)
        for node in nodes:
            node.signal(SIGTERM)
        for node in nodes:
            node.wait_exit(timeout=30)

    # What became of it

    def _judge(self, spent: float) -> Report:
        ids: dict[tuple[str, datetime], list[str]] = {}
        for message in self.messages:
            if message.due_at is not None:
                ids.setdefault((message.entry, message.due_at), []).append(message.task_id)
        fast = [message.at for message in self.messages if message.entry == "fast"]
        logs = {node.name: node.logs(all_runs=True) for node in self.setup.beat_cluster}
        terms, without_leader = ([], 0.0) if self.plain else self._terms()
        return Report(
            seconds=spent,
            deeds=self.deeds,
            messages=len(self.messages),
            two_ids=[_name(slot) for slot, found in ids.items() if len(set(found)) > 1],
            copies=[_name(slot) for slot, found in ids.items() if len(found) > len(set(found))],
            missed=self._missed(set(ids)),
            backwards=[
                f"{after.entry} term {after.term} after {before.term}"
                for before, after in zip(self.messages, self.messages[1:], strict=False)
                if before.term is not None and after.term is not None and after.term < before.term
            ],
            terms=len(terms),
            terms_in_order=all(before < after for before, after in zip(terms, terms[1:], strict=False)),
            exits=self.exits,
            tracebacks=[name for name, text in logs.items() if "Traceback" in text],
            longest_gap=max((after - before for before, after in zip(fast, fast[1:], strict=False)), default=0.0),
            longest_without_leader=without_leader,
            doubles=sum(
                after.at - before.at < ENTRIES[entry] / 2
                for entry in ENTRIES
                for before, after in zip(self._of(entry), self._of(entry)[1:], strict=False)
            ),
        )

    def _of(self, entry: str) -> list[Message]:
        return [message for message in self.messages if message.entry == entry]

    def _missed(self, sent: set[tuple[str, datetime]]) -> list[str]:
        missed = []
        for entry, every in ENTRIES.items():
            instants = sorted(due_at for name, due_at in sent if name == entry)
            if not instants:
                continue
            due_at, step = instants[0], timedelta(seconds=every)
            while due_at < instants[-1]:
                if (entry, due_at) not in sent:
                    missed.append(_name((entry, due_at)))
                due_at += step
        return missed

    def _terms(self) -> tuple[list[int], float]:
        """In the order in which they began, by the database's clock; and the longest time between two of them."""
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(
                "select term, extract(epoch from elected_at - lag(seen_at) over (order by elected_at))::float8"
                " from syncguard_beat_terms order by elected_at"
            ).fetchall()
        return [row[0] for row in rows], max((gap for _, gap in rows if gap is not None), default=0.0)


#: Ways for a leader to go, and what it is sent.
DEEDS = {"kill": SIGKILL, "freeze": SIGSTOP, "stop": SIGTERM}


def takeovers(setup: CeleryTestSetup, *, dsn: str, count: int, deed: str) -> list[float]:
    """Seconds from the end of a leader until another one leads, `count` times, sorted. `deed`: one of DEEDS."""
    nodes = [setup.start_beat("-S", "syncguard") for _ in range(2)]
    times = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        leading = (
            "select holder, fence::bigint from syncguard_locks where key = '__syncguard_leader:beat' "
            "and expires_at_ms > extract(epoch from clock_timestamp()) * 1000"
        )

        def leader() -> tuple[CeleryNode, int] | None:
            row = connection.execute(leading).fetchone()
            return next(((node, row[1]) for node in nodes if row and row[0].endswith(f"pid {node.pid}")), None)

        for _ in range(count):
            first, term = poll(lambda: leader(), timeout=30)
            (second,) = (node for node in nodes if node is not first)
            second.wait_for_log(rf"standby for 'beat': .* term 0*{term},")
            began = time.monotonic()
            first.signal(DEEDS[deed])
            poll(lambda: (found := leader()) and found[0] is second, timeout=30, interval=0.01)
            times.append(time.monotonic() - began)
            if deed == "freeze":
                first.signal(SIGCONT)
            else:
                first.wait_exit(timeout=20)
                first.start()
    for node in nodes:
        node.kill()
    return sorted(times)


def _name(slot: tuple[str, datetime]) -> str:
    return f"{slot[0]} {slot[1].time().isoformat(timespec='seconds')}"
