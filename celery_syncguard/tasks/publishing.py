"""Publishing a message that has its keys: claimed first, so that a second copy of the same work is not queued.

    claim (short life) -> publish -> the broker has it (`publisher_confirms`) -> confirm (whole life)

The claim is made on a connection of our own, so a duplicate never aborts the caller's transaction, and is ended again when
publishing raises. The publisher that gets the claim publishes; the others get the id of the task that has it.

What if a result of the duplicate itself is waited for, under its own id? That depends on what is still to be sent:

  * a head with a continuation (chain, link): refused with `DuplicateTask` before anything is sent, as its tail would be lost
    (sent by a beat: logged, as no code there would catch that);
  * a member of a group: not sent; its own result says SKIPPED and by whom, so that the group's result comes to an end;
  * a member of a chord, or what a worker sends for a task that has begun (a retry, a callback, the next step of a chain, the
    body of a chord): sent without a claim, with a warning, as an exception there would break what has been done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import current_task, uuid

from celery_syncguard import signals
from celery_syncguard.core.events import logger
from celery_syncguard.core.key import new_lock_id, task_key
from celery_syncguard.core.process import default_holder
from celery_syncguard.core.store import Claim
from celery_syncguard.errors import DuplicateTask, ImproperlyConfigured, SyncGuardError
from celery_syncguard.skipped import SKIPPED, Skipped, marker_for
from celery_syncguard.tasks import app_state, claims
from celery_syncguard.tasks.claims import Outcome, life, seconds_until
from celery_syncguard.tasks.delivery import DELIVERY
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.options import DEFAULTS, OnDuplicate, Seconds, TaskOptions, take_overrides
from celery_syncguard.tasks.publisher_confirms import ask_for_confirms
from celery_syncguard.tasks.queues import without_way
from celery_syncguard.tasks.typed import PublishedResult

__all__ = ["is_again", "new_call_id", "publish", "send_task", "sent_at_an_end", "sent_for_begun"]


def publish(
    app: Any,
    name: str,
    options: TaskOptions,
    *,
    header: Header,
    call: dict[str, Any],
    send: Callable[..., Any],
    task: Any = None,
) -> PublishedResult:
    """Send one message, claimed first if its header has a claim.

    Arguments:
        header: our header, keys and call id included.
        call: the keyword arguments for `send`, with `task_id` and `headers` among them or not.
        send: publishes and returns an AsyncResult.

    Returns:
        The AsyncResult, of the new or of the existing task, with `.duplicate` and `.holder`.

    Raises:
        DuplicateTask: the work is queued or running, and the caller wants an error or the message has a continuation.
        StoreUnavailable: the claim could not be asked for; nothing was sent.
    """
    call["headers"] = without_way(call.get("headers"), again=is_again(call))
    key = header.claim_key
    if key is None:
        return _sent(header, call, send)
    ask_for_confirms(app)
    guard = app_state.guard_for(app)
    task_id = call["task_id"] = call.get("task_id") or uuid()
    holder = f"{name}[{task_id}] {default_holder()}"
    # What was due long ago is work like any other, and its claim is no shorter.
    due = max(0.0, seconds_until(app, call.get("eta"), call.get("countdown")) or 0.0)
    expires = call.get("expires")
    ttl = life(app, getattr(task, "expires", None) if expires is None else expires, due + options.dedup_ttl)
    if header.claimed:
        # It comes again under the claim that it has, which lives as long as its message waits. (What comes back for a
        # held lock is renewed by its next delivery, unless that is far away.)
        if options.dedup_until != "ttl" and (due > options.dedup_ttl / 2 or _is_next_attempt(call)):
            claims.renew(guard, key, task_id=task_id, ttl=ttl, holder=holder, until=options.dedup_until)
        return _sent(header, call, send)
    try:
        claim = claims.make(guard, key, task_id=task_id, ttl=ttl, holder=holder, fingerprint=header.fingerprint)
    except SyncGuardError as exc:
        if not sent_for_begun(call):
            raise
        logger.warning("%s[%s] is sent without its claim: %s", name, task_id, exc)
        return _sent_unclaimed(header, call, send)
    if not claim.ours:
        guard.counts["duplicate"] += 1
        signals.task_duplicate.send(sender=task if task is not None else name, claim=claim)
        return _duplicate(app, name, options, claim, header=header, call=call, send=send)
    try:
        result = _sent(header._replace(claimed=True), call, send)
    except BaseException:
        claims.end(guard, key, Outcome.VOID, task_id=task_id, ttl=ttl)
        raise
    # Before the caller goes on: it may freeze, or end, as soon as it has its answer.
    claims.confirm(guard, key, task_id=task_id, ttl=ttl)
    request = current_task.request if current_task else None
    if request is not None and request.id == task_id and hasattr(request, DELIVERY):
        # A body put this in its own place (`self.replace`), under its id and so under its claim.
        getattr(request, DELIVERY).claim_passed_on = key
    return result


def _is_next_attempt(call: Mapping[str, Any]) -> bool:
    """Whether the running attempt publishes the next one, not the same again because it could not run."""
    request = current_task.request if current_task else None
    return request is not None and request.id == call.get("task_id") and request.retries != call.get("retries")


def is_again(call: Mapping[str, Any]) -> bool:
    """Whether the message is published again: only then the call says which attempt it is."""
    return "retries" in call


def new_call_id(call: Mapping[str, Any]) -> str | None:
    """The `Header.call_id` of a message that is published the first time. A new publish is new work, also under an old task id. Not so what replaces a body, which goes on in its place; nor
    beat's second send of one slot. Without a call id, the task id says which call it is.
    """
    if "replaced_task_nesting" in call:
        request = current_task.request if current_task else None
        if request is not None and request.id == call.get("task_id"):
            return Header.of(request.headers).call_id
    return None if "syncguard_due_at" in (call.get("headers") or {}) else new_lock_id()


def _duplicate(
    app: Any,
    name: str,
    options: TaskOptions,
    claim: Claim,
    *,
    header: Header,
    call: dict[str, Any],
    send: Callable[..., Any],
) -> PublishedResult:
    """The existing task's result, unless the message has to be sent all the same."""
    if header.differs(claim.fingerprint):
        logger.warning("%s: task %s has claimed %r with other arguments than these", name, claim.task_id, claim.key)
    error = DuplicateTask(
        f"{name} is a duplicate: {claim.key!r} was claimed {claim.age:.1f} s ago by task {claim.task_id}",
        task_id=claim.task_id,
        key=claim.key,
        holder=claim.holder,
        age=claim.age,
    )
    continued = bool(call.get("chain") or call.get("link"))
    group, chord = _waiting(call)
    if sent_for_begun(call) or chord or (group and continued):
        logger.warning("%s; it is sent nevertheless, because others wait for its end", error)
        return _sent_unclaimed(header, call, send)
    if group:
        logger.info("%s; as a member of a group it ends as SKIPPED", error)
        skipped = Skipped(key=claim.key, holder=claim.holder, task_id=claim.task_id, since=round(claim.age, 3))
        app.backend.store_result(call["task_id"], marker_for(app.backend, skipped), SKIPPED)
    elif (continued or options.dedup_on_duplicate == "raise") and not call["headers"].get("celery_beat_task"):
        # In a beat no code would catch it, and that the work of a slot is under way already happens every day there.
        raise error
    else:
        logger.info("%s", error)
    result_cls = call.get("result_cls") or app.AsyncResult
    return _marked(result_cls(claim.task_id), duplicate=True, holder=claim.holder)


def _sent(header: Header, call: dict[str, Any], send: Callable[..., Any]) -> PublishedResult:
    call["headers"] = header.into(call["headers"])
    return _marked(send(**call), duplicate=False, holder=None)


def _sent_unclaimed(header: Header, call: dict[str, Any], send: Callable[..., Any]) -> PublishedResult:
    return _sent(header._replace(claim_key=None), call, send)


def _waiting(call: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a group, and whether a chord, counts on the end of this message or of the chain that it begins."""
    chain = call.get("chain")
    last = (chain[0].get("options") or {}) if chain else {}
    return (
        bool(call.get("group_id") or last.get("group_id")),
        call.get("chord") is not None or last.get("chord") is not None,
    )


def sent_for_begun(call: Mapping[str, Any]) -> bool:
    """Whether Celery sends this for a task that has begun (its retry, callback, next step), not the body of the task."""
    if sent_at_an_end(call) or "retries" in call:
        return True
    request = current_task.request if current_task else None
    if request is None or request.called_directly:
        return False
    return current_task.name == "celery.chord_unlock" or request.id in (call.get("task_id"), call.get("parent_id"))


def sent_at_an_end(call: Mapping[str, Any]) -> bool:
    """Whether Celery itself sends this because a task has ended: a callback, an errback, the next step of a chain, the body of
    a chord. Celery passes parent_id or root_id for these; for what a body sends it fills them in only later.
    """
    request = current_task.request if current_task else None
    if request is None:
        # The main process of a worker, for a task whose process died. Others do not have to import what a worker needs.
        # Its own next attempt (Celery 5.7's `retry_on_worker_lost`) is none of these: Celery handles what it raises.
        if call.get("parent_id") is None or "retries" in call:
            return False
        from celery_syncguard.tasks.undertaker import undertaker

        return undertaker.is_bound
    if request.called_directly or hasattr(request, DELIVERY) or call.get("task_id") == request.id:
        return False
    body = ((request.chord or {}).get("options") or {}).get("task_id")
    return bool(
        call.get("parent_id") == request.id
        or call.get("root_id", ...) == (request.root_id or request.id)
        or (body is not None and call.get("task_id") == body)
    )


def _marked(result: PublishedResult, *, duplicate: bool, holder: str | None) -> PublishedResult:
    if hasattr(result, "id"):
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
    dedup_ttl: Seconds = DEFAULTS.dedup_ttl,
    dedup_on_duplicate: OnDuplicate = DEFAULTS.dedup_on_duplicate,
    **options: Any,
) -> PublishedResult:
    """`app.send_task`, for a producer that does not have the task's code: the keys are given as they are.

    Arguments:
        lock_key, dedup_key, run_once: literal keys, not templates.
        dedup_ttl: seconds. Others as `app.send_task`.

    Returns, raises: as `publish`.
    """
    if unsent := take_overrides(options, owner="send_task"):
        raise ImproperlyConfigured(
            f"send_task: {', '.join(unsent)} cannot be given here: the worker's task has its own"
        )
    app_state.attach(app)
    ours = DEFAULTS.replace({"dedup_ttl": dedup_ttl, "dedup_on_duplicate": dedup_on_duplicate})
    # What a body hands on (`headers=self.request.headers`) is about the body's own message.
    header = Header(
        call_id=None if is_again(options) else new_call_id(options),
        lock_key=None if lock_key is None else task_key(lock_key, what="lock_key"),
        claim_key=None if dedup_key is None else task_key(dedup_key, what="dedup_key"),
        run_key=None if run_once is None else task_key(run_once, what="run_once"),
        given=tuple(
            entry for entry, key in (("key", lock_key), ("claim", dedup_key), ("run", run_once)) if key is not None
        ),
    )

    def send(**call: Any) -> Any:
        return app.send_task(name, args, kwargs, **call)

    return publish(app, name, ours, header=header, call=options, send=send)
