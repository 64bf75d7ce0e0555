"""SKIPPED, the result state of a task that was not run because its lock was held, and its marker.

Celery ends a wait for a result only in a *ready* state, and knows nothing of states that others invent; so `register()`
adds SKIPPED to those. It is neither a success nor an exception: `AsyncResult.get()` returns the `Skipped` marker,
`successful()` and `failed()` are false, a chord's body receives the marker as that part's result, and the steps of a
chain behind a skipped one are SKIPPED too, so that no wait for them hangs.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from celery.app.task import Context
from kombu.utils.json import register_type

from celery_syncguard.tasks.celery_internals import add_ready_state

__all__ = ["SKIPPED", "Skipped", "marker_for", "register", "settle", "wants_result"]

SKIPPED = "SKIPPED"


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """Stands for the result of a task that did not run.

    `key` and who held it: `holder` for people, `task_id`, and `since`, seconds since the holder's acquire.
    """

    key: str
    holder: str | None = None
    task_id: str | None = None
    since: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, "holder": self.holder, "task_id": self.task_id, "since": self.since}


def register() -> None:
    """Make SKIPPED a state in which Celery's results are ready, and the marker a type that JSON results can carry."""
    register_type(Skipped, "syncguard.skipped", Skipped.as_dict, lambda facts: Skipped(**facts))
    add_ready_state(SKIPPED)


def marker_for(backend: Any, skipped: Skipped) -> Any:
    """The marker in the form that a result backend can store."""
    return skipped if backend.serializer in ("json", "pickle") else skipped.as_dict()


def settle(task: Any, request: Any, skipped: Skipped) -> None:
    """Store the outcome of a skipped task, for itself and for everything that waits for it."""
    backend = task.backend
    marker = marker_for(backend, skipped)
    backend.mark_as_done(request.id, marker, request, store_result=wants_result(task, request), state=SKIPPED)
    # The steps behind it will never be sent. What would complete the chain is marked, however deep it lies.
    elements: deque[Any] = deque(request.chain or ())
    while elements:
        element = elements.popleft()
        options = element.get("options") or {}
        context = Context(element)
        context.update(options)
        context.id = options.get("task_id")
        context.group = options.get("group_id")
        if context.id is not None and _is_wanted(task.app, element, options):
            backend.store_result(context.id, marker, SKIPPED, request=context)
        kind = element.get("subtask_type")
        # A group or a chord carries its chord's signature too, but only the tasks in it count as parts.
        if options.get("chord") is not None and not kind:
            backend.on_chord_part_return(context, SKIPPED, marker)
        inner = element.get("kwargs") or {}
        if kind == "chord":
            elements.extend(_members(inner.get("header")))
            elements.extend([inner["body"]] if inner.get("body") else ())
        elif kind in ("group", "chain"):
            elements.extend(inner.get("tasks") or ())


def _is_wanted(app: Any, element: Any, options: Any) -> bool:
    """Whether the result of a step that was not sent yet is wanted."""
    ignored = options.get("ignore_result")
    if ignored is None:
        ignored = getattr(app.tasks.get(element.get("task")), "ignore_result", False)
    return not ignored


def _members(header: Any) -> Any:
    """The signatures of a chord's header, which is a group or a list."""
    return (header.get("kwargs") or {}).get("tasks") or () if isinstance(header, dict) else header or ()


def wants_result(task: Any, request: Any) -> bool:
    """Whether the result of this call is wanted."""
    ignored = request.ignore_result if request.ignore_result is not None else task.ignore_result
    return not ignored


# At import: a process that only asks for results has the tasks imported, but binds none of them.
register()
