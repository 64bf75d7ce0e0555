"""Client processes of the rows `throughput` and `hot_key`; started by `rig.processes`, they say `ready` and wait for a line.

usage: python -m benchmarks.clients pairs DSN NUMBER SECONDS
       python -m benchmarks.clients wait ours|redis URL KEY THREADS SECONDS
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: How many keys each client of `pairs` uses in turn, and how long a body of `wait` takes in seconds.
KEYS = 1000
BODY = 0.005


def _say(text: str) -> None:
    print(text, flush=True)


def pairs(dsn: str, number: str, seconds: str) -> None:
    """Acquire and release, one after the other; answers with how many pairs."""
    from celery_syncguard import SyncGuard

    with SyncGuard(dsn) as guard:
        keys = [f"bench:{number}:{key}" for key in range(KEYS)]
        _cycle(guard, keys[0])
        _say("ready")
        sys.stdin.readline()
        count = 0
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            _cycle(guard, keys[count % KEYS])
            count += 1
        _say(json.dumps(count))


def _cycle(guard: Any, key: str) -> None:
    lease = guard.try_acquire(key)
    assert lease is not None
    lease.release()


def wait(kind: str, url: str, key: str, threads: str, seconds: str) -> None:
    """Threads that take the same lock again and again; answers with when each body began and ended."""
    with_lock = _ours(url, key) if kind == "ours" else _redis(url, key)
    bodies: list[tuple[float, float]] = []
    over = threading.Event()

    def body() -> None:
        began = time.monotonic()
        time.sleep(BODY)
        # The end is taken before the release: a hand-off begins with it.
        bodies.append((began, time.monotonic()))

    def work() -> None:
        while not over.is_set():
            with_lock(body)

    crew = [threading.Thread(target=work, daemon=True) for _ in range(int(threads))]
    _say("ready")
    sys.stdin.readline()
    for one in crew:
        one.start()
    time.sleep(float(seconds))
    _say(json.dumps(bodies[:]))
    sys.stdin.readline()  # the parent looks at the server before the connections end
    over.set()


def _ours(dsn: str, key: str) -> Callable[[Callable[[], None]], None]:
    from celery_syncguard import SyncGuard

    guard = SyncGuard(dsn)

    def with_lock(body: Callable[[], None]) -> None:
        with guard.hold(key, wait=600):
            body()

    return with_lock


def _redis(url: str, key: str) -> Callable[[Callable[[], None]], None]:
    import redis
    import redis_lock

    client = redis.Redis.from_url(url)

    def with_lock(body: Callable[[], None]) -> None:
        lock = redis_lock.Lock(client, key, expire=30)
        if lock.acquire(timeout=25):
            body()
            lock.release()

    return with_lock


if __name__ == "__main__":
    {"pairs": pairs, "wait": wait}[sys.argv[1]](*sys.argv[2:])
