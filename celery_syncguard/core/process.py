"""Which process this is, and state that must not outlive a fork.

The database knows a holder by `process_id`: its pid and a random token. A pid is used again after a while, so each process
draws a token of its own, also each fork. A worker's main process has to name its dead children's leases: so each fork notes
its token in memory that the whole family shares, where its parent finds it as long as no other process of the family has
got the same place.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
import socket
import struct
import sys
import weakref
from pathlib import Path
from typing import Protocol

__all__ = ["child_process_id", "default_holder", "forget_in_children", "process_id"]

_NOTE = struct.Struct("=QQ")  # pid, token
_PLACES = 65_536

#: Anonymous, so that forks see the same memory; of its megabyte only the pages in use are there. A place is that of a pid
#: modulo their number.
_notes = mmap.mmap(-1, _NOTE.size * _PLACES)


def _id(pid: int, token: int) -> str:
    return f"{token:016x}:{pid}"


def _note(pid: int) -> str:
    """A new name for this process, and a note of it for its parent."""
    token = secrets.randbits(64) or 1
    _NOTE.pack_into(_notes, pid % _PLACES * _NOTE.size, pid, token)
    return _id(pid, token)


_pid = os.getpid()
_own = _note(_pid)


def process_id() -> str:
    """The name of this process. Never used again, as its pid may be."""
    global _pid, _own
    pid = os.getpid()
    if pid != _pid:
        _pid, _own = pid, _note(pid)
    return _own


def child_process_id(pid: int) -> str | None:
    """The name of a process that was forked from this family, dead or alive. None: it left no note that is still there."""
    noted, token = _NOTE.unpack_from(_notes, pid % _PLACES * _NOTE.size)
    return _id(pid, token) if noted == pid else None


def default_holder() -> str:
    """Who holds, for people: program, host and pid."""
    return _holder(os.getpid())


@functools.lru_cache(maxsize=1)
def _holder(pid: int) -> str:
    program = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python").name
    text = f"{program} on {socket.gethostname()} pid {pid}"
    # A file name may hold bytes that are no text.
    return text.encode("utf-8", "replace").decode()


class Forgetful(Protocol):
    def forget(self) -> None:
        """Drop everything that belongs to the parent process, without closing what it shares with it."""


_forgetful: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def forget_in_children(item: Forgetful) -> None:
    """Have `item.forget()` called in every process that is forked from this one."""
    _forgetful.add(item)


def _after_fork() -> None:
    global _pid, _own  # noqa: PLW0603
    # Also where the pid is that of the parent, which is dead.
    _pid = os.getpid()
    _own = _note(_pid)
    for item in list(_forgetful):
        item.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
