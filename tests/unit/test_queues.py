"""Which queue a message came from, and which headers of its way it loses when it is published again."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_syncguard.tasks.queues import is_broadcast, queue_of, without_way


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


@pytest.mark.parametrize("again", [True, False])
def test_a_new_way_begins_without_what_brokers_noted_on_the_old_one(again):
    users = {"x-mine": 1, "x-deathly": 2, "syncguard": {"key": "k"}}
    noted = {"x-death": [], "x-first-death-queue": "q", "x-delivery-count": 1, "x-stream-offset": 3, "x-shovelled": []}
    copies = {"CC": ["a"], "BCC": ["b"]}
    left = without_way({**users, **noted, **copies}, again=again)
    assert left == (users if again else {**users, **copies})
    assert without_way(None, again=again) == {}
