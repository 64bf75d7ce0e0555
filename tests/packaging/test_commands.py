"""The commands around the tests keep their word: a missing server is never a silent skip, and nothing outlives Ctrl-C."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.fixtures import servers
from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll

#: The server may well be installed here, and cannot be hidden from root.
HIDE_RABBITMQ = """
from tests.fixtures import servers

def hidden():
    raise servers.ServerUnavailable("RabbitMQ: install the package rabbitmq-server")

servers._rabbitmq_program = hidden
"""

TWO_TESTS = """
def test_that_needs_no_server():
    pass

def test_that_needs_rabbitmq(amqp_url):
    raise AssertionError("it ran")
"""


HERE = [name for name in ("pg", "redis", "rabbitmq") if not servers.missing(name)]
#: Without the one that is dear to start.
LIGHT = [name for name in HERE if name != "rabbitmq"]


def environment(**more):
    """Ours, without what it says of servers and of being CI."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SYNCGUARD", "PYTEST"))}
    variables.pop("CI", None)
    return {**variables, **more}


@pytest.fixture
def run_tests(tmp_path):
    (tmp_path / "hide_rabbitmq.py").write_text(HIDE_RABBITMQ)
    (tmp_path / "test_two.py").write_text(TWO_TESTS)

    def run(*arguments, **variables):
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])
        loaded = [
            argument for name in ("tests.conftest", "no:cacheprovider", "hide_rabbitmq") for argument in ("-p", name)
        ]
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *loaded,
                "-c",
                ROOT / "pyproject.toml",
                *arguments,
                tmp_path / "test_two.py",
            ],
            cwd=tmp_path,
            env=environment(PYTHONPATH=paths, **variables),
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


@pytest.mark.parametrize(
    ("ci", "arguments"),
    [(True, ()), (True, ("-n", "2")), (False, ())],
    ids=["in CI", "in CI, several processes", "elsewhere"],
)
def test_a_missing_server_is_a_failure_in_ci_and_a_loud_line_elsewhere(run_tests, ci, arguments):
    done = run_tests(*arguments, **({"CI": "true"} if ci else {}))
    assert done.returncode == (pytest.ExitCode.TESTS_FAILED if ci else pytest.ExitCode.OK), done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "1 TESTS DID NOT RUN: a server is missing" in done.stdout
    assert "RabbitMQ: install the package rabbitmq-server" in done.stdout.splitlines()
    assert "skipped" not in done.stdout


def test_a_missing_server_that_nobody_asked_for_is_no_matter(run_tests):
    """Not of the run either when only other tests were asked for, and not of one that has everything: the controls."""
    alone = run_tests("-k", "no_server", CI="true")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert "DID NOT RUN" not in alone.stdout
    given = run_tests(CI="true", SYNCGUARD_TEST_AMQP_URL="amqp://127.0.0.1:1//")
    assert "DID NOT RUN" not in given.stdout
    assert "AssertionError: it ran" in given.stdout


@pytest.fixture
def folder():
    """Where servers put theirs. Root's run as other users, who cannot get into a test's own folder."""
    path = Path(tempfile.mkdtemp(prefix="services-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def services(folder):
    """A running `scripts/services run -- COMMAND` with these servers, in a session of its own."""
    started = []

    def start(*command, names=LIGHT):
        process = subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "services", "run", "--only", ",".join(names), "--", *command],
            env=environment(TMPDIR=str(folder)),
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how,names", [("Ctrl-C", HERE), ("SIGINT", LIGHT), ("SIGTERM", HERE)])
def test_services_stop_their_servers_and_leave_nothing_when_they_are_told_to_end(services, folder, how, names):
    process = services("sleep", "60", names=names)

    def everything_runs():
        with contextlib.suppress(psutil.NoSuchProcess):  # some come and go while they are looked at
            family = psutil.Process(process.pid).children(recursive=True)
            return family if any(one.name() == "sleep" for one in family) else []
        return []

    family = poll(everything_runs, timeout=60)
    assert len(list(folder.glob("syncguard-*"))) == len(names) >= 2
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells everybody in the foreground
    else:
        process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)
    assert process.wait(60) == 130
    poll(lambda: all(gone(one) for one in family))
    assert list(folder.iterdir()) == []


def test_services_end_with_the_status_of_the_command_and_stop_their_servers_then_too(services, folder):
    process = services("sh", "-c", 'test -n "$SYNCGUARD_TEST_DSN" -a -n "$SYNCGUARD_TEST_REDIS_URL" && exit 7')
    assert process.wait(60) == 7
    assert list(folder.iterdir()) == []
