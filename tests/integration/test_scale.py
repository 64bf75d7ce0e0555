"""Many leases in one process cost little more than one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import psycopg

from celery_syncguard import Lease, SyncGuard
from celery_syncguard.core import clock
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Renewal
from tests.fixtures.polling import poll

LEASES = 10_000
TTL = 6.0


def test_ten_thousand_leases_are_renewed_by_one_statement_a_round(pg_dsn: str) -> None:
    rounds: list[int] = []
    with SyncGuard(pg_dsn, timeout=20) as guard:
        renew = guard.store.renew

        def counting(renewals: Sequence[Renewal]) -> dict[str, bool | None]:
            answer = renew(renewals)
            assert list(answer.values()) == [True] * len(renewals)
            rounds.append(len(renewals))
            return answer

        guard.store.renew = counting  # type: ignore[method-assign]
        before = threading.active_count()
        leases = rows_of(pg_dsn, guard)
        for lease in leases:
            guard._renewer.add(lease)
        assert threading.active_count() <= before + 2
        assert guard._renewer.count == LEASES
        poll(lambda: sum(rounds) >= 3 * LEASES, timeout=40)
        print("leases in each statement:", rounds)
        for lease in leases:
            lease.check()
    # Three rounds. Leases that come while a round is under way, as on a busy machine, have rounds of their own.
    assert len(rounds) <= 6


def rows_of(dsn: str, guard: SyncGuard) -> list[Lease]:
    """Leases that were all granted now, without ten thousand acquires."""
    ids = [new_lock_id() for _ in range(LEASES)]
    sent_at = clock.now()
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "insert into syncguard_locks"
            " (key, lock_id, acquired_at_ms, expires_at_ms, fence, user_key, holder_lock_id)"
            " select 'k:' || n, id, syncguard_clock_ms(), syncguard_clock_ms() + %s, lpad(n::text, 15, '0'), '', id"
            " from unnest(%s::text[]) with ordinality as t (id, n)",
            (int(TTL * 1000), ids),
        )
    return [
        Lease(key=f"k:{n}", lock_id=one, fence=n, ttl=TTL, sent_at=sent_at, holder="me", keeper=guard)
        for n, one in enumerate(ids, start=1)
    ]
