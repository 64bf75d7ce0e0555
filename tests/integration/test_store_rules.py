"""The rules of the SQL functions, each with the fault that shows when the rule is broken."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_syncguard import SyncGuard, errors
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire, Buried, Done, Grant, Held, Release, Renewal
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.store import PostgresStore
from tests.fixtures.polling import poll
from tests.fixtures.races import race_threads

Connection = psycopg.Connection[Any]


@pytest.fixture
def store(pg_dsn: str) -> Iterator[PostgresStore]:
    store = PostgresStore(pg_dsn, pool_size=5)
    yield store
    store.close()


@pytest.fixture
def session(pg_dsn: str) -> Iterator[Connection]:
    """Somebody else's connection, in autocommit."""
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        yield connection


def ask(store: PostgresStore, key: str = "k", *, ttl: float = 60.0, **extras: Any) -> Any:
    return store.acquire(Acquire(key=key, lock_id=new_lock_id(), ttl=ttl, **extras))


def grant(store: PostgresStore, key: str = "k", *, ttl: float = 60.0, **extras: Any) -> Grant:
    answer = ask(store, key, ttl=ttl, **extras)
    assert isinstance(answer, Grant)
    return answer


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def wait_until_blocked(session: Connection) -> None:
    """Until some backend of this database waits for a lock."""

    def blocked() -> bool:
        # Asked on a connection of its own: a snapshot of the statistics lasts as long as the transaction.
        with psycopg.connect(session.info.dsn, autocommit=True) as observer:
            query = (
                "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            )
            return bool(observer.execute(query).fetchone()[0])  # type: ignore[index]

    poll(blocked)


def clock_ms(session: Connection) -> int:
    row = session.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])


def replace_acquire(session: Connection, without: str, leaving: str = "") -> None:
    """Have an acquire that lacks what this pattern finds in ours."""
    (text,) = re.findall(
        r"^create function syncguard_acquire\(.*?^\$\$;$",
        migrate.migrations()[0].text,
        flags=re.MULTILINE | re.DOTALL,
    )
    cut, found = re.subn(without, leaving, text, count=1, flags=re.DOTALL)
    assert found
    session.execute(cut.replace("create function", "create or replace function", 1).encode())


BLOCKERS = {
    "advisory lock": "select pg_advisory_xact_lock(hashtext('k'))",
    "counter row": "select 1 from syncguard_fence_counters where fence_key = 'fence:k' for update",
}


# Time


def acquire_behind(
    blocker: str, store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> tuple[Grant, int]:
    """A grant that had to wait for half a second, and the server's clock in ms when the wait ended."""
    store.release(Release(key="k", lock_id=grant(store).lock_id))  # the counter exists from now on
    with session.transaction():
        session.execute(BLOCKERS[blocker])  # type: ignore[call-overload]
        answer = background.submit(ask, store, ttl=5.0)
        wait_until_blocked(session)
        session.execute("select pg_sleep(0.5)")
        freed_at = clock_ms(session)
    granted = answer.result(30)
    assert isinstance(granted, Grant)
    return granted, freed_at


@pytest.mark.parametrize("blocker", BLOCKERS)
def test_waiting_for_a_row_costs_nothing_of_the_ttl(
    blocker: str, store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    granted, freed_at = acquire_behind(blocker, store, session, background)
    assert granted.acquired_at.timestamp() * 1000 >= freed_at - 1, "the ttl began before the wait was over"
    assert (granted.expires_at - granted.acquired_at).total_seconds() == 5


def test_with_the_time_of_the_transactions_start_it_would_cost_the_whole_wait(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    """The negative control: the same wait with now()."""
    session.execute(
        "create or replace function syncguard_clock_ms() returns bigint language sql volatile"
        " as $$ select (extract(epoch from now()) * 1000)::bigint $$"
    )
    granted, freed_at = acquire_behind("advisory lock", store, session, background)
    assert granted.acquired_at.timestamp() * 1000 < freed_at - 400


# Between the looks and the write


def acquire_beside_a_writer(store: PostgresStore, session: Connection, background: ThreadPoolExecutor) -> Any:
    """What an acquire returns if a writer that skips the advisory lock makes the row between its look and its write."""
    store.release(Release(key="k", lock_id=grant(store).lock_id))  # the counter exists from now on
    with session.transaction():
        session.execute(BLOCKERS["counter row"])  # type: ignore[call-overload]
        answer = background.submit(ask, store)
        wait_until_blocked(session)
        session.execute(
            "insert into syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)"
            " values ('k', 'theirs', syncguard_clock_ms() + 60000, syncguard_clock_ms(), '000000000000001', 'k')"
        )
    return answer.result(30)


def test_a_grant_overwrites_no_row_that_it_did_not_see(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    answer = acquire_beside_a_writer(store, session, background)
    assert isinstance(answer, Held)
    assert answer.lock_id == "theirs"
    assert [row.lock_id for row in store.locks("k")] == ["theirs"]


def test_without_its_condition_the_upsert_would_make_two_holders(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    replace_acquire(session, r"    where l\.lock_id = v_row\.lock_id\n(?=    returning)")
    assert isinstance(acquire_beside_a_writer(store, session, background), Grant)


def acquire_beside_a_completion(store: PostgresStore, session: Connection, background: ThreadPoolExecutor) -> Any:
    """What an acquire that pauses before it locks the expired row returns, if its holder commits a completion then."""
    lease = grant(store, ttl=0.5)
    with session.transaction():
        assert session.execute("select syncguard_fenced('k', %s, %s)", (lease.lock_id, lease.fence)).fetchone() == (
            True,
        )
        session.execute("select syncguard_complete('r', 'task', 60000)")
        poll(lambda: not store.locks("k"))
        answer = background.submit(ask, store, run_keys=("r",))
        with psycopg.connect(store.dsn, autocommit=True) as observer:
            pauses = "select 1 from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'"
            poll(lambda: observer.execute(pauses).fetchone())
    return answer.result(30)


def test_what_is_completed_until_the_expired_row_is_ours_is_seen(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    replace_acquire(
        session, r"  if outcome is null and v_row\.key is not null then\n", r"  perform pg_sleep(1);\n\g<0>"
    )
    assert isinstance(acquire_beside_a_completion(store, session, background), Done)


def test_with_the_look_before_the_lock_the_work_would_be_done_twice(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    replace_acquire(
        session,
        r"(  if outcome is null and v_row\.key is not null then\n.*?)(  if outcome is null then\n.*?    end loop;\n)",
        r"\2  end if;\n  perform pg_sleep(1);\n\1  if outcome is null then\n",
    )
    assert isinstance(acquire_beside_a_completion(store, session, background), Grant)


# Bounds


@pytest.mark.parametrize("blocker", BLOCKERS)
def test_a_wait_that_comes_to_its_bound_says_that_the_key_could_not_be_asked_and_never_that_it_is_held(
    blocker: str, store: PostgresStore, session: Connection
) -> None:
    """A skipped task would be skipped for a holder that does not exist."""
    store.release(Release(key="k", lock_id=grant(store).lock_id))
    with session.transaction():
        session.execute(BLOCKERS[blocker])  # type: ignore[call-overload]
        before = clock_ms(session)
        with pytest.raises(errors.StoreUnavailable, match=r"locked by another transaction.*pg_stat_activity"):
            ask(store)
        assert 1500 < clock_ms(session) - before < 20_000
    assert isinstance(ask(store), Grant)


def test_whoever_waits_for_a_lock_waits_on_while_another_transaction_is_in_the_way(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    def take() -> bool:
        with SyncGuard(store.dsn) as guard, guard.hold("k", wait=30) as lease:
            # It was asked for more than once, and nothing of that is released behind our back.
            guard.flush()
            return lease.renew()

    with session.transaction():
        session.execute("select pg_advisory_xact_lock(hashtext('k'))")
        before = clock_ms(session)
        taken = background.submit(take)
        poll(lambda: clock_ms(session) - before > 3000)
        assert not taken.done(), "the first bound was the last"
    assert taken.result(30) is True


WRITERS = {
    "a renewal or a waiter": "select 1 from syncguard_locks where key = 'k' for no key update",
    "a prune": "select 1 from syncguard_locks where key = 'k' for update",
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("ends", [True, False])
def test_whoever_writes_an_expired_row_is_waited_for_and_is_no_holder(
    writer: str, ends: bool, store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    grant(store, ttl=0.05)
    poll(lambda: not store.locks("k"))
    with session.transaction():
        session.execute(WRITERS[writer].encode())
        answer = background.submit(ask, store)
        wait_until_blocked(session)
        if not ends:
            with pytest.raises(errors.StoreUnavailable, match="locked by another transaction"):
                answer.result(30)
    if ends:
        assert isinstance(answer.result(30), Grant)


def test_without_that_wait_a_prune_would_look_like_a_holder(
    store: PostgresStore, session: Connection, pg_dsn: str
) -> None:
    """The negative control."""
    replace_acquire(session, r" *perform 1 from [^;]* for no key update;\n")
    grant(store, ttl=0.05)
    poll(lambda: not store.locks("k"))
    with session.transaction():
        session.execute(WRITERS["a prune"].encode())
        assert isinstance(ask(store), Held)


def test_an_expired_row_in_use_is_held_without_waiting(store: PostgresStore, session: Connection) -> None:
    old = grant(store, ttl=0.05)
    poll(lambda: not store.locks("k"))
    with session.transaction():
        session.execute("select 1 from syncguard_locks where key = 'k' for key share")
        answer = ask(store)
        assert isinstance(answer, Held)
        assert (answer.lock_id, answer.remaining) == (old.lock_id, 0.0)
    assert isinstance(ask(store), Grant)


@pytest.mark.parametrize(
    ("strength", "answer"), [("for update", None), ("for no key update", None), ("for key share", True)]
)
def test_a_renewal_of_a_row_in_use_is_neither_renewed_nor_lost(
    strength: str, answer: bool | None, store: PostgresStore, session: Connection
) -> None:
    lease, other = grant(store, ttl=5.0), grant(store, "other", ttl=5.0)
    renewals = [Renewal(key=one.key, lock_id=one.lock_id, ttl=60.0) for one in (lease, other)]
    with session.transaction():
        session.execute(f"select 1 from syncguard_locks where key = 'k' {strength}".encode())
        assert store.renew(renewals) == {lease.lock_id: answer, other.lock_id: True}
    assert store.renew(renewals) == {lease.lock_id: True, other.lock_id: True}


@pytest.mark.parametrize("call", ["release", "unclaim", "confirm"])
def test_every_other_wait_is_bounded_and_becomes_our_error(
    call: str, store: PostgresStore, session: Connection
) -> None:
    lease = grant(store, process="p:1")
    store.claim("c", task_id="t", ttl=60.0)
    calls: dict[str, Any] = {
        "release": lambda: store.release(Release(key="k", lock_id=lease.lock_id)),
        "unclaim": lambda: store.unclaim("c", task_id="t"),
        "confirm": lambda: store.confirm([("c", "t", 900.0)]),
    }
    with session.transaction():
        session.execute("select 1 from syncguard_locks for update")
        session.execute("select 1 from syncguard_claims for update")
        with pytest.raises(errors.StoreUnavailable):
            calls[call]()
    calls[call]()


def test_a_burial_frees_what_it_can_at_once_and_waits_for_no_row_that_is_in_use(
    store: PostgresStore, session: Connection
) -> None:
    """The server goes on with the statement of a dead child for as long as that takes. The control is a delete that waits."""
    busy = grant(store, "busy", process="p:1")
    for key in ("a", "b"):
        grant(store, key, process="p:1")
    with session.transaction():
        session.execute("select syncguard_fenced('busy', %s, %s)", (busy.lock_id, busy.fence))
        with psycopg.connect(store.dsn, autocommit=True) as other:
            other.execute("set lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute("delete from syncguard_locks where process = 'p:1'")
        started = time.monotonic()
        assert store.release_process("p:1") == Buried(freed=2, busy=1)
        assert time.monotonic() - started < 1
        assert [row.key for row in store.locks()] == ["busy"]
    assert store.release_process("p:1") == Buried(freed=1)


def test_a_waiter_that_cannot_announce_itself_has_heard_nothing(store: PostgresStore, session: Connection) -> None:
    """The server answers, so the key is held and not "unavailable", for which a task may choose to run unlocked."""
    lease = grant(store)
    with SyncGuard(store.dsn) as guard, session.transaction():
        # As a renewal does whose commit waits for a synchronous standby.
        session.execute("select 1 from syncguard_locks for no key update")
        before = clock_ms(session)
        assert store.wait("k", 0.1) is False
        assert clock_ms(session) - before >= 1900, "the wait did not come to its bound"
        with pytest.raises(errors.LockHeld) as caught, guard.hold("k", wait=0.5):
            raise AssertionError("it is held")
    assert caught.value.lock_id == lease.lock_id
    store.release(Release(key="k", lock_id=lease.lock_id))
    assert store.wait("k", 0.1) is True


def test_prune_waits_for_nobody_and_keeps_the_lease_of_a_claim_in_use(
    store: PostgresStore, session: Connection
) -> None:
    """Without the lease, nobody could tell any more that the claim's worker is dead."""
    for key in ("used", "unused"):
        grant(store, key, ttl=0.05, task_id="t", claim_key=key, claim_ttl=60.0)
    poll(lambda: not store.locks())
    with session.transaction():
        # As a confirmation does, which comes from the producer.
        session.execute("select 1 from syncguard_claims where claim_key = 'used' for no key update")
        pruned = store.prune(older=0.0)
        assert (pruned.locks, pruned.claims) == (1, 1)
        assert session.execute("select key from syncguard_locks").fetchall() == [("used",)]
    pruned = store.prune(older=0.0)
    assert (pruned.locks, pruned.claims) == (1, 1)


# What it costs


def wal_bytes(session: Connection, call: str) -> int:
    row = session.execute(f"explain (analyze, wal, format json) select * from {call}".encode()).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    return int(plan[0]["Plan"]["WAL Bytes"])


def test_a_blocked_acquire_writes_nothing(store: PostgresStore, session: Connection) -> None:
    grant(store, holder="me", task_id="t", attempt=0)
    store.claim("c", task_id="other", ttl=60.0)
    # With a claim that has more than half of its life left.
    call = (
        "syncguard_acquire('k', 'another-lock-id', 60000, 'you', 'p:1', 'other', 0,"
        " p_claim_key => 'c', p_claim_wait_ms => 100000)"
    )
    assert min(wal_bytes(session, call) for _ in range(3)) == 0
    assert wal_bytes(session, call.replace("100000", "200000")) > 0, "the control measures nothing"


def test_a_duplicate_claim_writes_nothing(store: PostgresStore, session: Connection) -> None:
    store.claim("c", task_id="t", ttl=60.0)
    # Not the first: whoever reads what was committed without waiting for the disk tidies up behind it.
    assert min(wal_bytes(session, "syncguard_claim('c', 'other', 60000)") for _ in range(3)) == 0
    assert wal_bytes(session, "syncguard_claim('new', 'other', 60000)") > 0, "the control measures nothing"


@pytest.mark.parametrize(
    ("call", "commit"),
    [
        ("syncguard_acquire('k2', 'l2', 60000)", "on"),
        ("syncguard_renew(array['k'], array['l'], array[60000::bigint])", "on"),
        ("syncguard_release('k', 'l')", "off"),
        ("syncguard_release('k', 'l', p_run_key => 'run', p_run_ttl_ms => 60000)", "on"),
        ("syncguard_claim('c', 't', 60000)", "on"),
    ],
)
def test_only_a_release_without_a_completion_commits_without_waiting_for_the_disk(
    call: str, commit: str, session: Connection
) -> None:
    session.execute("select * from syncguard_acquire('k', 'l', 60000)")
    with session.transaction():
        session.execute(f"select * from {call}".encode())
        assert session.execute("show synchronous_commit").fetchone() == (commit,)
    assert session.execute("show synchronous_commit").fetchone() == ("on",)


def test_a_release_notifies_only_if_somebody_waits(store: PostgresStore, session: Connection) -> None:
    session.execute("listen syncguard_released")
    for key, waits in (("alone", False), ("awaited", True)):
        lease = grant(store, key)
        if waits:
            assert session.execute("select syncguard_wait('awaited', 10000)").fetchone() == (True,)
        store.release(Release(key=key, lock_id=lease.lock_id))
    session.execute("notify syncguard_released, 'the end'")
    heard = [one.payload for one in session.notifies(timeout=10, stop_after=2)]
    assert heard == ["awaited", "the end"]


def test_nothing_stays_locked_after_an_error_in_the_body(pg_dsn: str, session: Connection) -> None:
    """No session-level lock exists that a failed unlock could leave behind."""
    with SyncGuard(pg_dsn) as guard:
        with pytest.raises(ZeroDivisionError), guard.hold("k"):
            1 / 0
        assert guard.locks() == []
        locks = (
            "select count(*) from pg_locks where locktype <> 'virtualxid' and pid <> pg_backend_pid()"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        assert session.execute(locks.encode()).fetchone() == (0,)


# Fences


def test_a_fence_is_computed_after_the_counter_is_ours(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    """Another client bumps the counter while our acquire waits for it; the later grant has the higher fence."""
    store.release(Release(key="k", lock_id=grant(store).lock_id))
    with session.transaction():
        row = session.execute(
            "update syncguard_fence_counters set fence = fence + 100000 where fence_key = 'fence:k' returning fence"
        ).fetchone()
        answer = background.submit(ask, store)
        wait_until_blocked(session)
    assert row is not None
    assert answer.result(30).fence > row[0]


def test_a_fence_from_a_sequence_would_go_backwards(session: Connection, background: ThreadPoolExecutor) -> None:
    """The negative control: evaluated before the wait for the row, whoever waits gets the lower number."""
    session.execute("create sequence s")
    session.execute("create table naive (key text primary key, fence bigint)")
    upsert = (
        "insert into naive values ('k', nextval('s'))"
        " on conflict (key) do update set fence = excluded.fence returning fence"
    )
    session.execute(upsert)
    with psycopg.connect(session.info.dsn, autocommit=True) as other:
        with session.transaction():
            session.execute("select 1 from naive for update")
            answer = background.submit(lambda: other.execute(upsert).fetchone())
            wait_until_blocked(session)
            first = session.execute(upsert).fetchone()
        second = answer.result(30)
    assert first is not None
    assert second is not None
    assert second[0] < first[0]


def test_fences_rise_after_a_failover_that_lost_commits(store: PostgresStore, session: Connection) -> None:
    lease = grant(store)
    # The standby that was promoted had not got these: neither the row nor the last ten thousand increments.
    session.execute("delete from syncguard_locks")
    session.execute("update syncguard_fence_counters set fence = fence - 10000")
    counter = session.execute("select fence + 1 from syncguard_fence_counters").fetchone()
    assert counter is not None
    assert counter[0] < lease.fence, "the control: a plain counter repeats old fences"
    assert grant(store).fence > lease.fence


def test_fences_rise_faster_than_the_clock_if_they_must(store: PostgresStore, session: Connection) -> None:
    session.execute("insert into syncguard_fence_counters values ('fence:k', 2000000000000)")
    first = grant(store)
    store.release(Release(key="k", lock_id=first.lock_id))
    assert (first.fence, grant(store).fence) == (2_000_000_000_001, 2_000_000_000_002)


def test_a_fence_has_fifteen_digits_and_a_counter_out_of_range_is_refused(
    store: PostgresStore, session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    grant(store)
    row = session.execute("select fence, length(fence) from syncguard_locks").fetchone()
    assert row is not None
    assert row[1] == 15

    session.execute("insert into syncguard_fence_counters values ('fence:high', 90000000000000)")
    with caplog.at_level(logging.WARNING, logger="celery_syncguard"):
        assert grant(store, "high").fence == 90_000_000_000_001
    assert "'high'" in caplog.text

    session.execute("insert into syncguard_fence_counters values ('fence:full', 900000000000000)")
    with pytest.raises(errors.SyncGuardError, match="out of range") as caught:
        ask(store, "full")
    assert not isinstance(caught.value, errors.StoreUnavailable), "waiting does not cure it"
    assert store.locks("full") == []


def test_locks_and_fences_survive_the_sudden_death_of_the_server(private_pg: Any, private_dsn: str) -> None:
    """No acquire that was answered is forgotten, and no fence is given twice."""
    store = PostgresStore(private_dsn, timeout=20)
    leases = [grant(store, f"k:{number}") for number in range(20)]
    private_pg.kill()
    private_pg.start()
    assert {row.lock_id for row in store.locks()} == {lease.lock_id for lease in leases}
    for lease in leases:
        store.release(Release(key=lease.key, lock_id=lease.lock_id))
        assert grant(store, lease.key).fence > lease.fence
    store.close()


# Races


def test_two_names_with_one_advisory_number_are_two_locks(store: PostgresStore, session: Connection) -> None:
    row = session.execute(
        "select min(k), max(k) from (select 'key:' || i as k from generate_series(1, 400000) i) t"
        " group by hashtext(k) having count(*) > 1 limit 1"
    ).fetchone()
    assert row is not None
    first, second = row
    assert first != second
    assert {grant(store, first).key, grant(store, second).key} == {first, second}
    assert {one.key for one in store.locks()} == {first, second}
    # And while the first one is being taken, the wait of the second is bounded.
    store.release(Release(key=second, lock_id=store.locks(second)[0].lock_id))
    with session.transaction():
        session.execute("select pg_advisory_xact_lock(hashtext(%s))", (first,))
        with pytest.raises(errors.StoreUnavailable, match="locked by another transaction"):
            ask(store, second)
    assert isinstance(ask(store, second), Grant)


def test_a_session_that_looked_before_another_wrote_does_not_win_too(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    """Both have seen a free key; the one that comes second is told so."""
    with session.transaction():
        session.execute("select * from syncguard_acquire('k', 'first-lock-id', 60000)")
        assert store.locks("k") == [], "to everybody else the key still looks free"
        answer = background.submit(ask, store)
        wait_until_blocked(session)
    held = answer.result(30)
    assert isinstance(held, Held)
    assert held.lock_id == "first-lock-id"


@pytest.mark.parametrize("before", ["no claim", "a claim that is over"])
def test_a_publisher_that_looked_before_another_claimed_is_told_whose_it_is(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor, before: str
) -> None:
    """Neither has seen a live claim; the one that comes second is not told that it is the first."""
    if before != "no claim":
        session.execute("insert into syncguard_claims values ('c', 'old-task', null, 1, 2)")
    with session.transaction():
        session.execute("select * from syncguard_claim('c', 'first-task', 60000)")
        with psycopg.connect(session.info.dsn) as other:
            row = other.execute("select count(*) from syncguard_claims where task_id = 'first-task'").fetchone()
        assert row == (0,), "to everybody else the work still looks new"
        answer = background.submit(store.claim, "c", task_id="second-task", ttl=60.0)
        wait_until_blocked(session)
        assert not answer.done()
    claim = answer.result(30)
    assert (claim.ours, claim.task_id) == (False, "first-task")
    assert session.execute("select claim_key, task_id from syncguard_claims").fetchall() == [("c", "first-task")]


def take_over_while_it_completes(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor, *, isolation: str = "read committed"
) -> Any:
    """The answer to the next delivery of a run whose transaction called complete(), outlived its lease, and commits when
    that delivery has found the lease expired.
    """
    session.execute(f"alter database {session.info.dbname} set default_transaction_isolation = '{isolation}'".encode())
    lease = grant(store, task_id="t", ttl=0.5)
    with psycopg.connect(session.info.dsn) as body:
        fence = (lease.key, lease.lock_id, lease.fence)
        assert body.execute("select syncguard_fenced(%s, %s, %s)", fence).fetchone() == (True,)
        assert body.execute("select syncguard_complete('run', 't', 60000)").fetchone() == (True,)
        poll(lambda: not store.locks("k"))
        with session.transaction():
            # What an acquire waits for before it locks the lock's row.
            session.execute("select pg_advisory_xact_lock(hashtext('k'))")
            answer = background.submit(ask, store, task_id="t", run_keys=("run",), max_deaths=9)
            wait_until_blocked(session)
            body.commit()
    return answer.result(30)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_run_that_completes_while_its_expired_lease_is_taken_over_is_not_repeated(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor, isolation: str
) -> None:
    done = take_over_while_it_completes(store, session, background, isolation=isolation)
    assert isinstance(done, Done), done
    assert (done.run_key, done.task_id) == ("run", "t")
    assert session.execute("select run_key from syncguard_completions").fetchall() == [("run",)]
    assert session.execute("select count(*) from syncguard_deaths").fetchone() == (0,)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_run_that_completed_nothing_is_taken_over(store: PostgresStore, session: Connection, isolation: str) -> None:
    session.execute(f"alter database {session.info.dbname} set default_transaction_isolation = '{isolation}'".encode())
    grant(store, task_id="t", ttl=0.05)
    poll(lambda: not store.locks("k"))
    grant(store, task_id="t", run_keys=("run", "attempt"))
    assert session.execute("select count(*) from syncguard_completions").fetchone() == (0,)


def test_a_look_at_the_completions_before_the_row_is_ours_alone_misses_one(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    """The negative control: an acquire that looks first."""
    look = r"(\n  if outcome is null then\n)(.*?    end loop;\n)"
    replace_acquire(session, r"(begin\n)(.*?)" + look, leaving=r"\1  now_ms := syncguard_clock_ms();\n\4\2\3")
    assert isinstance(take_over_while_it_completes(store, session, background), Grant)


def test_a_publisher_that_waited_for_one_who_gave_up_gets_the_claim(
    store: PostgresStore, session: Connection, background: ThreadPoolExecutor
) -> None:
    """The other one's transaction never committed."""
    with session.transaction(force_rollback=True):
        session.execute("select * from syncguard_claim('c', 'first-task', 60000)")
        answer = background.submit(store.claim, "c", task_id="second-task", ttl=60.0)
        wait_until_blocked(session)
    assert answer.result(30).ours
    assert session.execute("select task_id from syncguard_claims").fetchall() == [("second-task",)]


def test_of_two_publishers_that_have_both_seen_no_claim_a_plain_look_lets_both_win(
    session: Connection, pg_dsn: str
) -> None:
    """The negative control: the same interleaving with a query that looks and, in the same statement, writes."""
    look_and_write = (
        "with found as (select task_id from syncguard_claims where claim_key = 'c'),"
        " made as (insert into syncguard_claims (claim_key, task_id, claimed_at_ms, expires_at_ms)"
        " select 'c', %s, 0, 9e15 where not exists (select from found) on conflict do nothing)"
        " select count(*) from found"
    )
    seen = []
    with psycopg.connect(pg_dsn) as other, ThreadPoolExecutor(1) as pool:
        seen.append(other.execute(look_and_write, ("first-task",)).fetchone())
        answer = pool.submit(lambda: session.execute(look_and_write, ("second-task",)).fetchone())
        wait_until_blocked(other)
        other.commit()
        seen.append(answer.result(30))
    assert seen == [(0,), (0,)], "both are told that the work was not queued"


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_default_isolation_changes_nothing(level: str, pg_dsn: str, session: Connection) -> None:
    database = psycopg.conninfo.conninfo_to_dict(pg_dsn)["dbname"]
    session.execute(f"alter database {database} set default_transaction_isolation = '{level}'".encode())
    store = PostgresStore(pg_dsn, pool_size=9, timeout=20)
    for answers in race_threads(store, threads=8, rounds=25):
        assert sum(isinstance(answer, Grant) for answer in answers) == 1
    fences = []
    for _ in range(5):
        lease = grant(store)
        fences.append(lease.fence)
        assert store.renew([Renewal(key="k", lock_id=lease.lock_id, ttl=60.0)]) == {lease.lock_id: True}
        assert store.release(Release(key="k", lock_id=lease.lock_id))
    assert fences == sorted(set(fences))
    store.close()


# What other clients write


@pytest.mark.parametrize("fence", ["", "twelve", "-5", "1.5", "9" * 40, "000000000000007 "])
def test_a_row_whose_fence_is_no_number_is_shown_as_what_it_is(store, session, fence) -> None:
    row = grant(store, "odd")
    grant(store, "even")
    session.execute("update syncguard_locks set fence = %s where key = 'odd'", [fence])
    rows = {row.key: row for row in store.locks()}
    assert rows["odd"].fence == (int(fence) if fence.isdigit() else fence)
    assert rows["even"].fence > row.fence - 1_000
    held = ask(store, "odd")
    assert isinstance(held, Held)
    assert held.fence is None
    assert store.release(Release(key="odd", lock_id=rows["odd"].lock_id))
    assert grant(store, "odd").fence > row.fence


def test_one_such_row_would_fail_the_whole_list(store, session) -> None:
    """The negative control: a list that reads fences as numbers."""
    grant(store, "odd")
    session.execute("update syncguard_locks set fence = 'twelve' where key = 'odd'")
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        session.execute("select fence::bigint from syncguard_locks").fetchall()


@pytest.mark.parametrize("ms", [9_000_000_000_000_000, 253_402_300_800_000])
def test_a_row_with_an_impossible_instant_is_shown_too(store, session, ms) -> None:
    grant(store, "odd")
    session.execute("update syncguard_locks set expires_at_ms = %s where key = 'odd'", [ms])
    (row,) = store.locks()
    assert row.expires_at.year == 9999
    assert row.remaining > 0
