"""Acquire + release pairs per second, on distinct keys, by 1, 4, 16 and 64 processes.

Beside them pgbench, the C client, making the same two function calls; and pgbench with the two statements of `floor`, which
is as much as this server can do for anybody. Clients and server share the cores.
"""

from __future__ import annotations

import json

from benchmarks import floor
from benchmarks.clients import KEYS
from benchmarks.measure import Figure, Goal, estimate, paired
from benchmarks.rig import Rig, pgbench, processes

NAME = "throughput"

FUNCTIONS = f"""
\\set n random(1, {KEYS})
SELECT to_json(syncguard_acquire('c:' || :client_id || ':' || :n, md5(:client_id || ':' || :n), 30000, 'pgbench', 'p:1'));
SELECT to_json(syncguard_release('c:' || :client_id || ':' || :n, md5(:client_id || ':' || :n)));
"""
BY_HAND = f"""
\\set n random(1, {KEYS})
{floor.ACQUIRE % ("'c:' || :client_id || ':' || :n", "md5(:client_id || ':' || :n)")};
{floor.RELEASE % ("'c:' || :client_id || ':' || :n", "md5(:client_id || ':' || :n)")};
"""


def run(rig: Rig) -> list[Figure]:
    dsn = rig.database()
    rig.pg.execute(floor.TABLE, database=dsn.rpartition("/")[2])
    seconds = 1.0 if rig.quick else 4.0
    counts = (1, 4) if rig.quick else (1, 4, 16, 64)
    most = counts[-2] if len(counts) > 2 else counts[-1]
    ours: dict[int, list[float]] = {count: [] for count in counts}
    theirs: dict[int, list[float]] = {count: [] for count in counts}
    limit: list[float] = []
    for _ in range(rig.size(3, 1)):
        for count in counts:
            ours[count].append(_pairs(dsn, count, seconds))
            theirs[count].append(pgbench(rig, dsn, FUNCTIONS, clients=count, seconds=seconds))
        limit.append(pgbench(rig, dsn, BY_HAND, clients=most, seconds=seconds))
    parts = {f"{count} processes": estimate(ours[count]) for count in counts}
    parts |= {f"pgbench, {count} clients": estimate(theirs[count]) for count in counts}
    parts[f"pgbench, by hand, {most} clients"] = estimate(limit)
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
        Figure(NAME, "pgbench, our functions / by hand", paired(theirs[most], limit), goal=Goal(at_least=0.9)),
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
