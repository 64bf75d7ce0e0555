"""Interrupts a body that does nothing but start threads; see `test_interrupt_race`.

usage: python -m tests.integration.thread_births ours|bare SECONDS

Says "hangs" as soon as the body starts no more of them, or else how often it was interrupted.
"""

import ctypes
import os
import random
import sys
import threading
import time

from celery_syncguard.errors import LeaseLost
from celery_syncguard.tasks.interrupt import _raise_in

started = interrupted = 0


def bare(ident, kind):
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def body():
    global started, interrupted  # noqa: PLW0603 - only this thread writes them
    while True:
        try:
            while True:
                threading.Thread(target=int).start()
                started += 1
        except LeaseLost:
            interrupted += 1


def main(how, seconds):
    raise_in = {"ours": _raise_in, "bare": bare}[how]
    # Threads take turns as often as possible, which is what a busy machine makes of them.
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        raise_in(thread.ident, LeaseLost)
        time.sleep(random.uniform(0, 0.0005))
        before, give_up_at = started, time.monotonic() + 5
        while started == before:
            if time.monotonic() > give_up_at:
                return "hangs"
            time.sleep(0.0005)
    return f"interrupted {interrupted} times"


if __name__ == "__main__":
    print(main(sys.argv[1], float(sys.argv[2])), flush=True)
    os._exit(0)  # not for a body that hangs
