"""Publishing with a dedup key, against a real database; what a worker does with the messages is in `acceptance`."""

import datetime
import decimal
import enum
import os
import subprocess
import sys
import textwrap
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import kombu.exceptions
import psycopg
import pytest
from celery import Celery, chain, chord, group
from celery.beat import Scheduler
from celery.exceptions import ImproperlyConfigured as CeleryMisconfigured

from celery_syncguard import DuplicateTask, LockedTask, PublishedResult, StoreUnavailable, signals
from celery_syncguard.core.store import Acquire, Release
from celery_syncguard.dedup import send_task
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey, LockHeld, TooManyDeaths
from celery_syncguard.skipped import SKIPPED, Skipped
from celery_syncguard.tasks import app_state
from tests.fixtures.cluster import ROOT
from tests.fixtures.polling import poll
from tests.fixtures.servers import free_port


def one_argument(n=None, **_):
    """The body of most tasks here; nothing runs it."""


def returning(n):
    return n


def two_arguments(a, b=2):
    """As above."""


class Producer:
    """An application that publishes to a queue in memory, and a look at what it published and claimed."""

    def __init__(self, dsn, **conf):
        self.queue = f"q-{uuid.uuid4().hex}"
        self.dsn = dsn
        self.app = Celery(self.queue, broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(task_default_queue=self.queue, syncguard_dsn=dsn, **conf)

    def task(self, function=one_argument, **options):
        options.setdefault("dedup_key", "{n}")
        return self.app.task(base=LockedTask, shared=False, **options)(function)

    def sent(self):
        """The messages that are in the queue, taken out of it."""
        messages = []
        with self.app.connection_for_read() as connection, connection.SimpleQueue(self.queue) as queue:
            while queue.qsize():
                message = queue.get(timeout=1)
                message.ack()
                messages.append(message)
        return messages

    def flush(self):
        app_state.guard_for(self.app).flush()

    def claims(self):
        """claim_key -> (task_id, seconds left)."""
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(
                "select claim_key, task_id, (expires_at_ms - syncguard_clock_ms()) / 1000.0 from syncguard_claims"
            ).fetchall()
        return {key: (task_id, float(left)) for key, task_id, left in rows}

    def close(self):
        app_state.state_of(self.app).close()
        self.app.close()


@pytest.fixture
def producer(pg_dsn):
    producer = Producer(pg_dsn)
    yield producer
    producer.close()


def test_the_second_publish_gets_the_first_tasks_result_and_is_not_queued(producer):
    """The id of the existing task; also with ignore_result."""
    task = producer.task(ignore_result=True)
    first = task.delay(1)
    second = task.delay(1)
    other = task.delay(2)
    assert (first.duplicate, second.duplicate, other.duplicate) == (False, True, False)
    assert second.id == first.id != other.id
    assert first.id in second.holder
    assert [message.headers["id"] for message in producer.sent()] == [first.id, other.id]


@pytest.mark.parametrize("how", ["plain", "result_cls", "eager", "by name"])
def test_a_result_says_that_it_is_no_duplicate_also_without_a_dedup_key(producer, how):
    class Mine(producer.app.AsyncResult):
        """An application's own class of results."""

    task = producer.task(dedup_key=None, lock_key=None)
    producer.app.conf.task_always_eager = how == "eager"
    if how in ("by name", "result_cls"):
        own = {"result_cls": Mine} if how == "result_cls" else {}
        result = send_task(producer.app, task.name, [1], lock_key="k", **own)
    else:
        result = task.delay(1)
    assert (result.duplicate, result.holder) == (False, None)
    assert isinstance(result, Mine) == (how == "result_cls")
    assert isinstance(result, PublishedResult)


def test_without_a_dedup_key_both_are_queued(producer):
    """The negative control."""
    task = producer.task(dedup_key=None, lock_key=None)
    task.delay(1)
    task.delay(1)
    assert len(producer.sent()) == 2


def test_raise_tells_task_id_key_holder_and_age(producer):
    task = producer.task(dedup_on_duplicate="raise")
    first = task.delay(1)
    with pytest.raises(DuplicateTask, match=first.id) as caught:
        task.delay(1)
    assert caught.value.task_id == first.id
    assert caught.value.key == "1"
    assert first.id in caught.value.holder
    assert 0 <= caught.value.age < 60
    assert len(producer.sent()) == 1


def test_options_of_one_call_win(producer):
    task = producer.task(lock_key=None, dedup_key=None)
    first = task.apply_async((1,), dedup_key="n:{n}", dedup_ttl=100)
    assert task.apply_async((1,), dedup_key="n:{n}").id == first.id
    assert task.s(1).set(dedup_key="n:{n}").delay().id == first.id
    with pytest.raises(DuplicateTask):
        task.apply_async((1,), dedup_key="n:{n}", dedup_on_duplicate="raise")
    producer.flush()
    assert 90 < producer.claims()["n:1"][1] <= 100


def test_a_duplicate_is_told_by_a_signal(producer):
    seen = []

    def listener(sender, claim, **_):
        seen.append((sender, claim.task_id))

    signals.task_duplicate.connect(listener)
    try:
        task = producer.task()
        first = task.delay(1)
        task.delay(1)
    finally:
        signals.task_duplicate.disconnect(listener)
    assert seen == [(task, first.id)]


# --- equal arguments ------------------------------------------------------------------------------------------------


class Colour(str, enum.Enum):
    RED = "red"


_ID = uuid.UUID("0f0e0d0c-0b0a-0908-0706-050403020100")
_NOON = datetime.datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize(
    "calls",
    [
        [((1,), {}), ((1, 2), {}), ((), {"a": 1}), ((), {"b": 2, "a": 1})],
        [(((1, 2),), {}), (([1, 2],), {})],
        [((_ID,), {}), ((str(_ID),), {})],
        [((Colour.RED,), {}), (("red",), {})],
        [((decimal.Decimal("1.50"),), {}), ((decimal.Decimal("1.50"),), {})],
        [((_NOON,), {}), ((_NOON.replace(),), {})],
        [(({"x": 1, "y": [_ID, {"z": (1,)}]},), {}), (({"y": [_ID, {"z": [1]}], "x": 1},), {})],
        [((float("nan"),), {}), ((float("nan"),), {})],
        [((b"\xff\x00",), {}), ((b"\xff\x00",), {})],
        [((datetime.date(2026, 1, 2),), {}), ((datetime.date(2026, 1, 2),), {})],
    ],
    ids=["forms", "tuple", "uuid", "enum", "decimal", "datetime", "nested", "nan", "bytes", "date"],
)  # fmt: skip
def test_equal_work_has_one_key_whatever_form_the_call_has(producer, calls):
    """Positional, keyword and default forms; tuples, UUIDs, Decimals, datetimes, Enums."""

    def bound(self, a, b=2):
        """Not called."""

    task = producer.app.task(base=LockedTask, shared=False, bind=True, dedup_key=True)(bound)
    ids = {task.apply_async(args, kwargs).id for args, kwargs in calls}
    assert len(ids) == 1
    assert len(producer.sent()) == 1
    (key,) = producer.claims()
    assert key.startswith(task.name + ":")
    assert len(key) == len(task.name) + 33


@pytest.mark.parametrize(
    "pair",
    [((1,), (2,)), ((1,), ("1",)), ((1,), (1.0,)), ((None,), ("None",)), ((True,), (1,)), (([1, 2],), ([2, 1],))],
)
def test_different_work_has_different_keys(producer, pair):
    task = producer.task(two_arguments, dedup_key=True)
    assert len({task.apply_async(args).id for args in pair}) == 2


@pytest.mark.parametrize("argument", [object(), enum.Enum("Plain", "RED").RED, {1: {object()}}])
def test_what_the_serializer_refuses_is_refused_with_its_error_before_anything_is_claimed(producer, argument):
    task = producer.task(two_arguments, dedup_key=True)
    with pytest.raises(kombu.exceptions.EncodeError):
        task.delay(argument)
    assert producer.claims() == {}
    assert producer.sent() == []


def test_an_argument_that_only_pickle_can_carry_needs_a_key_of_the_users(producer):
    task = producer.task(two_arguments, dedup_key=True, serializer="pickle")
    with pytest.raises(InvalidKey, match="template or a callable"):
        task.delay(producer.__class__)


def test_the_tasks_own_address_is_no_part_of_the_key(producer):
    """Bound tasks and tasks that are classes."""

    class Import(LockedTask):
        name = "import"
        dedup_key = True

        def __init__(self):
            self.state = object()

        def run(self, n):
            """Not called."""

    first, second = producer.app.register_task(Import()), Import()
    second.bind(producer.app)
    assert first.delay(1).id == second.delay(1).id


def test_a_key_may_be_the_name_alone(producer):
    task = producer.task(dedup_key="import")
    assert task.delay(1).id == task.delay(2).id


# --- a claim does not stick -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_publish_that_fails_frees_its_claim(producer, scheme):
    """No broker."""
    producer.app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    task = producer.task()
    with (
        producer.app.connection_for_write(f"{scheme}://127.0.0.1:{free_port()}//") as nowhere,
        pytest.raises(kombu.exceptions.OperationalError),
    ):
        task.apply_async((1,), connection=nowhere, retry=False)
    assert producer.claims() == {}
    assert not task.delay(1).duplicate


_DYING = """
import os, sys
from celery import Celery
from celery_syncguard import LockedTask
app = Celery("dying", broker="memory://")
app.conf.syncguard_dsn = sys.argv[1]
@app.task(base=LockedTask, dedup_key="{n}", dedup_ttl=3600)
def work(n): pass
%s
"""


def _run_producer(dsn, text):
    script = _DYING % textwrap.dedent(text)
    return subprocess.run([sys.executable, "-c", script, dsn], cwd=ROOT, timeout=60, check=False).returncode


@pytest.mark.slow
def test_a_producer_that_dies_between_claim_and_publish_costs_seconds(producer):
    """`os._exit` in a patched `send_task`."""
    task = producer.task()
    assert _run_producer(producer.dsn, "app.send_task = lambda *a, **k: os._exit(9)\nwork.delay(1)\n") == 9
    assert 0 < producer.claims()["1"][1] <= 10
    assert task.delay(1).duplicate, "not claimed at all: this proves nothing"
    started = time.monotonic()
    poll(lambda: not task.delay(1).duplicate, timeout=20, interval=0.2)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("end", ["", "os._exit(0)\n"], ids=["at the end of its script", "without a word"])
def test_a_claim_outlives_a_producer_that_ends_at_once(producer, end):
    """A frozen one is the same: nothing of it runs any more."""
    assert _run_producer(producer.dsn, "work.delay(1)\n" + end) == 0
    assert producer.claims()["1"][1] > 3500


def test_a_claim_that_is_confirmed_only_later_ends_early_with_such_a_producer(producer):
    """The negative control."""
    later = "from celery_syncguard.tasks import claims\nclaims.confirm = lambda *a, **k: None\n"
    assert _run_producer(producer.dsn, later + "work.delay(1)\nos._exit(0)\n") == 0
    assert 0 < producer.claims()["1"][1] <= 10


def test_a_claim_has_its_whole_life_when_its_publish_returns(producer):
    producer.task(dedup_ttl=500).delay(1)
    assert 490 < producer.claims()["1"][1] <= 500


def test_a_confirmation_that_fails_is_repeated(pg_proxy, pg_dsn):
    producer = Producer(pg_proxy.dsn(pg_dsn), syncguard_timeout=0.5)
    direct = Producer(pg_dsn)
    send = producer.app.send_task

    def send_and_lose_the_database(*args, **kwargs):
        result = send(*args, **kwargs)
        pg_proxy.refuse()
        return result

    try:
        producer.app.send_task = send_and_lose_the_database
        assert not producer.task().delay(1).duplicate
        assert direct.claims()["1"][1] <= 10
        pg_proxy.accept()
        poll(lambda: direct.claims()["1"][1] > 3000)
    finally:
        pg_proxy.accept()
        producer.close()
        direct.close()


def test_a_claim_is_not_longer_than_its_message(producer):
    """Expires; and an eta comes on top."""
    task = producer.task()
    task.apply_async((1,), expires=5)
    task.apply_async((2,), expires=datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=50))
    task.apply_async((3,), countdown=7200)
    task.apply_async((4,), countdown=100, expires=200)
    now = datetime.datetime.now(datetime.timezone.utc)
    for n, overdue in ((5, datetime.timedelta(minutes=30)), (6, datetime.timedelta(days=2))):
        task.apply_async((n,), eta=now - overdue)
    task.apply_async((7,), countdown=-1800)
    producer.flush()
    left = {key: seconds for key, (_, seconds) in producer.claims().items()}
    assert 3 < left["1"] <= 5
    assert 45 < left["2"] <= 50
    assert 10700 < left["3"] <= 10800
    assert 190 < left["4"] <= 200
    for overdue in ("5", "6", "7"):
        assert 3500 < left[overdue] <= 3600, "what was due long ago is claimed no shorter than what is due now"


def test_a_message_that_comes_again_after_long_keeps_its_claim(producer):
    """Celery's retry with a countdown beyond dedup_ttl."""
    task = producer.task(dedup_ttl=60)
    first = task.delay(1)
    (message,) = producer.sent()
    task.apply_async((1,), task_id=first.id, headers=message.headers, countdown=600, retries=1)
    assert producer.claims()["1"][1] > 600
    assert len(producer.sent()) == 1


def test_nothing_is_sent_when_the_claim_cannot_be_asked_for(producer):
    nowhere = Producer(f"postgresql://nobody@127.0.0.1:{free_port()}/none", syncguard_timeout=0.2)
    task = nowhere.task()
    with pytest.raises(StoreUnavailable):
        task.delay(1)
    assert nowhere.sent() == []
    nowhere.close()


# --- canvases -------------------------------------------------------------------------------------------------------


def test_a_second_chain_with_the_same_head_is_refused_before_anything_is_sent(producer):
    head, tail = producer.task(name="head"), producer.task(name="tail", dedup_key=None, lock_key=None)
    first = chain(head.si(42), tail.si(1)).apply_async()
    with pytest.raises(DuplicateTask) as caught:
        chain(head.si(42), tail.si(2)).apply_async()
    assert caught.value.task_id == first.parent.id
    assert len(producer.sent()) == 1


def test_a_duplicate_with_a_link_is_refused(producer):
    task = producer.task()
    task.delay(1)
    with pytest.raises(DuplicateTask):
        task.apply_async((1,), link=task.si(2))
    assert len(producer.sent()) == 1


def test_a_member_of_a_group_ends_as_skipped_so_that_the_group_ends(producer):
    task = producer.task()
    first = task.delay(1)
    result = group(task.s(1), task.s(1), task.s(2)).apply_async()
    assert [message.headers["argsrepr"] for message in producer.sent()] == ["(1,)", "(2,)"]
    for member in result.results[:2]:
        assert member.state == SKIPPED
        marker = member.get(timeout=1)
        assert isinstance(marker, Skipped)
        assert marker.task_id == first.id


def test_a_member_of_a_chord_is_sent_because_its_body_waits(producer, caplog):
    task = producer.task()
    task.delay(1)
    producer.sent()
    body = producer.task(name="body", dedup_key=None, lock_key=None)
    chord([task.s(1), task.s(2), chain(task.s(1), body.s())], body.s()).apply_async()
    sent = [message for message in producer.sent() if message.headers["task"] == task.name]
    assert len(sent) == 3
    assert all(message.headers["task"] != "body" for message in sent)
    assert "claimed" not in sent[0].headers["syncguard"]
    assert sent[1].headers["syncguard"]["claimed"]
    assert "others wait for its end" in caplog.text


# --- producers without the code -------------------------------------------------------------------------------------


def test_a_producer_without_the_tasks_code_gives_its_keys(producer):
    first = send_task(producer.app, "elsewhere.work", [1], dedup_key="k", lock_key="l", run_once="r")
    assert send_task(producer.app, "elsewhere.work", [1], dedup_key="k").id == first.id
    with pytest.raises(DuplicateTask):
        send_task(producer.app, "elsewhere.work", [1], dedup_key="k", dedup_on_duplicate="raise")
    with pytest.raises(InvalidKey):
        send_task(producer.app, "elsewhere.work", dedup_key="")
    with pytest.raises(ImproperlyConfigured, match="send_task: unknown option dedup_kye; did you mean 'dedup_key'"):
        send_task(producer.app, "elsewhere.work", dedup_kye="k")
    with pytest.raises(ImproperlyConfigured, match="send_task: lock_ttl cannot be given here"):
        send_task(producer.app, "elsewhere.work", dedup_key="another", lock_ttl=5)
    (message,) = producer.sent()
    assert {"key": "l", "claim": "k", "run": "r", "claimed": True}.items() <= message.headers["syncguard"].items()
    producer.flush()
    assert producer.claims()["k"][1] > 3500


def test_eager_calls_are_deduplicated_by_their_callers(producer):
    producer.app.conf.task_always_eager = True
    inner = []

    def body(n):
        if n == 1:
            inner.append(task.delay(1))
        return n

    task = producer.task(body)
    result = task.delay(1)
    assert result.get() == 1
    assert [one.duplicate for one in inner] == [True]
    assert producer.claims() == {}
    assert task.apply((1,)).get() == 1


# --- the caller's transaction ---------------------------------------------------------------------------------------


def test_a_duplicate_does_not_touch_the_callers_transaction(producer):
    task = producer.task()
    task.delay(1)
    with psycopg.connect(producer.dsn) as connection:
        connection.execute("create table orders (id int)")
        connection.execute("insert into orders values (1)")
        assert task.delay(1).duplicate
        connection.execute("insert into orders values (2)")
    with psycopg.connect(producer.dsn) as connection:
        assert connection.execute("select count(*) from orders").fetchone() == (2,)


def test_a_claim_that_the_caller_has_made_itself_would_abort_its_transaction(producer):
    """The negative control: what a unique index in the caller's own transaction does."""
    with psycopg.connect(producer.dsn) as connection:
        connection.execute("create table queued (key text primary key)")
        connection.execute("insert into queued values ('1')")
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("insert into queued values ('1')")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            connection.execute("select 1")


_DJANGO = """
import os, sys
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": sys.argv[2], "HOST": "127.0.0.1",
                           "PORT": sys.argv[3], "USER": "postgres"}},
    INSTALLED_APPS=[], USE_TZ=True,
)
import django
django.setup()
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.db import connection, transaction
from celery_syncguard import LockedTask

class Task(LockedTask, DjangoTask):
    abstract = True
    lock_key = None

app = Celery("shop", broker="memory://")
app.conf.update(syncguard_dsn=sys.argv[1], task_default_queue="shop")
sent = []
from celery.signals import after_task_publish
after_task_publish.connect(lambda headers, **_: sent.append(headers["id"]), weak=False)

@app.task(base=Task, dedup_key="{n}", dedup_ttl=60)
def work(n): pass

with transaction.atomic():
    work.delay_on_commit(1)
    work.delay_on_commit(1)
    work.delay_on_commit(2)
    assert sent == []
assert len(sent) == 2, sent
try:
    with transaction.atomic():
        work.delay_on_commit(3)
        raise LookupError
except LookupError:
    pass
assert len(sent) == 2, sent
with transaction.atomic():
    # A duplicate at once, inside the block, does not break it.
    assert work.delay(1).duplicate
    with connection.cursor() as cursor:
        cursor.execute("select 1")
assert len(sent) == 2, sent
assert not work.delay(3).duplicate
"""


def test_djangos_delay_on_commit_claims_when_the_transaction_commits(pg_dsn, pg_server):
    done = subprocess.run(
        [sys.executable, "-c", _DJANGO, pg_dsn, pg_dsn.rpartition("/")[2], str(pg_server.port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# --- a worker that died ---------------------------------------------------------------------------------------------


def test_a_claim_whose_task_died_holding_its_lock_is_taken_over(producer):
    """The whole host is gone: nobody is left to end the claim, and no other task comes to take the lock over."""
    task = producer.task(lock_key="lock:{n}")
    first = task.delay(1)
    producer.flush()
    store = app_state.guard_for(producer.app).store
    dead = Acquire(key="lock:1", lock_id="d" * 22, ttl=0.5, task_id=first.id, attempt=0, claim_key="1", claim_ttl=3600)
    store.acquire(dead)
    assert task.delay(1).id == first.id
    second = poll(lambda: not (result := task.delay(1)).duplicate and result)
    assert second.id != first.id
    assert task.delay(1).id == second.id


def test_a_retry_is_no_death(producer):
    """A released lock says nothing: the task may be waiting for its next attempt."""
    task = producer.task(lock_key="lock:{n}")
    first = task.delay(1)
    producer.flush()
    store = app_state.guard_for(producer.app).store
    store.acquire(Acquire(key="lock:1", lock_id="a" * 22, ttl=60, task_id=first.id, claim_key="1", claim_ttl=3600))
    store.release(Release(key="lock:1", lock_id="a" * 22, task_id=first.id))
    assert task.delay(1).id == first.id


def _run(task, message, **options):
    """Run a message that was published, in this process."""
    return task.apply((1,), task_id=message.headers["id"], headers=message.headers, **options)


@pytest.mark.parametrize("until", ["start", "done", "ttl"])
@pytest.mark.parametrize("options", [{}, {"lock_key": "{n}"}], ids=["unlocked", "locked"])
def test_a_task_whose_claim_belongs_to_another_by_now_runs_and_leaves_it_alone(producer, until, options):
    task = producer.task(returning, dedup_until=until, **options)
    task.delay(1)
    producer.flush()
    with psycopg.connect(producer.dsn) as connection:
        connection.execute("update syncguard_claims set task_id = 'another'")
    (message,) = producer.sent()
    assert _run(task, message).get() == 1
    producer.flush()
    assert producer.claims()["1"][0] == "another"


@pytest.mark.parametrize("until", ["start", "done", "ttl"])
def test_a_task_whose_claim_was_lost_runs(producer, until):
    task = producer.task(returning, dedup_until=until)
    task.delay(1)
    producer.flush()
    with psycopg.connect(producer.dsn) as connection:
        connection.execute("delete from syncguard_claims")
    (message,) = producer.sent()
    assert _run(task, message).get() == 1
    producer.flush()
    assert producer.claims() == {}


def test_a_task_that_is_given_up_because_its_process_died_too_often_frees_its_claim(producer):
    task = producer.task(lock_key="{n}")
    first = task.delay(1)
    with psycopg.connect(producer.dsn) as connection:
        connection.execute("insert into syncguard_deaths values (%s, 5, syncguard_clock_ms())", (f"task:{first.id}",))
    (message,) = producer.sent()
    assert isinstance(_run(task, message).result, TooManyDeaths)
    assert producer.claims() == {}


def test_a_claim_is_ended_later_if_the_database_was_away_when_its_task_failed(pg_proxy, pg_dsn):
    producer, direct = Producer(pg_proxy.dsn(pg_dsn), syncguard_timeout=0.3), Producer(pg_dsn)
    try:
        task = producer.task(lock_key="{n}", lock_on_unavailable="raise")
        task.delay(1)
        producer.flush()
        (message,) = producer.sent()
        pg_proxy.refuse()
        assert isinstance(_run(task, message).result, StoreUnavailable)
        assert list(direct.claims()) == ["1"]
        pg_proxy.accept()
        poll(lambda: direct.claims() == {})
    finally:
        pg_proxy.accept()
        producer.close()
        direct.close()


def test_a_call_that_would_wait_for_its_own_caller_frees_its_claim(producer):
    outcomes = []

    def outer(n):
        outcomes.append(inner.apply_async((n,), lock_key="same").result)

    producer.app.conf.task_always_eager = True
    inner = producer.task(name="inner", dedup_key="inner:{n}", lock_key="same")
    producer.task(outer, name="outer", lock_key="same").delay(1)
    assert isinstance(outcomes[0], LockHeld)
    assert producer.claims() == {}


def test_threads_that_publish_the_same_work_get_one_task(producer):
    task = producer.task()
    with ThreadPoolExecutor(16) as pool:
        for n in range(50):
            results = list(pool.map(lambda _, n=n: task.delay(n), range(16)))
            assert [result.duplicate for result in results].count(False) == 1
            assert len({result.id for result in results}) == 1
    assert len(producer.sent()) == 50


def test_a_result_backend_is_not_needed(pg_dsn):
    producer = Producer(pg_dsn)
    producer.app.conf.result_backend = None
    task = producer.task()
    assert task.delay(1).id == task.delay(1).id
    result = group(task.s(1), task.s(2)).apply_async()
    with pytest.raises((NotImplementedError, CeleryMisconfigured)):
        result.results[0].get(timeout=1)
    producer.close()


@pytest.mark.parametrize("entry", [{"dedup_on_duplicate": "raise"}, {"link": []}], ids=["raise", "link"])
def test_a_duplicate_of_a_plain_beat_is_an_outcome_and_no_error(producer, caplog, entry):
    """A traceback in each slot would hide what matters."""
    task = producer.task(returning)
    options = {name: value or [task.s()] for name, value in entry.items()}
    scheduler = Scheduler(producer.app, schedule={}, lazy=True)
    due = scheduler.Entry(name="e", task=task.name, args=(1,), options=options, app=producer.app)
    with caplog.at_level("INFO"):
        scheduler.apply_entry(due)
        scheduler.apply_entry(due)
    assert "is a duplicate" in caplog.text
    assert "Message Error" not in caplog.text
    # The negative control: anybody else is told by an exception.
    with pytest.raises(DuplicateTask):
        task.apply_async((1,), **options)
