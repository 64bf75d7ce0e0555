"""The fixtures keep their word: otherwise no test that builds on them means anything."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import psycopg
import pytest

from tests.fixtures.cluster import ROOT
from tests.fixtures.history import Event, overlaps
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.gated"


@pytest.fixture
def pg_dsn(empty_dsn):
    """These tests need a database, not our schema."""
    return empty_dsn


@pytest.mark.both_brokers
@pytest.mark.smoke
def test_a_real_worker_runs_what_the_test_publishes_and_leaves_no_process(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    worker = setup.start_worker()
    result = setup.module.body.delay("a", "go")
    history.wait_for("start", key="a")
    children = worker.children()
    assert len(children) >= 2
    setup.open_gate("go")
    assert result.get(timeout=30) == "a"
    assert history.overlaps() == []
    assert worker.stop() == 0
    poll(lambda: not any(psutil.pid_exists(pid) for pid in children))


def test_unlocked_bodies_of_one_key_overlap_and_the_history_shows_it(celery_setup, broker, pg_dsn, history):
    """The negative control of every test that finds no overlap."""
    setup = celery_setup(MODULE)
    setup.start_worker()
    for _ in range(2):
        setup.module.body.delay("a", "go")
    history.wait_for("start", count=2)
    setup.open_gate("go")
    history.wait_for("end", count=2)
    assert len(history.overlaps()) == 1


@pytest.mark.both_brokers
def test_a_killed_worker_takes_its_children_along_and_the_message_comes_back(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE, conf={"broker_transport_options": {"visibility_timeout": 1}})
    worker = setup.start_worker(concurrency=1)
    setup.module.body.delay("a", "go")
    (first,) = history.wait_for("start")
    assert first.pid in worker.children()
    worker.kill()
    assert worker.returncode == -signal.SIGKILL
    poll(lambda: not psutil.pid_exists(first.pid))
    setup.open_gate("go")
    setup.start_worker(concurrency=1)
    history.wait_for("end", task_id=first.task_id, timeout=60)


def test_an_end_is_only_matched_by_the_body_that_it_ends():
    def row(number, event, pid, note=None):
        return Event(number, None, event, "a", f"task{pid}", 0, None, pid, note)

    assert overlaps([row(1, "start", 1), row(2, "end", 1), row(3, "start", 2)]) == []
    assert len(overlaps([row(1, "start", 1), row(2, "end", 2), row(3, "start", 2)])) == 1
    assert overlaps([row(1, "start", 1), row(2, "killed", 9, note="1"), row(3, "start", 2)]) == []


def test_each_database_is_empty_and_has_a_name_of_its_own(empty_dsn, pg_server):
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("select count(*) from pg_tables where schemaname = 'public'").fetchone() == (0,)


def test_a_private_server_restarts_and_keeps_its_data(private_pg):
    private_pg.execute("create table kept (id int)")
    for mode in ("fast", "immediate"):
        private_pg.restart(mode=mode)
        assert private_pg.execute("select count(*) from kept") == [(0,)]
    private_pg.kill()
    private_pg.start()
    assert private_pg.execute("select count(*) from kept") == [(0,)]
    assert "database system was not properly shut down" in private_pg.log_text()


def test_terminated_backends_are_gone(pg_server, empty_dsn):
    connection = psycopg.connect(empty_dsn, autocommit=True)
    assert pg_server.terminate_backends(empty_dsn.rpartition("/")[2]) == 1
    with pytest.raises(psycopg.OperationalError):
        connection.execute("select 1")


def test_the_proxy_cuts_stalls_refuses_and_swallows(pg_proxy, empty_dsn):
    dsn = pg_proxy.dsn(empty_dsn)

    def connect():
        return psycopg.connect(dsn, autocommit=True, connect_timeout=2)

    connection = connect()
    connection.execute("create table written (id int)")
    assert pg_proxy.cut() == 1
    with pytest.raises(psycopg.OperationalError):
        connection.execute("select 1")

    pg_proxy.refuse()
    with pytest.raises(psycopg.OperationalError):
        connect()
    pg_proxy.accept()
    connection = connect()

    pg_proxy.stall()
    with pytest.raises(psycopg.OperationalError):
        connect()
    pg_proxy.resume()
    assert connection.execute("select 1").fetchone() == (1,)

    swallowed = pg_proxy.swallow_next_reply(after=b"insert into written")
    connection.execute("select 1")
    assert not swallowed.is_set()
    with pytest.raises(psycopg.OperationalError):
        connection.execute("insert into written values (1)")
    assert swallowed.is_set()
    with connect() as second:
        # The server did what it was asked; only the answer was lost.
        assert second.execute("select count(*) from written").fetchone() == (1,)


def test_tls_to_postgresql_is_real(tls_proxy, empty_dsn):
    dsn = tls_proxy.dsn(empty_dsn) + "?sslmode=require"
    with psycopg.connect(dsn) as connection:
        assert connection.pgconn.ssl_in_use
        assert connection.execute("select repeat('x', 200000)").fetchone() == ("x" * 200000,)


def test_pgbouncer_pools_transactions(pgbouncer, empty_dsn):
    dsn = pgbouncer.dsn(empty_dsn.rpartition("/")[2])
    connections = [psycopg.connect(dsn, autocommit=True) for _ in range(6)]
    backends = {connection.execute("select pg_backend_pid()").fetchone() for connection in connections}
    for connection in connections:
        connection.close()
    assert len(backends) <= 2


def test_every_way_of_an_application_to_postgresql_leads_through_the_pooler_when_one_is_asked_for(
    app_dsn, empty_app_dsn, private_app_dsn, app_proxy, app_tls_proxy
):
    """The pooler alone has a console. Without a pooler there is no database of that name."""
    ways = [app_dsn, empty_app_dsn, private_app_dsn, app_proxy.dsn(app_dsn), app_tls_proxy.dsn(app_dsn)]
    pooled = os.environ.get("SYNCGUARD_TEST_PGBOUNCER", "") not in ("", "0")
    for way in ways:
        console = way.rpartition("/")[0] + "/pgbouncer"
        if pooled:
            with psycopg.connect(console, autocommit=True) as connection:
                assert "PgBouncer" in connection.execute("show version").fetchone()[0]
        else:
            with pytest.raises(psycopg.OperationalError, match="does not exist"):
                psycopg.connect(console)


def test_a_private_broker_keeps_durable_messages_over_a_restart(private_broker, celery_setup, pg_dsn, history):
    setup = celery_setup(MODULE, broker=private_broker)
    setup.module.body.delay("a")
    private_broker.server.restart()
    setup.start_worker()
    history.wait_for("end")


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    """A killed test run leaves no server behind."""
    script = (
        "import os, pathlib, sys, time\n"
        "from tests.fixtures.servers import ValkeyServer\n"
        "server = ValkeyServer()\n"
        "server.start()\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{server.process.pid} {server.folder}')\n"
        "time.sleep(60)\n"
    )
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", script, str(pid_file)], cwd=ROOT)
    try:
        pid, folder = poll(lambda: pid_file.exists() and pid_file.read_text().split(), timeout=30)
        assert psutil.pid_exists(int(pid))
    finally:
        parent.kill()
        parent.wait(10)
    poll(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    shutil.rmtree(folder)
