"""Acquire + release pairs per second, on distinct keys, by 1, 4, 16 and 64 processes.

Beside them pgbench, the C client, making the same two function calls; and pgbench with plain statements that
change the same rows of the same tables (a counter, a lock with its three indexes) and promise nothing else, which is as much as
this server can do for anybody. Clients and server share the cores.
"""

from __future__ import annotations

import json

from benchmarks.clients import KEYS
from benchmarks.measure import Figure, Goal, estimate, paired
from benchmarks.rig import Rig, pgbench, processes

NAME = "throughput"

FUNCTIONS = f"""
\\set n random(1, {KEYS})
SELECT to_json(syncguard_acquire('c:' || :client_id || ':' || :n, md5(:client_id || ':' || :n), 30000, 'pgbench', 'p:1'));
SELECT to_json(syncguard_release('c:' || :client_id || ':' || :n, md5(:client_id || ':' || :n)));
"""
PLAIN = f"""
\\set n random(1, {KEYS})
WITH counter AS (
  INSERT INTO syncguard_fence_counters AS c (fence_key, fence, key_debug)
  VALUES ('plain ' || :client_id::text || ':' || :n::text, 1, '')
  ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence + 1 RETURNING c.fence
), now AS (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms)
INSERT INTO syncguard_locks AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)
SELECT 'p:' || :client_id::text || ':' || :n::text, md5('p' || :client_id::text || ':' || :n::text), ms + 30000, ms, lpad(fence::text, 15, '0'), ''
FROM counter, now
ON CONFLICT (key) DO UPDATE SET lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms, fence = excluded.fence
WHERE l.expires_at_ms < excluded.acquired_at_ms
RETURNING l.fence;
WITH quietly AS (SELECT set_config('synchronous_commit', 'off', TRUE))
DELETE FROM syncguard_locks USING quietly
WHERE key = 'p:' || :client_id::text || ':' || :n::text AND lock_id = md5('p' || :client_id::text || ':' || :n::text);
"""


def run(rig: Rig) -> list[Figure]:
    dsn = rig.database()
    seconds = 1.0 if rig.quick else 3.0
    counts = (1, 4) if rig.quick else (1, 4, 16, 64)
    most = counts[-2] if len(counts) > 2 else counts[-1]
    ours: dict[int, list[float]] = {count: [] for count in counts}
    theirs: dict[int, list[float]] = {count: [] for count in counts}
    limit: list[float] = []
    for _ in range(rig.size(3, 1)):
        for count in counts:
            ours[count].append(_pairs(dsn, count, seconds))
            theirs[count].append(pgbench(rig, dsn, FUNCTIONS, clients=count, seconds=seconds))
        limit.append(pgbench(rig, dsn, PLAIN, clients=most, seconds=seconds))
    parts = {f"{count} processes": estimate(ours[count]) for count in counts}
    parts |= {f"pgbench, {count} clients": estimate(theirs[count]) for count in counts}
    parts[f"pgbench, plain statements, {most} clients"] = estimate(limit)
    points = {
        "ours": [(count, parts[f"{count} processes"].median) for count in counts],
        "pgbench, same calls": [(count, parts[f"pgbench, {count} clients"].median) for count in counts],
    }
    return [
        Figure(
            NAME,
            f"{most} processes / pgbench, same calls",
            paired(ours[most], theirs[most]),
            goal=Goal(at_least=0.6),
            parts=parts,
            part_unit="pairs/s",
            floor="two commits, one waits for the disk",
            points=points,
        ),
        Figure(NAME, "pgbench, our functions / plain statements", paired(theirs[most], limit), goal=Goal(at_least=0.9)),
    ]


def _pairs(dsn: str, count: int, seconds: float) -> float:
    arguments = [("pairs", dsn, str(number), str(seconds)) for number in range(count)]
    with processes("benchmarks.clients", arguments) as clients:
        for client in clients:
            assert client.stdout.readline() == "ready\n"
        for client in clients:
            client.stdin.write("go\n")
            client.stdin.flush()
        return sum(json.loads(client.stdout.readline()) for client in clients) / seconds
