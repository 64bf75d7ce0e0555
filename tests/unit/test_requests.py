"""What a worker's main process does to a message for one of our tasks, with whichever Celery is installed."""

import inspect
import os
import time

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.worker.request import Request

from celery_syncguard import LockedTask
from celery_syncguard.tasks import app_state, worker
from celery_syncguard.tasks.undertaker import undertaker
from celery_syncguard.tasks.worker import GuardedRequest


class Pool:
    """Remembers whom it was told to end."""

    def __init__(self):
        self.ended = []

    def terminate_job(self, pid, signal=None):
        self.ended.append(pid)


class Queue:
    """An application with a queue in memory, as a worker's main process has it."""

    def __init__(self):
        self.app = Celery("requests", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(syncguard_dsn="memory://", task_default_queue="requests")
        self.connection = self.app.connection()
        self.binding = app_state.state_of(self.app)
        self.went_back = False
        undertaker.bind(None, self.binding)

    def message(self):
        return self.app.amqp.queues["requests"](self.connection.channel()).get(no_ack=True)

    def accept(self, **options):
        """The request for a task that is published and begun."""

        @self.app.task(base=LockedTask, shared=False, lock_key="k", dedup_key="the work", **options)
        def f():
            """Is not run here."""

        f.delay()

        def on_reject(logger, errors, requeue):
            self.went_back = requeue

        request = GuardedRequest(self.message(), app=self.app, task=f, on_reject=on_reject)
        request.on_accepted(os.getpid(), time.monotonic())
        return request

    def is_claimed(self):
        """After the end of the main process, which first does all that was to be done in the background."""
        store = self.binding.guard.store
        worker.stop()
        return not store.claim("the work", task_id="a duplicate", ttl=60).ours


@pytest.fixture
def queue():
    queue = Queue()
    yield queue
    worker.stop()
    queue.message()
    queue.connection.release()


@pytest.fixture
def running(queue):
    return queue.accept(acks_late=True)


def test_a_running_task_is_cancelled_as_celery_asks_when_it_loses_its_broker(running):
    pool = Pool()
    running.cancel(pool)
    assert pool.ended == [os.getpid()]
    assert running.task.AsyncResult(running.id).state == "RETRY"


def test_a_running_task_is_cancelled_as_celery_asks_in_a_cold_shutdown(running):
    """Celery 5.6 wants no RETRY of what the broker delivers again. Before, there was no such wish."""
    wishes = {"emit_retry": False} if "emit_retry" in inspect.signature(Request.cancel).parameters else {}
    pool = Pool()
    running.cancel(pool, **wishes)
    assert pool.ended == [os.getpid()]
    assert running.task.AsyncResult(running.id).state == ("PENDING" if wishes else "RETRY")


LATE = {"acks_late": True}
REJECTS = {"acks_late": True, "reject_on_worker_lost": True}
RETRIES = {"retry_on_worker_lost": True}  # Celery 5.7; others know nothing of it
KEEPS = {"acks_late": True, "acks_on_timeout": False}  # the same

#: Before, the exit of a body was a lost process like any other.
ENDS = ["lost", "limit", *(["exit"] if hasattr(Request, "_worker_lost_info") else [])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        LATE,
        {"reject_on_worker_lost": True},
        REJECTS,
        RETRIES,
        {**RETRIES, "max_retries": 0},
        {**LATE, **RETRIES},
        {**REJECTS, **RETRIES},
        {**REJECTS, **RETRIES, "max_retries": 0},
        {**KEEPS, **REJECTS},
        KEEPS,
    ],
    ids=str,
)
@pytest.mark.parametrize("end", ENDS)
def test_the_claim_of_what_was_cut_off_stays_if_and_only_if_it_comes_again(queue, options, end):
    """Whatever this Celery makes of the options."""
    request = queue.accept(**options)
    if end == "limit":
        request.on_timeout(False, 1)
    failure = {"lost": WorkerLostError(), "exit": SystemExit(1), "limit": TimeLimitExceeded(1)}[end]
    try:
        raise failure
    except BaseException:
        request.on_failure(ExceptionInfo())
    comes_again = queue.went_back or queue.message() is not None
    assert queue.is_claimed() == comes_again
