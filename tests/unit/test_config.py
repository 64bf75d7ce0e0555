"""Settings: every value and each against the others, before any I/O."""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from celery_syncguard import SyncGuard, errors
from celery_syncguard.core.config import Settings


def test_names_are_those_of_celery_in_any_case_and_other_settings_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCGUARD_DSN", raising=False)
    settings = Settings.from_mapping(
        {"SYNCGUARD_DSN": "postgresql://u@h/d", "syncguard_lock_ttl": timedelta(minutes=1), "broker_url": "x", 7: 8}
    )
    assert (settings.dsn, settings.lock_ttl) == ("postgresql://u@h/d", 60.0)


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(errors.ImproperlyConfigured, match=r"syncguard_lock_tll.*did you mean 'syncguard_lock_ttl'"):
        Settings.from_mapping({"syncguard_lock_tll": 30})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dsn", 7),
        ("dsn", "mysql://u@h/d"),
        ("dsn", "postgresql+psycopg://u@h/d"),
        ("dsn", "sqlite:///x"),
        ("schema", ""),
        ("schema", "a\0b"),
        ("schema", 7),
        ("pool_size", 1),
        ("pool_size", 1001),
        ("pool_size", True),
        ("pool_size", "2"),
        ("timeout", 0),
        ("timeout", math.nan),
        ("lock_ttl", 0),
        ("lock_ttl", math.inf),
        ("lock_ttl", 10**400),
        ("leader_ttl", 1),
        ("leader_key", ""),
        ("leader_key", "a\0"),
        ("catch_up", "some"),
        ("hlc", "yes"),
        ("beat_scheduler", 7),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_meant_is_refused_naming_the_setting(name: str, value: Any) -> None:
    with pytest.raises(errors.ImproperlyConfigured, match=f"syncguard_{name}"):
        Settings.from_mapping({f"syncguard_{name}": value})


@pytest.mark.parametrize(
    "dsn",
    [
        "mysql://user:s3cret@host/db",
        "postgresql+psycopg://u:s3cret@h/d",
        "postgresql://u:s3cret@[::1/d?x",
        "u:s3cret@h/d",
    ],
)
def test_no_message_repeats_a_password(dsn: str) -> None:
    with pytest.raises(errors.SyncGuardError) as caught:
        SyncGuard(dsn)
    assert "s3cret" not in str(caught.value)


def test_without_a_dsn_the_message_names_the_setting_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCGUARD_DSN", raising=False)
    with pytest.raises(errors.ImproperlyConfigured, match=r"syncguard_dsn.*SYNCGUARD_DSN"):
        SyncGuard()


def test_the_environment_names_the_dsn_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCGUARD_DSN", "memory://")
    assert Settings.from_mapping({}).in_memory
    assert not Settings.from_mapping({"syncguard_dsn": "postgresql://u@h/d"}).in_memory


@pytest.mark.parametrize(
    "dsn", ["host=127.0.0.1 dbname=x", "postgresql://u@h/d", "postgres://u@h/d", "host=h password=a://b"]
)
def test_both_forms_of_a_libpq_connection_string_are_accepted(dsn: str) -> None:
    SyncGuard(dsn).close()


def test_the_readme_s_table_has_each_setting_and_its_default() -> None:
    page = Path(__file__).parents[2].joinpath("README.md").read_text()
    table = page.split("### Settings")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`syncguard_.+?) \| (.*?) ?\|", table, flags=re.MULTILINE)
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert [name for names, _ in rows for name in re.findall(r"`syncguard_(\w+)`", names)] == list(fields)
    written = {names.strip("`").removeprefix("syncguard_"): text.strip("`") for names, text in rows}
    for name in ("pool_size", "timeout", "lock_ttl", "hlc"):
        assert written[name] == format(fields[name], "" if isinstance(fields[name], bool) else "g"), name
