"""The main job, shown: real servers from wheels, real workers, and a history that is checked at the end.

`run` is what `celery-syncguard demo` calls. It starts PostgreSQL and Valkey, two `celery worker` processes and later two
beats, plays the scenes, reads back what the bodies wrote into the database, and says which checks held. It stops everything
that it started, also after Ctrl-C.

Modules: `processes` (servers and celery processes), `app` (the tasks), `scenes`, `view`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_syncguard.demo.scenes import Finding, Stage

__all__ = ["Check", "run"]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One statement about the history, and what was found."""

    scene: str
    statement: str
    held: bool
    found: str


def run(json_path: str | None = None) -> int:
    """Play the demo; 0 if every check held, 1 if not.

    Arguments:
        json_path: a file to write the checks to.
    """
    from celery_syncguard.demo import processes

    problem = processes.missing()
    if problem is not None:
        print(f"demo: {problem}")
        return 1
    from celery_syncguard.demo import scenes
    from celery_syncguard.demo.view import make_view

    folder = Path(tempfile.mkdtemp(prefix="syncguard-demo-"))
    view = make_view()
    started = time.monotonic()
    try:
        with view, scenes.Stage(folder, view) as stage:
            checks = [check for scene in scenes.SCENES for check in _play(scene, stage)]
    except KeyboardInterrupt:
        print("demo: interrupted, everything is stopped")
        return 130
    except (OSError, RuntimeError, subprocess.SubprocessError) as exc:
        print(f"demo: its servers or workers did not start: {exc}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    view.show_checks(checks)
    if json_path is not None:
        Path(json_path).write_text(json.dumps([dataclasses.asdict(check) for check in checks], indent=2) + "\n")
    broken = [check for check in checks if not check.held]
    for check in broken:
        print(f"demo: FAILED: {check.scene}: {check.statement} ({check.found})")
    if not broken:
        print(f"demo: all {len(checks)} checks held ({time.monotonic() - started:.0f} s)")
    return 1 if broken else 0


def _play(scene: Callable[[Stage], list[Finding]], stage: Stage) -> list[Check]:
    title = (scene.__doc__ or scene.__name__).strip()
    stage.view.scene(title)
    try:
        findings = scene(stage)
        stage.catch_up()
    except Exception as exc:
        findings = [("the scene could be played to its end", False, repr(exc))]
    return [Check(title, *finding) for finding in findings]
