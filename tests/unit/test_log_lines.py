"""docs/operations.md explains every line that the library logs: who reads one at three in the morning finds it there."""

import ast
import re
from pathlib import Path

import celery_syncguard

PACKAGE = Path(celery_syncguard.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "operations.md"
METHODS = {"info", "warning", "error", "exception", "critical"}
#: Lines that are the text of an error, or one of several reasons, from their first word on.
WITHOUT_WORDS = {"%s": "is a duplicate"}


def templates():
    """Every format string that is logged, with where."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func
            logs = (
                isinstance(called, ast.Attribute)
                and called.attr in METHODS
                and isinstance(called.value, ast.Name)
                and called.value.id == "logger"
            ) or (isinstance(called, ast.Name) and called.id == "level")
            if logs:
                first = node.args[0]
                assert isinstance(first, ast.Constant), (
                    f"{path.name}:{node.lineno}: a format string that nobody can look up"
                )
                yield f"{path.name}:{node.lineno}", first.value


def words_of(template):
    """The longest piece between two placeholders."""
    return max(re.split(r"%[-.0-9]*[a-z]", template), key=len).strip(" :;,'")


def unexplained(document):
    return [
        (where, template)
        for where, template in templates()
        if WITHOUT_WORDS.get(template, words_of(template)) not in document
    ]


def test_every_log_line_is_explained():
    assert unexplained(DOCUMENT.read_text()) == []


def test_a_line_that_is_not_explained_is_found():
    document = DOCUMENT.read_text()
    assert len(list(templates())) > 50
    assert unexplained(document.replace("not run, comes back in", "")) != []
