"""LockedTask: a Celery task that takes a lock before its body runs.

Publishing computes the keys (`dedup.publish`); running is `run.Run`. The lock is woven around `run` itself, when a class
defines one, so that it covers the body whatever else a subclass overrides (`__call__`, `before_start`, `on_success` …,
without `super()`), and lies inside Celery's autoretry, which then sees the lock released.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar

from celery import Task, current_task
from celery.app.task import Context
from celery.result import EagerResult
from celery.signals import task_postrun
from celery.states import SUCCESS
from celery.utils.imports import symbol_by_name

from celery_syncguard import binding, dedup
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey, NoLease, SyncGuardError, TooManyDeaths
from celery_syncguard.events import logger
from celery_syncguard.key import Fence
from celery_syncguard.lease import Lease
from celery_syncguard.message import HEADER, header_of, queue_of
from celery_syncguard.options import take_overrides
from celery_syncguard.plan import Plan
from celery_syncguard.run import RUN, Answered, Run, check_outer
from celery_syncguard.skipped import SKIPPED

__all__ = ["LockedTask"]


class LockedTask(Task):  # type: ignore[misc]
    """A task that runs under a lock. Options are class attributes or `apply_async` arguments; see the README's table.

    `self.lease` is the lease that the body runs under, `self.fence` its fence.
    """

    abstract = True
    Request = "celery_syncguard.worker:GuardedRequest"

    #: Required: a template such as "invoice:{invoice_id}", a callable (task, args, kwargs) -> str, or None for no lock.
    lock_key: ClassVar[Any] = ...

    #: Whether STARTED is stored, as `track_started` and `task_track_started` say; `run.Run` does it.
    reports_start: ClassVar[bool] = False

    #: A task that kills its process shall not come back for ever, whatever it retries.
    dont_autoretry_for: ClassVar[tuple[type[BaseException], ...]] = (TooManyDeaths,)

    _plan: ClassVar[Plan | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        body = cls.__dict__.get("run")
        if body is not None:
            cls.run = _weave(body)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the options as soon as the task is registered."""
        super().on_bound(app)
        if cls.__dict__.get("abstract") or cls is LockedTask:
            return
        if cls.Request is not LockedTask.Request:
            _check_request(cls)
        binding.attach(app)
        cls.reports_start = cls.reports_start or bool(cls.track_started)
        cls.track_started = False
        cls._plan = None
        # The default of lock_ttl is a setting, and settings may not be complete yet; all else is checked now.
        Plan.of_class(cls, lock_ttl=None)

    def plan(self) -> Plan:
        """What the options of this task come to."""
        found = type(self)._plan  # noqa: SLF001 - our own class
        if found is None:
            settings = binding.settings_for(self.app)
            found = Plan.of_class(type(self), lock_ttl=settings.lock_ttl)
            type(self)._plan = found  # noqa: SLF001
        return found

    # Publishing

    def apply_async(  # noqa: PLR0917 - Celery's signature
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's, and takes our options (`lock_key=…`, `dedup_key=…` and so on) for this call.

        Returns:
            An `AsyncResult`. With a dedup key: `.duplicate` tells whether the work was queued or running already, in which
            case the result is the existing task's and `.holder` says who it is.

        Raises:
            ImproperlyConfigured, InvalidKey: before anything is sent.
            DuplicateTask, StoreUnavailable: with a dedup key; see `dedup.publish`.
        """
        overrides = take_overrides(options)
        plan = self.plan()
        header = header_of(options.get("headers"))
        if options.get("serializer"):
            header["serializer"] = options["serializer"]
        if args is not None and not isinstance(args, (list, tuple)):
            raise TypeError(f"task args must be a list or tuple, got {type(args).__name__}")
        call: dict[str, Any] = dict(options, task_id=task_id)
        try:
            task_options = plan.complete(
                self, header, tuple(args or ()), dict(kwargs or {}), overrides, serializer=options.get("serializer")
            )
        except InvalidKey:
            if not dedup.begun(call):
                raise
            # The parent has ended well: it is this task that fails, in the worker that gets it.
            task_options = plan.options

        def send(**call: Any) -> Any:
            return Task.apply_async(
                self, args, kwargs, producer=producer, link=link, link_error=link_error, shadow=shadow, **call
            )

        if link is not None:
            # Only looked at by dedup; `send` has its own.
            call["link"] = link
            send = _without_link(send)
        result = dedup.publish(self.app, self.name, task_options, header=header, call=call, send=send, task=self)
        request = current_task.request if current_task else None
        if request is not None and request.id == task_id and (run := request.__dict__.get(RUN)) is not None:
            # The body's own next attempt, or what it put in its own place (`self.replace`).
            run.key_passed_on = run.key_passed_on or header.get("key") == run.lock_key
        return result

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run here and now, under the lock as in a worker. Takes our options too."""
        overrides = take_overrides(options)
        header = header_of(options.get("headers"))
        self.plan().complete(self, header, tuple(args or ()), dict(kwargs or {}), overrides)
        options["headers"] = {**(options.get("headers") or {}), HEADER: header}
        result = super().apply(args, kwargs, **options)
        check_outer()
        if isinstance(result, EagerResult) and isinstance(result.result, Answered):
            return _answered(result)
        return result

    def map(self, it: Any) -> Any:
        """Refused, as `starmap` and `chunks` are, for a task with a key: Celery runs their items as plain calls.

        Raises:
            ImproperlyConfigured: always, unless the task has no key.
        """
        self._refuse_plain_calls("map")
        return super().map(it)

    def starmap(self, it: Any) -> Any:
        """See `map`."""
        self._refuse_plain_calls("starmap")
        return super().starmap(it)

    def chunks(self, it: Any, n: int) -> Any:
        """See `map`."""
        self._refuse_plain_calls("chunks")
        return super().chunks(it, n)

    def _refuse_plain_calls(self, canvas: str) -> None:
        options = self.plan().options
        if options.lock_key or options.dedup_key or options.run_once:
            raise ImproperlyConfigured(
                f"{self.name}.{canvas}() would run without the lock, as Celery calls the body for each item: use a group"
            )

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None, **options: Any
    ) -> Any:
        """A retry with other arguments gets the keys of those, and keeps its claim if that is the same. Keys that were
        given for this call stay: a retry that lost them would run without the lock that its caller wanted. The same
        serializer again, as another one may change the arguments. And the queue from which it came: without its name,
        Celery's native delayed delivery takes the application's default queue.
        """
        request = self.request if request is None else request
        if queue is None and not options.keys() & {"exchange", "routing_key"}:
            came_from = queue_of(self.app, request.delivery_info)
            queue = None if came_from is None else came_from.name
        if serializer := header_of(request.headers).get("serializer"):
            options.setdefault("serializer", serializer)
        changed = (args is not None and list(args) != list(request.args or ())) or (
            kwargs is not None and dict(kwargs) != dict(request.kwargs or {})
        )
        if changed and "headers" not in options and request.headers:
            before = header_of(request.headers)
            made_anew = {"key", "run", "claim"}.difference(before.get("given", ())) | {"claimed"}
            header = {name: value for name, value in before.items() if name not in made_anew}
            # Computed now, so that the end of this attempt knows whether its claim goes on.
            new_args = request.args if args is None else args
            new_kwargs = request.kwargs if kwargs is None else kwargs
            self.plan().complete(
                self, header, tuple(new_args or ()), dict(new_kwargs or {}), {}, serializer=options.get("serializer")
            )
            if header.get("claim") == before.get("claim") and before.get("claimed"):
                header["claimed"] = True
            options["headers"] = {**request.headers, HEADER: header}
        return super().signature_from_request(request, args, kwargs, queue=queue, **options)

    # Running

    @property
    def lease(self) -> Lease:
        """The lease that the body runs under.

        Raises:
            NoLease: called directly, or the task has no lock. In a unit test, call `task.apply(…)` with the setting
                `syncguard_dsn = "memory://"`.
        """
        run: Run | None = self.request.__dict__.get(RUN)
        if run is None or run.lease is None:
            raise NoLease(
                f"{self.name} does not run under a lease here: it was called as a plain function, has no lock_key, or runs "
                f'with lock_on_unavailable="run". In a unit test use {self.__name__}.apply(...) with '
                f'syncguard_dsn = "memory://"'
            )
        return run.lease

    @property
    def fence(self) -> Fence:
        """The number of this lease, higher than every earlier one of its key: for writes that refuse a lower one.

        Raises:
            NoLease: as `lease`.
        """
        return self.lease.fence

    @property
    def hlc(self) -> Any:
        """The hybrid logical clock of this process, for stamping rows (setting `syncguard_hlc`)."""
        from celery_syncguard.stamps import clock_for

        return clock_for(self.app)


class _EagerlySkipped(EagerResult):  # type: ignore[misc]
    def get(self, *args: Any, **kwargs: Any) -> Any:
        return self.result

    wait = get


def _check_request(cls: type[LockedTask]) -> None:
    """A Request of the user's own: without ours in it nobody would see to the leases of a child that died."""
    from celery_syncguard.worker import GuardedRequest

    if not issubclass(symbol_by_name(cls.Request), GuardedRequest):
        raise ImproperlyConfigured(
            f"{cls.__name__}: its Request has to inherit from celery_syncguard.worker.GuardedRequest, which frees what a "
            f"dead child held"
        )


@task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def _on_postrun(sender: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    # A hook of the task could be overridden without super().
    if isinstance(sender, LockedTask):
        Run.never_came(sender, sender.request, state, retval)


def _answered(result: Any) -> Any:
    marker = result.result.skipped
    if marker is None:
        return EagerResult(result.id, None, SUCCESS, name=result.name)
    return _EagerlySkipped(result.id, marker, SKIPPED, name=result.name)


def _without_link(send: Any) -> Any:
    def without_link(*, link: Any, **call: Any) -> Any:  # noqa: ARG001 - taken out
        return send(**call)

    return without_link


def _traced_below(task: Any) -> Any:
    """The request that Celery's tracer runs, if this is the tracer's call: before 5.7 it comes as a plain one where a task
    has a `__call__` of its own and is applied eagerly, or is applied inside another call of itself.
    """
    stack = task.request_stack.stack
    below = stack[-2] if len(stack) > 1 else None
    return None if below is None or below.called_directly or RUN in below.__dict__ else below


def _is_failure(args: tuple[Any, ...]) -> bool:
    """Whether these are what Celery calls an errback with: (request, exc, traceback)."""
    return len(args) >= 3 and isinstance(args[0], Context) and isinstance(args[1], BaseException)


def _run_as_errback(task: Any, args: Any, kwargs: Any) -> Any:
    """What runs when a task is somebody's `link_error` and takes (request, exc, traceback): Celery then calls it as a
    function, where the other task failed. It takes its lock as an eager call does; the main process of a worker, which
    fails a task whose process died, does not wait for it. That it could not run is logged: an exception would be the
    other task's, and Celery before 5.7 does not expect one.
    """
    options = task.plan().options
    overrides: dict[str, Any] = {}
    if options.dedup_key:
        # Nothing is queued, and these arguments cannot be compared.
        overrides["dedup_key"] = None
    if options.lock_on_held == "retry" and task.app.current_worker_task is None:
        overrides["lock_on_held"] = "raise"
    try:
        return task.apply(args, kwargs, throw=True, **overrides).result
    except SyncGuardError as exc:
        logger.error("the errback %s of %s[%s] was not run: %s", task.name, args[0].task, args[0].id, exc)


def _weave(body: Any) -> Any:
    """A `run` that does what `body` does, under the lock."""
    if isinstance(body, classmethod) or not callable(getattr(body, "__func__", body)):
        raise ImproperlyConfigured(f"run must be a method or a function, got {type(body).__name__}")
    static = isinstance(body, staticmethod)
    function = body.__func__ if static else body

    @functools.wraps(function)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function if static else functools.partial(function, self), *args, **kwargs)
        request = self.request
        if request.called_directly and RUN not in request.__dict__:
            traced = _traced_below(self)
            if traced is None:
                # A plain call takes no lock, but that of an errback is Celery's and not the user's.
                return _run_as_errback(self, args, kwargs) if _is_failure(args) else call()
            # What the body sees is the request on top.
            this = request.__dict__[RUN] = Run.of(self, traced, args, kwargs)
            return this.execute(call)
        if RUN in request.__dict__:
            # super().run() and the like are inside a lock already.
            return call()
        return Run.of(self, request, args, kwargs).execute(call)

    if static:
        # So that inspect.signature() of the bound method shows the function's own parameters.
        signature = inspect.signature(function)
        first = inspect.Parameter("_task", inspect.Parameter.POSITIONAL_ONLY)
        run.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    return run
