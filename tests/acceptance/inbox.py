"""What beats sent: every message, read straight from the queue, so that no worker comes in between."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import kombu
import psycopg

from tests.fixtures.cluster import CeleryTestSetup
from tests.fixtures.polling import poll


@dataclass
class Message:
    entry: str
    task_id: str
    at: float
    due_at: datetime | None
    term: int | None
    headers: dict[str, Any] = field(default_factory=dict)

    @property
    def slot(self) -> tuple[str, datetime | None]:
        return self.entry, self.due_at


class Inbox:
    """The queue of a setup, read by a thread of its own; a context manager."""

    def __init__(self, setup: CeleryTestSetup) -> None:
        self.setup = setup
        self.messages: list[Message] = []
        self._marks: set[str] = set()
        self._reading = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Inbox:
        self._thread.start()
        assert self._reading.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)

    def of(self, entry: str) -> list[Message]:
        return [message for message in self.messages if message.entry == entry]

    def wait_for(self, count: int, *, entry: str | None = None, timeout: float = 30) -> list[Message]:
        """Wait until there are so many more messages than now; the new ones."""
        before = len(self.messages)

        def new() -> list[Message]:
            return [message for message in self.messages[before:] if entry in (None, message.entry)]

        poll(lambda: len(new()) >= count, timeout=timeout)
        return new()

    def wait_until(self, holds: Callable[[Message], bool], *, timeout: float = 30) -> Message:
        """Wait for a message of which `holds` is true."""
        return poll(lambda: next((message for message in self.messages if holds(message)), None), timeout=timeout)

    def copies(self) -> list[tuple[str, datetime | None]]:
        """Slots of which there is more than one message."""
        seen: set[Any] = set()
        return [message.slot for message in self.messages if message.slot in seen or seen.add(message.slot)]

    def wait_settled(self) -> None:
        """Wait until what was sent is marked as sent, so that a kill now leaves no copy behind."""

        def settled() -> bool:
            with psycopg.connect(self.setup.dsn) as connection:
                row = connection.execute("select count(*) from syncguard_beat_slots where sent_at is null").fetchone()
            return row == (0,)

        poll(settled)

    def drain(self) -> None:
        """Wait until what was sent before now is here: a message of our own comes last."""
        mark = str(uuid.uuid4())
        self.setup.app.send_task("mark", task_id=mark)
        poll(lambda: mark in self._marks)

    def _read(self) -> None:
        app = self.setup.app
        while not self._done.is_set():
            try:
                with app.connection_for_read() as connection:
                    queue = app.amqp.queues[self.setup.broker.queue].bind(connection.default_channel)
                    queue.declare()
                    with kombu.Consumer(connection.default_channel, [queue], callbacks=[self._note], accept=["json"]):
                        self._reading.set()
                        while not self._done.is_set():
                            try:
                                connection.drain_events(timeout=0.2)
                            except TimeoutError:
                                continue
            except Exception:  # a test has stopped the broker
                self._done.wait(0.2)

    def _note(self, body: Any, message: Any) -> None:
        headers = message.headers
        message.ack()
        if headers["task"] == "mark":
            self._marks.add(headers["id"])
            return
        due_at = headers.get("syncguard_due_at")
        self.messages.append(
            Message(
                entry=body[0][0],
                task_id=headers["id"],
                at=time.monotonic(),
                due_at=datetime.fromisoformat(due_at) if due_at else None,
                term=headers.get("syncguard_term"),
                headers=headers,
            )
        )
