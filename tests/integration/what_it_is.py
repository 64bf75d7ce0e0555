"""An application whose process says what it is when it imports this, and then waits or dies as it is told."""

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import uuid
from pathlib import Path

from celery import Celery

from celery_syncguard.core.process import process_id

app = Celery(__name__, set_as_current=False)


def _target(number):
    try:
        return str(number.readlink())
    except OSError:  # that of the listing itself
        return None


FACTS = {
    "pid": os.getpid(),
    "group and session": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "folder": str(Path.cwd()),
    "environment": dict(os.environ),
    "arguments": [Path(sys.argv[0]).name, *sys.argv[1:]],
    "main": [sys.modules["__main__"].__name__, Path(sys.modules["__main__"].__file__).name],
    "path": sys.path,
    "descriptors": sorted(filter(None, map(_target, Path("/dev/fd").iterdir()))),
    "signals": [str(signal.getsignal(signum)) for signum in sorted(signal.valid_signals())],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "flags": repr(sys.flags),
    "streams": [(one.encoding, one.errors, one.write_through, one.fileno()) for one in (sys.stdout, sys.stderr)],
    "faults are told": faulthandler.is_enabled(),
    "threads": threading.active_count(),
    "ours was imported before": sorted(name for name in sys.modules if name.startswith("celery_syncguard.tasks.task")),
    "chance": [random.random(), uuid.uuid4().hex, process_id().partition(":")[0]],
}
print("FACTS", json.dumps(FACTS), flush=True)
if os.environ.get("WHAT_NEXT") == "wait":
    signal.pause()
