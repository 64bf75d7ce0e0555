"""The way to a server that hangs, to one of several, and what is left behind on it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from celery_syncguard import SyncGuard, errors
from celery_syncguard.core import clock
from celery_syncguard.postgres import connection, hosts, psycopg_internals
from celery_syncguard.postgres.connection import Connection, connection_parameters
from celery_syncguard.postgres.hosts import Hosts
from tests.fixtures.polling import poll

#: libpq has had a request to cancel that is bounded in time since 17; psycopg's present wheels have it.
can_cancel = pytest.mark.skipif(not psycopg.capabilities.has_cancel_safe(), reason="libpq before 17")

OURS = "select count(*) from pg_stat_activity where application_name = 'celery-syncguard'"


# A server that does not end what it was asked


@pytest.fixture
def waiting_for_a_standby(private_pg: Any, private_dsn: str) -> Callable[[], None]:
    """From the call on, every commit waits for a standby that does not exist."""

    def begin() -> None:
        private_pg.reload(synchronous_standby_names="nobody")
        poll(lambda: private_pg.execute("show synchronous_standby_names") == [("nobody",)])

    return begin


def attempts(guard: SyncGuard, count: int) -> None:
    for number in range(count):
        with pytest.raises(errors.StoreUnavailable, match="did not answer"):
            guard.try_acquire(f"k:{number}", ttl=3)


def backends(server: Any) -> int:
    return int(server.execute(OURS)[0][0])


@can_cancel
def test_statements_that_are_given_up_are_cancelled_and_leave_no_backend(
    private_pg: Any, private_dsn: str, waiting_for_a_standby: Callable[[], None]
) -> None:
    with SyncGuard(private_dsn, timeout=0.1) as guard:
        waiting_for_a_standby()
        attempts(guard, 2)
        with pytest.raises(errors.StoreUnavailable, match=r"did not answer within 2.1 s: .*synchronous replication"):
            guard.try_acquire("k:2", ttl=3)
        assert backends(private_pg) <= 2
        private_pg.reload(synchronous_standby_names="")
        # What the server kept of them is released in the background.
        poll(lambda: guard.locks() == [])
        assert guard.try_acquire("k:0") is not None


@can_cancel
def test_a_request_to_cancel_has_a_bound(pg_dsn: str, pg_proxy: Any) -> None:
    with Connection.connect(pg_proxy.dsn(pg_dsn), autocommit=True) as conn:
        conn.pgconn.send_query(b"select pg_sleep(60)")
        conn.pgconn.flush()
        pg_proxy.stall()
        assert not connection.cancelled(conn.pgconn, timeout=0.3)
        pg_proxy.resume()
        assert connection.cancelled(conn.pgconn, timeout=10)
        assert connection.ended(conn.pgconn, timeout=10)


@pytest.mark.parametrize("fast", [True, False])
def test_a_statement_has_a_bound_under_every_psycopg(
    fast: bool, pg_dsn: str, pg_proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 3.3 psycopg's fast wait, which takes no timeout then, does not ask again."""
    real = psycopg.Connection.wait
    if not fast:
        monkeypatch.setattr(psycopg.Connection, "wait", lambda conn, gen, interval=0.1: real(conn, gen, interval))
    psycopg_internals._asks_again.cache_clear()
    try:
        with Connection.connect(pg_proxy.dsn(pg_dsn), autocommit=True) as conn:
            conn.patience = 0.3
            assert conn.execute("select 1").fetchone() == (1,)
            assert conn.call(b"select 1", ()) == 1
            pg_proxy.stall()
            with pytest.raises(psycopg.OperationalError, match="did not answer within"):
                conn.execute("select 2")
    finally:
        psycopg_internals._asks_again.cache_clear()


def test_without_a_cancel_they_fill_the_server(
    private_pg: Any, private_dsn: str, waiting_for_a_standby: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: closed by the client alone."""
    monkeypatch.setattr(Connection, "abandon", lambda conn: conn.pgconn.finish())
    with SyncGuard(private_dsn, timeout=0.5) as guard:
        waiting_for_a_standby()
        attempts(guard, 3)
        assert backends(private_pg) >= 3


def test_what_the_server_does_not_cancel_is_counted_and_bounded(
    private_pg: Any, private_dsn: str, waiting_for_a_standby: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a pooler that does not pass on requests to cancel."""
    for module in (connection, hosts):
        monkeypatch.setattr(module, "cancelled", lambda pgconn, timeout: False)
    with SyncGuard(private_dsn, timeout=0.1) as guard:
        waiting_for_a_standby()
        answers: list[tuple[str, float]] = []
        while len(answers) < hosts.LEFT_OVER + 6:
            before = clock.now()
            with pytest.raises(errors.StoreUnavailable) as caught:
                guard.try_acquire(f"another {len(answers)}")
            answers.append((str(caught.value), clock.now() - before))
        # One may still have found a connection that the pool had opened before.
        assert all("did not answer" in said for said, _ in answers[: hosts.LEFT_OVER])
        assert all("of this process were given up" in said and took < 1 for said, took in answers[-5:])
        assert backends(private_pg) <= hosts.LEFT_OVER + 2
        private_pg.reload(synchronous_standby_names="")

        def granted() -> bool:
            try:
                return guard.try_acquire("another") is not None
            except errors.StoreUnavailable:
                return False

        poll(granted)
        assert guard.store._hosts.left_over == 0  # type: ignore[attr-defined]


@can_cancel
def test_a_statement_that_an_exception_cut_off_is_cancelled_too(private_pg: Any, private_dsn: str) -> None:
    class SoftLimit(Exception):
        pass

    with SyncGuard(private_dsn) as guard:
        store: Any = guard.store
        with pytest.raises(SoftLimit), store.connection() as conn:
            conn.pgconn.send_query(b"select pg_sleep(60)")
            raise SoftLimit
        poll(lambda: private_pg.execute(OURS + " and query like '%pg_sleep(60)%' and state = 'active'") == [(0,)])
        with pytest.raises(SoftLimit), store._connections.reserved.use() as conn:
            conn.pgconn.send_query(b"select pg_sleep(60)")
            raise SoftLimit
        poll(lambda: private_pg.execute(OURS + " and query like '%pg_sleep(60)%' and state = 'active'") == [(0,)])


# Several servers, the first of which hangs


@pytest.fixture
def hanging() -> Iterator[int]:
    """The port of a host that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield listener.getsockname()[1]


def behind(port: int, dsn: str) -> str:
    """The same database, as the second of two hosts."""
    facts = psycopg.conninfo.conninfo_to_dict(dsn)
    return (
        f"postgresql://{facts['user']}@127.0.0.1:{port},{facts['host']}:{facts['port']}/{facts['dbname']}"
        f"?target_session_attrs=read-write"
    )


def test_the_second_host_is_reached_within_the_timeout_of_the_first_and_then_at_once(hanging: int, pg_dsn: str) -> None:
    with SyncGuard(behind(hanging, pg_dsn), timeout=1) as guard:
        started = clock.now()
        lease = guard.try_acquire("k", ttl=60)
        assert lease is not None, "the first call already"
        assert 1.5 < clock.now() - started < 4
        started = clock.now()
        with guard.store.connection():  # type: ignore[attr-defined] - so that a renewal needs a connection of its own
            assert lease.renew()
        assert clock.now() - started < 1.5


def test_without_a_memory_each_connection_costs_the_timeout_again(hanging: int, pg_dsn: str) -> None:
    """The negative control: in the order of the list each time, as libpq does."""
    parameters = connection_parameters(behind(hanging, pg_dsn), timeout=1)
    started = clock.now()
    Connection.connect(**parameters).close()
    assert clock.now() - started > 1.5


def test_a_name_with_an_address_that_hangs_is_reached_by_its_next_one(
    pg_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a name whose IPv6 is dropped."""
    port = int(psycopg.conninfo.conninfo_to_dict(pg_dsn)["port"])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with socket.create_server(("127.0.0.2", port)):
        with SyncGuard(pg_dsn.replace("127.0.0.1", "db.test"), timeout=2) as guard:
            started = clock.now()
            assert guard.try_acquire("k") is not None
            assert clock.now() - started > 1.5
            guard.store._connections.close()  # type: ignore[attr-defined]
            started = clock.now()
            guard.store._hosts.connect().close()  # type: ignore[attr-defined]
            assert clock.now() - started < 1


def test_a_server_that_is_not_what_the_dsn_asks_for_is_passed_over(
    pg_dsn: str, private_pg: Any, private_dsn: str
) -> None:
    """As an old primary that came back as a standby."""
    database = pg_dsn.rpartition("/")[2]
    private_pg.execute(f"create database {database}")
    dsn = behind(private_pg.port, pg_dsn)
    found = Hosts(connection_parameters(dsn, timeout=5))
    ports = []
    for read_only in ("off", "on", "off"):
        private_pg.reload(default_transaction_read_only=read_only)
        poll(lambda read_only=read_only: private_pg.execute("show default_transaction_read_only") == [(read_only,)])
        with found.connect() as conn:
            ports.append(conn.info.port)
    other = int(psycopg.conninfo.conninfo_to_dict(pg_dsn)["port"])
    assert ports == [private_pg.port, other, other], "the last one that answered comes first"


def test_a_server_that_takes_no_writes_is_not_stayed_with(
    pg_dsn: str, pg_proxy: Any, private_pg: Any, private_dsn: str
) -> None:
    """As a standby in a dsn that does not ask for the primary, while that restarted."""
    facts = psycopg.conninfo.conninfo_to_dict(pg_dsn)
    private_pg.execute(f"create database {facts['dbname']} template syncguard")
    private_pg.reload(default_transaction_read_only="on")
    poll(lambda: private_pg.execute("show default_transaction_read_only") == [("on",)])
    dsn = pg_proxy.dsn(pg_dsn).replace(f":{pg_proxy.port}/", f":{pg_proxy.port},127.0.0.1:{private_pg.port}/")
    with SyncGuard(dsn) as guard:
        pg_proxy.refuse()
        with pytest.raises(errors.StoreUnavailable, match="read-only"):
            guard.try_acquire("k")
        pg_proxy.accept()

        def granted() -> bool:
            # A connection to the other one may have been made before the first accepted again.
            try:
                return guard.try_acquire("k") is not None
            except errors.StoreUnavailable:
                return False

        assert poll(granted)


def test_the_error_names_each_host_and_what_it_said_and_how_long_it_took(hanging: int, pg_dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    dsn = f"postgresql://postgres@127.0.0.1:{nobody},127.0.0.1:{hanging}/postgres"
    with SyncGuard(dsn, timeout=0.5) as guard:
        started = clock.now()
        with pytest.raises(errors.StoreUnavailable) as caught:
            guard.try_acquire("k")
        took = clock.now() - started
    said = str(caught.value)
    assert f"port {nobody} failed: Connection refused" in said
    assert f"127.0.0.1:{hanging}" in said
    assert "in use" not in said
    waited = float(said.partition("no connection to PostgreSQL in ")[2].partition(" s")[0])
    assert abs(waited - took) < 1


def test_only_connections_that_are_in_use_are_said_to_be(pg_dsn: str) -> None:
    with SyncGuard(pg_dsn, timeout=0.3) as guard, guard.store.connection():  # type: ignore[attr-defined]
        with pytest.raises(errors.StoreUnavailable, match="all 1 connections of this process are in use"):
            guard.inspect("k")


# Platforms


def test_idle_connections_are_looked_at_without_poll_too(pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows; there renewals would never happen."""
    monkeypatch.delattr("select.poll")
    with SyncGuard(pg_dsn) as guard:
        lease = guard.try_acquire("k", ttl=60)
        assert lease is not None
        assert lease.renew()
        with guard.store.connection() as conn:  # type: ignore[attr-defined]
            assert conn.usable
            pid = conn.info.backend_pid
        with psycopg.connect(pg_dsn, autocommit=True) as session:
            session.execute("select pg_terminate_backend(%s)", (pid,))
        poll(lambda: not conn.usable)
        assert lease.renew()


# Once


def test_an_outage_is_told_once_by_the_listener_and_so_is_its_end(
    pg_dsn: str, pg_proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [one.message for one in caplog.records if "listen" in one.message and one.levelname == "INFO"]

    def wait() -> None:
        with pytest.raises((errors.LockHeld, errors.StoreUnavailable)), away.hold("k", wait=60):
            raise AssertionError("it is held")

    caplog.set_level("INFO", logger="celery_syncguard")
    with SyncGuard(pg_dsn) as guard, SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.3) as away, guard.hold("k"):
        listener = away.store._listener  # type: ignore[attr-defined]
        waiter = threading.Thread(target=lambda: listener.wait("k", 20, lambda: True))
        waiter.start()
        assert listener._listening.wait(10)
        pg_proxy.refuse()
        refused = pg_proxy.refused
        poll(lambda: pg_proxy.refused > refused + 3)
        assert len(lines()) == 1
        assert "cannot listen" in lines()[0]
        with pytest.raises(errors.StoreUnavailable):
            away.locks()
        assert [one for one in caplog.records if one.name == "psycopg.pool"] == []
        pg_proxy.accept()
        poll(lambda: listener._listening.is_set())
        poll(lambda: len(lines()) == 2)
        assert "again" in lines()[1]
        for heard in listener._waiters["k"]:
            heard.set()
        waiter.join(20)


def test_a_lease_outlives_a_host_that_begins_to_hang(pg_dsn: str, pg_proxy: Any) -> None:
    """As at a failover, where the old primary stands still. The control knows that host alone."""
    port = int(psycopg.conninfo.conninfo_to_dict(pg_dsn)["port"])
    first = pg_proxy.dsn(pg_dsn)
    both = first.replace(f":{pg_proxy.port}/", f":{pg_proxy.port},127.0.0.1:{port}/")
    with SyncGuard(both, timeout=0.5) as guard, SyncGuard(first, timeout=0.5) as control:
        lease, alone = guard.try_acquire("k", ttl=12), control.try_acquire("control", ttl=12)
        assert lease is not None
        assert alone is not None
        pg_proxy.stall()
        deadline = lease.deadline
        poll(lambda: alone.lost, timeout=30)
        assert lease.deadline > deadline + 3
        lease.check()
        pg_proxy.resume()
