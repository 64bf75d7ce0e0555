"""What a locked task adds, against the least that a durable lock can cost when written by hand.

The floor is psycopg in autocommit on one connection: one durable upsert that takes the key, one delete that does not
wait for the disk. No fence, no key check, no renewal, no holder, nobody told.
"""

from __future__ import annotations

import itertools
import os

import psycopg

from benchmarks.contestants import locked, plain
from benchmarks.measure import Figure, Goal, blocks, estimate, paired
from benchmarks.rig import Rig, application, loop
from celery_syncguard import SyncGuard

NAME = "floor"

TABLE = "create table by_hand (key text primary key, lock_id text unique, expires_at timestamptz)"
ACQUIRE = """
insert into by_hand as l (key, lock_id, expires_at) values (%s, %s, clock_timestamp() + interval '30 s')
on conflict (key) do update set lock_id = excluded.lock_id, expires_at = excluded.expires_at
where l.expires_at < clock_timestamp()
returning lock_id
"""
RELEASE = """
with quietly as (select set_config('synchronous_commit', 'off', true))
delete from by_hand using quietly where key = %s and lock_id = %s
"""


def run(rig: Rig) -> list[Figure]:
    dsn = rig.database()
    app = application(dsn)
    guard = SyncGuard(dsn)
    numbers = itertools.count()
    with psycopg.connect(dsn, autocommit=True) as conn, loop(app) as worker:
        conn.execute(TABLE)

        def by_hand() -> None:
            key, lock_id = f"bench:{next(numbers)}", os.urandom(16).hex()
            conn.execute(ACQUIRE, (key, lock_id)).fetchone()
            conn.execute(RELEASE, (key, lock_id))

        def pair() -> None:
            lease = guard.try_acquire(f"pair:{next(numbers)}")
            assert lease is not None
            lease.release()

        calls = {
            "plain": worker.call(plain(app)),
            "lock": worker.call(locked(app)),
            "by hand": by_hand,
            "try_acquire + release": pair,
        }
        results = blocks(calls, rounds=rig.size(40, 2), repeat=rig.size(100, 5))
    guard.close()
    added = [a - b for a, b in zip(results["lock"], results["plain"], strict=True)]
    parts = {"lock": estimate(added), "by hand": estimate(results["by hand"])}
    parts["try_acquire + release"] = estimate(results["try_acquire + release"])
    return [
        Figure(
            NAME,
            "a locked task's overhead / by hand",
            paired(added, results["by hand"]),
            goal=Goal(at_most=1.25),
            parts=parts,
        ),
        Figure(NAME, "try_acquire + release / by hand", paired(results["try_acquire + release"], results["by hand"])),
    ]
