"""The outbox by itself: what it repeats, what it tells, and who may interrupt it."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from celery_syncguard.core import outbox as module
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.outbox import Letter, Outbox
from celery_syncguard.errors import InvalidKey, StoreUnavailable
from celery_syncguard.guard import SyncGuard
from celery_syncguard.tasks import claims
from celery_syncguard.testing import FakeClock
from tests.fixtures.interrupting import at_step, hanging_step
from tests.fixtures.polling import poll


class Server:
    """Remembers what it was told, and answers as the test says."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.asked: list[str] = []
        self.away = False
        self.busy: set[str] = set()

    def letter(self, text: str, lost: list[str] | None = None, **more: object) -> Letter:
        def call() -> None:
            self.asked.append(text)
            if self.away:
                raise StoreUnavailable("no answer")
            if text in self.busy:
                raise StoreUnavailable("its row is in use", busy=True)
            self.told.append(text)

        return Letter(call, lambda: (lost if lost is not None else []).append(text), **more)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox("outbox")
    yield outbox
    outbox.close()


def quiet() -> Outbox:
    """Without a thread: only the test delivers."""
    return Outbox()


def test_a_letter_is_repeated_until_it_is_answered(outbox: Outbox, server: Server) -> None:
    server.away = True
    outbox.put(server.letter("a"))
    poll(lambda: len(server.asked) >= 2)
    server.away = False
    poll(lambda: server.told == ["a"])
    poll(lambda: not outbox.waiting)


def test_no_answer_is_asked_for_once_per_attempt_however_many_wait(server: Server) -> None:
    outbox = quiet()
    server.away = True
    for number in range(5):
        outbox.put(server.letter(str(number)))
    for attempts in (1, 2, 3):
        with pytest.raises(StoreUnavailable):
            outbox.deliver()
        assert len(server.asked) == attempts
    assert len(set(server.asked)) == 3, "the one that failed last comes last"
    server.away = False
    outbox.deliver()
    assert sorted(server.told) == list("01234")


def test_what_is_held_up_holds_up_no_other_and_comes_after_what_is_new(server: Server) -> None:
    """Each of them waits for its row for up to 2 s."""
    outbox = quiet()
    server.busy = {"busy 1", "busy 2"}
    for text in ("busy 1", "busy 2"):
        outbox.put(server.letter(text))
    with pytest.raises(StoreUnavailable):
        outbox.deliver()
    first = outbox.waiting[0]
    call = first.call

    def arrives_meanwhile() -> None:
        if "new" not in server.told:
            outbox.put(server.letter("new"))
        call()

    first.call = arrives_meanwhile
    outbox.put(server.letter("free"))
    server.asked.clear()
    with pytest.raises(StoreUnavailable):
        outbox.deliver()
    assert server.asked == ["free", "busy 1", "new", "busy 2"]
    server.busy.clear()
    outbox.deliver()
    assert outbox.waiting == []


def test_the_thread_asks_for_what_is_held_up_less_and_less_often(outbox: Outbox, server: Server) -> None:
    server.busy = {"a"}
    letter = server.letter("a")
    outbox.put(letter)
    poll(lambda: letter.pause >= 0.8)
    assert len(server.asked) <= 5
    server.busy.clear()
    poll(lambda: server.told == ["a"])


def test_a_letter_that_is_refused_holds_up_no_other(outbox: Outbox, server: Server) -> None:
    def refuse() -> None:
        raise InvalidKey("cannot be stored")

    def fail() -> None:
        raise ZeroDivisionError

    outbox.put(Letter(refuse))
    outbox.put(Letter(fail))
    outbox.put(server.letter("a"))
    poll(lambda: server.told == ["a"])


def test_a_letter_that_has_nothing_to_say_any_more_is_dropped_without_a_word(server: Server) -> None:
    lost: list[str] = []
    with FakeClock() as clock:
        outbox = quiet()
        outbox.put(server.letter("a", lost, until=module.clock.now() + 10))
        clock.advance(11)
        outbox.flush()
    assert (server.asked, lost, outbox.waiting) == ([], [], [])


def test_a_later_letter_takes_the_place_of_an_earlier_one_about_the_same(server: Server) -> None:
    outbox = quiet()
    outbox.put(server.letter("confirm", about="claim"))
    outbox.put(server.letter("end", about="claim"))
    outbox.put(server.letter("other", about="other"))
    outbox.withdraw("other")
    outbox.withdraw("unknown")
    outbox.deliver()
    assert server.told == ["end"]


def test_a_letter_that_comes_while_another_about_the_same_is_delivered_is_kept(server: Server) -> None:
    outbox = quiet()

    def call() -> None:
        outbox.put(server.letter("end", about="claim"))

    outbox.put(Letter(call, about="claim"))
    outbox.deliver()
    assert (server.told, outbox.waiting) == (["end"], [])


def test_a_letter_may_be_for_later(outbox: Outbox, server: Server) -> None:
    due = module.clock.now() + 0.3
    outbox.put(server.letter("a", at=due))
    poll(lambda: server.told)
    assert module.clock.now() >= due


def test_what_is_left_at_the_end_is_told_once_and_waited_for_once(server: Server) -> None:
    lost: list[str] = []
    outbox = quiet()
    server.away = True
    outbox.put(server.letter("a", lost))
    outbox.put(server.letter("b", lost))
    for _ in range(3):
        outbox.flush()
    assert (lost, len(server.asked)) == (["a", "b"], 1)


def test_letters_are_bounded_and_what_is_beyond_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    lost: list[str] = []
    outbox = quiet()
    for text in "abc":
        outbox.put(server.letter(text, lost))
    assert lost == ["c"]
    outbox.deliver()
    assert server.told == ["a", "b"]


def test_an_outage_is_told_when_it_begins_and_when_it_is_over(
    outbox: Outbox, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.away = True
    for text in "abc":
        outbox.put(server.letter(text))
    poll(lambda: len(server.asked) >= 3)
    server.away = False
    poll(lambda: sorted(server.told) == ["a", "b", "c"])
    poll(lambda: len(caplog.records) >= 2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_thread_that_could_not_be_started_is_started_for_the_next_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have no thread left for a moment."""
    with SyncGuard("memory://") as guard:
        for key in ("first", "second"):
            guard.store.claim(key, task_id=key, ttl=60, holder="test")

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                claims.end(guard, "first", claims.Outcome.VOID, task_id="first", later=True)
        claims.end(guard, "second", claims.Outcome.VOID, task_id="second", later=True)
        store = guard.store
        # Whoever claims them now has them.
        poll(lambda: all(store.claim(key, task_id="other", ttl=60).ours for key in ("first", "second")))


def test_what_was_put_without_starting_the_thread_is_seen_by_the_renewer() -> None:
    with SyncGuard("memory://", store=MemoryStore()) as guard:
        lease = guard.try_acquire("k", ttl=60)
        assert lease is not None
        told = threading.Event()
        guard.outbox.put(Letter(told.set), start=False)
        assert told.wait(5)


# Who may interrupt it


def test_a_destructor_that_runs_inside_put_may_put() -> None:
    """At every step of it: a collection of garbage comes anywhere."""

    class Dropped:
        def __init__(self, outbox: Outbox, server: Server) -> None:
            self.itself, self.outbox, self.server = self, outbox, server

        def __del__(self) -> None:
            self.outbox.put(self.server.letter("dropped"), start=False)

    number, more = 0, True
    while more:
        server, outbox = Server(), quiet()
        Dropped(outbox, server)
        letter = server.letter("put")
        more = at_step(number, lambda: outbox.put(letter, start=False), gc.collect)
        gc.collect()
        outbox.deliver()
        assert sorted(server.told) == ["dropped", "put"], number
        number += 1
    assert number > 10


def test_a_signal_handler_that_puts_or_delivers_inside_a_delivery_never_waits() -> None:
    """As that of beat, which writes what it has to write."""

    def scene() -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
        server, outbox = Server(), quiet()
        outbox.put(server.letter("a"))

        def handler() -> None:
            outbox.put(server.letter("b"), start=False)
            outbox.deliver()

        def check() -> None:
            outbox.deliver()
            assert {"a"} <= set(server.told) <= {"a", "b"}

        return outbox.deliver, handler, check

    assert hanging_step(scene, timeout=5) is None


def test_a_signal_handler_that_raises_inside_a_delivery_loses_no_letter() -> None:
    def leave() -> None:
        raise SystemExit

    number, more = 0, True
    while more:
        server, outbox = Server(), quiet()
        outbox.put(server.letter("a"))
        outbox.put(server.letter("b"))
        more = at_step(number, outbox.deliver, leave)
        outbox.deliver()
        assert set(server.told) == {"a", "b"}, number
        number += 1
    assert number > 20


def test_a_child_that_is_forked_during_a_delivery_has_an_outbox_of_its_own(server: Server) -> None:
    outbox = quiet()
    reached, go_on = threading.Event(), threading.Event()

    def call() -> None:
        reached.set()
        go_on.wait(20)

    outbox.put(Letter(call))
    thread = threading.Thread(target=outbox.deliver, daemon=True)
    thread.start()
    assert reached.wait(10)
    pid = os.fork()
    if not pid:
        signal.alarm(10)  # a child that hangs is killed
        try:
            assert outbox.waiting == []
            outbox.put(server.letter("child"))
            outbox.deliver()
            os._exit(0 if server.told == ["child"] else 1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    go_on.set()
    thread.join(10)
    assert (code, outbox.waiting) == (0, [])


def test_a_flush_at_the_end_waits_for_what_the_thread_has_begun(outbox: Outbox, server: Server) -> None:
    reached, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def call() -> None:
        calls.append(threading.current_thread().name)
        reached.set()
        go_on.wait(20)

    lost: list[str] = []
    outbox.put(Letter(call, lambda: lost.append("told"), until=math.inf))
    assert reached.wait(10)
    threading.Timer(0.3, go_on.set).start()
    outbox.flush()
    assert (calls, lost, outbox.waiting) == (["outbox"], [], [])
