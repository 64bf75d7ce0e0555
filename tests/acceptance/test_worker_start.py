"""A worker checks settings, server and schema before it takes its first task: it starts, or says in one line what to do.

The check comes before the first connection to the broker, so the broker makes no difference to what it finds. That is shown
by two cases, one without and one with a database behind it, and by the control, which run on both; the others take one.
"""

import re
import socket

import psycopg
import pytest
from psycopg import sql

from celery_syncguard.postgres import migrate
from tests.fixtures.cluster import ROOT
from tests.fixtures.servers import free_port

MODULE = "tests.acceptance.apps.working"
ONE_BROKER = pytest.mark.parametrize("broker", ["redis"], indirect=True)

EX_CONFIG = 78


@pytest.fixture
def pg_dsn(empty_dsn):
    """Without our schema: a test gives it as much of that as it wants."""
    return empty_dsn


def start_and_fail(setup):
    """What the worker says in the one line that it ends with."""
    # The environment of whoever runs the tests may name a database.
    worker = setup.start_worker(environment={"SYNCGUARD_DSN": ""}, wait=False)
    status = worker.wait_exit(timeout=20)
    logs = worker.logs()
    assert status == EX_CONFIG, logs
    assert "Traceback" not in logs
    assert worker.ready.replace("\\", "") not in logs
    lines = logs.splitlines()
    (line,) = [line for line in lines if line.startswith("celery-syncguard: ")]
    assert line == lines[-1], logs
    # Nobody else says anything about it, neither the pool nor Celery: the rest is what Celery has to say to root.
    assert not re.search(r"connect|psycopg|syncguard", "\n".join(lines[:-1]).replace(str(ROOT), "")), logs
    return line.removeprefix("celery-syncguard: ")


def test_without_a_dsn_the_line_says_where_to_put_one(celery_setup, broker):
    setup = celery_setup(MODULE, dsn=None, history_dsn="none")
    assert "set syncguard_dsn in the Celery configuration, or SYNCGUARD_DSN in the environment" in start_and_fail(setup)


def test_without_our_schema_the_line_names_the_command_that_makes_it(celery_setup, broker, pg_dsn):
    line = start_and_fail(celery_setup(MODULE))
    assert pg_dsn.rpartition("/")[2] in line
    assert "has no syncguard tables: run `celery syncguard migrate`" in line


@ONE_BROKER
def test_with_an_older_schema_the_line_names_what_is_missing_and_the_command(celery_setup, broker, pg_dsn, monkeypatch):
    ours = migrate.migrations()
    with monkeypatch.context() as older:
        older.setattr(migrate, "migrations", lambda: ours[:2])
        assert migrate.migrate(pg_dsn) == [one.name for one in ours[:2]]
    line = start_and_fail(celery_setup(MODULE))
    assert f"is behind by {', '.join(one.name for one in ours[2:])}: run `celery syncguard migrate`" in line


@ONE_BROKER
@pytest.mark.parametrize("manner", ["refuses", "is silent", "does not know the database"])
def test_a_server_that_cannot_be_asked_is_named_with_the_setting_that_leads_to_it(celery_setup, broker, pg_dsn, manner):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn, reason = {
            "refuses": (f"postgresql://somebody:s3cret@127.0.0.1:{free_port()}/locks", "refused"),
            # Connections are taken up by the kernel, and nobody says a word on them.
            "is silent": (
                f"postgresql://somebody:s3cret@127.0.0.1:{silent.getsockname()[1]}/locks",
                "not answer|timeout",
            ),
            "does not know the database": (pg_dsn.rpartition("/")[0] + "/nowhere", "does not exist"),
        }[manner]
        line = start_and_fail(celery_setup(MODULE, dsn=dsn, conf={"syncguard_timeout": 1}))
    address = re.search(r"127\.0\.0\.1:\d+", dsn)[0]
    assert re.search(reason, line), line
    assert "check that the server runs, and that syncguard_dsn leads to it" in line
    assert address in line
    assert "s3cret" not in line


@ONE_BROKER
def test_a_dsn_of_another_kind_of_database_is_refused_with_the_form_of_ours(celery_setup, broker, pg_dsn):
    line = start_and_fail(celery_setup(MODULE, dsn="mysql://somebody:s3cret@localhost/locks"))
    assert "syncguard_dsn is for mysql" in line
    assert "use postgresql://" in line
    assert "s3cret" not in line


@ONE_BROKER
def test_an_unknown_setting_is_refused_with_the_name_that_was_meant(celery_setup, broker, pg_dsn):
    migrate.migrate(pg_dsn)
    line = start_and_fail(celery_setup(MODULE, conf={"syncguard_lock_tll": 30}))
    assert line == "unknown setting syncguard_lock_tll; did you mean 'syncguard_lock_ttl'?"


@ONE_BROKER
def test_a_database_that_may_not_be_written_to_is_refused(celery_setup, broker, pg_dsn):
    migrate.migrate(pg_dsn)
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        name = sql.Identifier(pg_dsn.rpartition("/")[2])
        connection.execute(sql.SQL("alter database {} set default_transaction_read_only = on").format(name))
    line = start_and_fail(celery_setup(MODULE))
    assert line.startswith("default_transaction_read_only is on")


def test_with_everything_in_its_place_the_same_worker_starts_and_works(celery_setup, broker, pg_dsn, history):
    """The control of every test here."""
    migrate.migrate(pg_dsn)
    setup = celery_setup(MODULE)
    worker = setup.start_worker(environment={"SYNCGUARD_DSN": ""})
    assert setup.module.work.delay("a").get(timeout=30) == "a"
    assert "celery-syncguard:" not in worker.logs()
