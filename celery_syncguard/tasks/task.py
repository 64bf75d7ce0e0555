"""LockedTask: a Celery task that takes a lock before its body runs.

Publishing computes the keys (`publishing.publish`); running is `delivery.Delivery`. `gate` is where Celery's call of the task becomes a
locked one, whatever a subclass overrides, with or without `super()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from celery import Task, current_task, uuid
from celery.app.task import Context
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult
from celery.signals import task_postrun
from celery.states import SUCCESS
from kombu.exceptions import EncodeError, OperationalError

from celery_syncguard.core.events import logger
from celery_syncguard.core.key import Fence
from celery_syncguard.core.lease import Lease
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey, NoLease, SyncGuardError, TooManyDeaths
from celery_syncguard.hlc import HybridLogicalClock
from celery_syncguard.skipped import SKIPPED, wants_result
from celery_syncguard.tasks import app_state, celery_internals, gate, publishing
from celery_syncguard.tasks.delivery import DELIVERY, Delivery, check_outer, end_without_body
from celery_syncguard.tasks.header import HEADER, Header
from celery_syncguard.tasks.keys import TaskKeys
from celery_syncguard.tasks.not_run import NotRun
from celery_syncguard.tasks.options import CallOptions, OptionDefaults, take_overrides
from celery_syncguard.tasks.publisher_confirms import is_refusal
from celery_syncguard.tasks.queues import queue_of
from celery_syncguard.tasks.typed import PublishedResult, TaskSignature

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LockedTask"]


class LockedTask(OptionDefaults, Task):  # type: ignore[misc]
    """A task that runs under a lock. Options are class attributes or `apply_async` arguments; see the README's table.

    `self.lease` is the lease that the body runs under, `self.fence` its fence.
    """

    abstract = True
    Request = "celery_syncguard.tasks.worker:GuardedRequest"

    #: Whether STARTED is stored, as `track_started` and `task_track_started` say; `delivery.Delivery` does it.
    reports_start: ClassVar[bool] = False

    #: A task that kills its process must not be retried for ever, whatever `autoretry_for` names.
    dont_autoretry_for: ClassVar[tuple[type[BaseException], ...]] = (TooManyDeaths,)

    _task_keys: ClassVar[TaskKeys | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Celery does not bind a class whose base class was bound before.
        gate.install(cls)
        new = super().__new__
        return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(*celery_internals.weave(self, name, value))

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Check the options as soon as the task is registered. Not in `on_bound`, which is there to be overridden."""
        bound = super().bind(app)
        cls._prepare(app)
        return bound

    @classmethod
    def _prepare(cls, app: Any) -> None:
        if cls.__dict__.get("abstract") or cls is LockedTask:
            return
        celery_internals.refuse_unfit()
        gate.install(cls)
        if cls.Request is not LockedTask.Request:
            _check_request(cls)
        app_state.attach(app)
        cls.reports_start = cls.reports_start or bool(cls.track_started)
        cls.track_started = False
        cls._task_keys = None
        # The default of lock_ttl is a setting, and settings may not be complete yet; all else is checked now.
        TaskKeys.of_class(cls)

    def task_keys(self) -> TaskKeys:
        """The options of this task's class, checked, and its keys."""
        cls = type(self)
        # Those of a base class are not ours.
        found: TaskKeys | None = cls.__dict__.get("_task_keys")
        own = self.__dict__.get("run") if cls.run is Task.run else None
        if found is None or found.body is not (own or cls.run):
            if "_task_keys" not in cls.__dict__:
                cls._prepare(self.app)
            found = cls._task_keys = TaskKeys.of_class(cls, lock_ttl=app_state.settings_for(self.app).lock_ttl, own=own)
        return found

    # Publishing

    def apply_async(  # noqa: PLR0917 - Celery's signature
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Unpack[CallOptions],
    ) -> PublishedResult:
        """As Celery's, and takes our options (`lock_key=…`, `dedup_key=…` and so on) for this call.

        Returns:
            An `AsyncResult`. With a dedup key: `.duplicate` tells whether the work was queued or running already, in which
            case the result is the existing task's and `.holder` says who it is.

        Raises:
            ImproperlyConfigured, InvalidKey: before anything is sent.
            DuplicateTask, StoreUnavailable: with a dedup key; see `publishing.publish`.

        If Celery publishes this task because another one has ended (a chain, a callback), an error fails this task and is not
        raised, except for broker trouble: an exception would fail the task that has ended.
        """
        try:
            return self._publish(args, kwargs, task_id, producer, link, link_error, shadow, **options)
        except Exception as exc:
            call = {**options, "task_id": task_id}
            if _is_own_fault(exc) and publishing.sent_at_an_end(call) and not self.app.conf.task_always_eager:
                return self._fail_unsent(exc, args, kwargs, link_error, call)
            raise

    def _publish(  # noqa: PLR0917 - as `apply_async`
        self,
        args: Any,
        kwargs: Any,
        task_id: str | None,
        producer: Any,
        link: Any,
        link_error: Any,
        shadow: str | None,
        **options: Any,
    ) -> PublishedResult:
        overrides = take_overrides(options)
        task_keys = self.task_keys()
        if args is not None and not isinstance(args, (list, tuple)):
            raise TypeError(f"task args must be a list or tuple, got {type(args).__name__}")
        call: dict[str, Any] = dict(options, task_id=task_id)
        if publishing.is_again(call):
            header = Header.of(options.get("headers"))
        else:
            # What a body hands on to another task (`headers=self.request.headers`) is about the body's own message.
            header = Header(call_id=publishing.new_call_id(call))
        if options.get("serializer"):
            header = header._replace(serializer=options["serializer"])
        try:
            header, task_options = task_keys.complete(self, header, tuple(args or ()), dict(kwargs or {}), overrides)
        except InvalidKey:
            if publishing.sent_at_an_end(call) or not publishing.sent_for_begun(call):
                raise
            # A retry by autoretry of what could not make its key.
            task_options = task_keys.options

        def send(**call: Any) -> Any:
            return Task.apply_async(
                self, args, kwargs, producer=producer, link=link, link_error=link_error, shadow=shadow, **call
            )

        if link is not None:
            # Only looked at by dedup; `send` has its own.
            call["link"] = link
            send = _without_link(send)
        result = publishing.publish(self.app, self.name, task_options, header=header, call=call, send=send, task=self)
        # A new task has no id yet, and each look at the running one goes through proxies.
        request = current_task.request if task_id is not None and current_task else None
        if request is not None and request.id == task_id and (delivery := getattr(request, DELIVERY, None)) is not None:
            # The body's own next attempt, or what it put in its own place (`self.replace`).
            delivery.key_passed_on = delivery.key_passed_on or header.lock_key == delivery.lock_key
        return result

    def _fail_unsent(
        self, exc: Exception, args: Any, kwargs: Any, link_error: Any, call: dict[str, Any]
    ) -> PublishedResult:
        """End this task, which could not be published after its parent, as a failure of its own, with all that waits for it."""
        task_id = call["task_id"] or uuid()
        # The head of a chain is given the root only.
        before = current_task.request.id if current_task else call.get("parent_id")
        why = str(exc) or repr(exc.__cause__ or exc)
        logger.error("%s[%s] cannot be sent after %s, so it fails: %s", self.name, task_id, before, why)
        request = Context(
            id=task_id,
            task=self.name,
            args=args,
            kwargs=kwargs,
            chain=call.get("chain"),
            chord=call.get("chord"),
            group=call.get("group_id"),
            group_index=call.get("group_index"),
            errbacks=[link_error] if isinstance(link_error, dict) else link_error,
            root_id=call.get("root_id"),
            parent_id=call.get("parent_id"),
            ignore_result=call.get("ignore_result"),
            delivery_info={},
        )
        try:
            self.backend.mark_as_failure(task_id, exc, request=request, store_result=wants_result(self, request))
        except Exception:  # noqa: BLE001 - whatever a result backend raises: the parent has ended well
            logger.exception("the failure of %s[%s] could not be stored", self.name, task_id)
        result: PublishedResult = (call.get("result_cls") or self.AsyncResult)(task_id)
        if call.get("add_to_parent", True) and current_task:
            current_task.add_trail(result)
        result.duplicate, result.holder = False, None
        return result

    if TYPE_CHECKING:

        def delay(self, *args: Any, **kwargs: Any) -> PublishedResult:
            """As Celery's, which calls `apply_async`."""

        def s(self, *args: Any, **kwargs: Any) -> TaskSignature: ...
        def si(self, *args: Any, **kwargs: Any) -> TaskSignature: ...
        def signature(self, args: Any = None, *starargs: Any, **starkwargs: Any) -> TaskSignature: ...

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run here and now, under the lock as in a worker. Takes our options too."""
        overrides = take_overrides(options)
        headers = options.get("headers") or {}
        before = (current_task.request.headers or {}) if current_task and "retries" not in options else {}
        try:
            # What a body hands on is not for this task. A publish in an eager application has a call id of its own.
            header = Header.of(headers) if headers.get(HEADER) != before.get(HEADER) else Header()
        except SyncGuardError:
            pass  # the task fails with it, as in a worker
        else:
            header, _ = self.task_keys().complete(self, header, tuple(args or ()), dict(kwargs or {}), overrides)
            options["headers"] = header.into(headers)
        result = super().apply(args, kwargs, **options)
        check_outer()
        if isinstance(result, EagerResult) and isinstance(result.result, NotRun):
            return _result_of(result)
        return result

    def map(self, it: Any) -> Any:
        """Refused, as `starmap` and `chunks` are, for a task with a key: Celery runs their items as plain calls.

        Raises:
            ImproperlyConfigured: always, unless the task has no key.
        """
        self.refuse_plain_calls("map")
        return super().map(it)

    def starmap(self, it: Any) -> Any:
        """See `map`."""
        self.refuse_plain_calls("starmap")
        return super().starmap(it)

    def chunks(self, it: Any, n: int) -> Any:
        """See `map`."""
        self.refuse_plain_calls("chunks")
        return super().chunks(it, n)

    def refuse_plain_calls(self, canvas: str) -> None:
        """For `gate` too, to which such a canvas comes when it was made without the task, or by name."""
        options = self.task_keys().options
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
        before = Header.of(request.headers)
        if before.serializer:
            options.setdefault("serializer", before.serializer)
        changed = (args is not None and list(args) != list(request.args or ())) or (
            kwargs is not None and dict(kwargs) != dict(request.kwargs or {})
        )
        if changed and "headers" not in options and request.headers:
            # Computed now, so that the end of this attempt knows whether its claim goes on.
            new_args = request.args if args is None else args
            new_kwargs = request.kwargs if kwargs is None else kwargs
            header = before.for_other_arguments()._replace(serializer=options.get("serializer"))
            header, _ = self.task_keys().complete(self, header, tuple(new_args or ()), dict(new_kwargs or {}), {})
            if header.claim_key == before.claim_key and before.claimed:
                header = header._replace(claimed=True)
            options["headers"] = header.into(request.headers)
        return super().signature_from_request(request, args, kwargs, queue=queue, **options)

    def on_replace(self, sig: Any) -> Any:
        """As Celery's. What comes in this task's place may need the same lock, also where it runs inside of the body."""
        delivery = self._delivery_of_request()
        if delivery is not None and delivery.lease is not None and self.request.is_eager:
            delivery.give_up_lease()
        return super().on_replace(sig)

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the body as a function, without a lock. Celery's own call of it is the locked one; see `gate`."""
        return celery_internals.call_as_function(self, super().__call__, args, kwargs)

    def _delivery_of_request(self) -> Delivery | None:
        request = self.request
        delivery: Delivery | None = getattr(request, DELIVERY, None)
        if delivery is None and request.called_directly:
            # A `__call__` below ours has put a request on top.
            delivery = getattr(celery_internals.outer_request(self), DELIVERY, None)
        return delivery

    @property
    def lease(self) -> Lease:
        """The lease that the body runs under.

        Raises:
            NoLease: called directly, or the task has no lock. In a unit test, call `task.apply(…)` with the setting
                `syncguard_dsn = "memory://"`.
        """
        delivery = self._delivery_of_request()
        if delivery is None or delivery.lease is None:
            raise NoLease(
                f"{self.name} does not run under a lease here: it was called as a plain function, has no lock_key, or runs "
                f'with lock_on_unavailable="run". In a unit test use {self.__name__}.apply(...) with '
                f'syncguard_dsn = "memory://"'
            )
        return delivery.lease

    @property
    def fence(self) -> Fence:
        """The number of this lease, higher than every earlier one of its key: for writes that refuse a lower one.

        Raises:
            NoLease: as `lease`.
        """
        return self.lease.fence

    @property
    def hlc(self) -> HybridLogicalClock:
        """The hybrid logical clock of this process, for stamping rows (setting `syncguard_hlc`)."""
        from celery_syncguard.stamps import clock_for

        return clock_for(self.app)


def _is_own_fault(exc: Exception) -> bool:
    """Whether a publish failed because of the task, not because the broker could not be reached or the process is short of time
    or memory.
    """
    trouble = (OperationalError, EncodeError, SoftTimeLimitExceeded, MemoryError)
    return is_refusal(exc) or not isinstance(exc, trouble)


class _EagerlySkipped(EagerResult):  # type: ignore[misc]
    def get(self, *args: Any, **kwargs: Any) -> Any:
        return self.result

    wait = get


def _check_request(cls: type[LockedTask]) -> None:
    """A Request class of the user's own has to inherit ours, which has the leases of a dead child released."""
    from celery_syncguard.tasks.worker import GuardedRequest

    request: Any = cls.Request
    if not issubclass(resolve_name(request) if isinstance(request, str) else request, GuardedRequest):
        raise ImproperlyConfigured(
            f"{cls.__name__}: its Request has to inherit from celery_syncguard.tasks.worker.GuardedRequest, which frees what a "
            f"dead child held"
        )


@task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def _on_postrun(sender: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    # A hook of the task could be overridden without super().
    if isinstance(sender, LockedTask) and not gate.was_passed(sender.request):
        if state == SUCCESS:
            logger.error(
                "%s[%s] ran without its lock: %s",
                sender.name,
                sender.request.id,
                "called in a thread that is not the tracer's, or its class got another __call__ and before_start since",
            )
        end_without_body(sender, sender.request, state, retval)


def _result_of(result: Any) -> Any:
    marker = result.result.skipped
    if marker is None:
        return EagerResult(result.id, None, SUCCESS, name=result.name)
    return _EagerlySkipped(result.id, marker, SKIPPED, name=result.name)


def _without_link(send: Any) -> Any:
    def without_link(*, link: Any, **call: Any) -> Any:  # noqa: ARG001 - taken out
        return send(**call)

    return without_link
