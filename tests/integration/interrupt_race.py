"""Thousands of short bodies whose leases are lost at random moments around their ends. Run as a program by a test.

    python -m tests.integration.interrupt_race {main,threads,gevent} ROUNDS {whole,disarmless}

"disarmless" takes our protection away, the end of a body that forbids the interrupt, and has to show the fault. Prints
what happened as JSON. A program of its own, because what escapes may land anywhere.
"""

import sys

if sys.argv[1:2] == ["gevent"]:
    from gevent import monkey

    monkey.patch_all()

import collections
import json
import os
import random
import threading
import time

from celery import Celery

from celery_syncguard import LeaseLost, LockedTask, signals
from celery_syncguard.tasks import app_state, delivery, interrupt

#: Seconds that a body or the delay of a loss may last.
LONGEST = 0.0004 if sys.argv[1:2] == ["main"] else 0.003

seen = collections.Counter()
app = Celery("race", set_as_current=False)
app.conf.update(syncguard_dsn="memory://", task_always_eager=False)


def pause_for(seconds):
    """Busy, so that there are bytecodes to be interrupted between, giving way as a body under gevent does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        give_way()


def give_way():
    if "gevent" in sys.modules:
        time.sleep(0)  # gevent's


@app.task(base=LockedTask, bind=True, lock_key="{key}", lock_ttl=600)
def short(self, key, seconds):
    try:
        pause_for(seconds)
    finally:
        seen["bodies"] += 1


@app.task(base=LockedTask, bind=True, lock_key="other:{key}", lock_ttl=600)
def bystander(self, key):
    pause_for(LONGEST / 5)


@app.task
def plain():
    pause_for(LONGEST / 5)


def on_acquired(sender, lease, **_):
    if sender.name == short.name and random.random() < 0.9:
        threading.Thread(target=lose_after, args=(random.uniform(0, LONGEST), lease), daemon=True).start()


def lose_after(seconds, lease):
    pause_for(seconds)
    lease.lose("sabotage")


def rounds(name, count):
    for number in range(count):
        try:
            one_round(f"{name}-{number}")
        except LeaseLost:
            seen["escaped"] += 1


def one_round(key):
    result = short.apply((key, random.uniform(0, LONGEST)))
    if result.state == "FAILURE":
        facts = isinstance(result.result, LeaseLost) and result.result.key == key and result.result.reason == "sabotage"
        seen["interrupted" if facts else "failed otherwise"] += 1
        if not facts:
            seen[repr(result.result)] += 1
    else:
        seen["ended"] += 1
    for other in (bystander.apply((key,)), plain.apply()):
        seen["bystanders"] += 1
        if other.state != "SUCCESS":
            seen["bystanders hit"] += 1
    pause_for(LONGEST / 10)


def main():
    where, count, protection = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if protection == "disarmless":
        for kind in (interrupt._MainThreadInterrupt, interrupt._ThreadInterrupt, interrupt._GreenletInterrupt):
            kind.disarm = lambda self: None
    signals.lock_acquired.connect(on_acquired)
    app.finalize()
    sys.setswitchinterval(1e-5)
    if where == "main":
        rounds("main", count)
    else:
        workers = [threading.Thread(target=rounds, args=(str(one), count // 4), daemon=True) for one in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            # Without protection an interrupt may leave a lock taken, for which somebody then waits for ever.
            worker.join(10 if protection == "disarmless" else 90)
            seen["stuck"] += worker.is_alive()
        if seen["stuck"]:
            print(json.dumps(seen), flush=True)
            os._exit(0)
    store = app_state.guard_for(app).store
    print(
        json.dumps(
            {
                **seen,
                "locks left": len(store.locks()),
                "armed left": len(interrupt._in_main_thread),
                "running left": len(delivery._running),
                "requests left": len(short.request_stack.stack),
            }
        )
    )


if __name__ == "__main__":
    main()
