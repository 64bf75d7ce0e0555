"""Statements are prepared where nobody is in between, and nowhere else; what is gone costs nobody an answer."""

from __future__ import annotations

import psycopg
import pytest

from celery_syncguard import SyncGuard

PREPARED = "select name, statement from pg_prepared_statements order by prepare_time"


def pairs(guard: SyncGuard, count: int) -> None:
    for number in range(count):
        lease = guard.try_acquire(f"k{number}")
        assert lease is not None
        assert lease.release()


def prepared(guard: SyncGuard) -> list[tuple[str, str]]:
    with guard.store.connection() as conn:  # type: ignore[attr-defined]
        return list(conn.execute(PREPARED).fetchall())


def test_a_direct_connection_prepares_each_statement_at_its_second_call(pg_dsn: str) -> None:
    with SyncGuard(pg_dsn) as guard:
        pairs(guard, 1)
        assert prepared(guard) == [], "a connection that makes one call has nothing to gain"
        pairs(guard, 3)
        names, statements = zip(*prepared(guard), strict=True)
        assert ["acquire" in statements[0], "release" in statements[1], len(statements)] == [True, True, 2]
        assert len(set(names)) == 2


def test_nothing_is_prepared_behind_a_pooler(pgbouncer_dsn: str) -> None:
    with SyncGuard(pgbouncer_dsn) as guard:
        pairs(guard, 5)
        assert prepared(guard) == []
        with guard.store.connection() as conn:  # type: ignore[attr-defined]
            conn._direct = True
        pairs(guard, 2)
        assert prepared(guard) != [], "the control: had it not known of the pooler"


@pytest.mark.parametrize("gone", ["deallocate all", "discard all"])
def test_a_prepared_statement_that_is_gone_is_not_missed(pg_dsn: str, gone: str) -> None:
    """As behind a pooler that cannot be told from a server."""
    with SyncGuard(pg_dsn) as guard, guard.hold("held"):
        pairs(guard, 3)
        assert len(prepared(guard)) == 2
        with guard.store.connection() as conn:  # type: ignore[attr-defined]
            conn.execute(gone)
        pairs(guard, 3)
        assert guard.try_acquire("held") is None
        assert prepared(guard) == [], "it was not tried again"


def test_functions_that_a_migration_replaces_are_seen_by_prepared_statements(pg_dsn: str) -> None:
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn, autocommit=True) as admin:
        pairs(guard, 3)
        assert len(prepared(guard)) == 2
        (definition,) = admin.execute("select pg_get_functiondef('syncguard_release'::regproc)").fetchone()
        signature = admin.execute("select 'syncguard_release'::regproc::oid::regprocedure::text").fetchone()[0]
        with admin.transaction():
            admin.execute(f"drop function {signature}")
            admin.execute(definition)
        pairs(guard, 3)
        with admin.transaction():
            admin.execute(f"drop function {signature}")
            admin.execute(definition.replace("return true;", "return false;"))
        lease = guard.try_acquire("k")
        assert lease is not None
        assert lease.release() is False, "the control: the new one is what runs"
