"""What a worker's main process does to a message for one of our tasks, with whichever Celery is installed."""

import inspect
import time

import pytest
from celery import Celery
from celery.worker.request import Request

from celery_syncguard import LockedTask
from celery_syncguard.worker import GuardedRequest


class Pool:
    """Remembers whom it was told to end."""

    def __init__(self):
        self.ended = []

    def terminate_job(self, pid, signal=None):
        self.ended.append(pid)


@pytest.fixture
def running():
    """A request that process 4711 has accepted."""
    app = Celery("requests", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_default_queue="requests")

    @app.task(base=LockedTask, shared=False, lock_key="k", acks_late=True)
    def f():
        """Is not run here."""

    f.delay()
    with app.connection() as connection:
        message = app.amqp.queues["requests"](connection.channel()).get()
        request = GuardedRequest(message, app=app, task=f)
        request.on_accepted(4711, time.monotonic())
        yield request


def test_a_running_task_is_cancelled_as_celery_asks_when_it_loses_its_broker(running):
    pool = Pool()
    running.cancel(pool)
    assert pool.ended == [4711]
    assert running.task.AsyncResult(running.id).state == "RETRY"


def test_a_running_task_is_cancelled_as_celery_asks_in_a_cold_shutdown(running):
    """Celery 5.6 wants no RETRY of what the broker delivers again. Before, there was no such wish."""
    wishes = {"emit_retry": False} if "emit_retry" in inspect.signature(Request.cancel).parameters else {}
    pool = Pool()
    running.cancel(pool, **wishes)
    assert pool.ended == [4711]
    assert running.task.AsyncResult(running.id).state == ("PENDING" if wishes else "RETRY")
