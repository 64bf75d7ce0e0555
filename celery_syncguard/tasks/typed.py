"""The result and the signature of a `LockedTask` as type checkers see them. At run time both are Celery's own classes, or what the
application has in their place (`result_cls`, an `AsyncResult` of its own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from celery.result import AsyncResult

from celery_syncguard.tasks.options import SignatureOptions

__all__ = ["PublishedResult", "TaskSignature"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class PublishedResult(AsyncResult):  # type: ignore[misc]
        """What a publish returns."""

        duplicate: bool
        """Whether the work was queued or running already. Then this is the result of the task that was there."""
        holder: str | None
        """Who has the claim, for people; None unless this is a duplicate."""

    class TaskSignature(Signature):  # type: ignore[misc]
        """What `task.s()`, `task.si()` and `task.signature()` return."""

        def set(self, immutable: bool | None = None, **options: Unpack[SignatureOptions]) -> TaskSignature: ...
        def apply_async(
            self, args: Any = None, kwargs: Any = None, **options: Unpack[SignatureOptions]
        ) -> PublishedResult: ...
        def delay(self, *partial_args: Any, **partial_kwargs: Any) -> PublishedResult: ...
else:
    PublishedResult = AsyncResult
    TaskSignature = Signature
