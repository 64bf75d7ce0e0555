"""Faults of the way to the server and of the server: what is known is said, and nothing runs unlocked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_syncguard import Lease, SyncGuard, errors
from celery_syncguard.core import clock
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire, Grant, Held, Release, Renewal
from celery_syncguard.postgres.migrate import migrate
from celery_syncguard.postgres.store import PostgresStore
from tests.fixtures.polling import poll
from tests.fixtures.proxy import Proxy


@pytest.fixture
def store(pg_dsn: str, pg_proxy: Proxy) -> Iterator[PostgresStore]:
    """Through the proxy."""
    store = PostgresStore(pg_proxy.dsn(pg_dsn), timeout=5)
    yield store
    store.close()


def ask(store: PostgresStore, key: str = "k", **extras: Any) -> Any:
    return store.acquire(Acquire(key=key, lock_id=new_lock_id(), ttl=60.0, **extras))


# An answer that got lost


def test_an_acquire_whose_answer_was_lost_is_granted_once(
    store: PostgresStore, pg_proxy: Proxy, guard: SyncGuard
) -> None:
    swallowed = pg_proxy.swallow_next_reply(after=b"syncguard_acquire")
    granted = ask(store)
    assert swallowed.is_set()
    assert isinstance(granted, Grant)
    row = guard.inspect("k")
    assert row is not None
    assert (row.lock_id, row.fence, row.acquired_at) == (granted.lock_id, granted.fence, granted.acquired_at)


def test_a_new_lock_id_for_the_repeat_would_block_itself(
    store: PostgresStore, pg_proxy: Proxy, guard: SyncGuard
) -> None:
    """The negative control: what an acquire without the same lock_id comes to."""
    ids = iter([new_lock_id(), new_lock_id()])
    swallowed = pg_proxy.swallow_next_reply(after=b"syncguard_acquire")

    def forgetful(conn: Any) -> str:
        return str(conn.execute("select outcome from syncguard_acquire('k', %s, 60000)", (next(ids),)).fetchone()[0])

    assert store.run(forgetful) == "held"
    assert swallowed.is_set()


def test_a_release_and_a_renewal_whose_answers_were_lost_take_effect(
    store: PostgresStore, pg_proxy: Proxy, guard: SyncGuard
) -> None:
    granted = ask(store)
    swallowed = pg_proxy.swallow_next_reply(after=b"syncguard_renew")
    with pytest.raises(errors.StoreUnavailable):
        store.renew([Renewal(key="k", lock_id=granted.lock_id, ttl=900.0)])
    assert swallowed.is_set()
    row = guard.inspect("k")
    assert row is not None
    assert row.remaining > 800
    swallowed = pg_proxy.swallow_next_reply(after=b"syncguard_release")
    assert store.release(Release(key="k", lock_id=granted.lock_id)) is False  # the repeat finds nothing to do
    assert swallowed.is_set()
    assert guard.inspect("k") is None


def test_a_death_is_counted_once_although_the_answer_was_lost(store: PostgresStore, pg_proxy: Proxy) -> None:
    assert isinstance(ask(store, task_id="t", process="p:1"), Grant)
    swallowed = pg_proxy.swallow_next_reply(after=b"syncguard_release_process")
    store.release_process("p:1")
    assert swallowed.is_set()
    assert isinstance(ask(store, task_id="t", max_deaths=2), Grant)


@pytest.mark.parametrize("statement", range(1, 7))
def test_whichever_statement_loses_its_connection_the_locks_stay_right(
    statement: int, store: PostgresStore, pg_proxy: Proxy, guard: SyncGuard
) -> None:
    """The Nth statement fails, after the server did it; afterwards the invariants hold."""
    calls = 0
    run = store.run

    def counting(work: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == statement:
            pg_proxy.swallow_next_reply()
        return run(work)

    store.run = counting  # type: ignore[method-assign]
    fences = []
    for _ in range(2):
        first = ask(store)
        assert isinstance(first, Grant)
        fences.append(first.fence)
        held = ask(store)
        assert isinstance(held, Held)
        assert held.lock_id == first.lock_id
        store.release(Release(key="k", lock_id=first.lock_id))
    assert calls >= 6
    assert fences == sorted(set(fences))
    assert guard.inspect("k") is None


# A server that is away


def test_connections_that_were_cut_are_replaced_without_anybody_noticing(store: PostgresStore, pg_proxy: Proxy) -> None:
    for number in range(5):
        assert isinstance(ask(store, f"k:{number}"), Grant)
        assert pg_proxy.cut() >= 1


def test_nothing_is_granted_while_the_server_is_away_and_the_error_comes_in_time(
    pg_dsn: str, pg_proxy: Proxy, guard: SyncGuard
) -> None:
    """G6"""
    pg_proxy.refuse()
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.5) as away:
        started = clock.now()
        with pytest.raises(errors.StoreUnavailable) as caught:
            away.try_acquire("k")
        assert 0.4 < clock.now() - started < 10
        assert caught.value.sent is False
        entered = False
        with pytest.raises(errors.StoreUnavailable), away.hold("k", wait=1):
            entered = True
        assert not entered
        assert guard.locks() == []
        pg_proxy.accept()
        with away.hold("k", wait=5):
            assert guard.inspect("k") is not None


@pytest.mark.parametrize("call", ["acquire", "renew", "locks"])
def test_a_server_that_hangs_is_given_up_after_a_while(call: str, pg_dsn: str, pg_proxy: Proxy) -> None:
    """Its connections stay open, so that nothing but a clock can tell."""
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.5) as guard:
        lease = guard.try_acquire("k", ttl=60)
        assert lease is not None
        lease.renew()
        pg_proxy.stall()
        calls: dict[str, Any] = {
            "acquire": lambda: guard.try_acquire("other"),
            "renew": lease.renew,
            "locks": guard.locks,
        }
        started = clock.now()
        with pytest.raises(errors.StoreUnavailable, match=r"did not answer|no connection|timeout"):
            calls[call]()
        assert clock.now() - started < 15
        pg_proxy.resume()
        lease.check()
        poll(lambda: guard.inspect("other") is None)
        poll(lambda: renewed(lease))


def renewed(lease: Lease) -> bool:
    try:
        return lease.renew()
    except errors.StoreUnavailable:  # what was stuck arrives now, and the row is in use for a moment
        return False


def test_a_wait_without_a_clock_would_still_hang(pg_dsn: str, pg_proxy: Proxy) -> None:
    """The negative control: psycopg by itself."""
    done = threading.Event()

    def work() -> None:
        with psycopg.connect(pg_proxy.dsn(pg_dsn), autocommit=True) as connection:
            pg_proxy.stall()
            connection.execute("select 1")
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(4)
    pg_proxy.resume()
    assert done.wait(10)
    thread.join()


def test_a_restarted_server_is_found_again_within_one_call(private_pg: Any, private_dsn: str) -> None:
    with SyncGuard(private_dsn, timeout=30) as guard, ThreadPoolExecutor() as background:
        assert guard.try_acquire("before") is not None
        private_pg.stop()
        waiting_since = clock.now()
        during = background.submit(guard.try_acquire, "during")
        poll(lambda: clock.now() > waiting_since + 3)
        private_pg.start()
        back_at = clock.now()
        assert during.result(30) is not None
        assert clock.now() - back_at < 3, "the longer it was away, the later it was found"


# A server that refuses


def test_a_database_without_our_schema_says_which_command_helps(empty_dsn: str) -> None:
    with SyncGuard(empty_dsn) as guard, pytest.raises(errors.SchemaBehind, match="celery syncguard migrate"):
        guard.try_acquire("k")


def test_a_read_only_server_is_called_by_its_name(pg_dsn: str, guard: SyncGuard) -> None:
    database = pg_dsn.rpartition("/")[2]
    with psycopg.connect(pg_dsn, autocommit=True) as session:
        session.execute(f"alter database {database} set default_transaction_read_only = on".encode())
    with SyncGuard(pg_dsn) as other, pytest.raises(errors.StoreUnavailable, match="read-only"):
        other.try_acquire("k")


def test_a_role_without_rights_is_told_which_grants_are_missing(pg_dsn: str, pg_server: Any) -> None:
    role = f"poor_{new_lock_id()[:8].lower().replace('-', '_')}"
    pg_server.execute(f'create role "{role}" login')
    try:
        dsn = pg_dsn.replace("//postgres", f"//{role}", 1)
        with SyncGuard(dsn) as guard:
            started = clock.now()
            with pytest.raises(errors.StoreUnavailable, match=r"GRANT .*SELECT, INSERT, UPDATE, DELETE"):
                guard.try_acquire("k")
            assert clock.now() - started < 4, "time does not cure it, so it is not tried again"
    finally:
        pg_server.execute(f'drop role "{role}"')


def test_no_error_repeats_the_password(pg_dsn: str) -> None:
    dsn = pg_dsn.replace("postgres@", "postgres:s3cret@", 1).replace(pg_dsn.rpartition("/")[2], "no_such_database")
    assert "s3cret" in dsn
    with SyncGuard(dsn, timeout=0.3) as guard:
        with pytest.raises(errors.StoreUnavailable, match="no_such_database") as caught:
            guard.try_acquire("k")
        assert "s3cret" not in repr(guard)
    chain: BaseException | None = caught.value
    while chain is not None:
        assert "s3cret" not in str(chain)
        chain = chain.__cause__


def test_a_schema_of_ones_own_is_used_and_quoted(empty_dsn: str) -> None:
    name = 'we"ird %s schema'
    migrate(empty_dsn, schema=name)
    with SyncGuard(empty_dsn, schema=name) as guard:
        lease = guard.try_acquire("k")
        assert lease is not None
        with psycopg.connect(empty_dsn) as connection, lease.transaction(connection):
            pass
        assert lease.renew()
        assert lease.release()


# A closed guard


def test_a_closed_guard_says_so_and_may_be_closed_again(pg_dsn: str) -> None:
    before = set(threading.enumerate())
    guard = SyncGuard(pg_dsn)
    lease = guard.try_acquire("k")
    assert lease is not None
    assert [one for one in threading.enumerate() if one not in before and one.name == "syncguard-renewer"]
    guard.close()
    guard.close()
    with pytest.raises(errors.StoreUnavailable, match="closed"):
        guard.try_acquire("other")
    left = [one for one in threading.enumerate() if one not in before and one.name.startswith("syncguard-")]
    assert not [one for one in left if one.is_alive()]


def test_a_guard_that_was_never_used_closes_without_a_connection() -> None:
    SyncGuard("postgresql://nobody@127.0.0.1:1/nothing").close()


def test_what_names_the_holder_may_be_any_text(guard: SyncGuard) -> None:
    with guard.hold("k", holder="a\0b\ud800 é"):
        row = guard.inspect("k")
    assert row is not None
    assert row.holder == "a?b? é"


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_wrong_wall_clock_of_a_client_changes_nothing(
    skew: int, pg_dsn: str, guard: SyncGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is an hour wrong; leases last by the server's clock, deadlines by one that nobody sets."""
    with SyncGuard(pg_dsn) as skewed:
        real = clock.wall_ms
        monkeypatch.setattr(clock, "wall_ms", lambda: real() + skew * 1000)
        monkeypatch.setattr("time.time", lambda: real() / 1000 + skew)
        theirs = guard.try_acquire("theirs", ttl=30)
        ours = skewed.try_acquire("ours", ttl=30)
        assert theirs is not None
        assert ours is not None
        assert 25 < ours.remaining <= 29
        assert skewed.try_acquire("theirs") is None
        assert guard.try_acquire("ours") is None
        row = skewed.inspect("theirs")
        assert row is not None
        assert 25 < row.remaining <= 30
        assert ours.renew()
        assert ours.release()
        again = guard.try_acquire("ours")
        assert again is not None
        assert again.fence > ours.fence
