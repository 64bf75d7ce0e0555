"""What an administrator sets for a role or a database changes nothing that locks, revisions and `doctor` do."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest

from celery_syncguard import SyncGuard, revisions
from celery_syncguard.cli import doctor
from celery_syncguard.core.config import Settings
from celery_syncguard.core.store import Acquire, Release
from celery_syncguard.postgres.migrate import migrate
from tests.fixtures.servers import PostgresServer

#: All at once: what one of them breaks, all of them break.
ODD = {
    "DateStyle": "German",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "bytea_output": "escape",
    "extra_float_digits": "-5",
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
    "client_encoding": "LATIN1",
    "plan_cache_mode": "force_generic_plan",
    "jit": "on",
    "jit_above_cost": "0",
    "row_security": "off",
    "check_function_bodies": "off",
    "plpgsql.variable_conflict": "use_variable",
    "plpgsql.extra_errors": "all",
    "lock_timeout": "50ms",
    "idle_session_timeout": "500ms",
    "idle_in_transaction_session_timeout": "500ms",
    "synchronous_commit": "off",
    "enable_seqscan": "off",
    "session_replication_role": "replica",
}


def set_all(dsn: str, settings: dict[str, str]) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name, value in settings.items():
            conn.execute(f"alter database {conn.info.dbname} set {name} = '{value}'".encode())


def live(dsn: str) -> None:
    """A lock, a claim, a completion and a prune, with every answer looked at."""
    with SyncGuard(dsn, timeout=20) as guard:
        store = guard.store
        lease = guard.try_acquire("k☃'\\%", ttl=60, holder="ä\\'☃")
        assert lease is not None
        assert lease.renew()
        row = guard.inspect("k☃'\\%")
        assert row is not None
        assert (row.lock_id, row.fence, row.holder) == (lease.lock_id, int(lease.fence), "ä\\'☃")
        assert 55 < row.remaining <= 60
        assert guard.try_acquire("k☃'\\%") is None
        with psycopg.connect(dsn, client_encoding="utf8") as conn, lease.transaction(conn):
            pass
        assert guard.release_lease(lease, run_key="r☃", run_ttl=60.0)
        done: Any = store.acquire(Acquire(key="k", lock_id="l" * 22, ttl=60, run_keys=("o", "r☃")))
        assert 0 <= done.age < 30
        assert store.claim("c☃", task_id="t", ttl=60).ours
        assert 0 <= store.claim("c☃", task_id="other", ttl=60).age < 30
        assert store.confirm([("c☃", "t", 100.0)]) == 1
        assert store.unclaim("c☃", task_id="t")
        assert not store.release(Release(key="k", lock_id="m" * 22))
        store.prune(older=0.0, counters=True)


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_locks_live_under_any_settings_from_the_first_migration_on(empty_dsn: str, isolation: str) -> None:
    set_all(empty_dsn, {**ODD, "default_transaction_isolation": isolation, "default_transaction_deferrable": "on"})
    migrate(empty_dsn)
    live(empty_dsn)


def test_revisions_are_read_under_any_settings(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as conn:
        conn.execute(revisions.POSTGRES_MIGRATION_SQL.encode())
        conn.execute("create table notes (id uuid primary key, owner_id uuid, deleted_at timestamptz, revision bigint)")
    set_all(empty_dsn, ODD)
    owner = uuid.uuid4()
    with psycopg.connect(empty_dsn) as conn:
        revisions.ensure_owner(conn, owner)
        assert revisions.next_revision(conn, owner) == 1
        assert revisions.next_revisions(conn, [owner]) == {owner: 2}
        assert revisions.current_revision(conn, owner) == 2
        assert revisions.guard_pull(conn, owner, 1) is not None


def test_doctor_reads_the_same_under_any_settings_and_names_those_that_matter(pg_dsn: str) -> None:
    def found() -> dict[str, str]:
        return {check.name: check.status for check in doctor.examine(Settings(dsn=pg_dsn))}

    assert set(found().values()) == {"ok"}
    set_all(pg_dsn, ODD)
    assert {name for name, status in found().items() if status != "ok"} == {"durability"}
    set_all(pg_dsn, {"synchronous_commit": "on", "statement_timeout": "1s"})
    assert {name for name, status in found().items() if status != "ok"} == {"timeouts"}


def test_a_timestamp_read_as_text_would_depend_on_them(empty_dsn: str) -> None:
    """The negative control."""
    set_all(empty_dsn, ODD)
    with psycopg.connect(empty_dsn) as conn, pytest.raises(Exception, match="DateStyle"):
        conn.execute("select clock_timestamp()").fetchone()


def test_a_completion_is_on_disk_when_it_is_answered_whatever_the_role_is_set_to() -> None:
    def on_disk(server: PostgresServer, **extras: Any) -> bool:
        with SyncGuard(server.dsn()) as guard:
            lease = guard.try_acquire("k", ttl=60)
            assert lease is not None
            guard.release_lease(lease, **extras)
            # Nothing else writes there, and the one that flushes by and by sleeps.
            (flushed,) = server.execute("select pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()")[0]
        return bool(flushed)

    with PostgresServer(settings={"wal_writer_delay": "10s", "autovacuum": "off"}) as server:
        migrate(server.dsn())
        set_all(server.dsn(), {"synchronous_commit": "off"})
        assert on_disk(server, run_key="run", run_ttl=60.0)
        assert not on_disk(server), "the control: a plain release is not waited for"


def test_a_fence_counter_that_is_ahead_of_the_clock_is_told(pg_dsn: str) -> None:
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn, autocommit=True) as conn:
        lease = guard.try_acquire("k", ttl=60)
        assert lease is not None
        lease.release()
        checks = {check.name: check for check in doctor.examine(Settings(dsn=pg_dsn))}
        assert checks["fences"].status == "ok"
        conn.execute("update syncguard_fence_counters set fence = fence + 3600000")
        checks = {check.name: check for check in doctor.examine(Settings(dsn=pg_dsn))}
        assert checks["fences"].status == "warn"
        assert "'fence:k'" in checks["fences"].message
        assert any(f"{ahead} s" in checks["fences"].message for ahead in range(3590, 3601))
