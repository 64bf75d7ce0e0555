"""A claim lives on only if the broker has its message: RabbitMQ behind a proxy that loses what was written to it."""

import time
import uuid
from urllib.parse import urlsplit

import kombu
import psycopg
import pytest
from amqp.exceptions import MessageNacked
from celery import Celery, group
from celery.app import trace

from celery_syncguard import LockedTask
from celery_syncguard.dedup import send_task
from celery_syncguard.tasks import app_state, publisher_confirms
from tests.fixtures.polling import poll
from tests.fixtures.proxy import Proxy


def body(n=None):
    """Nothing runs it."""


@pytest.fixture
def rabbit(amqp_url):
    """In front of RabbitMQ; the broker's own URL is `rabbit.direct`, the one through the proxy `rabbit.url`."""
    parts = urlsplit(amqp_url)
    with Proxy(parts.port, host=parts.hostname) as proxy:
        proxy.direct = amqp_url
        proxy.url = parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}").geturl()
        yield proxy


@pytest.fixture
def make(rabbit, pg_dsn):
    """Makes an application that publishes through the proxy, without attempts of kombu's own unless asked for."""
    apps = []

    def make(**conf):
        queue = f"q-{uuid.uuid4().hex}"
        app = Celery(queue, broker=rabbit.url, set_as_current=False)
        app.conf.update(task_default_queue=queue, syncguard_dsn=pg_dsn, **{"task_publish_retry": False, **conf})
        apps.append(app)
        return app

    yield make
    rabbit.resume()
    for app in apps:
        app_state.state_of(app).close()
        app.close()
        with kombu.Connection(rabbit.direct) as connection:
            connection.default_channel.queue_delete(app.conf.task_default_queue)


def deduplicated(app, **options):
    return app.task(base=LockedTask, shared=False, name="work", **{"dedup_key": "{n}", **options})(body)


def queued(app, rabbit):
    """How many messages the broker has, asked past the proxy."""
    queue = app.conf.task_default_queue
    with kombu.Connection(rabbit.direct) as connection:
        return connection.default_channel.queue_declare(queue, durable=True, auto_delete=False).message_count


def claims(dsn):
    """claim_key -> seconds left, of the live ones."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select claim_key, (expires_at_ms - syncguard_clock_ms()) / 1000.0 from syncguard_claims"
            " where expires_at_ms > syncguard_clock_ms()"
        ).fetchall()
    return {key: float(left) for key, left in rows}


def plain(app):
    """A message without a claim: it opens the pool's connection."""
    app.send_task("plain")


def test_a_message_that_rabbitmq_never_got_is_an_error_and_frees_its_claim(make, rabbit, pg_dsn):
    app = make()
    task = deduplicated(app)
    task.delay(0)
    lost = rabbit.swallow_next_request(b"syncguard")
    with pytest.raises(kombu.exceptions.OperationalError):
        task.delay(1)
    assert lost.is_set()
    assert list(claims(pg_dsn)) == ["0"]
    assert queued(app, rabbit) == 1
    assert not task.delay(1).duplicate


def test_without_confirms_it_is_no_error_and_its_claim_stays(make, rabbit, pg_dsn):
    """The negative control: an application that has turned them off itself is left alone."""
    app = make(broker_transport_options={"confirm_publish": False})
    task = deduplicated(app)
    task.delay(0)
    poll(lambda: queued(app, rabbit) == 1)
    lost = rabbit.swallow_next_request(b"syncguard")
    task.delay(1)
    assert lost.wait(10)
    app_state.guard_for(app).flush()
    assert claims(pg_dsn)["1"] > 3500
    assert task.delay(1).duplicate
    assert queued(app, rabbit) == 1


@pytest.mark.parametrize("first", ["nothing", "plain"])
def test_a_second_attempt_of_the_publish_waits_for_its_answer_too(make, rabbit, pg_dsn, first):
    """Celery's default is to try again, over a new connection; there the message gets lost once more."""
    app = make(task_publish_retry=True, task_publish_retry_policy={"max_retries": 1})
    task = deduplicated(app)
    if first == "plain":
        plain(app)
        poll(lambda: queued(app, rabbit) == 1)  # nobody confirms it, and the connection is about to break
    lost = rabbit.swallow_next_request(b"syncguard")
    assert not task.delay(1).duplicate
    assert lost.is_set()
    assert queued(app, rabbit) == 1 + (first == "plain")
    app_state.guard_for(app).flush()
    assert claims(pg_dsn)["1"] > 3500
    with app.producer_pool.acquire() as producer:
        assert producer.channel.basic_publish == producer.channel.basic_publish_confirm


@pytest.mark.parametrize("opened", [False, True], ids=["first", "open before"])
@pytest.mark.parametrize("how", ["delay", "group", "producer", "connection", "by name", "per call", "retry"])
def test_whatever_publishes_waits_for_the_brokers_answer(make, rabbit, pg_dsn, how, opened):
    """Also over a connection that was open before the first claim, and one that the caller brings."""
    app = make()
    task = deduplicated(app)
    if opened:
        plain(app)
        poll(
            lambda: queued(app, rabbit) == 1
        )  # nobody confirms it, and what is still under way could be what gets lost
    lost = rabbit.swallow_next_request(b"syncguard")
    with pytest.raises(kombu.exceptions.OperationalError), app.connection_for_write() as own:
        if opened:
            own.connect()
        if how == "delay":
            task.delay(1)
        elif how == "group":
            group(task.s(1), task.s(2)).apply_async()
        elif how == "producer":
            with app.producer_pool.acquire() as producer:
                task.apply_async((1,), producer=producer)
        elif how == "connection":
            task.apply_async((1,), connection=own)
        elif how == "by name":
            send_task(app, "elsewhere", [1], dedup_key="1")
        elif how == "per call":
            deduplicated(app, dedup_key=None, lock_key=None).apply_async((1,), dedup_key="{n}")
        else:
            # A message that comes back under the claim that it has, as a retry does.
            app_state.guard_for(app).store.claim("1", task_id="t", ttl=60)
            task.apply_async((1,), task_id="t", headers={"syncguard": {"claim": "1", "claimed": True}}, retries=1)
    assert lost.is_set()
    if how != "retry":  # whose task goes on to fail, and ends its claim
        assert claims(pg_dsn) == {}


def test_an_application_without_claims_publishes_as_it_did(make, rabbit):
    app = make()
    locked = deduplicated(app, dedup_key=None, lock_key="{n}", run_once=True)
    locked.delay(1)
    plain(app)
    with app.producer_pool.acquire() as producer:
        assert not producer.connection.connection.confirm_publish
        assert "confirm_publish" not in producer.connection.transport_options
    assert app.conf.broker_transport_options == {}
    poll(lambda: queued(app, rabbit) == 2)  # nobody confirms them, and what is still under way could be what gets lost
    lost = rabbit.swallow_next_request(b"syncguard")
    locked.delay(2)
    assert lost.wait(10)


def test_a_broker_that_hangs_is_given_up_and_its_late_answer_is_not_the_next_messages(
    make, rabbit, pg_dsn, monkeypatch
):
    monkeypatch.setattr(publisher_confirms, "PATIENCE", 0.5)
    app = make()
    task = deduplicated(app)
    task.delay(0)
    rabbit.stall()
    started = time.monotonic()
    with pytest.raises(kombu.exceptions.OperationalError):
        task.delay(1)
    assert time.monotonic() - started < 5
    assert list(claims(pg_dsn)) == ["0"]
    rabbit.resume()
    # What was under way arrives after all. The next one is lost, and whoever takes an old answer for its own is mistaken.
    poll(lambda: queued(app, rabbit) == 2)
    lost = rabbit.swallow_next_request(b"syncguard")
    with pytest.raises(kombu.exceptions.OperationalError):
        task.delay(2)
    assert lost.is_set()
    assert list(claims(pg_dsn)) == ["0"]


@pytest.fixture
def full_queue(rabbit):
    """A queue that takes nothing."""
    name = f"full-{uuid.uuid4().hex}"
    arguments = {"x-max-length": 0, "x-overflow": "reject-publish"}
    with kombu.Connection(rabbit.direct) as connection:
        connection.default_channel.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)
        yield kombu.Queue(name, routing_key=name, queue_arguments=arguments)
        connection.default_channel.queue_delete(name)


def test_a_refused_message_is_an_error_for_who_has_a_claim_and_a_line_for_who_has_not(make, full_queue, pg_dsn, caplog):
    """Without our receipts nobody would hear of the second one: for a callback the error would be its parent's."""
    app = make(task_queues=[full_queue], task_create_missing_queues=True)
    task = deduplicated(app)
    with pytest.raises((MessageNacked, kombu.exceptions.OperationalError)):
        task.apply_async((1,), queue=full_queue.name)
    assert claims(pg_dsn) == {}
    app.send_task("plain", queue=full_queue.name)
    assert "the broker refuses a message of plain: MessageNacked" in caplog.text


def test_a_callback_that_the_broker_refuses_fails_by_itself(make, full_queue):
    app = make(task_queues=[full_queue], result_backend="cache+memory://")
    task = deduplicated(app)
    app.task(shared=False, name="parent")(body)
    parent_id, child_id = uuid.uuid4().hex, uuid.uuid4().hex
    link = dict(task.s().set(queue=full_queue.name, task_id=child_id))
    tracer = trace.build_tracer("parent", app.tasks["parent"], app=app)
    tracer(parent_id, (1,), {}, {"id": parent_id, "delivery_info": {}, "args": (1,), "kwargs": {}, "callbacks": [link]})
    assert app.AsyncResult(parent_id).state == "SUCCESS"
    assert app.AsyncResult(child_id).state == "FAILURE"


def test_who_has_asked_for_receipts_himself_gets_the_error(make, full_queue):
    app = make(task_queues=[full_queue], broker_transport_options={"confirm_publish": True})
    publisher_confirms.ask_for_confirms(app)
    with pytest.raises((MessageNacked, kombu.exceptions.OperationalError)):
        app.send_task("plain", queue=full_queue.name)
