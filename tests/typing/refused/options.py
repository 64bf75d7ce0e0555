"""What a checker refuses, with celery-types installed and without.

Each line with an error ends in a mark, `E:`, and words of the error; where mypy's and pyright's differ, first mypy's, then pyright's.
"""

from __future__ import annotations

from celery_syncguard import LockedTask, LockOptions, PublishedResult


class WrongValues(LockedTask):
    lock_key = 7  # E: Incompatible types | not assignable
    lock_ttl = "5"  # E: Incompatible types | not assignable
    lock_wait = None  # E: Incompatible types | not assignable
    lock_on_held = "ignore"  # E: Incompatible types | not assignable
    lock_retry_delay = (1, 2, 3)  # E: Incompatible types | not assignable
    lock_on_lost = True  # E: Incompatible types | not assignable
    lock_on_unavailable = "skip"  # E: Incompatible types | not assignable
    lock_min_hold = "1"  # E: Incompatible types | not assignable
    lock_max_deaths = 2.5  # E: Incompatible types | not assignable
    dedup_key = 7  # E: Incompatible types | not assignable
    dedup_until = "later"  # E: Incompatible types | not assignable
    dedup_ttl = "3600"  # E: Incompatible types | not assignable
    dedup_on_duplicate = None  # E: Incompatible types | not assignable
    run_once = 3.5  # E: Incompatible types | not assignable
    run_once_ttl = None  # E: Incompatible types | not assignable


class ReturnsNoText(LockedTask):
    def lock_key(self, args: object, kwargs: object) -> int:  # E: incompatible with supertype | overrides symbol
        return 7


class AProperty(LockedTask):
    @property
    def lock_key(self) -> str:  # E: read-only property | overrides symbol
        return "report"


def publish(task: LockedTask) -> None:
    task.apply_async((), lock_tll=5)  # E: lock_tll
    task.apply_async((), dedupe_key="k")  # E: dedupe_key
    task.apply_async((), contdown=5)  # E: contdown
    task.apply_async((), lock_ttl="5")  # E: lock_ttl
    task.apply_async((), lock_ttl=None)  # E: lock_ttl
    task.apply_async((), lock_on_held="wait")  # E: lock_on_held
    task.apply_async((), lock_retry_delay=("1", "60"))  # E: lock_retry_delay
    task.apply_async((), lock_max_deaths="5")  # E: lock_max_deaths
    task.apply_async((), dedup_key=7)  # E: dedup_key
    task.apply_async((), countdown="5")  # E: countdown
    task.apply_async("abc")
    task.apply_async(7)  # E: apply_async
    task.lock_ttl = 5  # E: via instance | through a class instance

    task.s().set(lock_tll=5)  # E: lock_tll
    task.s().set(lock_ttl="5")  # E: lock_ttl
    task.si().apply_async(lock_on_held="wait")  # E: lock_on_held

    misspelt: LockOptions = {"lock_tll": 5}  # E: lock_tll
    mistyped: LockOptions = {"lock_ttl": "5"}  # E: lock_ttl | Seconds
    print(misspelt, mistyped, LockOptions(lock_ttl="5"))  # E: lock_ttl


def read(result: PublishedResult) -> None:
    text: str = result.duplicate  # E: bool
    holder: str = result.holder  # E: None
    print(text, holder)
