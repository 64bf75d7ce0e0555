"""Does it stay quick? Acquire latency as counters and locks grow, and the size of the tables after many cycles.

Between a look and the next, counters are added by the million; a hundred thousand live leases of others are there from
10⁵ counters on. The cycles are made by pgbench, 16 clients on 16,000 keys, with autovacuum as installed; they do not wait
for the disk, which costs time and changes nothing about the size. Autovacuum looks once a minute, and dead rows make a table
grow until it has come: so the cycles go on for four minutes, however many that makes.
"""

from __future__ import annotations

import itertools
import time

import psycopg

from benchmarks.measure import Estimate, Figure, Goal, blocks, estimate, paired
from benchmarks.rig import Rig, pgbench
from benchmarks.throughput import FUNCTIONS
from celery_syncguard import SyncGuard

NAME = "scale"


def run(rig: Rig) -> list[Figure]:
    return [*_latency(rig), _size(rig)]


def _latency(rig: Rig) -> list[Figure]:
    dsn = rig.database()
    control = rig.database()
    levels = (10**3, 10**4) if rig.quick else (10**3, 10**5, 10**6, 10**7)
    numbers = itertools.count()
    figures: list[Figure] = []
    points: list[tuple[float, float]] = []
    with psycopg.connect(dsn, autocommit=True) as conn, SyncGuard(dsn) as large, SyncGuard(control) as small:
        with psycopg.connect(control, autocommit=True) as other:
            _fill(other, 0, 10**3)
            other.execute("vacuum analyze")
        filled = 0
        for level in levels:
            _fill(conn, filled, level)
            if filled == 10**3:
                _hold(conn, rig.size(10**5, 10**3))
            filled = level
            conn.execute("vacuum analyze syncguard_fence_counters")
            conn.execute("vacuum analyze syncguard_locks")
            conn.execute("checkpoint")

            def cycle(guard: SyncGuard, size: int) -> None:
                lease = guard.try_acquire(f"key:{(next(numbers) * 7919) % size}")
                assert lease is not None
                lease.release()

            results = blocks(
                {"here": lambda: cycle(large, filled), "10³": lambda: cycle(small, 10**3)},  # noqa: B023
                rounds=rig.size(30, 2),
                repeat=rig.size(60, 5),
                warm_up=3,
            )
            parts = {name: estimate(values) for name, values in results.items()}
            points.append((level, parts["here"].median))
            figures.append(
                Figure(
                    NAME,
                    f"acquire + release, {level:,} counters / 1,000",
                    paired(results["here"], results["10³"]),
                    goal=Goal(at_most=1.3),
                    parts=parts,
                    points={"acquire + release, µs": list(points)},
                )
            )
    return figures


def _fill(conn: psycopg.Connection, first: int, last: int) -> None:
    conn.execute(
        "insert into syncguard_fence_counters (fence_key, fence, key_debug)"
        f" select 'fence:key:' || n, 1, 'key:' || n from generate_series({first}, {last} - 1) n"
    )


def _hold(conn: psycopg.Connection, count: int) -> None:
    conn.execute(
        "insert into syncguard_locks (key, lock_id, acquired_at_ms, expires_at_ms, fence, user_key)"
        " select 'held:' || n, 'lock:' || n, syncguard_clock_ms(), syncguard_clock_ms() + 86400000, '000000000000001', ''"
        f" from generate_series(1, {count}) n"
    )


def _size(rig: Rig) -> Figure:
    dsn = rig.database()
    name = dsn.rpartition("/")[2]
    cycles = rig.size(10**6, 2000)
    sizes: list[tuple[float, float]] = []
    done = 0.0
    began = time.monotonic()
    least, most = (0.0, 60.0) if rig.quick else (240.0, 600.0)  # a slow machine makes fewer
    hasty = f"{dsn}?options=-csynchronous_commit%3Doff"
    while (spent := time.monotonic() - began) < least or (done < cycles and spent < most):
        seconds = 1.0 if rig.quick else 15.0
        done += pgbench(rig, hasty, FUNCTIONS, clients=16, seconds=seconds) * seconds
        sizes.append((done, _megabytes(rig, name)))
    half = next(size for count, size in sizes if count >= done / 2)
    ratio = sizes[-1][1] / half
    return Figure(
        NAME,
        f"tables and indexes after {round(done):,} cycles / after half of them",
        Estimate(ratio, ratio, ratio, 1),
        goal=Goal(at_most=1.3),
        parts={"size": Estimate(sizes[-1][1], sizes[-1][1], sizes[-1][1], 1)},
        part_unit="MB",
        points={"size, MB": sizes},
    )


def _megabytes(rig: Rig, name: str) -> float:
    query = "select pg_total_relation_size('syncguard_locks') + pg_total_relation_size('syncguard_fence_counters')"
    return float(rig.pg.execute(query, database=name)[0][0]) / 1e6
