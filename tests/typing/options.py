"""Options of a task as a user writes them: what a checker accepts, with celery-types installed and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal

from typing_extensions import assert_type

from celery_syncguard import Fence, Lease, LockedTask, LockOptions, PublishedResult
from celery_syncguard.dedup import send_task
from celery_syncguard.hlc import HybridLogicalClock


def by_owner(task: LockedTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return f"{task.name}:{args[0]}"


class Base(LockedTask):
    abstract = True
    lock_ttl = 10
    lock_wait = timedelta(seconds=1)
    # Overridden below. Without the annotation, mypy takes "skip" for the only value.
    lock_on_held: ClassVar[Literal["retry", "skip", "raise"]] = "skip"
    lock_retry_delay = (1, 60.0)
    lock_on_lost = "continue"
    lock_on_unavailable = "run"
    lock_min_hold = 0.5
    lock_max_deaths = 3


class Import(Base):
    lock_key = by_owner
    lock_on_held = "retry"
    dedup_key = True
    dedup_until = "start"
    dedup_ttl = timedelta(hours=1)
    dedup_on_duplicate = "raise"
    run_once = "import:{number}"
    run_once_ttl = 86_400

    def run(self, number: int) -> None:
        assert_type(self.lease, Lease)
        assert_type(self.fence, Fence)
        assert_type(self.hlc, HybridLogicalClock)


class Unlocked(LockedTask):
    lock_key = None


class ByMethod(LockedTask):
    def lock_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        return str(args[0])

    @staticmethod
    def dedup_key(task: LockedTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        return str(args[0])


def publish(app: Any, task: Import) -> None:
    result = task.apply_async((1,), {"number": 1}, lock_ttl=5, dedup_key=None, run_once=False, lock_retry_delay=[1, 5])
    assert_type(result, PublishedResult)
    assert_type(result.duplicate, bool)
    assert_type(result.holder, str | None)
    assert_type(task.delay(1).duplicate, bool)
    assert_type(send_task(app, "elsewhere.work", [1], dedup_key="k").duplicate, bool)
    print(result.id, result.get(timeout=5), result.ready())

    rare: LockOptions = {"lock_on_held": "skip", "lock_ttl": timedelta(minutes=1)}
    task.apply_async([1], countdown=3, queue="slow", priority=5, **rare)
    task.apply_async(
        [1],
        eta=datetime.now(),  # noqa: DTZ005
        expires=60,
        routing_key="a.b",
        serializer="json",
        headers={"a": "b"},
        retry=True,
        retry_policy={"max_retries": 3},
        soft_time_limit=5,
        ignore_result=True,
        link=None,
        task_id="7",
        shadow="name",
    )


def canvas(task: Import) -> None:
    signature = task.s(1).set(lock_ttl=5, countdown=3).set(immutable=True, task_id="7")
    assert_type(signature.delay().duplicate, bool)
    assert_type(task.si(1).apply_async(lock_on_held="skip").holder, str | None)
    print(task.signature((1,), countdown=3).set(queue="slow") | task.s())
