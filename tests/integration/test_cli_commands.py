"""The commands on a real server, as `celery -A proj syncguard` and as `celery-syncguard`."""

from __future__ import annotations

import json
import re
from datetime import datetime

import psycopg
import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_syncguard import SyncGuard
from celery_syncguard.cli import commands as cli
from celery_syncguard.cli.doctor import examine
from celery_syncguard.core import clock
from celery_syncguard.core.config import Settings
from celery_syncguard.errors import LeaseLost
from celery_syncguard.postgres import migrate

NAMES = [one.name for one in migrate.migrations()]


def run(dsn: str, *arguments: str, typed: str | None = None):
    return CliRunner().invoke(cli.main, ["--dsn", dsn, *arguments], input=typed)


def read(dsn: str, *arguments: str):
    """A command's JSON."""
    answer = run(dsn, *arguments, "--json")
    return json.loads(answer.output)


def test_migrate_applies_once_and_says_so(empty_dsn):
    first = run(empty_dsn, "migrate")
    assert (first.exit_code, first.output.split()) == (0, [word for name in NAMES for word in ("applied", name)])
    second = run(empty_dsn, "migrate")
    assert second.exit_code == 0
    assert second.output.endswith("is up to date\n")


def test_migrate_honours_the_schema_and_creates_it(empty_dsn):
    assert run(empty_dsn, "--schema", "Our schema", "migrate").exit_code == 0
    assert read(empty_dsn, "--schema", "Our schema", "status")["schema"] == "Our schema"


def test_migrate_as_the_workers_role_says_which_role_can(pg_server, empty_dsn):
    role = f"plain_{empty_dsn[-8:]}"
    pg_server.execute(f"create role {role} login")
    try:
        answer = run(psycopg.conninfo.make_conninfo(empty_dsn, user=role), "migrate")
        assert answer.exit_code == 1
        (line,) = answer.output.splitlines()
        assert "permission denied" in line
        assert "not as the workers' role" in line
    finally:
        pg_server.execute(f"drop role {role}")


def test_status_tells_server_schema_timeline_and_counts(pg_dsn):
    with SyncGuard(pg_dsn) as guard, guard.hold("a"), guard.hold("b"):
        guard.store.claim("c", task_id="t", ttl=60)
        facts = read(pg_dsn, "status")
    assert facts["counts"] == {"locks": 2, "claims": 1, "completions": 0, "counters": 2}
    assert (facts["schema"], facts["applied"], facts["pending"], facts["problems"]) == ("public", NAMES, [], [])
    assert facts["ready"] is True
    assert facts["in_recovery"] is False
    assert facts["timeline"] >= 1
    assert re.fullmatch(r"test_\w+ at 127\.0\.0\.1:\d+", facts["where"])
    text = run(pg_dsn, "status").output
    assert f"{len(NAMES)} applied, 0 pending" in text


def test_status_of_an_empty_database_says_what_is_pending(empty_dsn):
    facts = read(empty_dsn, "status")
    assert (facts["ready"], facts["pending"], facts["counts"]) == (False, NAMES, None)
    assert f"pending: {NAMES[0]}" in run(empty_dsn, "status").output


def test_locks_shows_who_holds_what_and_until_when(pg_dsn):
    assert run(pg_dsn, "locks").output == "no locks are held\n"
    assert read(pg_dsn, "locks") == []
    with SyncGuard(pg_dsn) as guard, guard.hold("first", ttl=30, holder="me") as lease, guard.hold("second", ttl=30):
        rows = read(pg_dsn, "locks")
        assert [row["key"] for row in rows] == ["first", "second"]
        row = rows[0]
        assert (row["lock_id"], row["fence"], row["holder"], row["task_id"]) == (
            lease.lock_id,
            int(lease.fence),
            "me",
            None,
        )
        assert 0 <= row["age"] < 30
        assert 0 < row["remaining"] <= 30
        lasts = datetime.fromisoformat(row["expires_at"]) - datetime.fromisoformat(row["acquired_at"])
        assert lasts.total_seconds() == pytest.approx(row["age"] + row["remaining"], abs=0.01)
        heading, line, _ = run(pg_dsn, "locks").output.splitlines()
        assert heading.split() == ["KEY", "HOLDER", "TASK", "AGE", "REMAINING", "FENCE", "LOCK_ID"]
        assert line.split()[0] == "first"
        assert line.endswith(f"{int(lease.fence)}  {lease.lock_id}")
        assert [row["key"] for row in read(pg_dsn, "locks", "--limit", "1")] == ["first"]
        assert [row["key"] for row in read(pg_dsn, "locks", "second")] == ["second"]
        assert run(pg_dsn, "locks", "third").output == "third is free\n"


def test_release_asks_and_releases_only_the_lease_that_was_named(pg_dsn):
    with SyncGuard(pg_dsn) as guard:
        lease = guard.try_acquire("a", holder="me")
        other = run(pg_dsn, "release", "a", "--lock-id", "x" * 22, "--yes")
        assert (other.exit_code, "held by another lease" in other.output) == (1, True)
        declined = run(pg_dsn, "release", "a", "--lock-id", lease.lock_id, typed="n\n")
        assert declined.exit_code == 1
        assert "a has been held by me for" in declined.output
        assert guard.inspect("a") is not None
        agreed = run(pg_dsn, "release", "a", "--lock-id", lease.lock_id, typed="y\n")
        assert agreed.exit_code == 0
        assert agreed.output.endswith("released a\n")
        assert guard.inspect("a") is None
        assert lease.renew() is False
        again = run(pg_dsn, "release", "a", "--lock-id", lease.lock_id, "--yes")
        assert (again.exit_code, again.output) == (1, "Error: nothing to release: a is free\n")


def test_step_down_asks_and_ends_the_term_that_was_shown(pg_dsn):
    with SyncGuard(pg_dsn) as guard, guard.leadership("beat", ttl=60, holder="beat 1") as leadership:
        lease = leadership.elect(timeout=10)
        declined = run(pg_dsn, "step-down", typed="n\n")
        assert declined.exit_code == 1
        assert f"beat 1 leads beat, term {int(lease.fence)}, for" in declined.output
        assert leadership.leading
        agreed = run(pg_dsn, "step-down", typed="y\n")
        assert agreed.output.endswith(f"ended term {int(lease.fence)} of beat 1\n")
        with pytest.raises(LeaseLost):
            lease.renew() or lease.check()
        assert leadership.elect(timeout=10).fence > lease.fence
        assert run(pg_dsn, "step-down", "--yes").exit_code == 0


def test_release_with_yes_does_not_ask(pg_dsn):
    with SyncGuard(pg_dsn) as guard:
        lease = guard.try_acquire("a")
        answer = run(pg_dsn, "release", "a", "--yes", "--lock-id", lease.lock_id)
        assert (answer.exit_code, answer.output) == (0, "released a\n")


def test_prune_deletes_what_is_over_and_nothing_else_however_much_there_is(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(
            "insert into syncguard_completions (run_key, completed_at_ms, expires_at_ms)"
            " select 'r' || n, 0, syncguard_clock_ms() - n * 3600000::bigint from generate_series(1, 25000) n"
        )
    with SyncGuard(pg_dsn) as guard, guard.hold("live"):
        total = read(pg_dsn, "prune", "--older-than", "10h")
        assert total == {"locks": 0, "completions": 24991, "claims": 0, "deaths": 0, "counters": 0}
        assert read(pg_dsn, "prune", "--older-than", "10h")["completions"] == 0
        assert read(pg_dsn, "prune", "--older-than", "0s", "--counters")["completions"] == 9
        assert guard.inspect("live") is not None
    assert run(pg_dsn, "prune").output.startswith("deleted 0 locks, 0 completions")


@pytest.mark.parametrize("command", [["locks"], ["prune"], ["release", "a", "--lock-id", "b"]])
def test_a_command_without_our_schema_names_the_command_that_helps(empty_dsn, command):
    answer = run(empty_dsn, *command)
    assert answer.exit_code == 1
    (line,) = answer.output.splitlines()
    assert "celery syncguard migrate" in line


# Doctor


def checks_of(dsn: str, **settings):
    return {one.name: one for one in examine(Settings(dsn=dsn, **settings))}


def test_doctor_finds_a_good_set_up_good(pg_dsn):
    answer = run(pg_dsn, "doctor")
    assert answer.exit_code == 0
    assert {line.split()[0] for line in answer.output.splitlines()} == {"ok"}
    facts = read(pg_dsn, "doctor")
    assert facts["ok"] is True
    assert [one["name"] for one in facts["checks"]] == [
        "settings", "connection", "server", "schema", "permissions", "pooler", "clock", "isolation", "durability",
        "notifications", "fences",
    ]  # fmt: skip


def test_doctor_ends_with_1_if_something_fails_and_with_0_if_it_only_warns(empty_dsn, pg_dsn):
    answer = run(empty_dsn, "doctor")
    assert answer.exit_code == 1
    assert "-> celery syncguard migrate" in answer.output
    assert read(empty_dsn, "doctor")["ok"] is False
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(f"alter database {conn.info.dbname} set default_transaction_isolation = 'serializable'")
    warned = run(pg_dsn, "doctor")
    assert (warned.exit_code, "warn  isolation" in warned.output) == (0, True)


@pytest.mark.parametrize("setting, check", [("synchronous_commit = off", "durability"),
                                            ("default_transaction_isolation = 'repeatable read'", "isolation")])  # fmt: skip
def test_doctor_warns_of_a_setting_that_weakens_a_promise(pg_dsn, setting, check):
    assert checks_of(pg_dsn)[check].status == "ok"
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(f"alter database {conn.info.dbname} set {setting}")
    found = checks_of(pg_dsn)[check]
    assert found.status == "warn"
    assert found.fix.startswith("ALTER ROLE")


PROJECT = """
from celery import Celery
from celery_syncguard import LockedTask
app = Celery("proj", broker={broker!r}, set_as_current=False)
app.conf.update(syncguard_dsn={dsn!r}, broker_transport_options={options!r})
@app.task(base=LockedTask, shared=False, name="work", **{task!r})
def work(n): pass
"""


@pytest.mark.parametrize("url, options, task, expected", [
    ("amqp://nobody@127.0.0.1:1//", {"confirm_publish": False}, {"dedup_key": "{n}"}, "warn"),
    ("amqp://nobody@127.0.0.1:1//", {}, {"dedup_key": "{n}"}, "ok"),
    ("amqp://nobody@127.0.0.1:1//", {"confirm_publish": True}, {"dedup_key": "{n}"}, "ok"),
    ("redis://127.0.0.1:1/0", {"confirm_publish": False}, {"dedup_key": "{n}"}, "ok"),
    ("amqp://nobody@127.0.0.1:1//", {"confirm_publish": False}, {"lock_key": "{n}"}, None),
], ids=["off", "default", "on", "redis", "locks only"])  # fmt: skip
def test_doctor_warns_of_claims_for_messages_that_nobody_answers_for(
    pg_dsn, tmp_path, monkeypatch, url, options, task, expected
):
    name = f"proj_of_doctor_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROJECT.format(dsn=pg_dsn, broker=url, options=options, task=task))
    monkeypatch.syspath_prepend(tmp_path)
    answer = CliRunner().invoke(cli.main, ["-A", name, "doctor", "--json"])
    assert answer.exit_code == 0, answer.output
    found = {one["name"]: one for one in json.loads(answer.output)["checks"]}
    assert found.get("broker", {"status": None})["status"] == expected
    if expected == "warn":
        assert "such as work" in found["broker"]["message"]
        assert "confirm_publish" in found["broker"]["fix"]


def test_doctor_says_if_the_tasks_cannot_be_imported(pg_dsn):
    app = Celery("proj", set_as_current=False, include=["no_such_module"])
    found = {one.name: one for one in examine(Settings(dsn=pg_dsn), app=app)}
    assert found["broker"].status == "warn"
    assert "no_such_module" in found["broker"].message


def test_doctor_knows_a_pooler_in_transaction_mode_from_a_direct_connection(pg_dsn, pgbouncer_dsn):
    assert checks_of(pg_dsn)["pooler"].status == "ok"
    behind = checks_of(pgbouncer_dsn)
    assert behind["pooler"].status == "warn"
    assert "LISTEN does not work" in behind["pooler"].message
    assert {one.status for name, one in behind.items() if name != "pooler"} == {"ok"}


def test_doctor_measures_the_offset_of_this_hosts_clock(pg_dsn, monkeypatch):
    assert checks_of(pg_dsn)["clock"].status == "ok"
    real = clock.wall_ms
    for skew, word in ((-7_000, "behind"), (7_000, "ahead")):
        monkeypatch.setattr(clock, "wall_ms", lambda skew=skew: real() + skew)
        found = checks_of(pg_dsn)["clock"]
        assert found.status == "warn"
        assert re.search(rf"clock is [67]\.\d+ s {word}", found.message)


def test_doctor_sets_settings_against_each_other(pg_dsn):
    assert checks_of(pg_dsn, lock_ttl=30)["settings"].status == "ok"
    found = checks_of(pg_dsn, lock_ttl=3)["settings"]
    assert found.status == "warn"
    assert "syncguard_lock_ttl 3 s" in found.message


# As a sub-command of Celery's


@pytest.fixture
def in_celery(monkeypatch):
    """The `celery` command with ours in it, as the entry point puts it there."""
    monkeypatch.setitem(celery.commands, "syncguard", cli.syncguard)
    return celery


def test_the_commands_take_the_database_of_the_celery_application(in_celery, pg_dsn):
    app = Celery("proj", set_as_current=False)
    app.conf.syncguard_dsn = pg_dsn
    with SyncGuard(pg_dsn) as guard, guard.hold("a"):
        answer = CliRunner().invoke(in_celery, ["syncguard", "locks", "--json"], default_map={"app": app})
    assert answer.exit_code == 0, answer.output
    assert [row["key"] for row in json.loads(answer.output)] == ["a"]


def test_the_application_is_found_by_its_name(in_celery, pg_dsn, tmp_path, monkeypatch):
    (tmp_path / "proj_of_cli.py").write_text(
        f"from celery import Celery\napp = Celery('proj')\napp.conf.syncguard_dsn = {pg_dsn!r}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    inside = CliRunner().invoke(in_celery, ["-A", "proj_of_cli", "syncguard", "status", "--json"])
    beside = CliRunner().invoke(cli.main, ["-A", "proj_of_cli", "status", "--json"])
    assert inside.exit_code == beside.exit_code == 0, inside.output + beside.output
    assert json.loads(inside.output) == json.loads(beside.output)
    other = CliRunner().invoke(
        in_celery, ["-A", "proj_of_cli", "syncguard", "--dsn", "postgresql://127.0.0.1:1/x", "status"]
    )
    assert (other.exit_code, "x at 127.0.0.1:1" in other.output) == (1, True)


def test_an_option_that_an_application_adds_to_every_command_does_no_harm(in_celery, pg_dsn, tmp_path, monkeypatch):
    (tmp_path / "proj_of_preload.py").write_text(
        "from celery import Celery\nfrom click import Option\napp = Celery('proj')\n"
        f"app.conf.syncguard_dsn = {pg_dsn!r}\n"
        "app.user_options['preload'].add(Option(('--theirs',), default='x'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    params, callbacks = {}, {}
    for name, command in in_celery.commands.items():
        params[name], callbacks[name] = list(command.params), command.callback
    try:
        answer = CliRunner().invoke(in_celery, ["-A", "proj_of_preload", "syncguard", "status", "--json"])
        assert answer.exit_code == 0, answer.output
    finally:
        for name, command in in_celery.commands.items():
            command.params, command.callback = params[name], callbacks[name]
