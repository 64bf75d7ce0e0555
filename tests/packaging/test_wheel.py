"""What users install: the wheel, built from the sdist, in an environment that has nothing else of ours."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.fixtures.cluster import ROOT

pytestmark = pytest.mark.timeout(400)

MIGRATIONS = sorted((ROOT / "migrations").glob("[0-9]*.sql"))

LOAD_ENTRY_POINTS = """
from importlib.metadata import distribution
for entry_point in distribution("celery-syncguard").entry_points:
    print(entry_point.group, entry_point.name, callable(entry_point.load()))
"""


class Environment:
    """A virtual environment of its own, in which the checkout is not on the path."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self.outside = folder / "outside"
        self.outside.mkdir()

    def install(self, *arguments: str) -> None:
        self.run("python", "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *arguments)

    def run(self, program: str, *arguments: str) -> str:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SYNCGUARD"))}
        done = subprocess.run(
            [self.bin / program, *arguments], cwd=self.outside, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: the build's requirements are pinned with everything else.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("wheel"))
    made.install(f"{wheel}[binary]")
    return made


def test_the_wheel_holds_the_package_and_every_migration_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "celery_syncguard").rglob("*.py")}
    folder = ROOT / "migrations"
    migrations = {f"celery_syncguard/migrations/{path.relative_to(folder)}" for path in folder.rglob("*.sql")}
    assert MIGRATIONS
    assert package | migrations | {"celery_syncguard/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"celery_syncguard", wheel.name.split("-py3")[0] + ".dist-info"}


def test_the_installed_command_prints_every_migration_in_order(environment):
    assert_prints_migrations(environment.run("celery-syncguard", "sql"))


def test_every_entry_point_resolves(environment):
    lines = environment.run("python", "-c", LOAD_ENTRY_POINTS).splitlines()
    assert set(lines) == {
        "console_scripts celery-syncguard True",
        "celery.commands syncguard True",
        "celery.beat_schedulers syncguard True",
    }


def test_celery_knows_the_subcommand(environment):
    assert "migrate" in environment.run("celery", "syncguard", "--help")


def test_other_celery_commands_do_not_load_a_database_driver(environment):
    """Every `celery` command loads the entry point, also where libpq is missing."""
    code = (
        "import sys, celery_syncguard.cli.commands; print([name for name in sys.modules if name.startswith('psycopg')])"
    )
    assert environment.run("python", "-c", code).strip() == "[]"


def test_the_version_is_that_of_the_distribution(environment, wheel):
    version = environment.run("python", "-c", "import celery_syncguard; print(celery_syncguard.__version__)").strip()
    assert wheel.name.startswith(f"celery_syncguard-{version}-")


def test_no_dependency_is_pinned_for_users(environment):
    """Pins are for development; a user's own pins must win."""
    code = "from importlib.metadata import requires; print('\\n'.join(requires('celery-syncguard')))"
    requirements = environment.run("python", "-c", code).splitlines()
    assert len(requirements) > 5
    assert not [requirement for requirement in requirements if "==" in requirement.split(";")[0]]


def test_an_editable_install_finds_the_migrations_of_the_checkout(environment):
    """Runs last: it replaces the wheel in the environment."""
    environment.install("--no-deps", "--editable", str(ROOT))
    where = environment.run("python", "-c", "import celery_syncguard; print(celery_syncguard.__file__)")
    assert Path(where.strip()).parent == ROOT / "celery_syncguard"
    assert_prints_migrations(environment.run("celery-syncguard", "sql"))


def assert_prints_migrations(printed: str) -> None:
    position = 0
    for path in MIGRATIONS:
        text = path.read_text().strip()
        found = printed.find(text, position)
        assert found >= 0, f"{path.name} is missing or out of order"
        position = found + len(text)
