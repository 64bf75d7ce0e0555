"""What a locked task adds, against the least that a durable lock can cost when written by hand.

By hand is a plain task whose body begins with one durable upsert that takes the key, and ends with a delete that does not
wait for the disk; psycopg in autocommit on one connection, with its defaults (so prepared from the sixth time on). No
fence, no key check, no renewal, no holder, nobody told. Beside it the same without prepared statements, which is what
every pooler carries, and how our calls work.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

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


def advisory(dsn: str) -> Callable[[], None]:
    """A session advisory lock of django-pglock: nothing durable, no lease, no fence, and no pooler."""
    import django
    import psycopg.conninfo
    from django.conf import settings

    facts = psycopg.conninfo.conninfo_to_dict(dsn)
    place = {"HOST": facts["host"], "PORT": facts["port"], "NAME": facts["dbname"], "USER": facts["user"]}
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **place}},
        INSTALLED_APPS=["pgactivity", "pglock"],
    )
    django.setup()
    import pglock

    numbers = itertools.count()

    def lock_and_unlock() -> None:
        with pglock.advisory(f"bench:{next(numbers)}") as acquired:
            assert acquired is not False

    return lock_and_unlock


def run(rig: Rig) -> list[Figure]:
    dsn = rig.database()
    app = application(dsn)
    numbers = itertools.count()
    with (
        psycopg.connect(dsn, autocommit=True) as prepared,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as unprepared,
        SyncGuard(dsn) as guard,
        loop(app) as worker,
    ):
        prepared.execute(TABLE)

        def by_hand(conn: psycopg.Connection, number: int) -> None:
            key, lock_id = f"bench:{number}", os.urandom(16).hex()
            conn.execute(ACQUIRE, (key, lock_id)).fetchone()
            conn.execute(RELEASE, (key, lock_id))

        @app.task(name="bench.prepared")
        def hand(number: int) -> None:
            by_hand(prepared, number)

        @app.task(name="bench.unprepared")
        def hand_unprepared(number: int) -> None:
            by_hand(unprepared, number)

        def pair() -> None:
            lease = guard.try_acquire(f"pair:{next(numbers)}")
            assert lease is not None
            lease.release()

        calls = {
            "plain": worker.call(plain(app)),
            "lock": worker.call(locked(app)),
            "by hand": worker.call(hand),
            "by hand, unprepared": worker.call(hand_unprepared),
            "try_acquire + release, no task": pair,
            "django-pglock, no task": advisory(dsn),
            "by hand, no task": lambda: by_hand(prepared, next(numbers)),
        }
        results = blocks(calls, rounds=rig.size(40, 2), repeat=rig.size(60, 5))
    added = {
        name: [a - b for a, b in zip(results[name], results["plain"], strict=True)]
        for name in ("lock", "by hand", "by hand, unprepared")
    }
    bare = ("try_acquire + release, no task", "by hand, no task", "django-pglock, no task")
    parts = {name: estimate(values) for name, values in added.items()} | {
        name: estimate(results[name]) for name in bare
    }
    return [
        Figure(
            NAME,
            "a locked task's overhead / by hand",
            paired(added["lock"], added["by hand"]),
            goal=Goal(at_most=1.25),
            parts=parts,
        ),
        Figure(NAME, "the same / by hand, unprepared", paired(added["lock"], added["by hand, unprepared"])),
        Figure(NAME, "try_acquire + release / by hand, no task", paired(results[bare[0]], results[bare[1]])),
    ]
