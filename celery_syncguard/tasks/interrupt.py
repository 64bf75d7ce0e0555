"""Raises `LeaseLost` inside a running body, and nowhere else.

Where the body runs decides how:

  * in a process's main thread (prefork, solo): a signal handler raises, so that a blocked system call ends at once. The
    signal is SIGURG, which is hardly used and ignored by default;
  * in another thread (threads pool), from Python 3.12 on: CPython's asynchronous exception, delivered between two bytecodes.
    Before 3.12 it may strike a thread that the body has just started, and the body waits for that for ever. There a body in a
    thread is not interrupted: it learns of the loss by `lease.check()` or `lease.fenced()`, as with `lock_on_lost="continue"`;
  * in a greenlet (gevent): a throw from the hub, so only when the body gives way.

In each, a C call that does not return cannot be interrupted; the exception comes when it does. The body's end and the
interrupt exclude each other: after `disarm()` nothing is raised any more, and what was raised but not yet delivered is
taken back.

No lock is taken in a thread that may be interrupted: an exception that arrives while `with` is entered would leave it
taken for ever. What decides between the end and the interrupt is always one step that cannot be divided.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import threading
import time
from typing import Any, Protocol

from celery_syncguard.core.events import logger
from celery_syncguard.core.lease import Lease
from celery_syncguard.errors import LeaseLost

try:
    # Every body asks, and the public one first looks for an enum of that name, which takes longer than all the rest.
    from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
except ImportError:  # pragma: no cover - not CPython
    from signal import getsignal as _getsignal

__all__ = ["Interrupt", "interrupt_for"]

_SIGNAL = getattr(signal, "SIGURG", None)

#: Before, a starting thread has the ident of the one that starts it.
_IN_THREADS = sys.version_info >= (3, 12)


class Interrupt(Protocol):
    """One interrupt for one body. Made in the thread that runs the body, before it starts."""

    fired: bool

    def fire(self, lease: Lease) -> None:
        """The lease is lost: raise in the body, unless it has ended. From any thread; at most once.

        Called in the body's own thread it does nothing: the code that noticed the loss raises it there.
        """

    def disarm(self) -> None:
        """The body has ended. Called in its own thread; may be repeated.

        The interrupt may come on the way into the first call, and then never again: the second always gets through.
        """


def interrupt_for() -> Interrupt | None:
    """The interrupt that fits the calling thread; None where there is none."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return _GreenletInterrupt()
    if threading.current_thread() is threading.main_thread() and _SIGNAL is not None:
        return _MainThreadInterrupt()
    if _IN_THREADS:
        return _ThreadInterrupt()
    _tell_of_threads()
    return None


@functools.cache
def _tell_of_threads() -> None:
    logger.warning(
        "bodies in threads are not interrupted before Python 3.12 when their lease is lost: call lease.check() or "
        "lease.fenced(), or use another pool"
    )


#: The bodies that run in the main thread, innermost last. Only the main thread writes it.
_in_main_thread: list[_MainThreadInterrupt] = []
_previous_handler: Any = None


def _on_signal(number: int, frame: Any) -> None:
    # Runs in the main thread, between two bytecodes of whatever runs there.
    for one in _in_main_thread:
        lease = one.lease
        if lease is not None and not one.over:
            one.over = True
            raise lease.loss()
    if callable(_previous_handler):
        _previous_handler(number, frame)


class _MainThreadInterrupt:
    __slots__ = ("fired", "ident", "lease", "over")

    def __init__(self) -> None:
        global _previous_handler  # noqa: PLW0603 - a signal handler belongs to the process
        self.lease: Lease | None = None
        self.fired = False
        self.over = False  # delivered, or the body has ended; only the main thread writes it
        self.ident = threading.get_ident()
        current = _getsignal(_SIGNAL)
        if current is not _on_signal:
            _previous_handler = current
            signal.signal(_SIGNAL, _on_signal)  # type: ignore[arg-type]
        _in_main_thread.append(self)

    def fire(self, lease: Lease) -> None:
        if threading.get_ident() == self.ident or self.fired:
            return
        self.fired = True
        self.lease = lease
        signal.pthread_kill(self.ident, _SIGNAL)  # type: ignore[arg-type]

    def disarm(self) -> None:
        # The flag first: the handler runs in this very thread, so it comes before this step or after it.
        self.over = True
        if self in _in_main_thread:
            _in_main_thread.remove(self)


class _ThreadInterrupt:
    __slots__ = ("_right", "_settled", "fired", "ident")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.fired = False
        self._right = [self]  # the side that pops it decides: to raise, or that nothing is raised any more
        self._settled = False  # what was decided has been done

    def fire(self, lease: Lease) -> None:
        if threading.get_ident() == self.ident:
            return
        try:
            self._right.pop()
        except IndexError:
            return
        self.fired = True
        _raise_in(self.ident, LeaseLost)
        self._settled = True

    def disarm(self) -> None:
        while True:
            try:
                try:
                    self._right.pop()
                except IndexError:
                    while not self._settled:
                        time.sleep(0)  # the other thread is between its two steps
                    if self.fired:
                        # Delivered or not: nothing may be left for whatever this thread does next.
                        _raise_in(self.ident, None)
                else:
                    self._settled = True
            except LeaseLost:
                continue
            return


def _raise_in(ident: int, kind: type[BaseException] | None) -> None:
    target = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), target)


class _GreenletInterrupt:
    __slots__ = ("_ended", "_greenlet", "_hub", "fired")

    def __init__(self) -> None:
        import gevent

        self._greenlet = gevent.getcurrent()
        self._hub = gevent.get_hub()
        self._ended = False
        self.fired = False

    def fire(self, lease: Lease) -> None:
        import gevent

        if self.fired or self._ended or gevent.getcurrent() is self._greenlet:
            return
        self.fired = True
        # All greenlets of a hub take turns, so between the look at `_ended` and the throw nothing can happen.
        self._hub.loop.run_callback_threadsafe(self._throw, lease)

    def _throw(self, lease: Lease) -> None:
        if not self._ended:
            self._greenlet.throw(lease.loss())

    def disarm(self) -> None:
        self._ended = True
