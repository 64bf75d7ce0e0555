"""An outbox: what the store must be told, repeated until the store has answered.

A caller that gets no answer must not wait, and what it had to say must not be forgotten. It puts a letter here.

  * `put` takes no lock, so that a destructor and a signal handler may call it.
  * Letters are delivered one at a time, by one thread at a time. A letter stays here until it is done: a call that is
    interrupted is repeated, so calls are such that may be repeated.
  * No answer ends the attempt, as the next letter would only wait for the same server. A letter whose row is in use
    (`StoreUnavailable.busy`) has a pause of its own, and holds up no other; new letters come before those that wait.
  * A letter is dropped when it has nothing to say any more. What is lost otherwise is told: at the end of the process, or
    because too many wait.

Not here: what the letters say. The caller that puts one knows what its loss means.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

from celery_syncguard.core import clock
from celery_syncguard.core.events import logger
from celery_syncguard.core.loop import Loop
from celery_syncguard.core.process import forget_in_children
from celery_syncguard.errors import StoreUnavailable, SyncGuardError

__all__ = ["Letter", "Outbox"]

#: Letters that wait. While the store is away no lease is granted and no claim is made, so they are few; the bound is for
#: the unforeseen.
MAX_WAITING = 10_000

#: Seconds between two attempts while the store does not answer.
_AGAIN = 0.5

#: The longest pause in seconds of a letter whose row is in use.
_LONGEST_PAUSE = 2.0

#: Seconds for which the end of a process waits for the thread's own attempt.
_PATIENCE = 15.0


@dataclasses.dataclass(slots=True, eq=False)
class Letter:
    """One thing to tell.

    Attributes:
        call: tells it. Done when it returns; a SyncGuardError means that it is to be repeated.
        loss: logs what it means that it was not told.
        until: the local instant from which on it has nothing to say.
        about: what it is about; a later letter about the same takes its place. None: it stands alone.
        at: the local instant before which the thread does not deliver it.
    """

    call: Callable[[], object]
    loss: Callable[[], object] = lambda: None
    until: float = math.inf
    about: Any = None
    at: float = -math.inf
    pause: float = 0.0
    told: bool = False

    def tell(self) -> None:
        if not self.told:
            self.told = True
            self.loss()


class Outbox:
    """The letters of one process.

    Arguments:
        name: of the thread that delivers them; None: only its owner does.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self.forget()
        forget_in_children(self)

    def forget(self) -> None:
        """After a fork (and at the start): the parent delivers its own."""
        self._letters: dict[object, Letter] = {}
        # Entered again by the handler of a signal that interrupted its owner, as that of beat.
        self._delivering = threading.RLock()
        self._loop = None if self._name is None else Loop(self._name, self._step)
        self._failing = False

    @property
    def waiting(self) -> list[Letter]:
        return list(self._letters.values())

    def put(self, letter: Letter, *, start: bool = True) -> None:
        """Deliver this letter as soon as possible.

        `start=False` takes no lock, for a destructor or a signal handler. If the thread does not run then, another
        call has to `start` it.
        """
        if len(self._letters) >= MAX_WAITING:
            letter.tell()
            return
        self._letters[self._key(letter)] = letter
        if start:
            self.start()
        if self._loop is not None:
            self._loop.wake()

    def withdraw(self, about: object) -> Letter | None:
        """Take out the letter about this, which is not needed any more; None: it is not here."""
        return self._letters.pop(about, None)

    def start(self) -> None:
        """Start the thread if something waits and it does not run, as after a start that failed. May be repeated."""
        if self._loop is not None and self._letters:
            self._loop.start()

    def deliver(self) -> None:
        """One attempt at every letter, in the calling thread.

        Raises:
            SyncGuardError: not all of them were delivered.
        """
        with self._delivering:
            self._attempt(math.inf)

    def flush(self) -> None:
        """The process ends: one attempt at every letter, then what is left is told. Raises nothing.

        What was told before is not waited for again: several things happen at the end of a process, and each flushes.
        """
        untold = any(not letter.told for letter in self.waiting)
        if untold and self._delivering.acquire(timeout=_PATIENCE):
            try:
                self._attempt(math.inf)
            except SyncGuardError:
                pass  # is told below
            except Exception:  # noqa: BLE001 - a fault of ours, which must not keep the rest from being closed
                logger.exception("could not write at the end what the database has not answered")
            finally:
                self._delivering.release()
        for letter in self.waiting:
            if clock.now() < letter.until:
                letter.tell()

    def close(self) -> None:
        """Flush, and end the thread. May be repeated."""
        self.flush()
        if self._loop is not None:
            self._loop.stop()

    def _key(self, letter: Letter) -> object:
        return letter if letter.about is None else letter.about

    def _attempt(self, now: float) -> None:
        """One attempt at what is due at `now`. Raises the error for which something is left."""
        tried: set[Letter] = set()
        busy: SyncGuardError | None = None
        while True:
            # Those that have waited least come first: each of the others may take up to 2 s in vain.
            due = sorted((one for one in self.waiting if one.at <= now and one not in tried), key=lambda one: one.pause)
            if not due:
                break
            for letter in due:
                tried.add(letter)
                if clock.now() < letter.until:
                    try:
                        letter.call()
                    except BaseException as exc:
                        letter.pause = min(max(0.1, 2 * letter.pause), _LONGEST_PAUSE)
                        letter.at = clock.now() + letter.pause
                        if not isinstance(exc, StoreUnavailable) or not exc.busy:
                            raise
                        busy = exc
                        break  # what has come meanwhile is looked for
                # Taken out only now: the handler of a signal may have raised at any step before.
                key = self._key(letter)
                found = self._letters.pop(key, None)
                if found is not None and found is not letter:
                    self._letters.setdefault(key, found)  # a later one about the same
        if busy is not None:
            raise busy

    def _step(self) -> float | None:
        pause = 0.0
        try:
            with self._delivering:
                self._attempt(clock.now())
        except SyncGuardError as exc:
            level = logger.debug if self._failing else logger.warning
            self._failing = True
            level("%d write(s) to the database have no answer yet and are repeated: %s", len(self._letters), exc)
            # What is held up has a pause of its own.
            pause = 0.0 if isinstance(exc, StoreUnavailable) and exc.busy else _AGAIN
        waiting = self.waiting
        if waiting:
            return max(pause, min(one.at for one in waiting) - clock.now())
        if self._failing:
            self._failing = False
            logger.info("everything that waited for the database is written")
        return None
