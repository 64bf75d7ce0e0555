"""Celery signals of this library. Connect to them as to Celery's own; the sender is the task unless said otherwise.

- `lock_acquired`: sender=task, lease
- `lock_held`: sender=task, held (`store.Held`), outcome ("retry", "skip", "raise" or "copy"), delay in seconds or None
- `lock_released`: sender=task, lease, released (False: it was no longer ours)
- `lease_lost`: sender=the SyncGuard, lease. Sent once, in the thread that noticed; perhaps after `lock_released`, since the
  body is interrupted first
- `run_answered`: sender=task, done (`store.Done`): the work was done before, so the delivery was answered and not run
- `task_skipped`: sender=task, skipped (`Skipped`)
- `task_duplicate`: sender=task, claim (`store.Claim`): a second copy was not published
- `leader_elected`: sender=the leadership key, term
- `leader_lost`: sender=the leadership key, term
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = [
    "leader_elected",
    "leader_lost",
    "lease_lost",
    "lock_acquired",
    "lock_held",
    "lock_released",
    "run_answered",
    "task_duplicate",
    "task_skipped",
]

lock_acquired = Signal(name="lock_acquired", providing_args={"lease"})
lock_held = Signal(name="lock_held", providing_args={"held", "outcome", "delay"})
lock_released = Signal(name="lock_released", providing_args={"lease", "released"})
lease_lost = Signal(name="lease_lost", providing_args={"lease"})
run_answered = Signal(name="run_answered", providing_args={"done"})
task_skipped = Signal(name="task_skipped", providing_args={"skipped"})
task_duplicate = Signal(name="task_duplicate", providing_args={"claim"})
leader_elected = Signal(name="leader_elected", providing_args={"term"})
leader_lost = Signal(name="leader_lost", providing_args={"term"})
