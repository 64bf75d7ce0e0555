"""Raises `LeaseLost` inside a running body, and nowhere else.

Where the body runs decides how:

  * in a process's main thread (prefork, solo): a signal handler raises, so that a blocked system call ends at once. The
    signal is SIGURG, which nobody uses and whose default is to be ignored;
  * in another thread (threads pool): CPython's asynchronous exception, delivered between two bytecodes;
  * in a greenlet (gevent): a throw from the hub.

In each, a C call that does not return cannot be interrupted; the exception comes when it does. The body's end and the
interrupt exclude each other: after `disarm()` nothing is raised any more, and what was raised but not yet delivered is
taken back.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import Any, Protocol

from celery_syncguard.errors import LeaseLost
from celery_syncguard.lease import Lease

__all__ = ["Interrupt", "interrupt_for"]

_SIGNAL = getattr(signal, "SIGURG", None)


class Interrupt(Protocol):
    """One interrupt for one body. Made in the thread that runs the body, before it starts."""

    def fire(self, lease: Lease) -> None:
        """The lease is lost: raise in the body, unless it has ended. From any thread; at most once."""

    def disarm(self) -> None:
        """The body has ended. Called in its own thread; may be repeated."""


def interrupt_for() -> Interrupt:
    """The interrupt that fits the calling thread."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return _GreenletInterrupt()
    if threading.current_thread() is threading.main_thread() and _SIGNAL is not None:
        return _MainThreadInterrupt()
    return _ThreadInterrupt()


#: The bodies that run in the main thread, innermost last. Only the main thread writes it.
_in_main_thread: list[_MainThreadInterrupt] = []
_previous_handler: Any = None


def _on_signal(number: int, frame: Any) -> None:
    # Runs in the main thread, between two bytecodes of whatever runs there.
    for one in _in_main_thread:
        lease = one.lease
        if lease is not None and not one.delivered:
            one.delivered = True
            raise lease.loss()
    if callable(_previous_handler):
        _previous_handler(number, frame)


class _MainThreadInterrupt:
    __slots__ = ("delivered", "ident", "lease")

    def __init__(self) -> None:
        global _previous_handler
        self.lease: Lease | None = None
        self.delivered = False
        self.ident = threading.get_ident()
        current = signal.getsignal(_SIGNAL)  # type: ignore[arg-type]
        if current is not _on_signal:
            _previous_handler = current
            signal.signal(_SIGNAL, _on_signal)  # type: ignore[arg-type]
        _in_main_thread.append(self)

    def fire(self, lease: Lease) -> None:
        self.lease = lease
        if threading.get_ident() != self.ident and not self.delivered:
            signal.pthread_kill(self.ident, _SIGNAL)  # type: ignore[arg-type]

    def disarm(self) -> None:
        # First the flag, which needs no call and therefore cannot be interrupted half-way.
        self.delivered = True
        if self in _in_main_thread:
            _in_main_thread.remove(self)


class _ThreadInterrupt:
    __slots__ = ("ended", "fired", "ident", "mutex")

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.ident = threading.get_ident()
        self.fired = False
        self.ended = False

    def fire(self, lease: Lease) -> None:
        if threading.get_ident() == self.ident:
            return
        with self.mutex:
            if not self.ended and not self.fired:
                self.fired = True
                _raise_in(self.ident, LeaseLost)

    def disarm(self) -> None:
        while True:
            try:
                with self.mutex:
                    self.ended = True
                    if self.fired:
                        # Delivered or not: nothing may be left for whatever this thread does next.
                        _raise_in(self.ident, None)
                return
            except LeaseLost:
                continue


def _raise_in(ident: int, kind: type[BaseException] | None) -> None:
    target = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), target)


class _GreenletInterrupt:
    __slots__ = ("ended", "fired", "greenlet", "hub")

    def __init__(self) -> None:
        import gevent

        self.greenlet = gevent.getcurrent()
        self.hub = gevent.get_hub()
        self.fired = False
        self.ended = False

    def fire(self, lease: Lease) -> None:
        import gevent

        if self.fired or self.ended or gevent.getcurrent() is self.greenlet:
            return
        self.fired = True
        # All greenlets of a hub take turns, so between the look at `ended` and the throw nothing can happen.
        self.hub.loop.run_callback_threadsafe(self._throw, lease)

    def _throw(self, lease: Lease) -> None:
        if not self.ended:
            self.greenlet.throw(lease.loss())

    def disarm(self) -> None:
        self.ended = True
