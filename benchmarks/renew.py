"""One process that holds 1, 100 and 10,000 leases for a minute: how many statements renew them, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from benchmarks.measure import Figure, Goal, estimate
from benchmarks.rig import Rig
from celery_syncguard import SyncGuard
from celery_syncguard.core import clock
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.store import Renewal

NAME = "renew"


def run(rig: Rig) -> list[Figure]:
    ttl, seconds = (6.0, 5.0) if rig.quick else (30.0, 60.0)
    counts = (1, 100, 1000) if rig.quick else (1, 100, 10_000)
    crews = [_Crew(rig.database(), count, ttl) for count in counts]
    for crew in crews:
        crew.start()
    time.sleep(seconds)
    figures = []
    for crew in crews:
        crew.check()
        rounds = sum(renewed for renewed, _ in crew.statements) / crew.count
        times = [took * 1e3 for _, took in crew.statements] or [float("nan")]
        label = f"{crew.count:,} lease{'s' if crew.count > 1 else ''}"
        figures.append(
            Figure(
                NAME,
                f"{label}, statements per round",
                estimate([len(crew.statements) / max(rounds, 1e-9)]),
                "",
                Goal(at_most=1.2),  # a lease that was acquired between two rounds may have a first one of its own
                {"a statement": estimate(times)},
                "ms",
            )
        )
    figures.append(
        Figure(
            NAME,
            f"{label}, a statement",
            estimate(times),
            "ms",
            Goal(at_most=200),
            floor="10,000 row updates, one commit",
        )
    )
    for crew in crews:
        crew.guard.close()
    return figures


class _Crew:
    """Leases that were all granted in one statement, and the statements that renew them."""

    def __init__(self, dsn: str, count: int, ttl: float) -> None:
        self.dsn = dsn
        self.count = count
        self.ttl = ttl
        self.guard = SyncGuard(dsn, timeout=20)
        self.statements: list[tuple[int, float]] = []
        self.leases: list[Lease] = []

    def start(self) -> None:
        renew = self.guard.store.renew

        def timed(renewals: Sequence[Renewal]) -> dict[str, bool | None]:
            began = time.perf_counter()
            answer = renew(renewals)
            self.statements.append((len(renewals), time.perf_counter() - began))
            return answer

        self.guard.store.renew = timed  # type: ignore[method-assign]
        ids = [new_lock_id() for _ in range(self.count)]
        sent_at = clock.now()
        with psycopg.connect(self.dsn) as conn:
            conn.execute(
                "insert into syncguard_locks (key, lock_id, acquired_at_ms, expires_at_ms, fence, user_key, holder_lock_id)"
                " select 'k:' || n, id, syncguard_clock_ms(), syncguard_clock_ms() + %s, lpad(n::text, 15, '0'), '', id"
                " from unnest(%s::text[]) with ordinality as t (id, n)",
                (int(self.ttl * 1000), ids),
            )
        for number, lock_id in enumerate(ids, start=1):
            lease = Lease(
                key=f"k:{number}",
                lock_id=lock_id,
                fence=number,
                ttl=self.ttl,
                sent_at=sent_at,
                holder="",
                keeper=self.guard,
            )
            self.leases.append(lease)
            self.guard._renewer.add(lease)

    def check(self) -> None:
        for lease in self.leases:
            lease.check()
