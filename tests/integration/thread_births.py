"""Raises exceptions in a thread that does nothing but start others; see `test_interrupt_race`.

usage: python -m tests.integration.thread_births SECONDS

Says "hangs" as soon as it waits for ever for a thread that it has started, or else how often it was interrupted.
"""

import ctypes
import os
import random
import sys
import threading
import time

from celery_syncguard.errors import LeaseLost

started = interrupted = 0


def body():
    global started, interrupted  # noqa: PLW0603 - only this thread writes them
    while True:
        try:
            while True:
                threading.Thread(target=int, daemon=True).start()
                started += 1
        except Exception:  # threading makes others of it
            interrupted += 1


def main(seconds):
    # Threads take turns as often as possible, which is what a busy machine makes of them.
    sys.setswitchinterval(1e-5)
    threading.excepthook = lambda _: None  # of a body that is struck where it catches nothing
    end = time.monotonic() + seconds
    thread = None
    while time.monotonic() < end:
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=body, daemon=True)
            thread.start()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(LeaseLost))
        time.sleep(random.uniform(0, 0.0005))
        before, give_up_at = started, time.monotonic() + 5
        while started == before and thread.is_alive():
            if time.monotonic() > give_up_at:
                return "hangs"
            time.sleep(0.0005)
    return f"interrupted {interrupted} times"


if __name__ == "__main__":
    print(main(float(sys.argv[1])), flush=True)
    os._exit(0)  # not for a body that hangs
