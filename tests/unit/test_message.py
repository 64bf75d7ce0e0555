"""What a message of somebody else's may carry in our header, and what it may not."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_syncguard import LockedTask, errors
from celery_syncguard.tasks.arguments import _formatter
from celery_syncguard.tasks.header import carried_options, is_broadcast, queue_of


@pytest.fixture
def task():
    app = Celery("headers", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, task_eager_propagates=True, syncguard_dsn="memory://")

    @app.task(base=LockedTask, shared=False, lock_key="n:{n}", dedup_key="d:{n}", run_once="r:{n}")
    def body(n):
        return n

    return body


@pytest.mark.parametrize("name", ["lock_key", "dedup_key", "run_once"])
def test_a_template_is_the_tasks_and_never_the_messages(task, name):
    with pytest.raises(errors.InvalidKey, match="template"):
        task.plan().complete(task, {"options": {name: "{n:99999999}"}}, (1,), {}, {})


def test_a_template_from_a_message_would_make_a_text_of_any_size():
    """The negative control: what such a template does, whatever becomes of its text."""
    assert len(_formatter.format("{n:9999999}", n=1)) == 9_999_999


@pytest.mark.parametrize("options", [5, [], "zz", None, True])
def test_options_that_are_no_mapping_are_refused_with_a_reason(task, options):
    with pytest.raises(errors.ImproperlyConfigured, match="mapping"):
        task.plan().complete(task, {"options": options}, (1,), {}, {})


def test_what_publishers_really_send_is_accepted(task):
    carried = {"lock_ttl": 5, "lock_key": None, "dedup_key": True, "run_once": False}
    assert carried_options({"options": carried}) == carried
    assert task.plan().complete(task, {"options": {"lock_ttl": 5}}, (1,), {}, {}).lock_ttl == 5.0


def test_a_template_given_per_call_is_one_of_the_publishers_code(task):
    assert task.apply((7,), lock_key="other:{n}").get() == 7


# --- where a message came from ----------------------------------------------------------------------------------------


@pytest.fixture
def with_queues():
    app = Celery("queues", broker="memory://", set_as_current=False)
    stream = {"x-queue-type": "stream"}
    app.conf.task_queues = [
        Queue("plain"),
        Queue("named", Exchange("tasks", type="topic"), routing_key="a.b"),
        Queue("twice", Exchange("tasks", type="topic"), routing_key="c"),
        Queue("again", Exchange("tasks", type="topic"), routing_key="c"),
        Queue("logged", Exchange("log", type="topic"), routing_key="l", queue_arguments=stream),
        Broadcast("everybody"),
    ]
    return app


BITS = "0." * 27 + "1."


@pytest.mark.parametrize(
    ("exchange", "routing_key", "queue"),
    [
        ("", "plain", "plain"),
        (None, "plain", "plain"),
        ("tasks", "a.b", "named"),
        ("celery_delayed_delivery", BITS + "a.b", "named"),
        ("celery_delayed_delivery", BITS + "0.a.b", None),
        ("tasks", "c", None),  # which of the two?
        ("tasks", "unknown", None),
        ("everybody", "celery", None),
        ("", "not ours", None),
    ],
)
def test_the_queue_of_a_message_is_known_where_it_is_clear(with_queues, exchange, routing_key, queue):
    found = queue_of(with_queues, {"exchange": exchange, "routing_key": routing_key})
    assert (found.name if found else None) == queue
    assert "not ours" not in with_queues.amqp.queues, "asking made one"


@pytest.mark.parametrize(
    ("exchange", "routing_key", "everybody"),
    [
        ("everybody", "", True),
        ("everybody", "celery", True),
        ("log", "l", True),
        ("", "logged", True),
        ("log", "other", False),
        ("tasks", "a.b", False),
        ("", "plain", False),
        (None, None, False),
    ],
)
def test_what_every_worker_gets_is_known_by_its_queue(with_queues, exchange, routing_key, everybody):
    assert is_broadcast(with_queues, {"exchange": exchange, "routing_key": routing_key}) is everybody
    assert not is_broadcast(with_queues, None)
