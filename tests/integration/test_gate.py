"""The one call that Celery makes of a task runs under its lock, whatever the task is made of; every other call is plain.

Each in an eager call and through the tracer that a worker builds, on the memory store.
"""

import asyncio
import functools
import uuid
from types import SimpleNamespace

import pytest
from celery import Celery, Task, signals
from celery.app import trace

from celery_syncguard import ImproperlyConfigured, LockedTask, LockHeld, NoLease
from celery_syncguard.tasks import app_state, gate
from celery_syncguard.testing import hold_elsewhere


@pytest.fixture
def app():
    app = Celery("gate", set_as_current=False)
    app.conf.update(
        syncguard_dsn="memory://",
        broker_url="memory://",
        result_backend="cache+memory://",
        task_default_queue=uuid.uuid4().hex,
    )
    yield app
    app_state.state_of(app).close()


@pytest.fixture(params=["eagerly", "in a worker"])
def run(app, request, monkeypatch):
    """Runs one delivery of a task; answers with its state and what it returned or raised."""
    if request.param == "eagerly":

        def run(task, *args, task_id=None):
            result = task.apply(args, task_id=task_id)
            return result.state, result.result

        return run
    # What `setup_worker_optimizations` does to `Task.__call__`.
    monkeypatch.setattr(Task, "__call__", Task.__call__)
    monkeypatch.setattr(Task, "_stackprotected", False, raising=False)
    trace._install_stack_protection()

    def run_traced(task, *args, task_id=None):
        seen = []
        tracer = trace.build_tracer(task.name, task, app=app)
        task_id = task_id or uuid.uuid4().hex
        traced = tracer(task_id, args, {}, {"id": task_id, "delivery_info": {}, "args": args, "kwargs": {}})
        state = traced.info.state if traced.info else "SUCCESS"
        seen.append(traced.info.retval if traced.info else app.backend.get_result(task_id))
        return state, seen[0]

    return run_traced


def keys(app):
    return [row.key for row in app_state.guard_for(app).locks()]


class Work:
    def run(self, key):
        return keys(self.app)


class WorkTask(Task):
    def run(self, key):
        return keys(self.app)


class OwnHooks:
    """Bases that forget `super()`."""

    def __init_subclass__(cls, **kwargs):
        pass

    @classmethod
    def on_bound(cls, app):
        pass


def inherited():
    class T(Work, LockedTask):
        name = "t"
        lock_key = "k:{key}"

    return T()


def inherited_from_a_task():
    class T(WorkTask, LockedTask):
        name = "t"
        lock_key = "k:{key}"

    return T()


def behind_us_in_the_bases():
    class Base(LockedTask):
        abstract = True
        lock_key = "k:{key}"

    class T(Base, WorkTask):
        name = "t"

    # Celery's own `run`, which ours inherits, is in front of it.
    T.run = WorkTask.run
    return T()


def bases_without_super():
    class T(OwnHooks, LockedTask):
        name = "t"
        lock_key = "k:{key}"

        def run(self, key):
            return keys(self.app)

    return T()


def body_in_call():
    class T(LockedTask):
        name = "t"
        lock_key = "k:{key}"

        def __call__(self, key):
            return keys(self.app)

    return T()


def call_that_calls_the_body_in_its_own_way():
    class T(LockedTask):
        name = "t"
        lock_key = "k:{key}"

        def __call__(self, key):
            return type(self).run(self, key)

        def run(self, key):
            return keys(self.app)

    return T()


MAKERS = [
    inherited,
    inherited_from_a_task,
    behind_us_in_the_bases,
    bases_without_super,
    body_in_call,
    call_that_calls_the_body_in_its_own_way,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("retrying", [False, True], ids=["", "autoretry"])
def test_a_body_is_locked_however_it_came_to_be(app, run, make, retrying):
    task = make()
    if retrying:
        type(task).autoretry_for = (LookupError,)
    task = app.register_task(task)
    assert run(task, "a") == ("SUCCESS", ["k:a"])
    assert keys(app) == []
    assert task("a") == [], "a plain call takes no lock"
    # Which is what makes a worker see to what a killed child held.
    assert app in app_state._states


@pytest.mark.parametrize("make", [inherited, body_in_call])
def test_without_the_gate_such_a_body_runs_unlocked(app, run, make, monkeypatch, caplog):
    """The negative control, and what the log says then."""
    monkeypatch.setattr(gate, "install", lambda task: None)
    monkeypatch.setattr(LockedTask, "__call__", Task.__call__)
    task = app.register_task(make())
    assert run(task, "a") == ("SUCCESS", [])
    assert f"{task.name}[" in caplog.text
    assert "ran without its lock" in caplog.text


@pytest.mark.parametrize("where", ["class", "task", "class, before it was registered"])
def test_a_body_that_is_set_later_is_locked(app, run, where):
    class T(LockedTask):
        name = "t"
        lock_key = "k:{key}"

        def run(self, key):
            return "the first body"

    def later(self, key):
        return keys(self.app)

    if where == "class, before it was registered":
        T.run = later
    task = app.register_task(T())
    if where == "class":
        T.run = later
    elif where == "task":
        task.run = later.__get__(task)
    assert run(task, "a") == ("SUCCESS", ["k:a"])


def test_a_body_that_is_set_later_has_keys_of_its_own_parameters(app, run):
    class T(LockedTask):
        name = "t"
        lock_key = "k:{key}"

        def run(self, key, other):
            """Does not run."""

    task = app.register_task(T())
    assert task.task_keys()

    def later(self, other, key):
        return keys(self.app)

    T.run = later
    assert run(task, "x", "a") == ("SUCCESS", ["k:a"])


def test_a_task_whose_class_has_no_body_has_keys_of_the_one_that_it_was_given(app, run):
    class T(LockedTask):
        name = "t"
        lock_key = "k:{key}"

    task = app.register_task(T())
    task.run = lambda key, other=None: keys(app)
    assert run(task, "a") == ("SUCCESS", ["k:a"])


def test_a_call_that_is_set_later_is_locked(app, run):
    @app.task(shared=False, base=LockedTask, lock_key="k")
    def f():
        """Does not run."""

    f.__class__.__call__ = lambda self: keys(self.app)
    assert run(f) == ("SUCCESS", ["k"])


def test_a_subclass_of_a_registered_task_has_its_own_options_and_is_locked(app, run):
    class First(LockedTask):
        name = "first"
        lock_key = "first"

        def run(self):
            return keys(self.app)

    class Second(First):
        name = "second"
        lock_key = "second"

        def before_start(self, *args):
            """Without super()."""

        def __call__(self):
            return keys(self.app)

    first = app.register_task(First())
    assert run(first) == ("SUCCESS", ["first"])
    # As a registry takes it, which does not bind.
    app.tasks.register(Second())
    assert run(app.tasks["second"]) == ("SUCCESS", ["second"])


def test_what_call_puts_around_the_body_ends_under_the_lock(app, run):
    """A transaction that `__call__` commits, for example."""

    class Committing(LockedTask):
        abstract = True
        lock_key = "k"

        def __call__(self, *args, **kwargs):
            try:
                return super().__call__(*args, **kwargs)
            finally:
                at_commit.append(keys(self.app))

    at_commit = []

    @app.task(shared=False, base=Committing)
    def f():
        return "ran"

    assert run(f) == ("SUCCESS", "ran")
    assert at_commit == [["k"]]


def test_autoretry_lies_around_the_lock_whatever_call_does(app):
    """A held lock is retried by autoretry, and what autoretry publishes gets the lock when this attempt has ended."""
    seen = []

    class Own(LockedTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            return self.run(*args, **kwargs)

        def retry(self, *args, **kwargs):
            seen.append(keys(self.app))
            return super().retry(*args, **kwargs)

    @app.task(
        shared=False,
        base=Own,
        bind=True,
        lock_key="k",
        lock_on_held="raise",
        autoretry_for=(LockHeld, LookupError),
        retry_kwargs={"countdown": 0, "max_retries": 1},
    )
    def f(self):
        if not self.request.retries:
            raise LookupError
        return keys(self.app)

    assert f.apply().result == ["k"]
    assert seen == [["k"]]
    with hold_elsewhere(app_state.guard_for(app), "k"):
        assert isinstance(f.apply().result, LockHeld)
    assert seen == [["k"], ["k"], ["k"]]


HOOKS = ["before_start", "on_success", "after_return", "on_failure", "body", "__call__"]


@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize("shape", ["plain", "with __call__"])
def test_a_call_of_the_task_by_code_is_plain_wherever_it_stands(app, run, where, shape):
    calls = []

    class Probes(LockedTask):
        abstract = True
        lock_key = "k"
        run_once = True

        def probe(self, at):
            if at == where and not calls.count("probing"):
                calls.append("probing")
                assert self("probe") == "ran"

        def before_start(self, *args):
            super().before_start(*args)
            self.probe("before_start")

        def on_success(self, *args):
            self.probe("on_success")

        def on_failure(self, *args):
            self.probe("on_failure")

        def after_return(self, *args):
            self.probe("after_return")

    class Calls(Probes):
        abstract = True

        def __call__(self, *args, **kwargs):
            self.probe("__call__")
            return self.run(*args, **kwargs)

    @app.task(shared=False, bind=True, base=Calls if shape == "with __call__" else Probes)
    def f(self, what):
        calls.append((what, keys(app)))
        self.probe("body")
        if what == "fails":
            raise LookupError
        return "ran"

    what = "fails" if where == "on_failure" else "real"
    state, _ = run(f, what)
    assert state == ("FAILURE" if what == "fails" else "SUCCESS")
    bodies = [call for call in calls if call != "probing"]
    assert (what, ["k"]) in bodies
    if where == "__call__" and shape == "plain":
        return
    assert sorted(call[0] for call in bodies) == sorted(["probe", what])
    inside = where in ("body", "__call__")
    assert ("probe", ["k"] if inside else []) in bodies


def test_a_probe_that_is_taken_for_the_delivery_eats_the_lock(app, run, monkeypatch):
    """The negative control: as if the first call were Celery's."""
    monkeypatch.setattr(gate, "_is_hooked", lambda task: False)
    monkeypatch.setattr(gate, "_CLOSED", None)
    calls = []

    class Probes(LockedTask):
        abstract = True
        lock_key = "k"

        def before_start(self, *args):
            self("probe")

    @app.task(shared=False, base=Probes)
    def f(what):
        calls.append((what, keys(app)))

    run(f, "real")
    assert calls[0] == ("probe", ["k"])


def test_a_plain_call_before_the_delivery_has_no_lease(app, run):
    class Probes(LockedTask):
        abstract = True
        lock_key = "k"

        def before_start(self, *args):
            with pytest.raises(NoLease):
                self("probe")

    @app.task(shared=False, bind=True, base=Probes)
    def f(self, what):
        return self.lease.key

    assert run(f, "real") == ("SUCCESS", "k")


@pytest.mark.parametrize("where", ["before_start", "body"])
def test_a_task_that_is_its_own_errback_is_locked_there(app, where):
    class Fails(LockedTask):
        abstract = True
        lock_key = "k"

        def before_start(self, task_id, args, kwargs):
            if args[0] == "before_start":
                raise LookupError

    seen = []

    @app.task(shared=False, base=Fails)
    def f(request, exc, traceback):
        if request == "body":
            raise LookupError
        seen.append(keys(app))

    assert f.apply((where, None, None), link_error=f.s()).state == "FAILURE"
    assert seen == [["k"]]


def errback_of(app):
    """A task that Celery calls as a function when another one fails, and what it saw."""

    @app.task(shared=False, base=LockedTask, lock_key="{a}", lock_on_held="raise")
    def undo(a, b):
        seen.append((a, b, keys(app)))

    @app.task(shared=False)
    def fails():
        raise LookupError

    seen = []
    return undo, fails, seen


def test_an_immutable_errback_is_locked_too(app, caplog):
    undo, fails, seen = errback_of(app)
    fails.apply(link_error=undo.si("a", "b"))
    assert seen == [("a", "b", ["a"])]
    undo.si("a", "b")()
    assert seen[1:] == [("a", "b", [])], "a call by code is plain"
    with hold_elsewhere(app_state.guard_for(app), "a"):
        assert fails.apply(link_error=undo.si("a", "b"), task_id="t").state == "FAILURE"
    assert len(seen) == 2
    assert f"the errback {undo.name} of {fails.name}[t] was not run: 'a' is held" in caplog.text


def test_without_a_look_at_its_caller_an_immutable_errback_is_a_plain_call(app, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(gate, "errback_request", lambda args, caller: None)
    undo, fails, seen = errback_of(app)
    fails.apply(link_error=undo.si("a", "b"))
    assert seen == [("a", "b", [])]


def test_a_call_in_a_receiver_of_celery_s_signal_is_plain(app, run):
    calls = []

    @app.task(shared=False, bind=True, base=LockedTask, lock_key="k", run_once=True)
    def f(self, what):
        calls.append((what, keys(app)))

    def probe(task=None, **_):
        task("probe")

    signals.task_prerun.connect(probe)
    signals.task_postrun.connect(probe)
    try:
        run(f, "real")
    finally:
        signals.task_prerun.disconnect(probe)
        signals.task_postrun.disconnect(probe)
    assert calls == [("probe", []), ("real", ["k"]), ("probe", [])]


def test_a_body_that_calls_its_task_does_it_inside_its_own_lock(app, run):
    @app.task(shared=False, bind=True, base=LockedTask, lock_key="{n}", run_once=True)
    def f(self, n):
        return [keys(app), self(n - 1)] if n else keys(app)

    assert run(f, 2) == ("SUCCESS", [["2"], [["2"], ["2"]]])


async def coroutine(self):
    """Does not run."""


async def generator(self):
    yield


class AsyncCallable:
    async def __call__(self):
        """Does not run."""


@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("body", [coroutine, generator])
def test_a_coroutine_as_a_body_is_refused_when_it_is_registered(app, body, bind):
    with pytest.raises(ImproperlyConfigured, match=r"its body is async.*asyncio\.run"):
        app.task(shared=False, lazy=False, base=LockedTask, lock_key="k", bind=bind)(body)


@pytest.mark.parametrize("body", [coroutine, AsyncCallable(), functools.partial(coroutine, None)])
def test_a_coroutine_as_the_run_of_a_class_is_refused_when_it_is_registered(app, body):
    class T(LockedTask):
        name = "t"
        lock_key = "k"
        run = body

    with pytest.raises(ImproperlyConfigured, match="its body is async"):
        app.register_task(T())


def test_a_body_that_returns_a_coroutine_fails(app, run):
    @app.task(shared=False, base=LockedTask, bind=True, lock_key="k")
    def f(self):
        return coroutine(self)

    state, error = run(f)
    assert state == "FAILURE"
    assert "returned a coroutine, which would run without its lock" in str(error)


def test_an_async_function_that_is_run_by_its_decorator_is_a_body(app, run):
    def runs(function):
        @functools.wraps(function)
        def runner(*args, **kwargs):
            return asyncio.run(function(*args, **kwargs))

        return runner

    @app.task(shared=False, base=LockedTask, lock_key="k:{n}")
    @runs
    async def f(n):
        return keys(app)

    assert run(f, 1) == ("SUCCESS", ["k:1"])


def test_a_worker_with_a_pool_that_calls_bodies_elsewhere_does_not_start(capsys):
    pool = type("AsyncIOPool", (), {"__module__": "celery_aio_pool.pool"})
    with pytest.raises(SystemExit):
        app_state._check_pool(SimpleNamespace(pool_cls=pool))
    assert "start this worker with another pool" in capsys.readouterr().err
    for name in ("prefork", "threads", "solo"):
        app_state._check_pool(SimpleNamespace(pool_cls=name))
