"""The command line without a server: its words, its exit codes, and what it refuses before it connects."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback

import click
import pytest
from celery import Celery
from click.testing import CliRunner

from celery_syncguard import SyncGuard
from celery_syncguard.cli import commands as cli
from celery_syncguard.cli import console
from celery_syncguard.cli.doctor import examine
from celery_syncguard.core.config import Settings
from celery_syncguard.errors import ImproperlyConfigured
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.connection import describe_dsn

COMMANDS = ["demo", "doctor", "locks", "migrate", "prune", "release", "sql", "status"]


@pytest.fixture(autouse=True)
def no_dsn(monkeypatch):
    monkeypatch.delenv("SYNCGUARD_DSN", raising=False)


def run(*arguments: str):
    return CliRunner().invoke(cli.main, list(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_server_and_says_what_the_command_is_for(command):
    answer = run(command, "--help")
    assert answer.exit_code == 0
    assert len(answer.output.splitlines()) > 5


def test_the_commands_are_listed():
    answer = run("--help")
    assert [name for name in COMMANDS if f"\n  {name} " not in answer.output] == []


def test_the_sql_needs_neither_application_nor_server():
    answer = run("sql")
    assert answer.exit_code == 0
    assert answer.output == migrate.copyable_sql()
    for one in migrate.migrations():
        assert one.text.strip() in answer.output


@pytest.mark.parametrize("arguments", [["--schema", 'We"ird', "sql"], ["sql", "--schema", 'We"ird']])
def test_the_sql_is_for_the_schema_that_was_named(arguments):
    assert run(*arguments).output == migrate.copyable_sql(schema='We"ird')


def test_the_sql_is_for_the_schema_of_the_application_that_was_named(tmp_path, monkeypatch):
    (tmp_path / "proj_of_sql.py").write_text(
        "from celery import Celery\napp = Celery('proj', set_as_current=False)\napp.conf.syncguard_schema = 'theirs'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("--app", "proj_of_sql", "sql").output == migrate.copyable_sql(schema="theirs")
    assert run("--app", "proj_of_sql", "sql", "--schema", "ours").output == migrate.copyable_sql(schema="ours")


@pytest.mark.parametrize("what", ["revisions", "revisions-rename"])
def test_the_sql_of_revisions_is_the_revisions_modules(what):
    from celery_syncguard import revisions

    assert run("sql", what).output == revisions.copy_sql(what)


def test_every_celery_command_loads_the_module_without_a_driver():
    """It is an entry point of the `celery` command, so its import is paid by every worker and beat."""
    script = "import sys, celery_syncguard.cli.commands; print([m for m in ('psycopg', 'celery', 'django') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["locks"], "set syncguard_dsn"),
        (["--dsn", "mysql://u:hunter2@host/db", "status"], "syncguard_dsn is for mysql"),
        (["--dsn", "postgresql+psycopg://u:hunter2@host/db", "status"], "write postgresql://"),
        (["--dsn", "u:hunter2@host/db", "doctor"], "not a PostgreSQL connection string"),
        (["--dsn", "postgresql://u:hunter2@[bad/db", "doctor"], "not a PostgreSQL connection string"),
        (["--dsn", "memory://", "locks"], "lives inside each process"),
        (["--app", "no_such_module", "locks"], "cannot load the application 'no_such_module'"),
        (["--dsn", "postgresql://h/d", "--schema", "", "status"], "syncguard_schema is the name of a schema"),
    ],
)
def test_a_wrong_setting_ends_as_one_line_before_anything_is_connected_to(arguments, said):
    answer = run(*arguments)
    assert answer.exit_code == 1
    (line,) = answer.output.splitlines()
    assert line.startswith("Error: ")
    assert said in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["release", "a"],
        ["prune", "--older-than", "5"],
        ["prune", "--older-than", "5 weeks"],
        ["prune", "--older-than", "-5s"],
        ["locks", "--limit", "0"],
        ["sql", "nonsense"],
        ["no-such-command"],
        ["locks", "--no-such-option"],
    ],
)
def test_wrong_usage_ends_with_2(arguments):
    answer = run("--dsn", "postgresql://127.0.0.1:1/x", *arguments)
    assert answer.exit_code == 2
    assert "Traceback" not in answer.output


def test_a_server_that_is_not_there_ends_as_one_line():
    answer = run("--dsn", "postgresql://u:hunter2@127.0.0.1:1/x", "status")
    assert answer.exit_code == 1
    (line,) = answer.output.splitlines()
    assert line.startswith("Error: x at 127.0.0.1:1: ")
    assert "hunter2" not in line


def test_doctor_reports_a_server_that_is_not_there_as_a_check():
    answer = run("--dsn", "postgresql://u:hunter2@127.0.0.1:1/x", "doctor")
    assert answer.exit_code == 1
    assert "fail  connection" in answer.output
    assert "hunter2" not in answer.output


# Passwords


SECRET = "hunter2"
DSNS = [
    f"postgresql://u:{SECRET}@127.0.0.1:1/x",
    f"host=127.0.0.1 port=1 user=u password={SECRET} dbname=x",
    f"host=127.0.0.1 port=1 user=u password='{SECRET} and more' dbname=x",
    f"u:{SECRET}@127.0.0.1/x",
    f"postgresql://u:{SECRET}@[127.0.0.1/x",
    f"mysql://u:{SECRET}@127.0.0.1/x",
    f"postgresql+psycopg2://u:{SECRET}@127.0.0.1/x",
    f"postgresql://u:{SECRET}@127.0.0.1:port/x",
    f"postgresql://u@127.0.0.1:1/x?password={SECRET}&nonsense=1",
    # An unescaped separator in the password: libpq takes the rest for a host, a port, a database or an option.
    f"postgresql://u:x@{SECRET}@127.0.0.1:1/x",
    f"postgresql://u:x/{SECRET}@127.0.0.1:1/x",
    f"postgresql://u:{SECRET}/x@127.0.0.1:1/x",
    f"postgresql://u:1/{SECRET}@127.0.0.1:1/x",
    f"postgresql://u:1@{SECRET}/x@127.0.0.1:1/x",
    f"postgresql://u:1/x?dbname={SECRET}@127.0.0.1:1/x",
    f"host=127.0.0.1 port={SECRET} user=u dbname=x",
]


@pytest.mark.parametrize("dsn", DSNS)
def test_a_password_is_in_no_message_no_log_and_no_traceback(dsn, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Exception) as caught:  # whatever it is, it is looked at
        with SyncGuard(dsn, timeout=0.2) as guard:
            caplog.clear()
            logging.getLogger("test").info("%r %s %r", guard, guard.settings, guard.store)
            guard.try_acquire("a")
    text = "".join(traceback.format_exception(caught.value))
    # The source lines of this very test name the variable, not its value.
    assert SECRET not in text
    assert SECRET not in caplog.text
    assert SECRET not in describe_dsn(dsn)


@pytest.mark.parametrize("dsn", DSNS[-7:])
def test_a_dsn_whose_parts_are_ambiguous_is_refused_with_the_remedy(dsn):
    with pytest.raises(ImproperlyConfigured, match="%40"):
        SyncGuard(dsn)


def test_a_password_cut_in_two_would_be_shown():
    """The negative control: what libpq makes of an unescaped separator."""
    import psycopg

    parameters = psycopg.conninfo.conninfo_to_dict(f"postgresql://u:x@{SECRET}@127.0.0.1:1/x")
    assert SECRET in parameters["host"]


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p%40s%2Fs@h:5433/d",
        "postgresql://h1:5432,h2:5433/d?target_session_attrs=any",
        "postgresql://[::1]/d",
        "postgresql:///d?host=/var/run/postgresql",
        "postgresql://u:p@/d?host=/cloudsql/project:region:instance",
        "host=@abstract dbname=d",
        "host=fe80::1%eth0 dbname=d",
        "user=u@server password=p@ss/word host=h",
    ],
)
def test_a_dsn_that_can_be_read_in_one_way_only_is_accepted(dsn):
    SyncGuard(dsn).close()
    assert "ambiguous" not in describe_dsn(dsn)


def test_the_password_that_is_looked_for_can_be_found():
    """The negative control: this is what a careless library would show."""
    import psycopg

    with pytest.raises(psycopg.ProgrammingError) as caught:
        psycopg.conninfo.conninfo_to_dict(DSNS[3])
    assert SECRET in str(caught.value)


# One line, whatever is wrong


def test_a_broker_that_nobody_knows_is_a_check_that_fails_and_no_traceback():
    app = Celery("unknown", broker="nosuch://u:s3cr3t@h", set_as_current=False)
    found = {check.name: check for check in examine(Settings(dsn="postgresql://u@127.0.0.1:1/d"), app=app)}
    assert found["broker"].status == "fail"
    assert "no such transport" in found["broker"].message
    assert "s3cr3t" not in str(found)
    assert found["connection"].status == "fail"  # the checks went on


@pytest.mark.parametrize("command", [["locks"], ["prune"], ["status"], ["migrate"]])
def test_without_a_server_a_command_says_one_line(command):
    environment = {**os.environ, "SYNCGUARD_DSN": "postgresql://u@127.0.0.1:1/d?connect_timeout=1"}
    program = [sys.executable, "-c", "from celery_syncguard.cli.commands import main; main()", *command]
    answer = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert "Connection refused" in line


# Settings of an application


def settings_of(app: Celery) -> Settings:
    return console.Target(app=app).settings()


def test_the_settings_of_an_application_are_found_in_every_spelling():
    plain = Celery("plain", set_as_current=False)
    plain.conf.syncguard_dsn = "postgresql://plain/x"
    assert settings_of(plain).dsn == "postgresql://plain/x"

    class Upper:
        SYNCGUARD_DSN = "postgresql://upper/x"

    upper = Celery("upper", set_as_current=False)
    upper.config_from_object(Upper)
    assert settings_of(upper).dsn == "postgresql://upper/x"


def test_a_namespace_is_honoured_as_in_a_django_project():
    class Project:
        CELERY_SYNCGUARD_DSN = "postgresql://namespaced/x"
        CELERY_SYNCGUARD_LOCK_TTL = 12
        SYNCGUARD_SCHEMA = "without"

    app = Celery("namespaced", set_as_current=False)
    app.config_from_object(Project, namespace="CELERY")
    settings = settings_of(app)
    assert (settings.dsn, settings.lock_ttl) == ("postgresql://namespaced/x", 12.0)

    class Misspelt:
        CELERY_SYNCGUARD_LOCK_TTTL = 12

    app = Celery("misspelt", set_as_current=False)
    app.config_from_object(Misspelt, namespace="CELERY")
    with pytest.raises(
        ImproperlyConfigured, match="unknown setting syncguard_lock_tttl; did you mean 'syncguard_lock_ttl'"
    ):
        settings_of(app)


def test_options_win_over_the_application_and_the_application_over_the_environment(monkeypatch):
    monkeypatch.setitem(os.environ, "SYNCGUARD_DSN", "postgresql://environment/x")
    assert console.Target().settings().dsn == "postgresql://environment/x"
    app = Celery("options", set_as_current=False)
    app.conf.syncguard_dsn = "postgresql://application/x"
    app.conf.syncguard_schema = "theirs"
    assert settings_of(app).dsn == "postgresql://application/x"
    chosen = console.Target(app=app, dsn="postgresql://option/x", schema="ours").settings()
    assert (chosen.dsn, chosen.schema) == ("postgresql://option/x", "ours")


# What people read


@pytest.mark.parametrize(
    "seconds, text",
    [(0.04, "0.0 s"), (12.34, "12.3 s"), (59.9, "59.9 s"), (60, "1 min 00 s"), (245, "4 min 05 s"), (11_220, "3 h 07 min"),
     (187_200, "2 d 04 h")],
)  # fmt: skip
def test_a_duration_reads_well(seconds, text):
    assert console.duration(seconds) == text


@pytest.mark.parametrize(
    "text, seconds", [("30s", 30), ("15m", 900), ("1.5h", 5400), ("7d", 604_800), (" 2 d ", 172_800)]
)
def test_a_time_with_its_unit_is_read(text, seconds):
    assert console.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "d", "5w", "-5s", "nan s", "1e3s", "5s5s"])
def test_a_time_without_a_unit_is_refused(text):
    with pytest.raises(click.BadParameter):
        console.seconds_of(text)


def test_a_key_cannot_move_the_cursor_or_break_the_table(capsys):
    console.table(("KEY", "HOLDER"), [("a\n\x1b[2Jb", None), ("ü", "x")])
    assert capsys.readouterr().out.splitlines() == ["KEY          HOLDER", "a\\n\\x1b[2Jb  -", "ü            x"]
