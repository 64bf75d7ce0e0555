"""Makes SIGTERM and SIGINT wait for a few milliseconds, in which a slot is sent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["undisturbed"]


@contextmanager
def undisturbed() -> Iterator[None]:
    """SIGTERM and SIGINT wait until the block is done; a second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    handlers = {signum: handler for signum, handler in handlers.items() if handler is not None}
    waiting: list[int] = []
    over = False

    def later(signum: int, frame: Any) -> None:
        handler = handlers[signal.Signals(signum)]
        if (waiting or over) and callable(handler):
            handler(signum, frame)
        else:
            waiting.append(signum)

    # A handler that is not replaced yet, or is restored already, may raise: then the other signal must not wait for ever.
    try:
        for signum in handlers:
            signal.signal(signum, later)
        yield
    finally:
        over = True
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if waiting:
            os.kill(os.getpid(), waiting[0])
