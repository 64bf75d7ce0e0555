"""The gate between Celery and a body: the one call that Celery's tracer makes runs under the lock, every other is plain.

Celery's tracer calls the task itself, and not its `run`, if the task's class has a `__call__` of its own, as LockedTask has.
So the gate lies around `__call__` of the task's own class, wherever that is defined, and covers whatever is called in it: `run`
wherever it was inherited from, a `run` that was set later, on the class or on the task, or a body in `__call__` itself.

Nothing in a call tells the tracer's from `self("probe")` in a hook. But directly before it the tracer calls `before_start`,
around which lies the other half of the gate. Its end opens the gate for one call:

    closed ──before_start ends──> open ──Celery calls the task──> passed ──the call ends──> over

Not here: what is done under the lock (`delivery`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from celery import current_task

from celery_syncguard.core.events import logger
from celery_syncguard.errors import ImproperlyConfigured, SyncGuardError
from celery_syncguard.tasks.celery_internals import AUTORETRY, errback_request, protect, traced_request
from celery_syncguard.tasks.delivery import Delivery

__all__ = ["install", "was_passed"]

#: Where a request keeps the state of the gate.
_GATE = "_syncguard_gate"
_CLOSED, _OPEN, _PASSED, _OVER = "closed", "open", "passed", "over"

#: Celery's tasks that call others as functions.
_MAPS = ("celery.map", "celery.starmap")

#: Set on our own wrappers, with themselves as the value: `functools.wraps` copies it to those that others put around them.
_OURS = "_syncguard_wrapper"


def install(task: type) -> None:
    """Put the gate around what the class has as `__call__` and `before_start` now. May be repeated."""
    for name, wrap in (("__call__", _around_call), ("before_start", _around_before_start)):
        found = inspect.getattr_static(task, name)
        if getattr(found, _OURS, None) is not found:
            wrapper = wrap(found)
            setattr(wrapper, _OURS, wrapper)
            setattr(task, name, wrapper)


def was_passed(request: Any) -> bool:
    """Whether the gate has let the body of this delivery run, or has refused it."""
    return bool(getattr(request, _GATE, None) == _OVER)


def _around_call(found: Any) -> Any:
    @functools.wraps(found)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - the name in tracebacks
        call = found.__get__(self, type(self))
        request = traced_request(self)
        state = _OVER if request is None else getattr(request, _GATE, None)
        if request is not None and (state == _OPEN or (state is None and not _is_hooked(self))):
            return _pass(self, request, call, args, kwargs)
        if state != _PASSED and (failed := errback_request(args, sys._getframe(1))) is not None:  # noqa: SLF001 - CPython's
            # A plain call takes no lock, but that of an errback is Celery's and not the user's.
            return _run_as_errback(self, failed, args, kwargs)
        if current_task and current_task.name in _MAPS:
            self.refuse_plain_calls(current_task.name.partition(".")[2])
        if request is not None and state != _PASSED:
            # Celery's own `__call__` would take it for the tracer's.
            protect(request)
        return call(*args, **kwargs)

    return __call__


def _around_before_start(found: Any) -> Any:
    @functools.wraps(found)
    def before_start(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        request = traced_request(self)
        # super().before_start() and other calls change nothing.
        is_ours = request is not None and not hasattr(request, _GATE)
        if is_ours:
            setattr(request, _GATE, _CLOSED)
        result = found.__get__(self, type(self))(*args, **kwargs)
        if not hasattr(type(self).__call__, _OURS):
            # Set on the class since it was bound.
            install(type(self))
        if is_ours:
            setattr(request, _GATE, _OPEN)
        return result

    return before_start


def _is_hooked(task: Any) -> bool:
    """Whether the tracer's call comes after our `before_start`. Where another one was put in its place, it is the
    first call.
    """
    return "before_start" not in task.__dict__ and hasattr(type(task).before_start, _OURS)


def _pass(task: Any, request: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """Run the body under its lock."""

    def body() -> Any:
        result = call(*args, **kwargs)
        if inspect.iscoroutine(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()
            raise ImproperlyConfigured(
                f"{task.name} returned a {type(result).__name__}, which would run without its lock: make the body an ordinary "
                f"function that calls asyncio.run(...)"
            )
        return result

    setattr(request, _GATE, _PASSED)
    protect(request, protected=False)  # a plain call in before_start may have set it
    try:
        return Delivery(task, request).run(body, args, kwargs, task.__dict__.get(AUTORETRY))
    finally:
        setattr(request, _GATE, _OVER)


def _run_as_errback(task: Any, failed: Any, args: Any, kwargs: Any) -> Any:
    """Run an errback under its lock, as an eager call.

    Celery calls the `link_error` of a failed task as a plain function if it takes (request, exc, traceback), or if it is
    immutable and takes more than one argument. In the main process of a worker, which fails a task whose process died, it
    does not wait for its lock. A failure is logged and not raised: it would be taken for the other task's, and Celery before
    5.7 does not expect an exception there.
    """
    options = task.task_keys().options
    overrides: dict[str, Any] = {}
    if options.dedup_key:
        # Nothing is queued, and these arguments cannot be compared.
        overrides["dedup_key"] = None
    if options.lock_on_held == "retry" and task.app.current_worker_task is None:
        overrides["lock_on_held"] = "raise"
    try:
        return task.apply(args, kwargs, throw=True, **overrides).result
    except SyncGuardError as exc:
        logger.error("the errback %s of %s[%s] was not run: %s", task.name, failed.task, failed.id, exc)
