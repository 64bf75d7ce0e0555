"""Which process this is, and state that must not outlive a fork.

The database knows a holder by `process_id`: its pid and a random token, since the system uses a pid again. Each fork draws
a token of its own. A worker's main process has to name the leases of its dead children, so each fork notes its token in
memory that all forks share, where its parent finds it until another process of the family takes the same place.
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

#: Anonymous, so forks see the same memory; of its megabyte only the pages in use exist. A process has the place of its pid
#: modulo their number.
_notes = mmap.mmap(-1, _NOTE.size * _PLACES)


def _id(pid: int, token: int) -> str:
    return f"{token:016x}:{pid}"


def _note(pid: int) -> str:
    """A new name for this process, and a note of it for its parent."""
    token = secrets.randbits(64) or 1
    _NOTE.pack_into(_notes, pid % _PLACES * _NOTE.size, pid, token)
    return _id(pid, token)


def _draw() -> None:
    global _pid, _own
    pid = os.getpid()
    _own, _pid = _note(pid), pid


_pid = os.getpid()
_own = _note(_pid)


def process_id() -> str:
    """The name of this process. Unlike its pid it is never used again."""
    if os.getpid() != _pid:
        _draw()
    return _own


def child_process_id(pid: int) -> str | None:
    """The name of a process that was forked from this family, dead or alive. None: its note is gone, or it left none."""
    noted, token = _NOTE.unpack_from(_notes, pid % _PLACES * _NOTE.size)
    return _id(pid, token) if noted == pid else None


def default_holder() -> str:
    """Who holds, for people: program, host and pid."""
    return _holder(os.getpid())


@functools.lru_cache(maxsize=1)
def _holder(pid: int) -> str:
    program = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python").name
    text = f"{program} on {socket.gethostname()} pid {pid}"
    # A file name may have bytes that are no text.
    return text.encode("utf-8", "replace").decode()


class Forgetful(Protocol):
    def forget(self) -> None:
        """Drop everything that belongs to the parent process; close nothing that both share."""


_forgetful: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def forget_in_children(item: Forgetful) -> None:
    """Have `item.forget()` called in every process that is forked from this one."""
    _forgetful.add(item)


def _after_fork() -> None:
    _draw()  # always: the child may have the pid of its dead parent
    for item in list(_forgetful):
        item.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
