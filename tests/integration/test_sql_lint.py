"""Rules for SQL that no test of behaviour would catch in time, over every statement that we ship."""

import ast
import re
from pathlib import Path

import pytest

from celery_syncguard.postgres import migrate

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(migrate.folder().rglob("*.sql"))
MODULES = sorted((ROOT / "celery_syncguard").rglob("*.py"))

TOKEN = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
STALE = re.compile(
    r"\bnow\s*\(|\b(?:current_timestamp|current_time|localtimestamp|localtime|statement_timestamp|transaction_timestamp)\b",
    re.IGNORECASE,
)
PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[sbt]")
STATEMENT = re.compile(
    r"\b(?:select|insert\s+into|update|delete\s+from|create|alter|set\s+local|with)\b", re.IGNORECASE
)
FUNCTION = re.compile(
    r"^create (?:or replace )?function (\w+)((?:(?!^create).)*?)\bas \$\$(.*?)\$\$", re.MULTILINE | re.DOTALL
)

#: They wait in the caller's transaction, under the caller's lock_timeout; or they wait for nobody (SKIP LOCKED).
UNBOUNDED = {"syncguard_fenced", "syncguard_complete", "syncguard_prune"}


def without_comments(text: str) -> str:
    return TOKEN.sub(lambda found: found[0] if found[0].startswith("'") else " ", text)


def without_literals(text: str) -> str:
    return TOKEN.sub(lambda found: "''" if found[0].startswith("'") else " ", text)


def stale_clocks(text: str) -> list[str]:
    return STALE.findall(without_literals(text))


def quoted_placeholders(text: str) -> list[str]:
    literals = [found[0] for found in TOKEN.finditer(text) if found[0].startswith("'")]
    return [literal for literal in literals if PLACEHOLDER.search(literal)]


def capitals(text: str) -> list[str]:
    """Lines of code that are not in lower case; comments, literals and quoted names may be."""
    code = re.sub(r'"[^"]*"', '""', without_literals(text))
    return [line for line in code.splitlines() if line != line.lower()]


def functions(text: str) -> list[tuple[str, str, str]]:
    """(name, declaration, body) of each function."""
    return [(name, declaration, without_comments(body)) for name, declaration, body in FUNCTION.findall(text)]


def without_search_path(text: str) -> list[str]:
    """Functions that would look for what they name, ours or PostgreSQL's, wherever the caller's search path leads."""
    return [name for name, declaration, _ in functions(text) if "set search_path " not in declaration]


def without_bound(text: str) -> list[str]:
    """Functions that may wait for a row for ever."""
    return [
        name
        for name, declaration, body in functions(text)
        if re.search(r"\b(?:insert into|update|delete from)\b", without_literals(body))
        and "set lock_timeout" not in declaration
        and name not in UNBOUNDED
    ]


def sql_in(source: str) -> list[str]:
    """The SQL among the strings of a module; an f-string's gaps become placeholders."""
    tree = ast.parse(source)
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if id(node) in prose | parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(one.value if isinstance(one, ast.Constant) else "gap" for one in node.values))
    # A statement begins with its verb, in capitals or small letters, after comments.
    return [text for text in found if STATEMENT.match(without_comments(text).strip())]


def test_there_is_something_to_look_at():
    assert any(file.name == "0001_create_locks.sql" for file in FILES)
    assert sum(len(functions(file.read_text())) for file in FILES) >= 20
    statements = [text for module in MODULES for text in sql_in(module.read_text())]
    assert any("syncguard_acquire" in text for text in statements)
    assert len(statements) >= 10


# What lies in copy/ becomes the application's, which may stamp its rows with the time of the transaction.
@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name != "copy"], ids=lambda file: file.name)
def test_a_file_reads_no_clock_that_goes_stale_while_it_waits(file):
    assert stale_clocks(file.read_text()) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_a_module_reads_no_clock_that_goes_stale_while_it_waits(module):
    assert [text for text in sql_in(module.read_text()) if stale_clocks(text)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_written_in_lower_case(file):
    assert capitals(file.read_text()) == []


def test_a_planted_capital_is_found():
    text = "select 1; -- SELECT 2\nselect 'SELECT', \"Weird\"; /* OR */\n"
    assert capitals(text) == []
    assert capitals(text + "DELETE from t") == ["DELETE from t"]


@pytest.mark.parametrize("file", [*FILES, *MODULES], ids=lambda file: file.stem)
def test_no_placeholder_stands_inside_a_quoted_literal(file):
    texts = [file.read_text()] if file.suffix == ".sql" else sql_in(file.read_text())
    assert [literal for text in texts for literal in quoted_placeholders(text)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_function_finds_our_tables_whatever_the_callers_search_path_is(file):
    assert without_search_path(file.read_text()) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_function_waits_for_a_row_no_longer_than_its_bound(file):
    assert without_bound(file.read_text()) == []


@pytest.mark.parametrize("migration", migrate.migrations(), ids=lambda one: one.name)
def test_a_migration_can_run_inside_one_transaction(migration):
    text = without_literals(migration.text)
    outside = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(?:begin|commit|rollback|concurrently|vacuum)\b", outside, re.IGNORECASE)
    assert re.fullmatch(r"\d{4}(?:_[a-z]+)+", migration.name)


# Negative controls: the same rules find what was planted.


@pytest.mark.parametrize(
    "clock",
    ["now()", "NOW ( )", "pg_catalog.now()", "current_timestamp", "CURRENT_TIMESTAMP(3)", "statement_timestamp()",
     "transaction_timestamp()", "localtimestamp"],
)  # fmt: skip
def test_a_planted_stale_clock_is_found(clock):
    assert stale_clocks(f"UPDATE t SET expires_at = {clock} + ttl -- why not\nWHERE x = 'y'")
    assert sql_in(f"def f(conn):\n    conn.execute('''UPDATE t SET a = {clock}''')") != []


def test_a_clock_in_a_comment_or_a_text_is_no_finding():
    assert not stale_clocks("-- never now()\nSELECT clock_timestamp(), 'now() is stale' /* current_timestamp */")


@pytest.mark.parametrize("literal", ["'%(ttl)s seconds'", "'%s seconds'", "'every %(unit)s'", "'it''s %s'"])
def test_a_planted_placeholder_in_a_literal_is_found(literal):
    assert quoted_placeholders(f"SELECT clock_timestamp() + interval {literal}")
    assert not quoted_placeholders("SELECT %s, %(a)s, 'a' || %s, 'fence % is out of range' -- '%s'")


def test_a_planted_function_without_a_search_path_or_a_bound_is_found():
    text = (migrate.folder() / "0001_create_locks.sql").read_text()
    assert without_search_path(text.replace("set search_path from current", "", 1)) == ["syncguard_fence_text"]
    assert without_bound(text.replace("set lock_timeout = '2s'", "", 1)) == ["syncguard_acquire"]
