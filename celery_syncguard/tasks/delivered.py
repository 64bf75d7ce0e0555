"""One delivered message, the base of `Delivery`: its keys, and what identifies its call and its attempt."""

from __future__ import annotations

from typing import Any

from celery_syncguard.core.key import RESERVED_PREFIX, shortened
from celery_syncguard.core.store import Held
from celery_syncguard.guard import SyncGuard
from celery_syncguard.tasks import app_state, claims
from celery_syncguard.tasks.claims import Outcome
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.options import TaskOptions
from celery_syncguard.tasks.queues import is_broadcast

__all__ = ["Delivered"]


class Delivered:
    """One message for one task."""

    __slots__ = ("_call_id", "_guard", "header", "options", "outcome", "patience", "request", "task", "waited")

    def __init__(self, task: Any, request: Any, header: Header, options: TaskOptions) -> None:
        self.task = task
        self.request = request
        self.header = header
        self.options = options
        #: What has become of its work so far.
        self.outcome = Outcome.VOID
        #: Seconds that it waits in place for its lock, where it cannot come back.
        self.patience = 0.0
        #: Seconds that an eager call has waited for its lock.
        self.waited = 0.0
        self._guard: SyncGuard | None = None
        self._call_id: str | None = None

    @property
    def guard(self) -> SyncGuard:
        if self._guard is None:
            self._guard = app_state.guard_for(self.task.app)
        return self._guard

    @property
    def who(self) -> str:
        """Task and id, for logs."""
        return f"{self.task.name}[{self.request.id}]"

    @property
    def run_key(self) -> str | None:
        """What a completed run is remembered by."""
        return f"task:{self.request.id}" if self.options.run_once is True else self.header.run_key

    @property
    def lock_key(self) -> str | None:
        """The lock's key. A task with run_once alone is locked by that key: it must not run beside itself."""
        if self.header.lock_key is None and (run_key := self.run_key) is not None:
            return shortened(RESERVED_PREFIX + "run:" + run_key)
        return self.header.lock_key

    @property
    def attempt(self) -> int:
        """Which of the task's attempts this is. What a body put in its own place (`self.replace`) keeps the task's id,
        and comes after all attempts of that.
        """
        replaced = getattr(self.request, "replaced_task_nesting", 0) or 0
        return int(replaced) * 1_000_000 + (self.request.retries or 0)

    @property
    def for_everybody(self) -> bool:
        """Whether each worker got a message of its own (a Broadcast queue): sent again, it would go to all of them."""
        return not self.request.is_eager and is_broadcast(self.task.app, self.request.delivery_info)

    @property
    def call_id(self) -> str:
        """Which publish of the task id this is: a new publish under an old id is new work, not a copy. From a Broadcast queue
        each worker's message is a call of its own.
        """
        if self._call_id is None:
            call: str = self.header.call_id or self.request.id
            self._call_id = f"{call}@{self.request.hostname}" if self.for_everybody else call
        return self._call_id

    @property
    def attempt_key(self) -> str:
        """The key of the completion that says that this attempt has ended, for its copies."""
        return f"attempt:{self.call_id}:{self.attempt}"

    def is_ours(self, held: Held) -> bool:
        """Whether a delivery of this very call holds the lock."""
        return held.task_id == self.request.id and self.call_id == (held.call_id or held.task_id)

    def end_claim(self, outcome: Outcome, *, later: bool = False) -> None:
        """End its claim, if it ends at this outcome, where no lease is released that would end it."""
        key, options = self.header.claim_key, self.options
        if key is not None and outcome.ends(options.dedup_until):
            claims.end(
                self.guard,
                key,
                outcome,
                task_id=self.request.id,
                until=options.dedup_until,
                ttl=options.dedup_ttl,
                later=later,
            )
            # Only now: if a soft time limit strikes before, the end of the delivery ends it.
            self.header = self.header._replace(claim_key=None)
