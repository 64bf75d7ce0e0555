"""CONTRIBUTING.md leads a newcomer to the right place: its map and its way through the code name what is there."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

import celery_syncguard

PACKAGE = Path(celery_syncguard.__file__).parent
PAGE = (PACKAGE.parent / "CONTRIBUTING.md").read_text()


def section(title: str) -> str:
    """What stands between a heading and the next."""
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def modules_of_the_map() -> list[str]:
    """`room/module`, one for each indented line of the map."""
    found, room = [], ""
    for line in section("The map").split("```")[1].splitlines()[1:]:
        name = line.split()[0] if line.strip() else ""
        if name and not line.startswith(" "):
            room = name.removeprefix("celery_syncguard/")
        elif name:
            found.append(f"{room}{name}")
    return found


def modules_of_the_package() -> list[str]:
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    return [str(path) for path in paths if path.name != "__init__"]


def test_the_map_names_each_module_once_and_no_other() -> None:
    assert sorted(modules_of_the_map()) == sorted(modules_of_the_package())


def test_each_module_of_the_map_has_its_phrase() -> None:
    lines = [line for line in section("The map").split("```")[1].splitlines() if line.startswith("  ")]
    assert [line for line in lines if len(line.split()) < 3] == []


STEPS = re.findall(r"`([a-z_.]+):([A-Za-z_.]+)`", section("The way of one task") + section("Where to add"))


@pytest.mark.parametrize("module, name", STEPS)
def test_each_function_that_is_named_exists(module: str, name: str) -> None:
    assert reduce(getattr, name.split("."), import_module(f"celery_syncguard.{module}"))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+/[a-z_./]*)`", section("Where to add")))))
def test_each_place_that_is_named_exists(path: str) -> None:
    assert (PACKAGE / path).exists() or (PACKAGE.parent / path).exists()


def test_the_way_of_a_task_has_its_seven_steps() -> None:
    rows = re.findall(r"^\| (\d) \| \*\*(\w+)", section("The way of one task"), flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == [1, 2, 3, 4, 5, 6, 7]


def test_the_index_of_decisions_names_each_once() -> None:
    folder = PACKAGE.parent / "docs" / "adr"
    listed = re.findall(r"\]\((\d{4}-[^)]*)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("0*.md"))
