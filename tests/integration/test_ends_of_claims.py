"""What becomes of a claim, for every way in which a task ends and each `dedup_until`: the table of `claims.end`.

Eagerly, on both stores, and the store is asked afterwards.
"""

import contextlib

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery.exceptions import Reject

from celery_syncguard import LockedTask, TooManyDeaths
from celery_syncguard.core.store import Acquire
from celery_syncguard.errors import StoreUnavailable
from celery_syncguard.signals import lock_released
from celery_syncguard.tasks import app_state, claims
from celery_syncguard.tasks.claims import Outcome
from celery_syncguard.tasks.delivery import Delivery
from celery_syncguard.testing import hold_elsewhere
from tests.fixtures.claimed import CLAIM, claimed_store, is_free
from tests.fixtures.polling import poll

UNTIL = ("start", "done", "ttl")

#: With which `dedup_until` the claim has ended then.
TABLE = {
    Outcome.BEGUN: {"start"},
    Outcome.ENDED: {"start", "done"},
    Outcome.VOID: {"start", "done", "ttl"},
    Outcome.AGAIN: set(),
}


@pytest.fixture
def app(eager_app):
    return eager_app


@pytest.fixture
def store(app):
    return claimed_store(app)


@pytest.mark.parametrize("until", UNTIL)
@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("how", ["at once", "later", "with a lease"])
def test_the_table_is_right(app, store, outcome, until, how):
    guard = app_state.guard_for(app)
    lease = guard.try_acquire("k") if how == "with a lease" else None
    if lease is not None:
        lease.task_id = "t"
    released = claims.end(
        guard, CLAIM, outcome, task_id="t", until=until, lease=lease, later=how == "later", start=False
    )
    guard.flush()
    assert is_free(store) == (until in TABLE[outcome])
    assert released == (lease is not None)
    assert guard.locks() == []


class Watched(LockedTask):
    """Notes whether its claim is free in the body, and when it is retried."""

    abstract = True
    dedup_key = CLAIM
    seen = ()

    def look(self):
        self.seen += (is_free(app_state.guard_for(self.app).store),)

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        self.look()


def returns(self):
    self.look()


def fails(self):
    self.look()
    raise LookupError


def retries(self):
    self.retry(countdown=0, max_retries=1)


def goes_back(self):
    raise Reject(requeue=True)


LOCKS = [{"lock_key": "k"}, {"lock_key": None}]


@pytest.mark.parametrize("until", UNTIL)
@pytest.mark.parametrize("options", LOCKS, ids=["locked", "unlocked"])
@pytest.mark.parametrize("body", [returns, fails])
def test_a_claim_is_there_in_the_body_and_after_it_as_the_table_says(app, store, until, options, body):
    task = app.task(base=Watched, bind=True, shared=False, dedup_until=until, **options)(body)
    task.apply(task_id="t")
    assert task.seen == (until in TABLE[Outcome.BEGUN],)
    assert is_free(store) == (until in TABLE[Outcome.ENDED])


@pytest.mark.parametrize("until", UNTIL)
def test_a_body_that_has_released_its_lease_itself_ends_its_claim_all_the_same(app, store, until):
    told = []

    def tell(lease, released, **_):
        told.append(released)

    lock_released.connect(tell)

    def lets_go(self):
        assert self.lease.release()

    task = app.task(base=Watched, bind=True, shared=False, lock_key="k", dedup_until=until)(lets_go)
    assert task.apply(task_id="t").successful()
    assert is_free(store) == (until in TABLE[Outcome.ENDED])
    assert told == [False], "by the end, which found it released"


@pytest.mark.parametrize("until", ["done", "ttl"])
@pytest.mark.parametrize("options", LOCKS, ids=["locked", "unlocked"])
def test_a_claim_stays_while_its_task_is_retried(app, store, until, options):
    task = app.task(base=Watched, bind=True, shared=False, dedup_until=until, **options)(retries)
    task.apply(task_id="t")
    assert task.seen == (False,)
    assert is_free(store) == (until == "done")


@pytest.mark.parametrize("until", ["done", "ttl"])
@pytest.mark.parametrize("options", LOCKS, ids=["locked", "unlocked"])
def test_a_claim_stays_if_its_message_goes_back(app, store, until, options):
    app.task(base=Watched, bind=True, shared=False, dedup_until=until, **options)(goes_back).apply(task_id="t")
    assert not is_free(store)


# "skip" with "start" is refused at registration.
@pytest.mark.parametrize("until,on_held", [*((until, "raise") for until in UNTIL), ("done", "skip"), ("ttl", "skip")])
def test_a_claim_ends_with_what_does_not_run(app, store, until, on_held):
    task = app.task(base=Watched, bind=True, shared=False, lock_key="k", dedup_until=until, lock_on_held=on_held)(
        returns
    )
    with hold_elsewhere(app_state.guard_for(app), "k"):
        task.apply(task_id="t")
    assert task.seen == ()
    assert is_free(store)


@pytest.mark.parametrize("until", UNTIL)
def test_a_claim_ends_with_what_died_too_often(app, store, until):
    for _ in range(2):
        store.acquire(Acquire(key="k", lock_id="x" * 22, ttl=60, process="dead", task_id="t"))
        store.release_process("dead")
    task = app.task(base=Watched, bind=True, shared=False, lock_key="k", dedup_until=until, lock_max_deaths=2)(returns)
    assert isinstance(task.apply(task_id="t").result, TooManyDeaths)
    assert is_free(store)


@pytest.mark.parametrize("until", ["done", "ttl"])
def test_a_claim_ends_with_what_is_answered(app, store, until):
    task = app.task(base=Watched, bind=True, shared=False, run_once="r", dedup_until=until)(returns)
    task.apply(task_id="first", dedup_key=None)
    task.apply(task_id="t")
    assert len(task.seen) == 1
    assert is_free(store) == (until == "done")


# The end lies outside of Celery's autoretry


class Autoretried(Watched):
    abstract = True
    lock_key = "k"
    autoretry_for = (LookupError,)
    default_retry_delay = 0
    max_retries = 1
    meanwhile = staticmethod(lambda: None)

    def retry(self, *args, **kwargs):
        self.meanwhile()
        return super().retry(*args, **kwargs)


def test_while_autoretry_publishes_the_lock_is_held_and_renewed(app, store):
    held = []

    def meanwhile():
        if not held:
            (before,) = store.locks()
            poll(lambda: any(row.since > task.lock_ttl and row.expires_at > before.expires_at for row in store.locks()))
            held.extend(row.key for row in store.locks())

    task = app.task(base=Autoretried, bind=True, shared=False, lock_ttl=0.5, meanwhile=staticmethod(meanwhile))(fails)
    assert isinstance(task.apply(task_id="t").result, LookupError)
    assert held == ["k"]
    assert store.locks() == []


def test_a_lock_that_is_lost_while_autoretry_publishes_is_told_and_interrupts_nothing(app, store):
    lost = []
    guard = app_state.guard_for(app)
    guard.events.subscribe("lease_lost", lambda lease: lost.append(lease))

    def meanwhile():
        if not lost:
            for row in store.locks("k"):
                guard.release("k", lock_id=row.lock_id)
            poll(lambda: lost)

    task = app.task(base=Autoretried, bind=True, shared=False, lock_ttl=0.5, meanwhile=staticmethod(meanwhile))(fails)
    result = task.apply(task_id="t").result
    assert isinstance(result, LookupError), result
    assert len(lost) == 1
    assert not any(task.seen), "the next attempt goes on under the claim"
    assert is_free(store)


def test_a_soft_time_limit_while_autoretry_publishes_ends_all(app, store):
    def meanwhile():
        raise SoftTimeLimitExceeded

    task = app.task(base=Autoretried, bind=True, shared=False, meanwhile=staticmethod(meanwhile))(fails)
    assert isinstance(task.apply(task_id="t").result, SoftTimeLimitExceeded)
    assert store.locks() == []
    assert is_free(store)


def test_what_autoretry_cannot_publish_ends_with_its_claim(app, store):
    """A foreseen retry would have kept it to its ttl."""

    def meanwhile():
        raise Reject("the broker is away", requeue=False)  # as `Task.retry` does then

    task = app.task(base=Autoretried, bind=True, shared=False, meanwhile=staticmethod(meanwhile))(fails)
    task.apply(task_id="t")
    assert store.locks() == []
    assert is_free(store)


@pytest.mark.parametrize(
    "spared",
    [{"dont_autoretry_for": (LookupError,)}, {"max_retries": 0}, {"retry_kwargs": {"max_retries": 0}}],
    ids=str,
)
def test_what_autoretry_lets_fail_ends_with_its_claim(app, store, spared):
    task = app.task(base=Autoretried, bind=True, shared=False, **spared)(fails)
    assert isinstance(task.apply(task_id="t").result, LookupError)
    assert len(task.seen) == 1
    assert is_free(store)


@pytest.mark.parametrize("options", LOCKS, ids=["locked", "unlocked"])
def test_a_soft_time_limit_in_the_end_of_a_retried_attempt_leaves_the_claim_to_the_next(
    app, store, options, monkeypatch
):
    header_after, strikes = Delivery._header_after, iter([True])

    def struck(run, failure):
        if next(strikes, False):
            raise SoftTimeLimitExceeded
        return header_after(run, failure)

    task = app.task(base=Watched, bind=True, shared=False, **options)(retries)
    monkeypatch.setattr(Delivery, "_header_after", struck)
    assert isinstance(task.apply(task_id="t").result, SoftTimeLimitExceeded)
    assert not is_free(store)
    assert store.locks() == []


def test_ctrl_c_just_after_the_grant_leaves_no_lock(app, store, monkeypatch):
    guard = app_state.guard_for(app)
    acquire = guard.acquire_waiting

    def struck(request, *, wait):
        acquire(request, wait=wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(guard, "acquire_waiting", struck)
    with pytest.raises(KeyboardInterrupt):
        app.task(base=Watched, bind=True, shared=False, lock_key="k")(returns).apply(task_id="t")
    guard.flush()
    assert store.locks() == []


@pytest.mark.parametrize("again", ["publish", "retry"])
def test_what_waits_to_end_a_claim_does_not_end_the_next_one_of_its_task(app, store, again, monkeypatch):
    guard = app_state.guard_for(app)
    facts = {"task_id": "t", "ttl": 600, "holder": "h"}

    def claim():
        claims.end(guard, CLAIM, Outcome.VOID, task_id="t", later=True, start=False)
        if again == "publish":
            claims.make(guard, CLAIM, **facts, fingerprint=None)
        else:
            claims.renew(guard, CLAIM, **facts, until="start")

    def absent(*args, **kwargs):
        raise StoreUnavailable("no answer")

    claim()
    guard.flush()
    assert not is_free(store)
    with monkeypatch.context() as away:
        away.setattr(guard.store, "claim", absent)
        with pytest.raises(StoreUnavailable) if again == "publish" else contextlib.nullcontext():
            claim()
    guard.flush()
    assert is_free(store), "without a new claim the old one has to end"
