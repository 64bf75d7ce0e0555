"""PostgreSQL in trouble while tasks run: nothing runs twice, nothing runs unlocked, nothing is lost."""

import contextlib
import threading
import time

import psycopg
import pytest

from celery_syncguard import StoreUnavailable, SyncGuard
from celery_syncguard.postgres.migrate import migrate
from tests.fixtures.history import History
from tests.fixtures.polling import poll
from tests.fixtures.servers import PostgresServer

APP = "tests.acceptance.apps.holding"


@pytest.fixture
def record(pg_dsn):
    """The history, on the server that stays well: it must not share the trouble."""
    with History(pg_dsn) as one:
        one.create()
        yield one


@pytest.fixture
def guard(private_dsn):
    with SyncGuard(private_dsn, timeout=1) as one:
        yield one


@pytest.fixture
def start(celery_setup, broker, private_app_dsn, pg_dsn):
    def start(pool="prefork", concurrency=2, **conf):
        conf = {"syncguard_timeout": 1.0, **conf}
        setup = celery_setup(APP, dsn=private_app_dsn, history_dsn=pg_dsn, conf=conf)
        return setup, setup.start_worker(pool=pool, concurrency=concurrency)

    return start


def test_backends_terminated_every_second_lose_no_lease(start, broker, record, private_pg, guard):
    setup, _ = start(concurrency=3)
    results = [setup.module.quick.apply_async((f"k{number % 4}",), {"seconds": 1.0}) for number in range(12)]
    ended = threading.Event()

    def terminate():
        while not ended.wait(1):
            private_pg.terminate_backends("syncguard")

    terminator = threading.Thread(target=terminate)
    terminator.start()
    try:
        fences = [result.get(timeout=90) for result in results]
    finally:
        ended.set()
        terminator.join()
    for key in range(4):
        assert len(set(fences[key::4])) == 3
    assert record.overlaps() == []
    assert record.count("end") == 12
    poll(lambda: not guard.locks())
    # The faults did hit.
    assert "terminating connection due to administrator command" in private_pg.log_text()


def test_a_restart_during_a_run_is_survived(start, record, private_pg, guard):
    """Rows outlive the server's restart, unlike session locks."""
    setup, _ = start()
    result = setup.module.quick.apply_async(("a",), {"seconds": 6.0}, lock_ttl=6)
    record.wait_for("start", key="a")
    before = guard.inspect("a")
    private_pg.restart(mode="immediate")
    poll(lambda: guard.inspect("a").since > before.since)
    assert guard.inspect("a").lock_id == before.lock_id
    assert result.get(timeout=30) == before.fence
    poll(lambda: not guard.locks())


@pytest.mark.slow
def test_an_outage_longer_than_the_ttl_tells_the_holder_before_anybody_else_runs(start, record, private_pg, guard):
    """Ten seconds without a server; the work that waits comes back by itself."""
    setup, worker = start()
    holder = setup.module.hold.delay("a", "go")
    record.wait_for("start", key="a")
    other = setup.module.hold.delay("b", "go")
    record.wait_for("start", key="b")
    private_pg.stop(mode="immediate")
    down_at = time.monotonic()
    waiting = setup.module.hold.apply_async(("a", "open"))
    setup.open_gate("open")
    record.wait_for("lost", key="a")
    record.wait_for("lost", key="b")
    worker.wait_for_log("will come back")
    poll(lambda: time.monotonic() - down_at >= 10, timeout=12)
    assert record.count("start", key="a") == 1, "ran without a lock"
    private_pg.start()
    assert waiting.get(timeout=60) == "a"
    for result in (holder, other):
        with pytest.raises(Exception, match="is lost"):
            result.get(timeout=10)
    events = [event.event for event in record.events(key="a")]
    assert events[:2] == ["start", "lost"], "the holder was not told first"
    assert events[-2:] == ["start", "end"]
    assert "written" not in events
    poll(lambda: not guard.locks())


def test_a_task_says_what_an_unreachable_server_means_for_it(start, record, private_pg):
    """lock_on_unavailable: fails, runs unlocked, or comes back."""
    setup, worker = start()
    private_pg.stop()
    retried = setup.module.retry_unavailable.delay("r")
    with pytest.raises(StoreUnavailable):
        setup.module.raise_unavailable.delay("a").get(timeout=30)
    assert record.count("start") == 0
    assert setup.module.run_unavailable.delay("b").get(timeout=30) == "ran"
    worker.wait_for_log(r"run_unavailable\[.*runs without its lock")
    worker.wait_for_log(r"retry_unavailable\[.*not run, will come back")
    assert not retried.ready()
    private_pg.start()
    assert retried.get(timeout=60) == "ran"


def test_work_waits_out_a_read_only_server(start, record, private_pg):
    setup, worker = start()
    assert setup.module.retry_unavailable.delay("a").get(timeout=30) == "ran"
    private_pg.reload(default_transaction_read_only="on")
    poll(lambda: private_pg.execute("show default_transaction_read_only") == [("on",)])
    private_pg.terminate_backends("syncguard")
    result = setup.module.retry_unavailable.delay("a")
    worker.wait_for_log("will come back.*read-only")
    with psycopg.connect(private_pg.dsn(), autocommit=True) as conn:
        conn.execute("set default_transaction_read_only = off")
        conn.execute("alter system reset default_transaction_read_only")
        conn.execute("select pg_reload_conf()")
    poll(lambda: private_pg.execute("show default_transaction_read_only") == [("off",)])
    private_pg.terminate_backends("syncguard")
    assert result.get(timeout=60) == "ran"


@pytest.mark.direct  # behind a pooler the slots are the pooler's, and it keeps those that it has
def test_work_waits_out_a_server_without_a_free_slot(celery_setup, broker, pg_dsn, record):
    with PostgresServer(settings={"max_connections": 12}) as server:
        server.execute("create database syncguard")
        migrate(server.dsn("syncguard"))
        # A superuser has slots of his own, so the worker's role must not be one.
        server.execute("create role plain login")
        server.execute("grant all on all tables in schema public to plain", database="syncguard")
        dsn = server.dsn("syncguard", user="plain")
        setup = celery_setup(APP, dsn=dsn, conf={"syncguard_timeout": 1.0})
        worker = setup.start_worker()
        assert setup.module.retry_unavailable.delay("a").get(timeout=30) == "ran"
        with contextlib.ExitStack() as slots:
            server.terminate_backends("syncguard")
            poll(lambda: fill(server, dsn, slots))
            result = setup.module.retry_unavailable.delay("a")
            worker.wait_for_log("will come back.*(too many clients|remaining connection slots)")
            assert not result.ready()
        assert result.get(timeout=60) == "ran"


def fill(server, dsn, slots):
    """Take a free slot, or end a worker's; true when none is left and all are ours."""
    try:
        slots.enter_context(psycopg.connect(dsn, application_name="slot"))
    except psycopg.OperationalError:
        others = server.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'celery-syncguard%'"
        )
        return not others
    return False


def test_a_holder_cut_off_without_a_word_blocks_for_its_ttl_only(
    celery_setup, broker, pg_dsn, app_dsn, app_proxy, history
):
    """Packets vanish, the connection stays open on both ends, and no FIN is ever seen."""
    setup = celery_setup(APP, dsn=app_proxy.dsn(app_dsn), conf={"syncguard_timeout": 1.0})
    setup.start_worker()
    setup.module.hold.delay("a", "go")
    (held,) = history.wait_for("start", key="a")
    app_proxy.stall()
    stalled_at = time.monotonic()
    with SyncGuard(pg_dsn) as guard:
        # The holder's own deadline comes first: it is told before anybody can take over.
        successor = poll(lambda: guard.try_acquire("a"), timeout=20)
        assert time.monotonic() - stalled_at < 2 + 5
        assert successor.fence > held.fence
        history.record("start", key="a", note="successor")
        assert [event.event for event in history.events(key="a")][:2] == ["start", "lost"]
        successor.release()
    app_proxy.resume()
    assert setup.module.quick.delay("a").get(timeout=60) > successor.fence


def test_a_client_that_vanishes_while_its_acquire_runs_blocks_for_its_ttl_and_never_runs_on_that_grant(
    celery_setup, broker, pg_dsn, app_dsn, app_proxy, history
):
    """While a statement is still running: the server grants what nobody hears of in time."""
    setup = celery_setup(APP, dsn=app_proxy.dsn(app_dsn), conf={"syncguard_timeout": 1.0})
    setup.start_worker(concurrency=1)
    fence = setup.module.quick.delay("a").get(timeout=30)
    with psycopg.connect(pg_dsn) as blocker, SyncGuard(pg_dsn) as guard:
        blocker.execute("select pg_advisory_xact_lock(hashtext('a'))")
        result = setup.module.quick.apply_async(("a",), {"seconds": 0.01}, lock_ttl=4)

        def it_waits_in_the_server():
            waiting = (
                "select count(*) from pg_locks join pg_database d on d.oid = database"
                " where locktype = 'advisory' and not granted and datname = current_database()"
            )
            return blocker.execute(waiting).fetchone()[0] == 1

        poll(it_waits_in_the_server, timeout=30)
        app_proxy.stall()
        stalled_at = time.monotonic()
        blocker.commit()
        granted = poll(lambda: guard.inspect("a"))
        assert granted.task_id == result.id
        assert granted.fence > fence
        successor = poll(lambda: guard.try_acquire("a"), timeout=20)
        assert time.monotonic() - stalled_at < 4 + 5
        app_proxy.resume()
        # It is told of the grant now, when that is over, or has given up before; it does not run on it.
        setup.worker.wait_for_log("comes? back")
        assert history.count("start") == 0
        assert successor.release()
    assert result.get(timeout=60) > successor.fence
    assert [row.fence > successor.fence for row in history.events("start")] == [True]


@pytest.mark.usefixtures("redelivered")
def test_everyday_answers_leave_no_error_in_the_servers_log(start, record, private_pg, guard):
    """Duplicates, held locks, copies, skips and waits are answers, and no statement of ours fails for them."""
    setup, worker = start(concurrency=4)
    module = setup.module
    first = module.deduplicated.delay("d", "go")
    record.wait_for("start", key="d")
    assert module.deduplicated.delay("d", "go").duplicate
    module.deduplicated.apply_async(("d", "go"), task_id=first.id, dedup_key=None)
    held = module.hold.delay("a", "go")
    record.wait_for("start", key="a")
    assert module.skipping.delay("a").get(timeout=30).key == "a"
    with pytest.raises(Exception, match="is held by"):
        module.raising.delay("a").get(timeout=30)
    retried = module.quick.delay("a")
    waiting = module.quick.apply_async(("a",), lock_wait=20)
    worker.wait_for_log("quick.*not run, comes back")
    assert guard.release("nobody", lock_id="x" * 22) is False
    setup.open_gate("go")
    assert held.get(timeout=30) == "a"
    assert first.get(timeout=30) == "d"
    assert retried.get(timeout=60) != waiting.get(timeout=60)
    assert module.deduplicated.delay("d", "go").get(timeout=30) == "d"
    assert record.count("start", key="d") == 1
    bad = [line for line in private_pg.log_text().splitlines() if " ERROR:" in line or " FATAL:" in line]
    # Those before the database or its tables were there are the test's own.
    assert [line for line in bad if " syncguard " in line] == []
