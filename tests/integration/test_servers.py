"""Servers of the tests: one that starts slowly is waited for, one that hangs is told with what it said last."""

import os
import pwd
import sys

import pytest

from tests.fixtures.servers import Server, _accepts

STARTS = {
    "logs": "for i in range(15): print('step', i, flush=True); time.sleep(0.2)",
    "computes": "until = time.process_time() + 2.4\nwhile time.process_time() < until: pass",
}


class Slow(Server):
    """Works on its start in some way, and then listens."""

    user = pwd.getpwuid(os.geteuid()).pw_name

    def __init__(self, work):
        super().__init__()
        self.work = work

    def _command(self):
        listen = "server = socket.create_server(('127.0.0.1', int(sys.argv[1])))\ntime.sleep(60)"
        return [sys.executable, "-c", f"import socket, sys, time\n{self.work}\n{listen}", str(self.port)]

    def _check_ready(self):
        self._assert_alive()
        if not _accepts(self.port):
            raise AssertionError("no listener")


class WithoutProgress(Slow):
    """For the negative control."""

    def _progress(self):
        return (0, 0)


@pytest.fixture
def server(request):
    made = []

    def make(kind, work):
        made.append(kind(work))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("work", STARTS.values(), ids=STARTS)
def test_a_server_is_waited_for_as_long_as_it_makes_progress(server, work):
    slow = server(Slow, work)
    slow.start(patience=2)
    assert slow.running


@pytest.mark.parametrize("work", STARTS.values(), ids=STARTS)
def test_by_the_clock_alone_the_same_server_is_given_up(server, work):
    with pytest.raises(RuntimeError, match="did not start: no listener; no progress"):
        server(WithoutProgress, work).start(patience=2)


def test_a_server_that_hangs_is_told_with_its_last_words(server):
    hanging = server(Slow, "print('waiting for nothing', flush=True); time.sleep(60)")
    with pytest.raises(RuntimeError, match=r"(?s)did not start: no listener; no progress for 1 s.*waiting for nothing"):
        hanging.start(patience=1)
    assert not hanging.running


def test_progress_without_an_end_has_a_limit(server):
    with pytest.raises(RuntimeError, match=r"(?s)did not start: no listener; after \d s.*step"):
        server(Slow, STARTS["logs"].replace("15", "1000")).start(limit=2)
