"""Runs many locked tasks, half of which fail, through Celery's tracer, and prints what has piled up as JSON.

python -m tests.acceptance.apps.many_tasks COUNT
"""

import gc
import json
import logging
import sys
import threading

from celery import Celery
from celery.app.trace import build_tracer

from celery_syncguard import LockedTask
from celery_syncguard.core.lease import Lease
from celery_syncguard.tasks import app_state

app = Celery("many", set_as_current=False)
app.conf.update(syncguard_dsn="memory://", broker_url="memory://", result_backend="disabled://")


@app.task(base=LockedTask, bind=True, lock_key="{number}", shared=False)
def work(self, number):
    payload = bytearray(1000)  # what would pile up, if frames did
    if number % 2:
        raise ValueError(number, len(payload))
    return number


def memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def main(count):
    logging.disable(logging.CRITICAL)
    trace = build_tracer(work.name, work, app=app)
    seen = {"succeeded": 0, "failed": 0, "memory": [], "threads": []}
    for number in range(count):
        result = trace(f"id{number}", (number % 200,), {}, {"headers": {}, "retries": 0, "called_directly": False})
        seen["failed" if result.info is not None else "succeeded"] += 1
        if (number + 1) % (count // 10) == 0:
            app_state.guard_for(app).prune(older=0)  # what has ended, in the store that is this process's own
            gc.collect()
            seen["memory"].append(memory())
            seen["threads"].append(threading.active_count())
    del result
    gc.collect()
    seen["leases"] = sum(isinstance(one, Lease) for one in gc.get_objects())
    seen["requests"] = len(work.request_stack.stack)
    seen["locks"] = len(app_state.guard_for(app).locks())
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]))
