"""What users' type checkers see, mypy and pyright, with celery-types installed and without.

The package is checked as an installed one. A line of `tests/typing` that a checker is to refuse has a mark; see `refused`.
"""

import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.fixtures.cluster import ROOT

FOLDER = ROOT / "tests" / "typing"
SCRIPTS = Path(sysconfig.get_path("scripts"))


class Environment:
    """An environment with what this one has, and perhaps celery-types before it."""

    def __init__(self, folder: Path, *, celery_types: bool) -> None:
        self.name = "with celery-types" if celery_types else "without celery-types"
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (packages / "checkout.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
        self.files = [*FOLDER.glob("*.py"), *(FOLDER / "refused").glob("*.py")]
        if celery_types:
            self.files += (FOLDER / "celery_types").glob("*.py")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-c", str(ROOT / "constraints.txt")]
            subprocess.run([*pip, "--target", str(packages), "celery-types"], check=True, timeout=100)

    def run(self, checker: str, *arguments: str) -> str:
        # Outside of the checkout, so that the package counts as installed.
        command = [SCRIPTS / checker, *arguments, *map(str, self.files)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=200)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.stdout

    def mypy(self) -> list[tuple[Path, int, str]]:
        cache = ROOT / ".mypy_cache" / self.name.replace(" ", "-")
        settings = ["--config-file=", "--strict", "--ignore-missing-imports", "--allow-untyped-decorators"]
        printed = self.run(
            "mypy", *settings, f"--python-executable={self.python}", f"--cache-dir={cache}", "--no-pretty"
        )
        found = re.findall(r"^(.+?):(\d+): error: (.*)$", printed, flags=re.MULTILINE)
        return [((self.folder / path).resolve(), int(line), text) for path, line, text in found]

    def pyright(self) -> list[tuple[Path, int, str]]:
        project = self.folder / "pyrightconfig.json"
        project.write_text(json.dumps({"typeCheckingMode": "standard"}))
        printed = self.run("basedpyright", "--outputjson", "--level=error", f"--pythonpath={self.python}")
        return [
            (Path(one["file"]).resolve(), one["range"]["start"]["line"] + 1, one["message"])
            for one in json.loads(printed)["generalDiagnostics"]
            if one["severity"] == "error"
        ]


@pytest.fixture(scope="module", params=[False, True], ids=["without-celery-types", "with-celery-types"])
def environment(request, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("typing"), celery_types=request.param)


def marks(files, *, second):
    """(file, line) -> words of the error that it has to have."""
    found = {}
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if mark := re.search(r"# E: (.+)$", line):
                found[path, number] = mark[1].split(" | ")[-1 if second else 0]
    return found


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_each_marked_line_is_refused_for_its_reason_and_no_other_line_is(environment, checker):
    errors = getattr(environment, checker)()
    expected = marks(environment.files, second=checker == "pyright")
    assert len(expected) > 30
    unexpected = [error for error in errors if error[:2] not in expected]
    assert unexpected == []
    texts = {}
    for path, line, text in errors:
        texts.setdefault((path, line), []).append(text)
    missed = {where: words for where, words in expected.items() if words not in " ".join(texts.get(where, []))}
    assert missed == {}
