"""The TypeScript client on the same two tables: it must exclude us, and be excluded by us."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from celery_syncguard import SyncGuard
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire, Buried, Grant, Held, Release, Renewal
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.store import PostgresStore
from tests.fixtures.other_client import OtherClient
from tests.fixtures.polling import poll

ADVISORY = "perform pg_advisory_xact_lock(hashtext(p_key));"


def request(key: str, *, ttl: float = 30.0, **facts: object) -> Acquire:
    return Acquire(key=key, lock_id=new_lock_id(), ttl=ttl, **facts)


def remove_from_function(dsn: str, name: str, text: str, *, leaving: str = "") -> None:
    """Make a variant of one of our functions that lacks a part, as a negative control."""
    with psycopg.connect(dsn) as conn:
        (definition,) = conn.execute(
            "select pg_get_functiondef(p.oid) from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
            " where n.nspname = 'public' and p.proname = %s",
            [name],
        ).fetchone()
        assert text in definition
        conn.execute(definition.replace(text, leaving).encode())


def columns(conn, table):
    return conn.execute(
        "select attname, format_type(atttypid, atttypmod), attnotnull, attgenerated <> '' from pg_attribute"
        " where attrelid = %s::regclass and attnum > 0 order by attnum",
        [table],
    ).fetchall()


def test_the_shared_tables_are_the_other_clients_to_the_letter(pg_dsn):
    """Names, types, order, defaults, keys and indexes; what is ours comes after them and may be null."""
    with psycopg.connect(pg_dsn) as conn:
        locks = columns(conn, "syncguard_locks")
        assert locks[:8] == [
            ("key", "text", True, False),
            ("lock_id", "text", True, False),
            ("expires_at_ms", "bigint", True, False),
            ("acquired_at_ms", "bigint", True, False),
            ("fence", "text", True, False),
            ("user_key", "text", True, False),
            ("expires_at_ts", "timestamp with time zone", False, True),
            ("acquired_at_ts", "timestamp with time zone", False, True),
        ]
        assert [name for name, _, required, _ in locks[8:] if required] == []
        assert columns(conn, "syncguard_fence_counters") == [
            ("fence_key", "text", True, False),
            ("fence", "bigint", True, False),
            ("key_debug", "text", False, False),
        ]
        indexes = dict(
            conn.execute(
                "select indexname, regexp_replace(indexdef, ' ON .*USING', ' USING') from pg_indexes"
                " where tablename in ('syncguard_locks', 'syncguard_fence_counters')"
            ).fetchall()
        )
        ours = indexes.pop("idx_syncguard_locks_claim")
        assert ours.endswith("(claim_key) WHERE (claim_key IS NOT NULL)"), (
            "nothing to maintain for the other client's rows"
        )
        assert indexes == {
            "syncguard_locks_pkey": "CREATE UNIQUE INDEX syncguard_locks_pkey USING btree (key)",
            "idx_syncguard_locks_lock_id": "CREATE UNIQUE INDEX idx_syncguard_locks_lock_id USING btree (lock_id)",
            "idx_syncguard_locks_expires": "CREATE INDEX idx_syncguard_locks_expires USING btree (expires_at_ms)",
            "syncguard_fence_counters_pkey": "CREATE UNIQUE INDEX syncguard_fence_counters_pkey USING btree (fence_key)",
        }
        conn.execute("insert into syncguard_fence_counters (fence_key) values ('fence:x')")
        assert conn.execute("select fence from syncguard_fence_counters").fetchall() == [(0,)]


def test_each_client_is_refused_while_the_other_holds(pg_dsn):
    with OtherClient(pg_dsn) as other, SyncGuard(pg_dsn) as guard:
        lease = guard.try_acquire("a")
        assert lease is not None
        assert other.acquire("a") is None
        lease.release()
        taken = other.acquire("a")
        assert taken is not None
        assert guard.try_acquire("a") is None
        assert other.release(taken[0])
        again = guard.try_acquire("a")
        assert again is not None
        assert int(lease.fence) < int(taken[1]) < int(again.fence)
        assert [len(fence) for fence in (str(lease.fence), taken[1], str(again.fence))] == [15, 15, 15]


def test_a_lease_that_the_other_client_took_over_can_do_nothing_and_its_holder_is_not_shown(pg_dsn):
    """Our columns of such a row are stale: they belong to a lock_id that is gone."""
    store = PostgresStore(pg_dsn)
    ours = request("a", ttl=0.001, holder="our worker", process="p:1", task_id="task-1", attempt=0)
    grant = store.acquire(ours)
    assert isinstance(grant, Grant)
    with OtherClient(pg_dsn) as other:
        taken = poll(lambda: other.acquire("a"), timeout=10)  # it waits for its second past the expiry
        (row,) = store.locks("a")
        assert (row.lock_id, row.holder, row.task_id, row.attempt) == (taken[0], None, None, None)
        held = store.acquire(request("a"))
        assert isinstance(held, Held)
        assert (held.lock_id, held.holder, held.task_id) == (taken[0], None, None)
        assert store.renew([Renewal("a", ours.lock_id, 30.0)]) == {}
        assert store.release(Release("a", ours.lock_id)) is False
        assert store.release_process("p:1") == Buried(0), "a dead process of ours does not free somebody else's lease"
        assert int(taken[1]) > grant.fence
        # Negative control: the stale words are there, so that it takes the comparison not to show them.
        assert other.conn.execute("select holder, task_id from syncguard_locks").fetchall() == [
            ("our worker", "task-1")
        ]
    store.close()


def test_an_acquire_waits_while_the_other_client_is_between_its_read_and_its_write(pg_dsn):
    """The other client stands still there; without the wait, both would have the lock."""
    store = PostgresStore(pg_dsn)
    answers: list[object] = []
    with OtherClient(pg_dsn) as other:
        other.begin("a")
        assert other.look("a") is False
        thread = threading.Thread(target=lambda: answers.append(store.acquire(request("a"))))
        thread.start()
        poll(lambda: waiting_for_advisory_lock(pg_dsn))
        assert answers == []
        lock_id, _ = other.take("a", 30_000)
        thread.join(30)
    (held,) = answers
    assert isinstance(held, Held)
    assert held.lock_id == lock_id
    store.close()


def test_without_the_advisory_lock_both_clients_hold_at_once(pg_dsn):
    """The negative control of the test above."""
    remove_from_function(pg_dsn, "syncguard_acquire", ADVISORY)
    store = PostgresStore(pg_dsn)
    with OtherClient(pg_dsn) as other:
        other.begin("a")
        assert other.look("a") is False
        assert isinstance(store.acquire(request("a")), Grant)
        other.take("a", 30_000)  # granted too
    store.close()


def waiting_for_advisory_lock(dsn: str) -> bool:
    with psycopg.connect(dsn) as conn:
        return bool(conn.execute("select 1 from pg_locks where locktype = 'advisory' and not granted").fetchall())


def expired_for_both(dsn: str, key: str) -> bool:
    with psycopg.connect(dsn) as conn:
        return bool(
            conn.execute(
                "select 1 from syncguard_locks where key = %s"
                " and expires_at_ms < extract(epoch from clock_timestamp()) * 1000 - 1100",
                [key],
            ).fetchall()
        )


def renew_while_the_other_client_takes(dsn: str) -> bool | None:
    """A renewal long after the expiry, between the other client's read and its write: what it was told."""
    store = PostgresStore(dsn)
    ours = request("a", ttl=0.001)
    assert isinstance(store.acquire(ours), Grant)
    poll(lambda: expired_for_both(dsn, "a"))
    with OtherClient(dsn) as other:
        other.begin("a")
        assert other.look("a") is False
        renewed = store.renew([Renewal("a", ours.lock_id, 30.0)])
        other.take("a", 30_000)
    assert store.renew([Renewal("a", ours.lock_id, 30.0)]) == {}
    store.close()
    return renewed[ours.lock_id]


def test_a_late_renewal_does_not_revive_a_lease_that_the_other_client_is_taking(pg_dsn):
    """A lease may be renewed just after its expiry, but not while somebody has decided to take it over."""
    assert renew_while_the_other_client_takes(pg_dsn) is None


def test_without_a_look_at_the_advisory_lock_a_late_renewal_makes_two_holders(pg_dsn):
    """The negative control of the test above."""
    remove_from_function(pg_dsn, "syncguard_renew", " or pg_try_advisory_xact_lock(hashtext(k.key))")
    remove_from_function(pg_dsn, "syncguard_renew", "k.expires_at_ms > syncguard_clock_ms()", leaving="true")
    assert renew_while_the_other_client_takes(pg_dsn) is True


def test_a_late_renewal_succeeds_while_nobody_takes_the_lease(pg_dsn):
    store = PostgresStore(pg_dsn)
    ours = request("a", ttl=0.001)
    assert isinstance(store.acquire(ours), Grant)
    poll(lambda: expired_for_both(pg_dsn, "a"))
    assert store.renew([Renewal("a", ours.lock_id, 30.0)]) == {ours.lock_id: True}
    with OtherClient(pg_dsn) as other:
        assert other.acquire("a") is None
    store.close()


# Contention: two of each client increment a counter that nothing else protects.


def contend(dsn: str, *, seconds: float, until_a_fault: bool = False) -> tuple[int, int, list[int]]:
    """(increments made, value reached, fences in the order of the increments)."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create table counter (value bigint not null)")
        conn.execute("insert into counter values (0)")
        conn.execute("create table history (at bigserial primary key, fence text not null)")
    stop = threading.Event()
    made: list[int] = []
    errors: list[BaseException] = []

    def work(acquire, release):
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                while not stop.is_set():
                    lease = acquire()
                    if lease is None:
                        continue
                    lock_id, fence = lease
                    (value,) = conn.execute("select value from counter").fetchone()
                    conn.execute("insert into history (fence) values (%s)", [fence])
                    conn.execute("update counter set value = %s", [value + 1])
                    made.append(1)
                    release(lock_id)
        except BaseException as exc:
            errors.append(exc)
            stop.set()

    def theirs():
        with OtherClient(dsn) as other:
            work(lambda: other.acquire("hot"), other.release)

    def ours():
        store = PostgresStore(dsn)

        def acquire():
            answer = store.acquire(request("hot"))
            return (answer.lock_id, f"{answer.fence:015d}") if isinstance(answer, Grant) else None

        work(acquire, lambda lock_id: store.release(Release("hot", lock_id)))
        store.close()

    def faulty() -> bool:
        with psycopg.connect(dsn, autocommit=True) as conn:
            fences = [int(fence) for (fence,) in conn.execute("select fence from history order by at").fetchall()]
        return fences != sorted(set(fences))

    threads = [threading.Thread(target=client) for client in (ours, theirs, ours, theirs)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    poll(
        lambda: (
            stop.is_set()
            or (time.monotonic() > end and (until_a_fault or len(made) > 100))  # a busy machine takes longer for them
            or (until_a_fault and faulty())
        ),
        timeout=seconds + 90,
        interval=0.2,
    )
    stop.set()
    for thread in threads:
        thread.join(30)
    assert errors == []
    with psycopg.connect(dsn, autocommit=True) as conn:
        (value,) = conn.execute("select value from counter").fetchone()
        fences = [int(fence) for (fence,) in conn.execute("select fence from history order by at").fetchall()]
    return len(made), value, fences


def test_two_of_each_client_lose_no_increment_of_an_unprotected_counter(pg_dsn):
    made, value, fences = contend(pg_dsn, seconds=3)
    assert made > 100, "not much happened"
    assert value == made
    assert fences == sorted(set(fences))


def test_without_the_advisory_lock_increments_are_lost_or_fences_go_backwards(pg_dsn):
    """The negative control of the test above."""
    remove_from_function(pg_dsn, "syncguard_acquire", ADVISORY)
    made, value, fences = contend(pg_dsn, seconds=60, until_a_fault=True)
    assert value != made or fences != sorted(set(fences))


# Whoever came first made the tables.


def other_clients_tables(conn) -> None:
    conn.execute(
        "create table syncguard_locks (key text primary key, lock_id text not null, expires_at_ms bigint not null,"
        " acquired_at_ms bigint not null, fence text not null, user_key text not null)"
    )
    conn.execute("create unique index idx_syncguard_locks_lock_id on syncguard_locks (lock_id)")
    conn.execute("create index idx_syncguard_locks_expires on syncguard_locks (expires_at_ms)")
    conn.execute(
        "create table syncguard_fence_counters (fence_key text primary key, fence bigint not null default 0,"
        " key_debug text)"
    )


def test_tables_that_the_other_client_made_are_adopted_with_their_locks_and_counters(empty_dsn):
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        other_clients_tables(conn)
    with OtherClient(empty_dsn) as other:
        taken = other.acquire("a")
        lines = []
        migrate.migrate(empty_dsn, warn=lines.append)
        assert len(lines) == 1
        assert "must connect anew once" in lines[0]
        migrate.migrate(empty_dsn, warn=lines.append)
        assert len(lines) == 1
        with SyncGuard(empty_dsn) as guard:
            assert guard.try_acquire("a") is None
            assert other.release(taken[0])
            lease = guard.try_acquire("a")
            assert lease is not None
            assert int(lease.fence) > int(taken[1])
            assert other.acquire("a") is None


def test_what_the_other_client_has_prepared_fails_until_it_connects_anew_as_migrate_says(empty_dsn):
    look = "select * from syncguard_locks where key = %s"
    with psycopg.connect(empty_dsn, autocommit=True) as conn, psycopg.connect(empty_dsn, autocommit=True) as theirs:
        other_clients_tables(conn)
        theirs.execute(look, ("a",), prepare=True)
        migrate.migrate(empty_dsn)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="cached plan must not change result type"):
            theirs.execute(look, ("a",), prepare=True)
    with psycopg.connect(empty_dsn, autocommit=True) as theirs:
        theirs.execute(look, ("a",), prepare=True)
        with SyncGuard(empty_dsn) as guard, guard.hold("a"):
            assert len(theirs.execute(look, ("a",), prepare=True).fetchall()) == 1


def test_nobody_is_told_to_connect_anew_where_no_table_was_there(empty_dsn):
    lines = []
    migrate.migrate(empty_dsn, warn=lines.append)
    assert lines == []


def test_a_table_of_another_shape_is_refused_as_a_whole(empty_dsn):
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create table syncguard_locks (key text primary key, owner text)")
    with pytest.raises(Exception, match=r"column .* does not exist"):
        migrate.migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select tablename from pg_tables where schemaname = 'public'").fetchall() == [
            ("syncguard_locks",)
        ]


def test_prune_leaves_the_counters_of_the_other_client_alone(pg_dsn):
    """It would start such a key at 1 again."""
    with OtherClient(pg_dsn) as other, SyncGuard(pg_dsn) as guard:
        taken = other.acquire("theirs")
        other.release(taken[0])
        assert guard.prune(older=0.0, counters=True).counters == 0
        assert int(other.acquire("theirs")[1]) > int(taken[1])
        # Negative control: a counter that has moved past the clock is pruned, and our next fence is higher all the same.
        lease = guard.try_acquire("ours")
        lease.release()
        assert poll(lambda: guard.prune(older=0.0, counters=True).counters) == 1
        assert int(guard.try_acquire("ours").fence) > int(lease.fence)
