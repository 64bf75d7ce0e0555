"""Publishing: keys are computed, and a second copy of the same work is not queued.

    claim (short life) -> publish -> confirm (whole life, in the background)

The claim is made on a connection of our own, so a duplicate never aborts the caller's transaction, and is ended again when
publishing raises. Whoever gets the claim publishes; everybody else gets the id of the task that has it.

What if a duplicate carries a continuation (link, chain, chord)? Its tail would be lost with it. So it is refused loudly
before anything is sent; but where the caller is a worker that dispatches the next step of a finished parent, or the step is
a member of a chord that is half sent, it is sent without a claim, since an exception there would break what has been done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import current_task
from celery.result import AsyncResult
from celery.utils import uuid

from celery_syncguard import binding, signals
from celery_syncguard.confirmer import UNCONFIRMED_TTL
from celery_syncguard.errors import DuplicateTask, SyncGuardError
from celery_syncguard.events import logger
from celery_syncguard.message import HEADER, header_of
from celery_syncguard.options import DEFAULT_DEDUP_TTL, TaskOptions
from celery_syncguard.process import default_holder
from celery_syncguard.store import Claim

__all__ = ["publish", "send_task"]


def publish(
    app: Any,
    name: str,
    options: TaskOptions,
    header: dict[str, Any],
    *,
    call: dict[str, Any],
    send: Callable[..., Any],
    task: Any = None,
) -> Any:
    """Send one message, claimed first if its header has a claim.

    Arguments:
        header: our header, keys included; put into `call["headers"]`.
        call: the keyword arguments for `send`, with `task_id` and `headers` among them or not.
        send: publishes and answers with an AsyncResult.

    Returns:
        The AsyncResult, of the new or of the existing task, with `.duplicate` and `.holder`.

    Raises:
        DuplicateTask: the work is queued or running, and the caller wants an error or the message has a continuation.
        StoreUnavailable: the claim could not be asked for; nothing was sent.
    """
    call["headers"] = {**(call.get("headers") or {}), HEADER: header}
    claim_key = header.get("claim")
    if claim_key is None or header.get("claimed"):
        # Nothing to claim, or a message that comes again under the claim that it has.
        return send(**call)
    store = binding.guard_for(app).store
    task_id = call.get("task_id") or uuid()
    call["task_id"] = task_id
    claim = store.claim(claim_key, task_id=task_id, ttl=UNCONFIRMED_TTL, holder=f"{name}[{task_id}] {default_holder()}")
    if not claim.ours:
        signals.task_duplicate.send(sender=task if task is not None else name, claim=claim)
        answer = _duplicate(app, name, options, claim, call)
        if answer is not None:
            return answer
        header.pop("claim")
        return _marked(send(**call), duplicate=False, holder=None)
    header["claimed"] = True
    try:
        result = send(**call)
    except BaseException:
        try:
            store.unclaim(claim_key, task_id=task_id)
        except SyncGuardError as exc:
            logger.warning("publishing failed and its claim could not be ended; it ends within seconds: %s", exc)
        raise
    binding.binding_for(app).confirmer.confirm(claim_key, task_id=task_id, ttl=options.dedup_ttl)
    return _marked(result, duplicate=False, holder=None)


def _duplicate(app: Any, name: str, options: TaskOptions, claim: Claim, call: Mapping[str, Any]) -> Any:
    """The existing task's result; None if the message has to be sent all the same."""
    error = DuplicateTask(
        f"{name} is a duplicate: {claim.key!r} was claimed {claim.age:.1f} s ago by task {claim.task_id}",
        task_id=claim.task_id,
        key=claim.key,
        holder=claim.holder,
        age=claim.age,
    )
    if call.get("chord") is not None or _dispatched_by_worker(call):
        logger.warning("%s; it is sent nevertheless, because others wait for its end", error)
        return None
    if call.get("chain") or call.get("link"):
        raise error
    if options.dedup_on_duplicate == "raise":
        raise error
    logger.info("%s", error)
    result_cls = call.get("result_cls") or app.AsyncResult
    return _marked(result_cls(claim.task_id), duplicate=True, holder=claim.holder)


def _dispatched_by_worker(call: Mapping[str, Any]) -> bool:
    """Whether Celery's tracer sends this as a callback or as the next step of a task that has just finished."""
    parent = current_task
    request = parent.request if parent else None
    return bool(
        request is not None
        and not request.called_directly
        and call.get("parent_id") is not None
        and call.get("parent_id") == request.id
    )


def _marked(result: Any, *, duplicate: bool, holder: str | None) -> Any:
    if isinstance(result, AsyncResult) or hasattr(result, "id"):
        result.duplicate = duplicate
        result.holder = holder
    return result


def send_task(
    app: Any,
    name: str,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    lock_key: str | None = None,
    dedup_key: str | None = None,
    run_once: str | None = None,
    dedup_ttl: float = DEFAULT_DEDUP_TTL,
    dedup_on_duplicate: str = "return",
    **options: Any,
) -> Any:
    """`app.send_task`, for a producer that does not have the task's code: the keys are given as they are.

    Arguments:
        lock_key, dedup_key, run_once: literal keys, not templates.
        dedup_ttl: seconds. Others as `app.send_task`.

    Returns, raises: as `publish`.
    """
    from celery_syncguard.key import public_key

    binding.attach(app)
    ours = TaskOptions().replace({"dedup_ttl": dedup_ttl, "dedup_on_duplicate": dedup_on_duplicate})
    header = header_of(options.get("headers"))
    for entry, key, what in (
        ("key", lock_key, "lock_key"),
        ("claim", dedup_key, "dedup_key"),
        ("run", run_once, "run_once"),
    ):
        if key is not None:
            header[entry] = public_key(key, what=what)
    return publish(app, name, ours, header, call=options, send=lambda **call: app.send_task(name, args, kwargs, **call))
