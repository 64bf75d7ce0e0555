"""Who a process is, and the undertaker by itself: real children, and a store that remembers what it was asked."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_syncguard.core import process
from celery_syncguard.core.outbox import Outbox
from celery_syncguard.core.store import Buried
from celery_syncguard.errors import StoreUnavailable
from celery_syncguard.tasks import undertaker as module
from tests.fixtures.polling import poll


class Graveyard:
    """Buries as the test says."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.away = False
        self.buried: list[str] = []
        self.asked: list[str] = []

    def release_process(self, name: str) -> Buried:
        if self.away:
            raise StoreUnavailable("no answer")
        self.asked.append(name)
        if name in self.busy:
            return Buried(0, busy=1)
        self.buried.append(name)
        return Buried(1)


@pytest.fixture
def store() -> Graveyard:
    return Graveyard()


@pytest.fixture
def undertaker(store: Graveyard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    undertaker = module.Undertaker()
    guard = SimpleNamespace(store=store, outbox=Outbox("outbox"))
    state = SimpleNamespace(guard=guard, close=guard.outbox.close)
    undertaker.bind(SimpleNamespace(pool_cls=SimpleNamespace(is_green=False)), state)
    yield undertaker
    undertaker.stop()


class Child:
    """A fork that says who it is, and lives until it is killed."""

    def __init__(self) -> None:
        reads, writes = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.write(writes, process.process_id().encode())
                signal.pause()
            finally:
                os._exit(1)
        os.close(writes)
        assert select.select([reads], [], [], 10)[0]
        self.name = os.read(reads, 100).decode()
        os.close(reads)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def reborn(pid: int) -> str:
    """What a new process with this pid does first. Its name."""
    return process._note(pid)


def test_a_parent_knows_the_names_of_its_children_dead_or_alive() -> None:
    children = [Child() for _ in range(3)]
    assert [process.child_process_id(child.pid) for child in children] == [child.name for child in children]
    for child in children:
        child.kill()
    assert [process.child_process_id(child.pid) for child in children] == [child.name for child in children]
    assert len({process.process_id(), *(child.name for child in children)}) == 4


def test_no_name_is_used_again_though_the_pid_is(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {process._note(4711) for _ in range(1000)}
    assert len(names) == 1000
    assert process.child_process_id(4711) in names
    assert process.child_process_id(4711 + process._PLACES) is None, "its place, and another process"


def test_a_process_that_forked_without_our_hook_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = process.process_id()
    monkeypatch.setattr(process, "_pid", -1)
    monkeypatch.setattr(process, "_own", before)
    assert process.process_id() != before


@pytest.mark.parametrize("pidfd", [True, False])
def test_what_a_dead_child_held_is_freed_and_nothing_of_the_child_that_got_its_pid(
    pidfd: bool, undertaker: Any, store: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its burial is held up, and meanwhile a new child has the pid. A burial by pid (the control) would name that, too."""
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    child = Child()
    store.busy.add(child.name)
    undertaker.watch(child.pid)
    child.kill()
    poll(lambda: child.name in store.asked)
    heir = reborn(child.pid)
    assert heir.partition(":")[2] == child.name.partition(":")[2]
    asked = len(store.asked)
    poll(lambda: len(store.asked) > asked)
    store.busy.clear()
    poll(lambda: store.buried == [child.name])
    assert set(store.asked) == {child.name}


def test_a_child_that_is_gone_before_anybody_looked_is_buried_by_its_own_name(
    undertaker: Any, store: Graveyard
) -> None:
    child = Child()
    child.kill()
    undertaker.watch(child.pid)
    poll(lambda: store.buried == [child.name])


def test_a_pid_that_is_used_again_tells_that_its_last_process_is_dead_where_the_system_does_not(
    undertaker: Any, store: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(module, "_birth", lambda pid: "")
    child = Child()
    try:
        undertaker.watch(child.pid)
        heir = reborn(child.pid)
        undertaker.watch(child.pid)
        poll(lambda: store.buried == [child.name])
        poll(lambda: list(undertaker._watched) == [heir])
    finally:
        child.kill()


def test_burials_that_are_held_up_do_not_hold_up_others(undertaker: Any, store: Graveyard) -> None:
    """Four children whose statements the server has not ended yet, and a bystander that dies with them."""
    children = [Child() for _ in range(5)]
    store.busy.update(child.name for child in children[:4])
    for child in children:
        undertaker.watch(child.pid)
    started = time.monotonic()
    for child in children:
        child.kill()
    poll(lambda: store.buried == [children[4].name])
    assert time.monotonic() - started < 3
    store.busy.clear()
    poll(lambda: len(store.buried) == 5)


def test_what_could_not_be_freed_until_the_worker_ends_is_told(
    undertaker: Any, store: Graveyard, caplog: pytest.LogCaptureFixture
) -> None:
    store.away = True
    child = Child()
    undertaker.watch(child.pid)
    child.kill()
    undertaker.stop()
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == [f"could not free what the dead child process {child.pid} held: it is free when its ttl is over"]


def test_a_burial_that_is_held_up_is_waited_for_at_the_end_of_the_worker(undertaker: Any, store: Graveyard) -> None:
    """The server still ends the statement of the child."""
    child = Child()
    undertaker.watch(child.pid)
    store.busy.add(child.name)
    threading.Timer(0.4, store.busy.clear).start()
    child.kill()
    undertaker.stop()
    assert store.buried == [child.name]
