"""Celery without one of its undocumented parts, or with another one: a fallback, or a refusal that names the versions."""

from __future__ import annotations

import functools
import signal
import uuid
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, beat, schedules, states
from celery.app import trace
from celery.app.task import Context
from celery.backends import base as backends
from celery.concurrency import prefork
from celery.utils import threads
from celery.worker import request as worker_request
from celery.worker import state as worker_state

from celery_syncguard import ImproperlyConfigured, LockedTask, NoLease
from celery_syncguard.tasks import app_state, celery_internals, worker
from celery_syncguard.tasks import publisher_confirms as confirms

REFUSED = r"^celery-syncguard \S+ does not work with celery \S+ \(.+\): install another version of one of them$"


@pytest.fixture
def app():
    app = Celery("internals", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.update(syncguard_dsn="memory://", task_default_queue=uuid.uuid4().hex)
    yield app
    app_state.state_of(app).close()


def locked(app: Celery, **options: Any) -> Any:
    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k", **options)
    def f(self: Any) -> Any:
        return int(self.fence)

    return f


def run_traced(task: Any) -> Any:
    """Through the tracer that a worker builds."""
    tracer = trace.build_tracer(task.name, task, app=task.app)
    headers: dict[str, Any] = {}
    return tracer("id", (), {}, {"id": "id", "headers": headers, "delivery_info": {}, "called_directly": False})


# Refusals, when a task is registered or a worker starts


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Task, "request_stack"), (Context, "_protected"), (backends.Backend, "_call_task_errbacks")],
)
def test_a_task_is_not_registered_where_its_body_could_run_without_its_lock(app, monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    task = locked(app)
    with pytest.raises(ImproperlyConfigured, match=REFUSED) as caught:
        app.finalize()
        task.name  # a proxy until somebody asks
    assert name in str(caught.value)


def test_errbacks_that_do_not_know_whose_they_are_are_refused_too(app, monkeypatch):
    monkeypatch.setattr(backends.Backend, "_call_task_errbacks", lambda self, failed, exc, traceback: None)
    with pytest.raises(ImproperlyConfigured, match="_call_task_errbacks has no `request`"):
        celery_internals.refuse_unfit()


def test_a_worker_does_not_start_where_the_tracer_passes_by_a_task(app, monkeypatch, capsys):
    bound = app_state.state_of(app)
    worker.check(bound)
    monkeypatch.setattr(trace, "task_has_custom", lambda task, name: False)
    with pytest.raises(ImproperlyConfigured, match=REFUSED):
        worker.check(bound)
    with pytest.raises(SystemExit):
        worker.start(SimpleNamespace(), bound)
    assert "its tracer does not call the __call__ of a task" in capsys.readouterr().err


def test_a_tracer_that_cannot_be_asked_and_passes_by_a_task_shows_in_the_log(app, monkeypatch, caplog):
    monkeypatch.delattr(trace, "task_has_custom")
    worker.check(app_state.state_of(app))
    monkeypatch.setattr(trace, "task_has_custom", lambda task, name: False, raising=False)

    @app.task(base=LockedTask, shared=False, lock_key="k")
    def f() -> str:
        return "ran"

    assert run_traced(f).retval == "ran"
    assert "ran without its lock" in caplog.text


@pytest.mark.parametrize("name", ["apply_entry", "populate_heap", "schedules_equal", "tick"])
def test_a_beat_does_not_start_with_another_scheduler(app, monkeypatch, name):
    celery_internals.refuse_unfit_beat()
    monkeypatch.delattr(beat.Scheduler, name)
    with pytest.raises(ImproperlyConfigured, match=REFUSED):
        celery_internals.refuse_unfit_beat()


def test_a_beat_does_not_start_with_schedules_that_take_no_time_from_us(monkeypatch):
    monkeypatch.setattr(schedules.BaseSchedule, "now", lambda self: datetime.now(timezone.utc))
    with pytest.raises(ImproperlyConfigured, match="does not ask its nowfun"):
        celery_internals.refuse_unfit_beat()


# A call of a task


def test_without_a_stack_below_the_top_a_lease_is_not_found_and_said_so(app, monkeypatch):
    task = locked(app)
    task.push_request(id="outer")
    task.push_request(id="inner")
    try:
        assert celery_internals.outer_request(task).id == "outer"
        monkeypatch.setattr(type(task.request_stack), "stack", property(lambda self: []))
        assert celery_internals.outer_request(task) is None
        with pytest.raises(NoLease):
            task.lease
    finally:
        monkeypatch.undo()
        task.pop_request()
        task.pop_request()


def test_a_call_of_celerys_that_is_written_elsewhere_puts_a_request_on_top_and_the_lease_is_found(app, monkeypatch):
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return celerys(self, *args, **kwargs)

    celerys = Task.__call__
    monkeypatch.setattr(Task, "__call__", __call__)
    assert run_traced(locked(app)).retval > 0


def test_autoretry_that_is_woven_in_another_way_retries_within_the_lock(app, monkeypatch):
    def weave(task: Any, **options: Any) -> None:
        inner = task.run

        @functools.wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except KeyError as exc:
                raise task.retry(exc=exc, countdown=0) from None

        task.run = run

    monkeypatch.setattr("celery.app.base.add_autoretry_behaviour", weave)
    fences = []

    @app.task(base=LockedTask, bind=True, shared=False, lock_key="k", autoretry_for=(KeyError,), max_retries=2)
    def f(self: Any) -> str:
        fences.append(int(self.fence))
        if len(fences) < 3:
            raise KeyError("again")
        return "done"

    assert f.apply().get() == "done"
    assert sorted(set(fences)) == fences
    assert len(fences) == 3
    assert app_state.guard_for(app).locks() == []


def test_bodies_are_told_apart_by_thread_where_celery_does_not_say_how(monkeypatch):
    monkeypatch.delattr(threads, "get_ident")
    assert celery_internals.find("celery.utils.threads:get_ident") is None


# Publishing


def test_nothing_is_sent_with_a_claim_where_no_confirmation_can_be_asked_for(app, monkeypatch):
    monkeypatch.setattr(type(app.amqp), "send_task_message", property(lambda self: self.missing), raising=False)
    with pytest.raises(ImproperlyConfigured, match=r"AMQP.send_task_message does not exist"):
        confirms.ask_for_confirms(app)


@pytest.mark.parametrize("gone", [(), ("maybe_iso8601",), ("maybe_make_aware",)])
def test_a_moment_is_read_as_celery_reads_it(app, monkeypatch, gone):
    app.conf.timezone = "Europe/Berlin"
    for name in gone:
        monkeypatch.delattr(f"celery.utils.time.{name}")
    expected = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
    moments = ["2030-01-01T12:00:00", datetime(2030, 1, 1, 12), "2030-01-01T13:00:00+01:00", expected]  # noqa: DTZ001
    assert [celery_internals.instant(app, one) for one in moments] == [expected] * 4


# Results


def test_a_state_is_put_wherever_celery_keeps_a_copy_of_those_that_are_ready(monkeypatch):
    def another_place(self: Any, ready: Any = states.READY_STATES) -> Any:
        return ready

    monkeypatch.setattr(states, "READY_STATES", states.READY_STATES)
    monkeypatch.setattr(states, "ALL_STATES", states.ALL_STATES)
    monkeypatch.setattr(backends.Backend, "COPY", states.READY_STATES, raising=False)
    monkeypatch.setattr(backends.Backend, "another_place", another_place, raising=False)
    monkeypatch.delattr(backends.Backend, "READY_STATES")
    monkeypatch.delattr(backends.BaseKeyValueStoreBackend, "get_many")
    celery_internals.add_ready_state("TESTED")
    celery_internals.add_ready_state("TESTED")
    assert "TESTED" in states.READY_STATES & states.ALL_STATES
    assert backends.Backend.COPY is states.READY_STATES
    assert another_place(None) is states.READY_STATES


def test_results_without_those_classes_are_left_alone(monkeypatch):
    monkeypatch.setattr(states, "READY_STATES", states.READY_STATES)
    monkeypatch.setattr(states, "ALL_STATES", states.ALL_STATES)
    monkeypatch.delattr(backends, "Backend")
    monkeypatch.delattr(backends, "BaseKeyValueStoreBackend")
    celery_internals.add_ready_state("TESTED")
    assert "TESTED" in states.READY_STATES


# A worker's main process


class Plain(celery_internals.SeesReturn):
    """A Request of a Celery that has neither the flags nor the hooks."""

    acknowledged = False


def test_a_request_without_flags_counts_as_not_ended_by_the_worker():
    request = Plain()
    assert not request.was_ended
    assert not request.comes_again
    request._already_cancelled = True  # type: ignore[attr-defined]
    assert request.was_ended


def test_a_request_that_celery_returns_in_another_way_does_not_seem_to_come_again(app, monkeypatch):
    """Then its claim ends early, and nothing is lost."""
    for name in ("reject", "_retry_worker_lost"):
        monkeypatch.delattr(worker_request.Request, name, raising=False)
    assert issubclass(worker.GuardedRequest, celery_internals.SeesReturn)
    assert not worker.GuardedRequest.comes_again


def test_the_headers_of_a_request_are_found_in_one_of_three_places(monkeypatch):
    headers = {"syncguard": {"claim": "k"}}
    assert celery_internals.headers_of(SimpleNamespace(request_dict=headers)) is headers
    assert celery_internals.headers_of(Context(headers=headers)) is headers
    assert celery_internals.headers_of(SimpleNamespace(message=SimpleNamespace(headers=headers))) is headers
    assert celery_internals.headers_of(None) == {}


def test_a_worker_whose_requests_are_elsewhere_has_none_to_end(monkeypatch):
    monkeypatch.setattr(worker_state, "active_requests", {"one"})
    assert celery_internals.active_requests() == ("one",)
    monkeypatch.delattr(worker_state, "active_requests")
    assert celery_internals.active_requests() == ()


def test_a_pool_that_cannot_be_looked_up_is_unknown(monkeypatch):
    node = SimpleNamespace(pool_cls="prefork")
    assert celery_internals.pool_module(node) == prefork.__name__
    monkeypatch.delattr("celery.concurrency.get_implementation")
    assert celery_internals.pool_module(node) == ""


# Beat


def test_a_heap_has_the_same_names_without_celerys_tuple(monkeypatch):
    theirs = celery_internals.heap_event()(1.0, 5, "entry")
    monkeypatch.delattr(beat, "event_t")
    ours = celery_internals.heap_event()(1.0, 5, "entry")
    assert ours == theirs
    assert ours._asdict() == theirs._asdict()


def test_a_schedule_is_written_back_also_where_nobody_notes_it(app, monkeypatch):
    written = []
    monkeypatch.setattr(beat.Scheduler, "sync", lambda self: written.append(self))
    scheduler = beat.Scheduler(app, lazy=True)
    celery_internals.sync_noting(scheduler)
    assert scheduler._last_sync is not None
    monkeypatch.delattr(beat.Scheduler, "_do_sync")
    celery_internals.sync_noting(scheduler)
    assert written == [scheduler] * 2


def test_a_schedule_with_slots_is_copied_too():
    class Slotted:
        __slots__ = ("every", "nowfun")

        def __init__(self) -> None:
            self.every = 5

    before = Slotted()
    copied = celery_internals.altered(before, nowfun=int)
    assert (copied.every, copied.nowfun) == (5, int)
    assert copied is not before
    plain = schedules.schedule(timedelta(seconds=7))
    assert celery_internals.altered(plain, relative=True).run_every == plain.run_every
    assert not plain.relative


def test_a_schedule_that_is_due_says_so_with_and_without_a_name(monkeypatch):
    plan = schedules.schedule(60)
    assert celery_internals.due_now(plan).is_due(None).is_due
    monkeypatch.delattr(schedules, "schedstate")
    assert celery_internals.due_now(plan).is_due(None) == (True, 0.0)


@pytest.mark.parametrize("name", ["minute", "hour", "day_of_week", "day_of_month", "month_of_year"])
def test_a_crontab_with_other_fields_is_asked_for_its_slots(name):
    from celery_syncguard.beat import timetable

    plan = schedules.crontab(minute="30", hour="2", nowfun=lambda: datetime.now(timezone.utc))
    after = datetime(2030, 1, 1, tzinfo=timezone.utc)
    before = timetable.next_due(plan, after)
    assert celery_internals.has_fields(plan)
    other = celery_internals.altered(plan, **{name: SimpleNamespace(values=getattr(plan, name))})
    assert not celery_internals.has_fields(other)
    assert not timetable._is_crontab(other)
    assert before == datetime(2030, 1, 1, 2, 30, tzinfo=timezone.utc)


def test_a_zone_of_celerys_own_is_known_as_long_as_there_is_one(monkeypatch):
    from celery.utils import time as celery_time

    zone = celery_time.LocalTimezone()
    assert celery_internals.is_system_zone(zone)
    assert not celery_internals.is_system_zone(timezone.utc)
    monkeypatch.delattr(celery_time, "LocalTimezone")
    assert not celery_internals.is_system_zone(zone)


def test_a_handler_that_is_written_elsewhere_is_not_taken_for_beats(app):
    from celery.apps.beat import Beat

    before = signal.getsignal(signal.SIGTERM)
    try:
        Beat(app=app).install_sync_handler(SimpleNamespace())
        theirs = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert celery_internals.is_of_beat(theirs)
    theirs.__module__ = "celery.apps.elsewhere"
    assert not celery_internals.is_of_beat(theirs)
    assert not celery_internals.is_of_beat(signal.SIG_DFL)
