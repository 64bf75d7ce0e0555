"""The classes of everything that this library raises. An error has its facts as attributes. Its text is written where it is
raised, and says what is, since when, and what to do.

Everyday answers (a lock that is held, a release that came too late) are values. They are raised only where the caller
asked for an error (`lock_on_held="raise"`, `hold(...)` without success).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "DuplicateTask",
    "ImproperlyConfigured",
    "InvalidKey",
    "LeaseLost",
    "LeaseNotVisible",
    "LockHeld",
    "NoLease",
    "SchemaBehind",
    "StoreUnavailable",
    "SyncGuardError",
    "TooManyDeaths",
    "one_line",
]


def one_line(text: str) -> str:
    """Text that can neither break a line nor move a cursor, whatever a task id, a key or a holder's name contains."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class SyncGuardError(Exception):
    """The root of all errors here. `facts` are set as attributes and survive pickling.

    The message is one line. It goes into logs and results of other processes, and may quote text of other programs.
    """

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(one_line(message))
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[SyncGuardError], args: tuple[Any, ...], facts: dict[str, Any]) -> SyncGuardError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class ImproperlyConfigured(SyncGuardError, ValueError):
    """An invalid setting, option or argument. Raised before any I/O."""


class InvalidKey(SyncGuardError, ValueError):
    """A key that cannot name a lock: empty, too long, not text, reserved. Raised before any I/O."""


class LockHeld(SyncGuardError):
    """Another lease is live on the key.

    Attributes: `key`; `holder` (text for people or None); `task_id` of the holder or None; `lock_id` and `fence`
    (None if it is no number) of its lease; `since` seconds since the holder acquired; `remaining` seconds
    until its lease ends unless it renews.
    """

    key: str = ""
    holder: str | None = None
    task_id: str | None = None
    lock_id: str | None = None
    fence: int | None = None
    since: float | None = None
    remaining: float | None = None


class LeaseLost(SyncGuardError):
    """This process may no longer act on the lease. Attributes: `key`, `lock_id`, `fence`, `reason`."""

    key: str = ""
    lock_id: str = ""
    fence: int = 0
    reason: str = ""


class LeaseNotVisible(SyncGuardError, RuntimeError):
    """The lease is alive, but the connection to fence does not see it: it leads to another database or schema, or its
    snapshot is older than the lease. Roll its transaction back.

    Attributes: `key`; `here`, the place that the connection leads to; `there`, the one in which the lease lives.
    """

    key: str = ""
    here: str = ""
    there: str = ""


class NoLease(SyncGuardError, RuntimeError):
    """There is no lease here: the code does not run under a lock, or the lease was released."""


class DuplicateTask(SyncGuardError):
    """The work is already queued or running. Attributes: `task_id`, `key`, `holder`, `age` in seconds."""

    task_id: str = ""
    key: str = ""
    holder: str | None = None
    age: float = 0.0


class TooManyDeaths(SyncGuardError):
    """The process that ran this task died too often in a row. Attributes: `task_id`, `key`, `deaths`."""

    task_id: str = ""
    key: str = ""
    deaths: int = 0


class StoreUnavailable(SyncGuardError):
    """The database did not answer, or refused: it is unknown whether the statement took effect.

    Attributes: `sent`, false if it certainly did not: no connection was available, or `busy` is true, since the statement
    waited two seconds, its bound, for a lock of another transaction.
    """

    sent: bool = True
    busy: bool = False


class SchemaBehind(SyncGuardError):
    """The database lacks our schema, or has an older or an edited one. The message names the command that helps."""
