"""A refused acquire: how long it takes beside `SELECT 1`, and how much WAL it writes."""

from __future__ import annotations

from benchmarks.measure import Estimate, Figure, Goal, blocks, estimate, paired
from benchmarks.rig import Rig
from celery_syncguard import SyncGuard

NAME = "held"


def run(rig: Rig) -> list[Figure]:
    dsn = rig.database()
    with SyncGuard(dsn) as holder, SyncGuard(dsn) as guard, holder.hold("taken"):
        store = guard.store

        def select_one() -> None:
            with store.connection() as conn:
                conn.execute("SELECT 1").fetchone()

        def refused() -> None:
            assert guard.try_acquire("taken") is None

        results = blocks({"SELECT 1": select_one, "refused": refused}, rounds=rig.size(40, 2), repeat=rig.size(150, 10))
        refusals = 1000
        before = _wal(rig)
        for _ in range(refusals):
            refused()
        written = _wal(rig) - before
    parts = {name: estimate(values) for name, values in results.items()}
    return [
        Figure(
            NAME,
            "a refused acquire / SELECT 1",
            paired(results["refused"], results["SELECT 1"]),
            goal=Goal(at_most=1.6),
            parts=parts,
            floor="one round trip",
        ),
        Figure(NAME, f"WAL of {refusals} refusals", Estimate(written, written, written, 1), "bytes", Goal(at_most=0)),
    ]


def _wal(rig: Rig) -> float:
    """Where the server's log stands. Nobody else writes: the renewals of the held lease are ten seconds apart."""
    return float(rig.pg.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])
