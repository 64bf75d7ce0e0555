"""What a checker knows more when celery-types is installed. Marks are as in `refused`.

Celery's decorator takes any option of any type there, so these are checked when the task is registered; `LockOptions` has a checker
look at them too.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, chain
from celery.result import AsyncResult
from typing_extensions import assert_type

from celery_syncguard import LockedTask, LockOptions, PublishedResult

app = Celery("typed")


@app.task(base=LockedTask, lock_key="charge:{number}", lock_ttl="5")
def charge(number: int) -> int:
    return number


@app.task(bind=True, base=LockedTask, **LockOptions(lock_key="refund:{number}", lock_ttl="5"))  # E: lock_ttl
def refund(self: LockedTask, number: int) -> int:
    return number + len(str(self.fence))


def publish() -> None:
    assert_type(charge, LockedTask)
    assert_type(charge.delay(1), PublishedResult)
    result: AsyncResult[Any] = charge.apply_async((1,), lock_ttl=5)
    identifier: str = result.id
    print(identifier)
    charge.apply_async((1,), lock_ttl="5")  # E: lock_ttl
    charge.delay(1).duplicat  # E: duplicat
    assert_type(chain(charge.s(1), refund.s().set(lock_ttl=5)).apply_async().id, str)
