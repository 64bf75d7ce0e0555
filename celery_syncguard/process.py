"""Which process this is, and state that must not outlive a fork.

A worker's main process knows its children by pid; the database knows a holder by `process_id`. The random token is drawn
in the first process that imports this module and is inherited by its forks, so that a parent can name its child's leases
and nobody else's.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
import weakref
from pathlib import Path
from typing import Protocol

__all__ = ["default_holder", "forget_in_children", "process_id"]

_FAMILY = secrets.token_hex(8)


def process_id(pid: int | None = None) -> str:
    """The name of a process of this family: this one, or the child with that pid."""
    return f"{_FAMILY}:{pid or os.getpid()}"


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
    for item in list(_forgetful):
        item.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
