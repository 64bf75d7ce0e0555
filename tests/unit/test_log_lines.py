"""docs/operations.md explains every line that the library logs, with its level, and explains no line that does not exist.

Who reads a line at three in the morning finds it there.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import celery_syncguard

PACKAGE = Path(celery_syncguard.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "operations.md"
LEVELS = {"info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR", "critical": "CRITICAL"}
PLACEHOLDER = re.compile(r"%[-.0-9]*[a-z]")


@dataclass(frozen=True)
class Logged:
    """One call of the logger."""

    where: str
    text: str
    levels: frozenset[str]
    #: Whether it has a traceback: always, never, or (None) sometimes.
    traceback: bool | None
    event: str | None

    @property
    def pattern(self):
        return pattern_of(PLACEHOLDER.split(self.text), open_end=bool(re.search(r": %[a-z]$", self.text)))


@dataclass(frozen=True)
class Explained:
    """One line that the document explains: an instance of what is logged, with `…` for what varies."""

    text: str
    level: str
    traceback: bool


def pattern_of(pieces, *, open_end=False):
    """What is between the pieces is anything. The reason at the end may be left out."""
    if open_end:
        pieces = [*pieces[:-2], pieces[-2].removesuffix(": ")]
    return re.compile(".+".join(map(re.escape, pieces)) + ("(: .+)?" if open_end else ""))


def calls(tree):
    """Every call of `logger`, also through a variable that is one of its methods: name of the call, and the methods."""
    chosen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            methods = {
                one.attr
                for one in ast.walk(node.value)
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "logger"
            }
            if methods and not isinstance(node.value, ast.Call):
                chosen[node.targets[0].id] = methods
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = node.func
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "logger":
                yield node, {called.attr}
            elif isinstance(called, ast.Name) and called.id in chosen:
                yield node, chosen[called.id]


@functools.cache
def logged():
    """Every line above DEBUG that the package logs."""
    lines = []
    for path, tree in trees().items():
        for node, methods in calls(tree):
            levels = frozenset(LEVELS[method] for method in methods if method in LEVELS)
            if not levels:
                continue
            where = f"{path.name}:{node.lineno}"
            text = node.args[0]
            assert isinstance(text, ast.Constant), f"{where}: a format string that cannot be looked up"
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            sometimes = isinstance(options.get("exc_info"), ast.IfExp)
            traceback = None if sometimes else "exc_info" in options or "exception" in methods
            event = ast.literal_eval(fields["event"]) if "event" in (fields := fields_of(options)) else None
            lines.append(Logged(where, text.value, levels, traceback, event))
    return lines


def fields_of(options):
    extra = options.get("extra")
    return {key.value: value for key, value in zip(extra.keys, extra.values, strict=True)} if extra else {}


@functools.cache
def other_texts():
    """The texts of the package, for lines that are the text of an error: in pieces, and how much of it is words."""
    texts = []
    for tree in trees().values():
        for node in ast.walk(tree):
            pieces = [""]
            if isinstance(node, ast.JoinedStr):
                pieces = "".join(
                    str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values
                ).split("\0")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces = PLACEHOLDER.split(node.value)
            if (length := sum(map(len, pieces))) > 20:
                texts.append((pieces, length))
    return texts


@functools.cache
def trees():
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def explained(document):
    """Every line in a table of lines, and those that other rows mention with their level."""
    in_table = False
    for row in document.splitlines():
        in_table = row.startswith("|") and (in_table or row.startswith("| line | level |"))
        if not in_table or row.startswith("|---"):
            continue
        first, level, meaning = row.strip("| ").split(" | ", 2)
        if level in LEVELS.values():
            for text in re.findall(r"`([^`]+)`", first):
                yield Explained(text, level, "traceback" in first)
        for text, other in re.findall(r"`([^`]+)` \(([A-Z]+)\)", meaning):
            yield Explained(text, other, traceback=False)


def fit(pieces, text):
    return all(piece in text for piece in pieces) and pattern_of(pieces).fullmatch(text)


def words(line):
    return len(PLACEHOLDER.sub("", line.text))


def differences(document):
    """What one side has and the other has not."""
    lines = logged()
    texts = other_texts()
    found = {line: set() for line in lines}
    for row in explained(document):
        # "%s fails: %s" fits many rows: the line with the most words is meant, or one that is the text of an error.
        fitting = [line for line in lines if words(line) and line.pattern.fullmatch(row.text)]
        most = max(map(words, fitting), default=0)
        owners = [line for line in fitting if words(line) == most]
        if any(length > most and fit(pieces, row.text) for pieces, length in texts):
            owners += [line for line in lines if not words(line)]
        if not owners:
            yield f"explained and never logged: {row.text}"
        elif not any(row.level in line.levels for line in owners):
            yield f"explained as {row.level}, logged otherwise: {row.text}"
        elif not any(line.traceback in (None, row.traceback) for line in owners):
            yield f"with a traceback in one place and without in the other: {row.text}"
        for line in owners:
            found[line].add(row.level)
    for line in lines:
        if not found[line] & line.levels:
            yield f"logged and not explained: {line.where}: {line.text}"
        if line.event is not None and f"`{line.event}`" not in document:
            yield f"an event that is not explained: {line.where}: {line.event}"


def test_what_is_logged_and_what_is_explained_are_the_same():
    assert list(differences(DOCUMENT.read_text())) == []
    assert len(logged()) > 50


def test_a_line_that_only_one_of_the_two_has_or_has_otherwise_is_found():
    document = DOCUMENT.read_text()

    def after(old, new):
        assert old in document
        return [difference.partition(":")[0] for difference in differences(document.replace(old, new, 1))]

    row = "| `could not release 'k', trying again in the background` | WARNING |"
    assert after("trying again in the background` | WARNING |", "it will be fine` | WARNING |") != []
    assert after(row, row.replace("WARNING", "INFO")) == [
        "explained as INFO, logged otherwise",
        "logged and not explained",
    ]
    assert after(row, row.replace("` |", "` (with a traceback) |")) == [
        "with a traceback in one place and without in the other"
    ]
    assert after(row, f"| `the moon is full` | INFO | wait |\n{row}") == ["explained and never logged"]
