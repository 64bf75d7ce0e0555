"""What we use of Celery that it does not document, and nothing else. Each function says what it relies on and what happens if
that has changed. Nothing here fails at import: what cannot be done without is refused when a task is registered or a worker
starts.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from types import FrameType
from typing import Any

from celery import states
from celery.app.task import Context

from celery_syncguard.core.libraries import find, require, unfit

__all__ = [
    "AUTORETRY",
    "SeesReturn",
    "active_requests",
    "add_ready_state",
    "altered",
    "call_as_function",
    "call_attempt",
    "due_now",
    "errback_request",
    "find_app",
    "get_ident",
    "has_fields",
    "headers_of",
    "heap_event",
    "instant",
    "is_of_beat",
    "is_system_zone",
    "outer_request",
    "pool_module",
    "protect",
    "refuse_unfit",
    "refuse_unfit_beat",
    "refuse_unfit_worker",
    "sync_noting",
    "traced_request",
    "weave",
    "wrap_sending",
]


def refuse_unfit() -> None:
    """Raises ImproperlyConfigured, when a task is registered, if this Celery could run a body without its lock."""
    require("celery", "celery.app.task:Task.request_stack", "celery.app.task:Context._protected")
    called = find("celery.backends.base:Backend._call_task_errbacks")
    if called is None or "request" not in inspect.signature(called).parameters:
        raise unfit("celery", "celery.backends.base.Backend._call_task_errbacks has no `request`")


def refuse_unfit_worker(task: type) -> None:
    """Raises ImproperlyConfigured, when a worker starts, if Celery's tracer would call `run` and pass by the `__call__` of `task`.

    Relies on `celery.app.trace.task_has_custom` for that. Without it: not refused, and each such run logs an error.
    """
    has_custom = find("celery.app.trace:task_has_custom")
    if has_custom is not None and not has_custom(object.__new__(task), "__call__"):
        raise unfit("celery", "its tracer does not call the __call__ of a task")


# A call of a task


def traced_request(task: Any) -> Any:
    """The request that Celery's tracer runs in this thread, if it is on top; else None.

    Relies on `Task.request_stack` and `Context.called_directly`. Without the former: refused by `refuse_unfit`.
    """
    request = task.request_stack.top if task.request_stack is not None else None
    return None if request is None or request.called_directly else request


def outer_request(task: Any) -> Any:
    """The request below the one on top, which a `__call__` may have put there; None if there is none.

    Relies on `Task.request_stack.stack`, the top last. Without it: None, and `self.lease` raises NoLease there.
    """
    stack: list[Any] = getattr(task.request_stack, "stack", [])
    return stack[-2] if len(stack) > 1 else None


def protect(request: Any, *, protected: bool = True) -> None:
    """Have Celery's `Task.__call__` take a call within this request for a plain one, or for the tracer's.

    Relies on `Context._protected`, as Celery's `__protected_call__` has it. Without it: refused by `refuse_unfit`.
    """
    request._protected = int(protected)  # noqa: SLF001


def call_as_function(task: Any, following: Any, args: Any, kwargs: Any) -> Any:
    """Call `following`, a bound `__call__`; if that is Celery's own, without another request on top of the tracer's.

    Relies on the modules of Celery's two `__call__`. If they are others, the body sees a request of its own.
    """
    request = traced_request(task)
    if (
        request is not None
        and not request._protected  # noqa: SLF001
        and following.__func__.__module__ in ("celery.app.task", "celery.app.trace")
    ):
        # It would put one there where the tracer's is not a worker's.
        protect(request)
        return task.run(*args, **kwargs)
    return following(*args, **kwargs)


def errback_request(args: tuple[Any, ...], caller: FrameType | None) -> Any:
    """The request of the task that failed, if this call of a task comes from Celery, as an errback; else None.

    Relies on the frame of `Backend._call_task_errbacks`, as nothing else tells of an immutable errback, which gets its own
    arguments only. Without it: refused by `refuse_unfit`.
    """
    if len(args) >= 3 and isinstance(args[0], Context) and isinstance(args[1], BaseException):
        return args[0]  # (request, exc, traceback)
    while caller is not None and caller.f_globals.get("__name__") in ("celery.local", "celery.canvas"):
        caller = caller.f_back
    if caller is None or caller.f_code.co_name != "_call_task_errbacks":
        return None
    return caller.f_locals.get("request")


#: Where a task keeps Celery's autoretry, which a delivery puts around its attempt.
AUTORETRY = "_syncguard_autoretry"


def call_attempt(attempt: Any) -> Any:
    """What Celery's autoretry calls instead of `run`. Its only argument is the attempt of a delivery."""
    return attempt()


def weave(task: Any, name: str, value: Any) -> tuple[str, Any]:
    """What to set instead of an attribute of a task: Celery's autoretry goes around the gate and not around `run`.

    Relies on autoretry reading `run` and then setting `_orig_run` and `run`, in this order. If it does otherwise, it lies within
    the lock and retries as `self.retry` does.
    """
    if name == "_orig_run":
        return name, call_attempt
    if name == "run" and "_orig_run" in task.__dict__ and AUTORETRY not in task.__dict__:
        return AUTORETRY, value
    return name, value


#: What tells apart the bodies of one process: Celery's own, a greenlet where there are such. Without it: a thread.
get_ident: Callable[[], Any] = find("celery.utils.threads:get_ident") or threading.get_ident


def find_app(name: str) -> Any:
    """The application that `celery -A` means by a name.

    Relies on `celery.app.utils.find_app`. Without it: refused, when a command is called.
    """
    require("celery", "celery.app.utils:find_app")
    return find("celery.app.utils:find_app")(name)


# Publishing


def wrap_sending(app: Any, kind: type, **arguments: Any) -> None:
    """Put a `kind(what was there, **arguments)` where an application hands its messages to a producer. May be repeated.

    Relies on `app.amqp.send_task_message`. Raises ImproperlyConfigured if that does not exist: nothing is sent then.
    """
    hand_over = getattr(app.amqp, "send_task_message", None)
    if hand_over is None:
        raise unfit("celery", "celery.app.amqp.AMQP.send_task_message does not exist")
    if not isinstance(hand_over, kind):
        app.amqp.send_task_message = kind(hand_over, **arguments)


def instant(app: Any, moment: str | datetime) -> datetime:
    """A moment as Celery takes `eta` and `expires`: a datetime or its ISO form, in UTC unless it says otherwise.

    Relies on two functions of `celery.utils.time`. Without them: read by Python's own `datetime.fromisoformat`.
    """
    parse, localise = find("celery.utils.time:maybe_iso8601"), find("celery.utils.time:maybe_make_aware")
    if parse is not None and localise is not None:
        found: datetime = localise(parse(moment), app.timezone)
        return found
    found = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


# Results


def add_ready_state(state: str) -> None:
    """Have all result backends, and all code that waits for a result, take a state of ours for one in which a result is ready.

    Relies on the frozen sets of `celery.states` and their copies: in the base class of backends, and in default arguments of
    its methods. A copy that is not there any more is passed over; a new one would have a wait go on until its timeout.
    """
    if state in states.READY_STATES:
        return
    before, states.READY_STATES = states.READY_STATES, frozenset({*states.READY_STATES, state})
    states.ALL_STATES = frozenset({*states.ALL_STATES, state})
    for cls in (find("celery.backends.base:Backend"), find("celery.backends.base:BaseKeyValueStoreBackend")):
        for name, value in list(vars(cls).items()) if cls is not None else ():
            defaults = getattr(value, "__defaults__", None) or ()
            if value is before:
                setattr(cls, name, states.READY_STATES)
            elif any(one is before for one in defaults):
                value.__defaults__ = tuple(states.READY_STATES if one is before else one for one in defaults)


# A worker's main process


class SeesReturn:
    """Put before Celery's `Request`: `comes_again` says whether its message went back to the queue, or Celery sent the next
    attempt. Observed and not predicted, as the options that decide on it are more with every version.

    Relies on Celery calling `reject`, and from 5.7 on `_retry_worker_lost`. If it does not: the claim ends early, and a
    duplicate may be queued.
    """

    acknowledged: bool
    comes_again = False

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT002 - Celery's
        self.comes_again = self.comes_again or (requeue and not self.acknowledged)
        super().reject(requeue)  # type: ignore[misc]

    def _retry_worker_lost(self, *args: Any, **kwargs: Any) -> bool:
        self.comes_again = bool(super()._retry_worker_lost(*args, **kwargs))  # type: ignore[misc]
        return self.comes_again

    @property
    def was_ended(self) -> bool:
        """Whether the worker itself has ended this task, by a signal.

        Relies on two flags of the request. Without them: no, and its claim ends early.
        """
        return bool(getattr(self, "_already_cancelled", False) or getattr(self, "_already_revoked", False))


def headers_of(request: Any) -> Mapping[str, Any]:
    """The headers of the message of a request, be it a worker's or a task's.

    Relies on `request_dict` of the former. Without it: its message's own, or none, so that a claim lasts until its ttl.
    """
    message = getattr(request, "message", None)
    return (
        getattr(request, "request_dict", None)
        or getattr(request, "headers", None)
        or getattr(message, "headers", None)
        or {}
    )


def active_requests() -> Iterable[Any]:
    """The requests that this worker's processes are at.

    Relies on `celery.worker.state.active_requests`. Without it: none, so that claims of tasks that are cut off last until
    their ttl.
    """
    return tuple(find("celery.worker.state:active_requests") or ())


def pool_module(worker: Any) -> str:
    """Where the pool of a worker that starts is written.

    Relies on `celery.concurrency.get_implementation`, as the worker knows only a name. Without it: unknown, and a pool without
    locks shows by an error for each run.
    """
    implementation = find("celery.concurrency:get_implementation")
    return "" if implementation is None else str(implementation(worker.pool_cls).__module__)


# Beat


def refuse_unfit_beat() -> None:
    """Raises ImproperlyConfigured, when a beat starts, if Celery's schedulers and schedules are not as ours extends them."""
    names = (
        "apply_async",
        "apply_entry",
        "is_due",
        "populate_heap",
        "reserve",
        "schedules_equal",
        "should_sync",
        "tick",
    )
    require("celery", *(f"celery.beat:Scheduler.{name}" for name in names))
    every = find("celery.schedules:schedule")
    then = datetime(2000, 1, 1, tzinfo=timezone.utc)
    if altered(every(60.0), nowfun=lambda: then).now() != then:
        raise unfit("celery", "a schedule does not ask its nowfun for the time")


def heap_event() -> Any:
    """The class of what lies in the heap of a scheduler: time, priority, entry.

    Relies on `celery.beat.event_t`, for schedulers that look into the heap. Without it: a tuple of ours with these names.
    """
    return find("celery.beat:event_t") or namedtuple("event_t", ("time", "priority", "entry"))  # noqa: PYI024


def sync_noting(scheduler: Any) -> None:
    """Have a scheduler write back its schedule, and note when it did.

    Relies on `Scheduler._do_sync` of Celery. Without it: not noted, so that it writes more often.
    """
    getattr(scheduler, "_do_sync", scheduler.sync)()


def altered(schedule: Any, **attributes: Any) -> Any:
    """A copy of a schedule with other attributes. `copy` would call its constructor, with what its `__reduce__` says.

    Relies on schedules keeping what they are in their `__dict__`. One with slots is copied by `copy`.
    """
    if hasattr(schedule, "__dict__"):
        made = object.__new__(type(schedule))
        made.__dict__.update(schedule.__dict__)
    else:
        made = copy.copy(schedule)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def due_now(schedule: Any) -> Any:
    """A copy of a schedule that says that it is due.

    Relies on `celery.schedules.schedstate`, which some read by name. Without it: a tuple, as documented.
    """
    state = find("celery.schedules:schedstate")
    due = (True, 0.0) if state is None else state(is_due=True, next=0.0)
    return altered(schedule, is_due=lambda _last_run_at: due)


def has_fields(schedule: Any) -> bool:
    """Whether a crontab has its fields as sets of numbers.

    Relies on five attributes of it. Without them: no, and it is asked for one slot after the other, as any other schedule.
    """
    names = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
    return all(isinstance(getattr(schedule, name, None), (set, frozenset)) for name in names)


def is_system_zone(zone: Any) -> bool:
    """Whether a time zone is Celery's own for the system's, which is an hour off around a change.

    Relies on `celery.utils.time.LocalTimezone`. Without it: no, as with any zone that keeps to the rules.
    """
    return isinstance(zone, getattr(_time, "LocalTimezone", ()))


_time = find("celery.utils.time")


def is_of_beat(handler: Any) -> bool:
    """Whether a handler of a signal is that of `celery beat`.

    Relies on where it is written. If it is elsewhere: no, so that it stays, and ends beat when its tick is over.
    """
    return getattr(handler, "__module__", None) == "celery.apps.beat"
