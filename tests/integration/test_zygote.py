"""A node that is forked is a process like a fresh one: the same `python -m celery`, told apart by nothing but its birth."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from tests.fixtures import zygote
from tests.fixtures.cluster import ROOT, CeleryNode, usual_environment
from tests.fixtures.polling import poll

MODULE = "tests.integration.what_it_is"


@pytest.fixture
def start(tmp_path):
    nodes = []

    def start(*command, name="node", fresh=False, wait=True, **variables):
        environment = {**usual_environment(), **variables}
        environment.pop("HOME", None)  # which the zygote has
        node = CeleryNode(
            command or ["report"],
            module=MODULE,
            folder=tmp_path,
            environment=environment,
            name=name,
            ready="FACTS",
            fresh=fresh,
        )
        nodes.append(node)
        return node.start(wait=wait)

    yield start
    for node in nodes:
        node.reap()


def facts(node):
    return json.loads(node.wait_for_log(r"FACTS (.*)\n")[1])


def is_forked(node):
    return isinstance(node._process, zygote.Node)


def test_a_forked_node_sees_what_a_fresh_one_sees(start):
    """Folder, arguments, environment, import path, signals, descriptors and streams; a fresh process is the measure."""
    one, other = start(ONLY_THERE="1"), start(ONLY_THERE="1", fresh=True)
    assert is_forked(one)
    assert not is_forked(other)
    forked, fresh = facts(one), facts(other)
    assert forked.pop("pid") == one.pid
    assert fresh.pop("pid") == other.pid
    assert forked.pop("chance") != fresh.pop("chance")
    assert forked["group and session"] == [True, True]
    assert forked["environment"]["ONLY_THERE"] == "1"
    assert "HOME" not in forked["environment"]
    assert forked == fresh


def test_nodes_of_one_zygote_draw_numbers_of_their_own(start):
    """What is drawn by chance names processes, leases and stamps. `process_id` also says that ours is imported anew."""
    first, second = facts(start(name="first"))["chance"], facts(start(name="second"))["chance"]
    assert not set(first) & set(second)


def test_a_node_ends_with_the_status_of_its_process(start):
    assert start().wait_exit() == 0
    assert start("no-such-command", name="other", wait=False).wait_exit() == 2
    waiting = start(WHAT_NEXT="wait")
    assert waiting.alive
    assert waiting.returncode is None
    waiting.signal_group(signal.SIGTERM)
    assert waiting.wait_exit() == -signal.SIGTERM
    assert not waiting.alive
    frozen = start(WHAT_NEXT="wait")
    frozen.freeze()
    assert frozen.alive
    frozen.kill()
    assert frozen.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "command,environment",
    [
        (["report"], {"PYTHONHASHSEED": "1"}),
        (["report"], {"LC_ALL": "POSIX"}),
        (["report", "-P", "gevent"], {}),
    ],
    ids=["PYTHON variable", "locale", "patching pool"],
)
def test_what_is_read_at_the_start_of_a_process_gets_a_fresh_one(start, command, environment):
    assert zygote.zygote_for(command, {**usual_environment(), **environment}, usual=usual_environment()) is None
    assert zygote.zygote_for(["report"], usual_environment(), usual=usual_environment()) is not None


def test_nodes_end_with_the_tests_however_those_end(tmp_path):
    script = (
        "import os, pathlib, sys, time\n"
        "from tests.fixtures import cluster, zygote\n"
        "node = cluster.CeleryNode(['report'], module='tests.integration.what_it_is', folder=pathlib.Path(sys.argv[1]),\n"
        "    environment={**cluster.usual_environment(), 'WHAT_NEXT': 'wait'}, name='node', ready='FACTS').start()\n"
        "print(node.pid, zygote._zygote._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    tests = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in tests.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
    finally:
        tests.kill()
        tests.wait(10)
        tests.stdout.close()
    poll(lambda: not any(map(runs, pids)))


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # an orphan's, which nobody may reap in a container
    except psutil.NoSuchProcess:
        return False
