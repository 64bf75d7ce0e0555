"""What we use of billiard, Celery's multiprocessing, that it does not document, and nothing else."""

from __future__ import annotations

import os
import signal

from celery_syncguard.core.libraries import find

__all__ = ["cause_of", "parent_pid", "term_signal"]


def cause_of(exc: BaseException) -> BaseException:
    """What a body raised, where billiard has put an exception around it that carries its traceback.

    Relies on `billiard.einfo.ExceptionWithTraceback.exc`. Without it: as it came, so that the claim of a process that exited
    by itself ends at its ttl.
    """
    wrapper = find("billiard.einfo:ExceptionWithTraceback")
    found: BaseException = getattr(exc, "exc", exc) if wrapper is not None and isinstance(exc, wrapper) else exc
    return found


def parent_pid() -> int:
    """The process that has started this one, noted before the fork: it may be gone by now.

    Relies on `_parent_pid` of billiard's current process, its only name for it. Without it: the parent as it is now.
    """
    process = find("billiard.process:current_process")
    found: int | None = None if process is None else getattr(process(), "_parent_pid", None)
    return found or os.getppid()


def term_signal() -> int:
    """The signal by which billiard ends a process. Relies on `billiard.common.TERM_SIGNAL`. Without it: SIGTERM."""
    return int(find("billiard.common:TERM_SIGNAL") or signal.SIGTERM)
