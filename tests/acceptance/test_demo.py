"""The demo is a promise too: it ends by itself, leaves nothing behind, and says what held and what did not."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll

# The demo starts a server of its own and goes to it directly.
pytestmark = pytest.mark.direct

COMMAND = [sys.executable, "-c", "from celery_syncguard.cli.commands import main; main()", "demo"]


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _left(folder: Path) -> list[str]:
    """Processes that work in the folder, and what lies in it."""
    processes = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in command:
            processes.append(command)
    return [*processes, *(path.name for path in folder.iterdir() if path.name.startswith("syncguard-demo-"))]


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own: the servers run as another user when the tests run as root, and must be able to enter.
    with tempfile.TemporaryDirectory(prefix="of-the-demo-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.slow
def test_the_demo_holds_every_check_writes_them_and_leaves_nothing_behind(folder: Path) -> None:
    process = _start(folder, "--json", "checks.json")
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    checks = json.loads((folder / "checks.json").read_text())
    ending = re.search(r"demo: all (\d+) checks held \((\d+) s\)", output)
    assert ending is not None, output
    assert int(ending[1]) == len(checks)
    assert int(ending[2]) < 60, "the demo promises to end within a minute"
    assert "\x1b" not in output, "this is no terminal"
    assert len({check["scene"] for check in checks}) == 6
    assert all(check["held"] for check in checks)
    assert _left(folder) == []


@pytest.mark.slow
def test_on_a_terminal_the_demo_redraws_one_table_and_ends_with_the_checks(folder: Path) -> None:
    code = (
        "import sys\n"
        "import celery_syncguard.demo as demo\n"
        "from celery_syncguard.demo import scenes\n"
        "scenes.SCENES = scenes.SCENES[:1]\n"
        "sys.exit(demo.run('checks.json'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        environment.pop(name, None)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # which is what the end of a terminal is on Linux
        while piece := os.read(ours, 65536):
            output += piece
    os.close(ours)
    text = output.decode()
    assert process.wait(10) == 0, text
    checks = json.loads((folder / "checks.json").read_text())
    frames = text.split(checks[0]["scene"])
    assert len(frames) > 10, "the table was not redrawn while things happened"
    assert "\x1b[1A\x1b[2K" in text, "redrawn further down instead of in place"
    for word in ("worker", "event", "fence", "start", "end", "what the history says"):
        assert word in text
    shown = text.rpartition("what the history says")[2]
    assert shown.count("✓") == len(checks)
    for check in checks:
        assert check["statement"] in shown
    assert f"demo: all {len(checks)} checks held" in shown
    assert _left(folder) == []


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_the_demo_stops_everything(folder: Path) -> None:
    process = _start(folder)
    assert process.stdout is not None
    for line in process.stdout:
        if "start" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130

    def nothing_left() -> None:
        assert _left(folder) == []

    poll(nothing_left, timeout=10)


def test_a_check_that_does_not_hold_fails_the_demo_and_is_named(folder: Path) -> None:
    # Without its lock the same scene shows the fault that the check is there for.
    code = (
        "import sys, uuid\n"
        "import celery_syncguard.demo as demo\n"
        "from celery_syncguard.demo import scenes\n"
        "scenes.SCENES = scenes.SCENES[:1]\n"
        "build = scenes.Stage._build\n"
        "def unlocked(stage):\n"
        "    build(stage)\n"
        "    task = stage.tasks.charge\n"
        "    publish = task.apply_async\n"
        "    task.apply_async = lambda args: publish(args, lock_key='{key}:' + uuid.uuid4().hex)\n"
        "scenes.Stage._build = unlocked\n"
        "sys.exit(demo.run())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "demo: FAILED" in done.stdout
    assert "overlap" in done.stdout
    assert _left(folder) == []
