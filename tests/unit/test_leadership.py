"""The state machine of leadership, on the memory store: several contenders in one process."""

import contextlib
import threading

import pytest

from celery_syncguard import SyncGuard
from celery_syncguard.core import clock, leadership
from celery_syncguard.core.config import Settings
from celery_syncguard.core.leader_key import end_term, leader_lock_key
from celery_syncguard.core.leadership import Leadership
from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey, LeaseLost, StoreUnavailable
from tests.fixtures.interrupting import hanging_step
from tests.fixtures.polling import poll


class Flaky(MemoryStore):
    """A store that can be made not to answer."""

    down = False

    def _answer(self):
        if self.down:
            raise StoreUnavailable("the database is away")

    def acquire(self, request):
        self._answer()
        return super().acquire(request)

    def renew(self, renewals):
        self._answer()
        return super().renew(renewals)

    def release(self, release):
        self._answer()
        return super().release(release)


@pytest.fixture
def store():
    return Flaky()


@pytest.fixture
def contender(store):
    with contextlib.ExitStack() as stack:

        def make(ttl=1.0, **options):
            guard = SyncGuard(settings=Settings(dsn="memory://"), store=store)
            stack.callback(guard.close)
            leadership = Leadership(guard, "relay", ttl=ttl, **options)
            stack.callback(leadership.stop)
            return leadership

        yield make


def held_up(store, call, monkeypatch):
    """Two events: the store was asked this, and may answer."""
    asked, answered = threading.Event(), threading.Event()
    answer = getattr(store, call)

    def slowly(request):
        asked.set()
        assert answered.wait(30)
        return answer(request)

    monkeypatch.setattr(store, call, slowly)
    return asked, answered


def test_one_of_many_leads_and_the_others_know_who(contender):
    crowd = [contender(holder=f"host {number}") for number in range(5)]
    for one in crowd:
        one.start()
    poll(lambda: sum(one.leading for one in crowd) == 1 and sum(one.leader is not None for one in crowd) == 5)
    (leader,) = [one for one in crowd if one.leading]
    heard = {(one.leader.holder, int(one.leader.term)) for one in crowd}
    assert heard == {(leader.lease.holder, int(leader.term))}
    assert [one.leader.ours for one in crowd].count(True) == 1


def test_without_a_common_key_all_of_them_lead(store, contender):
    """The negative control."""
    crowd = []
    for number in range(3):
        guard = SyncGuard(settings=Settings(dsn="memory://"), store=store)
        crowd.append(Leadership(guard, f"relay {number}", ttl=1.0))
        crowd[-1].start()
    poll(lambda: all(one.leading for one in crowd))
    for one in crowd:
        one.stop()


def test_a_stop_hands_over_at_once_and_the_term_is_higher(contender):
    first, second = contender(ttl=60), contender(ttl=60)
    lease = first.elect(timeout=5)
    second.start()
    poll(lambda: second.leader is not None)
    began = clock.now()
    assert first.stop() is True
    following = second.elect(timeout=5)
    assert clock.now() - began < 2
    assert following.fence > lease.fence
    assert first.elect(timeout=0.2) is None, "who was stopped stands no more"


def test_a_stop_in_the_middle_of_an_election_waits_for_its_answer_and_gives_the_term_back(
    store, contender, monkeypatch
):
    """Several beats stop together: the first one's term must not go to one that is about to end, and stay there."""
    asked, answered = held_up(store, "acquire", monkeypatch)
    one = contender(ttl=300)
    one.start()
    assert asked.wait(10)
    stopped = []
    stopper = threading.Thread(target=lambda: stopped.append(one.stop()))
    stopper.start()
    stopper.join(0.3)
    assert stopper.is_alive()
    answered.set()
    stopper.join(10)
    assert stopped == [True]
    assert store.locks(one.lock_key) == []


def test_a_stop_waits_for_a_release_that_is_under_way_already(store, contender, monkeypatch):
    """Whoever ends its process then, in the middle of the release, keeps the others waiting for a whole ttl."""
    one = contender(ttl=300)
    one.elect(timeout=5)
    asked, answered = held_up(store, "release", monkeypatch)
    one.step_down()
    assert asked.wait(10)
    try:
        assert one.stop(timeout=0.1) is False
        assert one.stop(timeout=0.1) is False, "nor may the second one go"
    finally:
        answered.set()
    assert one.stop()
    assert store.locks(one.lock_key) == []


@pytest.mark.parametrize("down", [False, True])
def test_a_stop_on_standby_waits_for_nothing(store, contender, down):
    leader, standby = contender(ttl=300), contender(ttl=300)
    leader.elect(timeout=5)
    standby.start()
    poll(lambda: standby.leader is not None)
    store.down = down
    began = clock.now()
    assert standby.stop()
    assert clock.now() - began < 0.5
    store.down = False
    assert leader.leading


class LockedWaits(Leadership):
    """As it would be with Python's own events: what waits, and what ends a wait, takes a lock."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._stopped = threading.Event()
        self._loop._bell = threading.Event()


@pytest.mark.parametrize("kind,interrupted", [(Leadership, "stop"), (Leadership, "lost"), (LockedWaits, "stop")])
def test_any_number_of_stops_in_signal_handlers_gives_the_term_back(kind, interrupted):
    """The second handler may come at any step of the first one, the first one while somebody waits for the end of a term."""
    stopped = []

    def scene():
        store = MemoryStore()
        one = kind(SyncGuard(settings=Settings(dsn="memory://"), store=store), "relay", ttl=300)
        one.elect(timeout=5)

        def action():
            one.stop(timeout=0.5) if interrupted == "stop" else one.lost(timeout=0.001)

        def interrupt():
            one.stop(timeout=1.0)
            raise SystemExit

        def afterwards():
            stopped.append((one.stop(timeout=5), store.locks(one.lock_key)))

        return action, interrupt, afterwards

    hangs = hanging_step(scene, timeout=3 if kind is LockedWaits else 15)
    if kind is LockedWaits:
        assert hangs is not None, "the negative control"
        return
    assert hangs is None
    assert len(stopped) > 20
    assert set(map(str, stopped)) == {"(True, [])"}


def test_who_stepped_down_lets_another_lead_and_then_stands_by_for_the_next_term(contender, monkeypatch):
    """However long it would have let the others go first: once one of them leads, its release is not missed."""
    monkeypatch.setattr(leadership, "_ASIDE", 60.0)
    first, second = contender(ttl=300), contender(ttl=300)
    first.elect(timeout=5)
    second.start()
    poll(lambda: second.leader is not None)
    first.step_down()
    following = second.elect(timeout=5)
    assert not first.leading
    poll(lambda: first.leader is not None and first.leader.term == following.fence)
    second.step_down()
    assert first.elect(timeout=5)
    assert not second.leading


def test_its_own_row_does_not_make_who_stepped_down_believe_that_another_leads(store, contender, monkeypatch):
    """The release did not arrive: the row of its own term is still there."""
    monkeypatch.setattr(leadership, "_ASIDE", 60.0)
    first = contender(ttl=300)
    lease = first.elect(timeout=5)
    store.down = True
    first.step_down()
    assert first.lost(timeout=5)
    assert store.locks(lease.key), "nobody has taken it out"
    assert not first._another_leads()


def test_stepping_down_alone_is_followed_by_a_new_term(contender):
    only = contender(ttl=1.0)
    before = only.elect(timeout=5)
    only.step_down()
    assert only.lost(timeout=5)
    after = only.elect(timeout=5)
    assert after.fence > before.fence


def test_a_leader_that_cannot_renew_stops_at_its_deadline_and_leads_again_later(store, contender):
    """A lost lease is a state, not the end."""
    told = []
    only = contender(
        ttl=1.0,
        on_elected=lambda lease: told.append(("elected", int(lease.fence))),
        on_lost=lambda lease: told.append(("lost", int(lease.fence))),
    )
    lease = only.elect(timeout=5)
    store.down = True
    assert only.lost(timeout=5)
    with pytest.raises(LeaseLost):
        lease.check()
    assert only.term is None
    assert not only.elect(timeout=0.5)
    store.down = False
    again = only.elect(timeout=10)
    assert again.fence > lease.fence
    poll(lambda: len(told) == 3)
    assert told == [("elected", int(lease.fence)), ("lost", int(lease.fence)), ("elected", int(again.fence))]


def test_healthy_is_whoever_hears_from_the_database(store, contender):
    leader, standby = contender(ttl=2.0), contender(ttl=2.0)
    assert not standby.healthy, "it has not asked yet"
    leader.elect(timeout=5)
    standby.start()
    poll(lambda: standby.healthy)
    assert leader.healthy
    store.down = True
    poll(lambda: not leader.healthy, timeout=5)
    poll(lambda: not standby.healthy, timeout=10)


def test_a_deleted_row_ends_the_term(store, contender):
    only = contender(ttl=1.5)
    before = only.elect(timeout=5)
    with store._changed:
        store._rows.clear()
    assert only.lost(timeout=5)
    assert only.elect(timeout=10).fence > before.fence


def test_a_term_that_an_operator_ends_is_no_lost_lease(store, contender, caplog):
    """The negative control: the row is gone in any other way."""
    caplog.set_level("INFO", logger="celery_syncguard")
    only = contender(ttl=4)

    def end(by_note):
        caplog.clear()
        lease = only.elect(timeout=10)
        if by_note:
            assert end_term(only._guard, "relay", lock_id=lease.lock_id, ttl=lease.remaining)
        else:
            assert only._guard.release(lease.key, lock_id=lease.lock_id)
        poll(lambda: "leads 'relay' no more" in caplog.text or "no longer leads 'relay'" in caplog.text)
        assert not end_term(only._guard, "relay", lock_id=lease.lock_id, ttl=1.0), "it is over"
        return [record.levelname for record in caplog.records if not record.message.startswith("elected")]

    assert [end(by_note) for by_note in (True, True, False, True)] == [
        ["INFO"],
        ["INFO"],
        ["WARNING", "WARNING"],
        ["INFO"],
    ]
    assert only._guard.counts["lost"] == 1


def test_who_has_the_same_name_pid_and_process_id_is_still_somebody_else(contender):
    """Pid 1 on two hosts of one name. A machine cannot show it; the identity is what would be equal there."""
    twins = [contender(holder="celery beat on web pid 1") for _ in range(2)]
    for one in twins:
        one.start()
    poll(lambda: any(one.leading for one in twins))
    poll(lambda: sum(one.leader is not None for one in twins) == 2)
    assert sum(one.leading for one in twins) == 1


def test_a_program_that_hangs_is_replaced_although_its_lease_could_be_renewed(contender):
    hanging = []
    first, second = contender(ttl=60, alive=lambda: not hanging), contender(ttl=60)
    first.elect(timeout=5)
    second.start()
    hanging.append(True)
    assert second.elect(timeout=10)
    second.stop()
    assert first.elect(timeout=0.5) is None
    hanging.clear()
    assert first.elect(timeout=10)


def test_a_listener_that_fails_costs_nothing(contender, caplog):
    def fail(lease):
        raise LookupError("mine")

    only = contender(ttl=5, on_elected=fail)
    assert only.elect(timeout=5)
    poll(lambda: "a listener of the leadership 'relay' failed" in caplog.text)
    assert only.leading


def test_a_deadline_that_passed_means_standby_before_anybody_says_so(contender, monkeypatch):
    """A suspended machine wakes up with a lease that is over."""
    only = contender(ttl=1.0)
    lease = only.elect(timeout=5)
    later = clock.now() + 10
    monkeypatch.setattr(clock, "now", lambda: later)
    assert not only.leading
    assert only.term is None
    with pytest.raises(LeaseLost):
        lease.check()


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), 0.1, 1e9])
def test_a_ttl_that_cannot_be_meant_is_refused(store, ttl):
    guard = SyncGuard(settings=Settings(dsn="memory://"), store=store)
    with pytest.raises(ImproperlyConfigured):
        guard.leadership("relay", ttl=ttl)


@pytest.mark.parametrize("key", ["", "__syncguard_leader:beat", "x" * 500, None, "a\0b"])
def test_a_key_that_cannot_be_meant_is_refused(store, key):
    guard = SyncGuard(settings=Settings(dsn="memory://"), store=store)
    with pytest.raises(InvalidKey):
        guard.leadership(key)


def test_the_lock_behind_it_is_reserved(store):
    guard = SyncGuard(settings=Settings(dsn="memory://"), store=store)
    with pytest.raises(InvalidKey):
        guard.try_acquire(leader_lock_key("beat"))
