"""An exception that comes into a thread in the middle of our own calls, as interrupts and soft time limits do."""

import random
import sys
import threading

import pytest

from celery_syncguard import LeaseLost, LockHeld, StoreUnavailable, SyncGuard
from celery_syncguard.tasks.interrupt import _raise_in
from tests.fixtures.polling import poll


@pytest.fixture
def guard(pg_dsn):
    with SyncGuard(pg_dsn, timeout=0.5) as one:
        yield one


def test_a_connection_that_was_lost_to_an_exception_is_replaced(guard):
    """Else a process with one connection for its work would never get one again."""
    with guard.hold("a"):
        pass
    lost = guard.store._connections._pool.getconn()
    with pytest.raises(StoreUnavailable, match="lost its connection"):
        guard.try_acquire("b")

    def check():
        try:
            return guard.try_acquire("b")
        except StoreUnavailable as exc:
            raise AssertionError from exc

    assert poll(check, timeout=20).release()
    assert not lost.closed


class Interrupted(Exception):
    pass


class RaisesOnce(set):
    """Raises at the given step of a loan, once, as an exception does that comes into the thread there."""

    def __init__(self, step):
        self.step = step

    def add(self, conn):
        super().add(conn)
        self._strike("add")

    def discard(self, conn):
        super().discard(conn)
        self._strike("discard")

    def _strike(self, step):
        if step == self.step:
            self.step = None
            raise Interrupted


@pytest.mark.parametrize("step", ["add", "discard"])
def test_an_exception_in_the_steps_of_a_loan_does_not_lose_the_connection(guard, step):
    with guard.hold("a"):
        pass
    store = guard.store
    store._connections.lent = RaisesOnce(step)
    with pytest.raises(Interrupted), store.connection():
        pass
    assert store._connections.lent == set()
    with store.connection() as conn:  # at once: it is the same one
        assert conn.execute("select true").fetchone() == (True,)


def test_exceptions_between_our_steps_leave_a_guard_that_works_and_no_lock(guard, monkeypatch):
    # Python swallows an exception that strikes in a destructor and hands it to this hook; the next one may strike in the hook.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    interrupted = []
    over = threading.Event()

    def work():
        while not over.is_set():
            try:
                while not over.is_set():
                    with guard.hold("a", ttl=1, wait=5):
                        pass
            except LeaseLost:
                interrupted.append(1)
            except (LockHeld, StoreUnavailable):
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(300):
        over.wait(random.uniform(0.0, 0.02))
        _raise_in(threads[number % 2].ident, LeaseLost)
    over.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(interrupted) > 30
    # A lease whose acquire was cut off is freed in the background, or ends at its ttl.
    poll(lambda: guard.store.run(lambda conn: conn.execute("select true").fetchone()), timeout=20)
    poll(lambda: not guard.locks(), timeout=20)
