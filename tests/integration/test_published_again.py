"""What is published again (it comes back, it is retried, it is replaced) begins a new way: nothing of the old one goes with it,
and it leads to the queue from which it came. Messages are taken from the broker and run here, as a worker does.
"""

import importlib.util
import re
import threading
import uuid
from contextlib import contextmanager, nullcontext, suppress

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Retry
from celery.worker.request import Request
from kombu import Consumer, Exchange, Queue
from kombu.common import Broadcast

from celery_syncguard import LockedTask
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.tasks import app_state, delivered, publishing, queues
from celery_syncguard.testing import hold_elsewhere
from tests.fixtures.polling import poll

#: Since 5.5.
DELAYS_NATIVELY = importlib.util.find_spec("celery.utils.quorum_queues") is not None

#: What RabbitMQ notes on a message that went through a queue with a ttl, a quorum queue's redelivery, federation, a stream.
NOTED = {
    "x-death": [{"queue": "celery_delayed_0", "reason": "expired", "count": 1}],
    "x-first-death-queue": "celery_delayed_0",
    "x-last-death-reason": "expired",
    "x-delivery-count": 3,
    "x-acquired-count": 3,
    "x-stream-offset": 7,
    "x-received-from": [{"uri": "amqp://elsewhere"}],
}


class Desk:
    """Takes the messages of one queue and runs them."""

    def __init__(self, app, queue):
        self.app = app
        self.connection = app.connection_for_read()
        self.queue = queue(self.connection.default_channel)

    def take(self):
        return self.queue.get(no_ack=True)

    def run(self, message, task, hostname="here"):
        if task.__trace__ is None:
            task.__trace__ = build_tracer(task.name, task, app=self.app, loader=self.app.loader)
        Request(message, on_ack=lambda *_: None, app=self.app, task=task, hostname=hostname, decoded=False).execute()


@contextmanager
def desk(app, queue):
    one = Desk(app, queue)
    one.queue.declare()
    try:
        yield one
    finally:
        one.queue.delete()
        one.connection.close()
        app_state.state_of(app).close()
        app.close()


@pytest.fixture
def in_memory():
    app = Celery("again", broker="memory://", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_default_queue=uuid.uuid4().hex, task_ignore_result=True)
    with desk(app, app.amqp.queues[app.conf.task_default_queue]) as one:
        yield one


def does_nothing(n):
    """Nor is it run."""


def comes_back(self, n):
    """Its lock is held."""


def is_retried(self, n):
    raise self.retry(countdown=1)


def is_retried_with_other_arguments(self, n):
    raise self.retry(args=(n + 1,), countdown=1)


def is_replaced(self, n):
    self.replace(self.app.tasks["other"].si(n).set(headers=self.request.headers))


HOW = pytest.mark.parametrize(
    "body", [comes_back, is_retried, is_retried_with_other_arguments, is_replaced], ids=lambda body: body.__name__
)


def published_again(desk, body, **noted):
    """The headers of what is published again for a message on which the broker noted something on its way."""
    app = desk.app
    task = app.task(base=LockedTask, bind=True, shared=False, name="work", lock_key="k")(body)
    app.task(base=LockedTask, shared=False, name="other", lock_key=None)(does_nothing)
    task.apply_async((1,), headers={"x-mine": "kept"})
    received = desk.take()
    received.headers.update(noted)
    if body is comes_back:
        with hold_elsewhere(app_state.guard_for(app), "k"):
            desk.run(received, task)
    else:
        desk.run(received, task)
    return desk.take().headers


@pytest.mark.parametrize(
    "body", [comes_back, is_retried, is_retried_with_other_arguments], ids=lambda body: body.__name__
)
def test_the_entries_of_a_newer_publisher_go_on_with_the_message(in_memory, body):
    """A worker that is not upgraded yet does not know them, but the one that gets the message next may."""
    app = in_memory.app
    task = app.task(base=LockedTask, bind=True, shared=False, name="work", lock_key="k")(body)
    task.apply_async((1,))
    received = in_memory.take()
    received.headers["syncguard"]["new"] = {"a": [1]}
    with hold_elsewhere(app_state.guard_for(app), "k") if body is comes_back else nullcontext():
        in_memory.run(received, task)
    again = in_memory.take().headers["syncguard"]
    assert (again["new"], again["v"]) == ({"a": [1]}, 1)


@pytest.mark.parametrize("lock_key", ["k", None])
def test_lock_and_claim_end_though_the_header_of_the_next_attempt_cannot_be_read(in_memory, lock_key):
    def body(self, n):
        raise Retry(sig=self.signature_from_request(headers={"syncguard": {"v": 99, "claim": 5}}))

    app = in_memory.app
    task = app.task(base=LockedTask, bind=True, shared=False, name="work", lock_key=lock_key, dedup_key="d")(body)
    task.apply_async((1,))
    in_memory.run(in_memory.take(), task)
    store = app_state.guard_for(app).store
    assert not app_state.guard_for(app).locks()
    assert store.claim("d", task_id="another", ttl=60).ours


@HOW
def test_what_brokers_noted_on_a_message_is_not_published_again(in_memory, body):
    headers = published_again(in_memory, body, **NOTED)
    assert headers["x-mine"] == "kept"
    assert not NOTED.keys() & headers.keys()


def test_without_the_filter_rabbitmq_is_told_of_the_old_way(in_memory, monkeypatch):
    """The negative control: by such a header RabbitMQ takes the second return for a circle, and drops the message."""
    monkeypatch.setattr(queues, "_NOTED", re.compile("nothing"))
    assert "x-death" in published_again(in_memory, comes_back, **NOTED)


@pytest.mark.parametrize("body", [comes_back, is_retried, is_retried_with_other_arguments])
def test_a_copy_that_went_to_several_queues_comes_back_to_its_own(in_memory, body):
    assert "CC" not in published_again(in_memory, body, CC=["another"])


def test_who_publishes_first_may_send_to_several_queues(in_memory):
    task = in_memory.app.task(base=LockedTask, shared=False, name="work", lock_key="k")(does_nothing)
    task.apply_async((1,), headers={"CC": ["another"], **NOTED})
    headers = in_memory.take().headers
    assert headers["CC"] == ["another"]
    assert "x-death" not in headers


def test_a_task_that_gets_the_headers_of_another_one_has_keys_of_its_own(in_memory):
    """Bodies hand headers on, for those of the user in them."""
    app = in_memory.app

    def body(self, n):
        other.apply_async((2,), headers=self.request.headers)

    task = app.task(base=LockedTask, bind=True, shared=False, name="work", lock_key="{n}", run_once="{n}")(body)
    other = app.task(base=LockedTask, shared=False, name="other", lock_key="other:{n}")(does_nothing)
    task.apply_async((1,), headers={"x-mine": "kept"})
    before = in_memory.take()
    in_memory.run(before, task)
    after = in_memory.take()
    assert after.headers["x-mine"] == "kept"
    assert after.headers["syncguard"].pop("call") != before.headers["syncguard"]["call"]
    assert after.headers["syncguard"] == {"v": 1, "key": "other:2"}


def test_what_is_sent_by_name_with_the_headers_of_another_one_has_keys_of_its_own(in_memory):
    app = in_memory.app

    def body(self, n):
        publishing.send_task(app, "other", [2], lock_key="given", headers=self.request.headers)

    task = app.task(base=LockedTask, bind=True, shared=False, name="work", lock_key="{n}", dedup_key="{n}")(body)
    task.apply_async((1,), headers={"x-mine": "kept"})
    before = in_memory.take()
    in_memory.run(before, task)
    after = in_memory.take()
    assert after.headers["x-mine"] == "kept"
    assert after.headers["syncguard"].pop("call") != before.headers["syncguard"]["call"]
    assert after.headers["syncguard"] == {"v": 1, "key": "given", "given": ["key"]}


@pytest.mark.parametrize("again", [True, False])
def test_what_a_worker_s_main_process_publishes_again_is_no_duplicate(in_memory, again):
    """Celery 5.7's `retry_on_worker_lost`, of a message without a claim of its own. The control is a new publish."""
    app = in_memory.app
    task = app.task(base=LockedTask, shared=False, name="work", lock_key=None, dedup_key="{n}")(does_nothing)
    app_state.guard_for(app).store.claim("1", task_id="another", ttl=60)
    result = task.apply_async((1,), task_id="mine", **({"retries": 1} if again else {}))
    assert (result.id, in_memory.take() is not None) == (("mine", True) if again else ("another", False))


# --- a task id that is used again -------------------------------------------------------------------------------------


class Gated:
    """A task whose body says that it has begun, and ends when it is told to."""

    def __init__(self, app, **options):
        self.ran = []
        self.go = threading.Event()

        def body(n):
            self.ran.append(n)
            assert self.go.wait(30)

        options = {"lock_key": "k", "lock_retry_delay": (0.1, 0.2), **options}
        self.task = app.task(base=LockedTask, shared=False, name="gated", **options)(body)

    @contextmanager
    def running(self, desk, message, hostname="here"):
        """It runs `message` beside what is done inside, and ends with that."""
        before = len(self.ran)
        thread = threading.Thread(target=desk.run, args=(message, self.task, hostname))
        thread.start()
        poll(lambda: len(self.ran) > before)
        try:
            yield
        finally:
            self.go.set()
            thread.join(30)


def test_a_new_publish_under_an_old_task_id_is_new_work(in_memory):
    """While the first one runs, and when all is over."""
    gated = Gated(in_memory.app)
    gated.task.apply_async((1,), task_id="t")
    with gated.running(in_memory, in_memory.take()):
        gated.task.apply_async((2,), task_id="t")
        in_memory.run(in_memory.take(), gated.task)
        assert gated.ran == [1]
    in_memory.run(in_memory.take(), gated.task)
    gated.task.apply_async((3,), task_id="t")
    in_memory.run(in_memory.take(), gated.task)
    assert gated.ran == [1, 2, 3]
    assert in_memory.take() is None


def test_without_a_name_for_each_publish_the_second_one_is_taken_for_a_copy(in_memory, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(publishing, "new_call_id", lambda call: None)
    gated = Gated(in_memory.app)
    gated.task.apply_async((1,), task_id="t")
    with gated.running(in_memory, in_memory.take()):
        gated.task.apply_async((2,), task_id="t")
        in_memory.run(in_memory.take(), gated.task)
    in_memory.run(in_memory.take(), gated.task)
    assert gated.ran == [1]


def test_a_copy_of_the_same_publish_is_answered(in_memory):
    gated = Gated(in_memory.app)
    gated.task.apply_async((1,), task_id="t")
    message = in_memory.take()
    with gated.running(in_memory, message):
        in_memory.run(message, gated.task)
    in_memory.run(in_memory.take(), gated.task)
    assert gated.ran == [1]
    assert in_memory.take() is None


def test_a_new_publish_is_not_thrown_away_because_an_old_one_is_at_a_later_attempt(in_memory):
    gated = Gated(in_memory.app)
    gated.task.apply_async((1,), task_id="t", retries=1)
    with gated.running(in_memory, in_memory.take()):
        gated.task.apply_async((2,), task_id="t")
        in_memory.run(in_memory.take(), gated.task)
    in_memory.run(in_memory.take(), gated.task)
    assert gated.ran == [1, 2]


# --- copies of an attempt that has ended, and claims of what comes again ------------------------------------------------


@pytest.mark.parametrize("run_once", [True, False], ids=["run_once", "without run_once"])
def test_an_attempt_that_was_retried_runs_once_however_often_it_is_delivered(in_memory, run_once):
    """Its copies come when it is over, so that nobody has seen them. The control: at least once."""

    def body(self):
        attempts.append(self.request.retries)
        if self.request.retries < 1:
            raise self.retry(countdown=0)

    attempts = []
    task = in_memory.app.task(base=LockedTask, bind=True, shared=False, name="work", lock_key="k", run_once=run_once)(
        body
    )
    task.delay()
    message = in_memory.take()
    for _ in range(4):
        in_memory.run(message, task)
    retries = [one for one in iter(in_memory.take, None) if one.headers["retries"] == 1]
    assert (attempts.count(0), len(retries)) == ((1, 1) if run_once else (4, 4))
    for retry in retries * 2:
        in_memory.run(retry, task)
    assert attempts.count(1) == (1 if run_once else 8)


@pytest.mark.parametrize("until", ["done", "start"])
def test_a_claim_lives_as_long_as_its_message_waits(in_memory, until):
    guard = app_state.guard_for(in_memory.app)
    gated = Gated(in_memory.app, dedup_key="d", dedup_ttl=1800, dedup_until=until, lock_retry_delay=(0.1, 0.1))
    first = gated.task.delay(1)
    with hold_elsewhere(guard, "k"):
        for _ in range(3):
            guard.store._claims["d"].expires -= 1790
            in_memory.run(in_memory.take(), gated.task)
        assert gated.task.delay(2).id == first.id
        assert guard.store.claim("d", task_id="another", ttl=1).remaining > 1700


def test_without_its_renewal_a_claim_ends_before_its_message_runs(in_memory, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(MemoryStore, "_keep_claim", lambda *_: None)
    gated = Gated(in_memory.app, dedup_key="d", dedup_ttl=1.0)
    gated.task.delay(1)
    with hold_elsewhere(app_state.guard_for(in_memory.app), "k"):
        in_memory.run(in_memory.take(), gated.task)
        poll(lambda: not gated.task.delay(2).duplicate)


@pytest.mark.parametrize("countdown", [1, 3000])
def test_a_retry_after_a_long_body_has_its_claim_until_it_runs(in_memory, countdown):
    """However little of it the body has left."""

    def body(self):
        claim = app_state.guard_for(in_memory.app).store._claims["d"]
        claim.expires -= 1799
        raise self.retry(countdown=countdown)

    task = in_memory.app.task(
        base=LockedTask, bind=True, shared=False, name="work", lock_key="k", dedup_key="d", dedup_ttl=1800
    )(body)
    task.delay()
    in_memory.run(in_memory.take(), task)
    claim = app_state.guard_for(in_memory.app).store.claim("d", task_id="another", ttl=1)
    assert claim.remaining > countdown + 1700


def test_one_runs_or_will_run_again_and_one_waits_and_there_is_no_third(in_memory):
    """`dedup_until="start"`: the running one is retried while another waits, and then that one is, too."""

    def body(self, name):
        started.append(name)
        accept(f"while {name} runs")
        if started.count(name) < 2:
            raise self.retry(countdown=10)

    def accept(name):
        if not task.delay(name).duplicate:
            accepted.append(name)

    started, accepted = [], []
    task = in_memory.app.task(
        base=LockedTask,
        bind=True,
        shared=False,
        name="work",
        lock_key="k",
        dedup_key="d",
        dedup_until="start",
    )(body)
    accept("first")
    waiting = []

    def run_next(name):
        waiting.extend(iter(in_memory.take, None))
        (message,) = [one for one in waiting if one.headers["argsrepr"] == repr((name,))]
        waiting.remove(message)
        in_memory.run(message, task)
        accept(f"after {name}")

    run_next("first")
    second = "while first runs"
    assert accepted == ["first", second]  # one runs and will run again, one waits
    run_next(second)
    assert accepted == ["first", second]  # both will run again: whoever comes now is refused
    run_next("first")
    run_next(second)
    assert started == ["first", second, "first", second]
    # The first has started for the last time, the second too: each left room for one.
    assert len(accepted) == 3


# --- one key, other arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [True, False], ids=["other arguments", "the same in another form"])
def test_a_duplicate_with_other_arguments_is_told_and_one_with_the_same_is_not(in_memory, caplog, other):
    def body(feed, url="one"):
        """Nothing runs it."""

    task = in_memory.app.task(base=LockedTask, shared=False, name="work", dedup_key="{feed}")(body)
    first = task.delay("f", "one")
    assert task.delay("f", "two").duplicate if other else task.delay(feed="f").duplicate
    assert (f"work: task {first.id} has claimed 'f' with other arguments than these" in caplog.text) is other


class Wordless:
    def __str__(self):
        raise LookupError


def test_arguments_of_which_no_fingerprint_can_be_made_are_published_without_one(in_memory):
    def body(n, other):
        """Nothing runs it."""

    task = in_memory.app.task(base=LockedTask, shared=False, name="work", run_once="{n}")(body)
    endless = []
    endless.append(endless)
    for argument in (Wordless(), endless):
        task.apply_async((1, argument), serializer="pickle")
        assert in_memory.take().headers["syncguard"].get("print") is None


@pytest.mark.parametrize("other", [True, False], ids=["other arguments", "the same in another form"])
def test_a_run_that_is_answered_for_other_arguments_is_told_and_one_for_the_same_is_not(in_memory, caplog, other):
    def body(payment, amount=10):
        return amount

    task = in_memory.app.task(base=LockedTask, shared=False, name="work", run_once="{payment}")(body)
    first = task.delay(7, 10)
    in_memory.run(in_memory.take(), task)
    task.delay(7, 9999) if other else task.delay(payment=7)
    in_memory.run(in_memory.take(), task)
    assert (f"task {first.id} did '7' with other arguments than these" in caplog.text) is other
    assert app_state.guard_for(in_memory.app).counts["answered"] == 1


# --- a Broadcast queue ------------------------------------------------------------------------------------------------


@pytest.fixture
def two_workers(broker):
    """Two desks with a Broadcast queue each, of one application, and everything that arrived at either."""
    name = f"test-{uuid.uuid4().hex}"
    queues = [Broadcast(name), Broadcast(name)]
    app = Celery("again", broker=broker.url, set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_queues=queues, task_ignore_result=True)
    app.conf.task_routes = {"gated": {"queue": name, "exchange": name}}
    with desk(app, queues[0]) as one, app.connection_for_read() as connection:
        arrived = []
        consumers = [
            Consumer(one.connection.default_channel, [queues[0]], on_message=arrived.append, no_ack=True),
            Consumer(connection.default_channel, [queues[1]], on_message=arrived.append, no_ack=True),
        ]

        def drain(*, wait=0.2):
            for each in (one.connection, connection):
                with suppress(TimeoutError):
                    while True:
                        each.drain_events(timeout=wait)
            return arrived

        for consumer in consumers:
            consumer.consume()
        drain()  # Redis subscribes with the first look
        yield one, drain


def test_what_was_sent_to_every_worker_runs_once_in_each_one_after_the_other_and_is_sent_to_nobody_again(two_workers):
    one, drain = two_workers
    gated = Gated(one.app)
    gated.task.apply_async((1,), declare=[one.queue.exchange])
    poll(lambda: len(drain()) == 2)
    first, second = drain()
    with gated.running(one, first, "w1"):
        waiting = threading.Thread(target=one.run, args=(second, gated.task, "w2"))
        waiting.start()
        poll(lambda: app_state.guard_for(one.app).counts["retry"] >= 2)
        assert gated.ran == [1]
    waiting.join(30)
    assert gated.ran == [1, 1]
    assert len(drain(wait=1)) == 2


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_without_waiting_in_place_what_comes_back_goes_to_every_worker(two_workers, monkeypatch):
    """The negative control. (On Redis it is lost: a worker that only publishes there does not know that it goes to all.)"""
    monkeypatch.setattr(delivered, "is_broadcast", lambda app, delivery_info: False)
    one, drain = two_workers
    gated = Gated(one.app)
    gated.task.apply_async((1,), declare=[one.queue.exchange])
    poll(lambda: len(drain()) == 2)
    first, second = drain()
    with gated.running(one, first, "w1"):
        one.run(second, gated.task, "w2")
        poll(lambda: len(drain()) == 4)


# --- a quorum queue, with Celery's native delayed delivery ------------------------------------------------------------


@pytest.fixture
def quorum(amqp_url):
    """A quorum queue that is not the application's default one, bound as a worker binds it."""
    from kombu.transport import native_delayed_delivery as delayed

    name, other = f"test-{uuid.uuid4().hex}", f"test-{uuid.uuid4().hex}"
    queues = [
        Queue(one, Exchange(one, type="topic"), routing_key=one, queue_arguments={"x-queue-type": "quorum"})
        for one in (name, other)
    ]
    app = Celery("again", broker=amqp_url, set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_queues=queues, task_default_queue=other, task_ignore_result=True)
    with desk(app, queues[0]) as one:
        delayed.declare_native_delayed_delivery_exchanges_and_queues(one.connection, "quorum")
        delayed.bind_queue_to_native_delayed_delivery_exchange(one.connection, queues[0])
        yield one
        for exchange in (name, other):
            one.connection.default_channel.exchange_delete(exchange)


if DELAYS_NATIVELY:

    def test_a_message_that_comes_back_to_a_quorum_queue_again_and_again_runs_in_the_end(quorum):
        def body(self, n):
            ran.append(self.request.headers["syncguard"]["held"])

        ran = []
        options = {"lock_key": "k", "lock_retry_delay": (0.1, 0.2)}
        task = quorum.app.task(base=LockedTask, bind=True, shared=False, name="work", **options)(body)
        task.apply_async((1,), queue=quorum.queue.name)
        with hold_elsewhere(app_state.guard_for(quorum.app), "k"):
            for _ in range(3):
                quorum.run(arrived(quorum), task)
        quorum.run(arrived(quorum), task)
        assert ran == [3]

    @pytest.mark.parametrize("countdown", [0, 1])
    def test_a_retry_goes_back_to_the_quorum_queue_from_which_it_came(quorum, countdown):
        def body(self, n):
            ran.append(n)
            if n < 3:
                raise self.retry(args=(n + 1,), countdown=countdown)

        ran = []
        task = quorum.app.task(base=LockedTask, bind=True, shared=False, name="work", lock_key="k")(body)
        task.apply_async((1,), queue=quorum.queue.name)
        for _ in range(3):
            quorum.run(arrived(quorum), task)
        assert ran == [1, 2, 3]


def arrived(quorum):
    found = []

    def look():
        found.append(quorum.take())
        assert found[-1] is not None

    poll(look, timeout=10)
    return found[-1]
