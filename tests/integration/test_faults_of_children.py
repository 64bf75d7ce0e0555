"""What cannot be sent after a task has ended fails by itself: its parent stays what it was.

A worker's tracer in this process, on stores and brokers in memory.
"""

import uuid

import pytest
from celery import Celery, Task, chain, group
from celery.app import trace
from celery.app.task import Context
from celery.exceptions import SoftTimeLimitExceeded

from celery_syncguard import ImproperlyConfigured, InvalidKey, LockedTask
from celery_syncguard.tasks import app_state, publishing
from celery_syncguard.tasks.undertaker import undertaker


class Hooks:
    """Notes which hooks of the parent run."""

    abstract = True

    def on_success(self, *args):
        self.app.hooks.append("on_success")

    def on_failure(self, *args):
        self.app.hooks.append("on_failure")

    def after_return(self, *args):
        self.app.hooks.append("after_return")


class PlainParent(Hooks, Task):
    abstract = True


class LockedParent(Hooks, LockedTask):
    abstract = True
    lock_key = "parent"


def no_key(task, args, kwargs):
    raise LookupError("no such account")


@pytest.fixture
def app():
    app = Celery("children", broker="memory://", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", result_backend="cache+memory://", task_default_queue=uuid.uuid4().hex)
    app.hooks = []

    @app.task(base=LockedTask, shared=False, name="ok", lock_key="ok")
    def ok(*args):
        """Nothing runs it."""

    @app.task(shared=False, name="told")
    def told(task_id):
        """Nothing runs it."""

    @app.task(base=LockedTask, shared=False, name="child", lock_key="child:{n}")
    def child(n):
        """Nothing runs it."""

    @app.task(base=LockedTask, shared=False, name="raising", lock_key=no_key)
    def raising(n):
        """Nothing runs it."""

    @app.task(base=LockedTask, shared=False, name="dup", dedup_key="dup", lock_key=None)
    def dup(*args):
        """Nothing runs it."""

    app.finalize()
    yield app
    app_state.state_of(app).close()
    app.close()


@pytest.fixture(params=[PlainParent, LockedParent])
def parent(app, request):
    """Runs a parent that is followed by something; its state, and the hooks that ran."""

    @app.task(base=request.param, shared=False, name="parent")
    def parent(fails=False):
        if fails:
            raise LookupError("the parent's own")
        return 7

    def run(*, fails=False, **followed):
        tracer = trace.build_tracer("parent", app.tasks["parent"], app=app)
        message = {name: [dict(one) for one in what] for name, what in followed.items()}
        task_id = uuid.uuid4().hex
        facts = {"id": task_id, "delivery_info": {}, "args": (fails,), "kwargs": {}, "root_id": task_id, **message}
        tracer(task_id, (fails,), {}, facts)
        result = app.AsyncResult(task_id)
        assert app.hooks == (["on_failure", "after_return"] if fails else ["on_success", "after_return"])
        assert str(result.result) == ("the parent's own" if fails else "7")
        return result

    return run


def sent(app):
    names = []
    with app.connection_for_read() as connection, connection.SimpleQueue(app.conf.task_default_queue) as queue:
        while queue.qsize():
            message = queue.get_nowait()
            message.ack()
            names.append(message.headers["task"])
    return sorted(names)


FAULTS = {
    "a callable that raises": ("raising", {}, InvalidKey, "no such account"),
    "ttl": ("child", {"lock_ttl": 0}, ImproperlyConfigured, "lock_ttl"),
    "on_held": ("child", {"lock_on_held": "ignore"}, ImproperlyConfigured, "lock_on_held"),
    "template": ("child", {"lock_key": "x:{nope}"}, ImproperlyConfigured, "nope"),
    "unknown option": ("child", {"lock_tttl": 1}, ImproperlyConfigured, "lock_tttl"),
}


@pytest.fixture(params=FAULTS.values(), ids=FAULTS)
def faulty(app, request):
    """A signature that cannot be published, with an id, and a check of how it ended."""
    name, options, error, words = request.param
    task_id = uuid.uuid4().hex
    signature = app.tasks[name].s().set(**options, task_id=task_id)

    def check():
        result = app.AsyncResult(task_id)
        assert result.state == "FAILURE"
        assert isinstance(result.result, error)
        assert words in str(result.result)

    signature.check = check
    return signature


def test_a_callback_that_cannot_be_sent_fails_by_itself(app, parent, faulty, caplog):
    result = parent(callbacks=[faulty.set(link_error=[app.tasks["told"].s()])])
    faulty.check()
    assert faulty.options["task_id"] in [child.id for child in result.children]
    assert "cannot be sent after" in caplog.text
    # Its own errback.
    assert sent(app) == ["told"]


def test_one_callback_of_two_and_a_group_of_them(app, parent, faulty):
    ok = app.tasks["ok"]
    parent(callbacks=[faulty, ok.s(), group(ok.s(), ok.s())])
    faulty.check()
    assert sent(app) == ["ok"] * 3


def test_a_next_step_that_cannot_be_sent_fails_with_the_steps_behind_it(app, parent, faulty):
    last = uuid.uuid4().hex
    parent(chain=[app.tasks["ok"].s().set(task_id=last), faulty])
    faulty.check()
    assert app.AsyncResult(last).state == "FAILURE"
    assert sent(app) == []


@pytest.mark.parametrize("length", [1, 2])
def test_a_chain_as_a_callback(app, parent, faulty, length):
    faulty.options.pop("task_id")
    parent(callbacks=[chain(faulty, *[app.tasks["ok"].s()] * (length - 1))])
    assert sent(app) == []


def test_an_errback_that_cannot_be_sent_leaves_the_failure_of_its_parent(app, parent, faulty):
    parent(fails=True, errbacks=[faulty])
    faulty.check()


@pytest.mark.parametrize("shape", ["link", "chain of one", "chain of two", "next step"])
def test_a_duplicate_that_follows_a_task_is_sent(app, parent, shape):
    dup, ok = app.tasks["dup"], app.tasks["ok"]
    assert not dup.delay().duplicate
    assert sent(app) == ["dup"]
    if shape == "next step":
        parent(chain=[ok.s(), dup.s()])
    else:
        shapes = {"link": dup.s(), "chain of one": chain(dup.s()), "chain of two": chain(dup.s(), ok.s())}
        parent(callbacks=[shapes[shape]])
    assert sent(app) == ["dup"]


def test_what_a_body_sends_itself_still_raises_there(app):
    @app.task(base=LockedParent, shared=False, name="publisher")
    def publisher():
        with pytest.raises(ImproperlyConfigured):
            app.tasks["child"].apply_async((1,), lock_ttl=0)
        with pytest.raises(InvalidKey):
            app.tasks["raising"].delay(1)
        assert not app.tasks["dup"].delay().duplicate
        assert app.tasks["dup"].delay().duplicate
        with pytest.raises(publishing.DuplicateTask):
            chain(app.tasks["dup"].s(), app.tasks["ok"].s()).apply_async()
        return "raised"

    tracer = trace.build_tracer("publisher", app.tasks["publisher"], app=app)
    task_id = uuid.uuid4().hex
    tracer(task_id, (), {}, {"id": task_id, "delivery_info": {}, "args": (), "kwargs": {}})
    assert app.AsyncResult(task_id).result == "raised"


def test_without_our_catching_a_child_s_fault_is_its_parent_s(app, parent, faulty, monkeypatch):
    """The negative control."""
    for name in ("sent_at_an_end", "sent_for_begun"):
        monkeypatch.setattr(publishing, name, lambda call: False)
    with pytest.raises(AssertionError):
        parent(callbacks=[faulty])
    assert "on_failure" in app.hooks


def test_an_eager_application_that_wants_its_exceptions_gets_them(app):
    app.conf.update(task_always_eager=True, task_eager_propagates=True)

    @app.task(base=LockedTask, shared=False, name="failing", lock_key=None)
    def failing(n):
        raise LookupError("the child's own")

    @app.task(base=PlainParent, shared=False, name="parent")
    def parent():
        """Ends well."""

    with pytest.raises(LookupError, match="the child's own"):
        parent.apply_async(link=failing.s())


def test_a_time_limit_that_strikes_while_a_callback_is_sent_is_the_parent_s(app, monkeypatch):
    monkeypatch.setattr(publishing, "publish", lambda *args, **kwargs: (_ for _ in ()).throw(SoftTimeLimitExceeded))

    @app.task(base=Task, shared=False, name="parent")
    def parent():
        """Ends well."""

    tracer = trace.build_tracer("parent", app.tasks["parent"], app=app)
    callbacks, task_id = [dict(app.tasks["ok"].s())], uuid.uuid4().hex
    tracer(task_id, (), {}, {"id": task_id, "delivery_info": {}, "args": (), "kwargs": {}, "callbacks": callbacks})
    assert app.AsyncResult(task_id).state == "FAILURE"


def test_an_errback_that_a_worker_s_main_process_cannot_send_fails_by_itself(app, faulty, monkeypatch):
    """For a task whose process died there is no current task."""

    def fail():
        task_id = uuid.uuid4().hex
        request = Context(id=task_id, errbacks=[dict(faulty)], delivery_info={}, args=(), kwargs={})
        app.backend.mark_as_failure(task_id, LookupError("its process died"), request=request)
        assert app.AsyncResult(task_id).state == "FAILURE"

    # The negative control: anybody else who gives a parent is told.
    with pytest.raises((ImproperlyConfigured, InvalidKey)):
        fail()
    monkeypatch.setattr(undertaker, "_worker", object())
    fail()
    faulty.check()
