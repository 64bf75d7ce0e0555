"""What every lock store does. `test_store` runs it for both of ours.

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self): ...        # an empty store
    @pytest.fixture
    def reopen(self): ...       # a picklable function that opens the same store in another process
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import (
    Acquire,
    Buried,
    Claim,
    Dead,
    Done,
    Grant,
    Held,
    LockRow,
    LockStore,
    Release,
    Renewal,
)
from tests.fixtures.polling import poll
from tests.fixtures.races import race_processes, race_threads


def _acquire(store: LockStore, key: str = "k", *, ttl: float = 60.0, **extras: Any) -> Grant:
    answer = store.acquire(Acquire(key=key, lock_id=extras.pop("lock_id", None) or new_lock_id(), ttl=ttl, **extras))
    assert isinstance(answer, Grant), answer
    return answer


def _ask(store: LockStore, key: str = "k", *, ttl: float = 60.0, **extras: Any) -> Grant | Held | Done | Dead:
    return store.acquire(Acquire(key=key, lock_id=new_lock_id(), ttl=ttl, **extras))


def _release(store: LockStore, grant: Grant, **extras: Any) -> bool:
    return store.release(Release(key=grant.key, lock_id=grant.lock_id, **extras))


def _renew(store: LockStore, *grants: Grant, ttl: float = 60.0) -> dict[str, bool | None]:
    return store.renew([Renewal(key=grant.key, lock_id=grant.lock_id, ttl=ttl) for grant in grants])


def _row(store: LockStore, key: str = "k") -> LockRow:
    (row,) = store.locks(key)
    return row


def _expire(store: LockStore, key: str = "k") -> None:
    poll(lambda: not store.locks(key))


class StoreContract:
    """What every lock store does. Test ids are the same for all of them."""

    #: How often each race is run.
    rounds = 1000

    # Acquire

    def test_a_free_key_is_granted(self, store: LockStore) -> None:
        grant = _acquire(store, "k", ttl=60)
        row = _row(store, "k")
        assert (row.key, row.lock_id, row.fence) == ("k", grant.lock_id, grant.fence)
        assert grant.expires_at - grant.acquired_at == timedelta(seconds=60)
        assert (row.acquired_at, row.expires_at) == (grant.acquired_at, grant.expires_at)
        assert 59 < row.remaining <= 60
        assert 0 <= row.since < 1

    def test_a_held_key_answers_who_since_when_and_for_how_long(self, store: LockStore) -> None:
        grant = _acquire(store, "k", ttl=60, holder="me", process="p:1", task_id="t1", attempt=2)
        held = _ask(store, "k", holder="you", process="p:2", task_id="t2", attempt=0)
        assert isinstance(held, Held)
        assert (held.key, held.lock_id, held.fence) == ("k", grant.lock_id, grant.fence)
        assert (held.holder, held.task_id, held.attempt) == ("me", "t1", 2)
        assert 0 <= held.since < 10
        assert 50 < held.remaining <= 60

    def test_a_held_key_stays_with_its_holder(self, store: LockStore) -> None:
        grant = _acquire(store, "k")
        for _ in range(3):
            assert isinstance(_ask(store, "k"), Held)
        assert _row(store, "k").fence == grant.fence
        assert _renew(store, grant) == {grant.lock_id: True}

    def test_keys_do_not_block_each_other(self, store: LockStore) -> None:
        for key in ("a", "A", "a ", "fence:a", "é", "k" * 512):
            _acquire(store, key)

    def test_a_repeated_acquire_gives_the_same_grant(self, store: LockStore) -> None:
        """The answer to the first one was lost."""
        request = Acquire(key="k", lock_id=new_lock_id(), ttl=60.0)
        assert store.acquire(request) == store.acquire(request)

    def test_an_acquire_repeated_after_its_expiry_is_a_new_grant_and_no_death(self, store: LockStore) -> None:
        lock_id = new_lock_id()
        first = _acquire(store, "k", ttl=0.05, lock_id=lock_id, task_id="t", max_deaths=1)
        _expire(store, "k")
        assert _acquire(store, "k", lock_id=lock_id, task_id="t", max_deaths=1).fence > first.fence

    def test_an_expired_key_is_taken_over_with_a_higher_fence(self, store: LockStore) -> None:
        first = _acquire(store, "k", ttl=0.05)
        second = poll(lambda: answer if isinstance(answer := _ask(store, "k"), Grant) else None)
        assert second.fence > first.fence
        assert second.acquired_at >= first.expires_at

    def test_the_old_holder_is_not_shown_for_the_new_one(self, store: LockStore) -> None:
        _acquire(store, "k", ttl=0.05, holder="old", task_id="t1", attempt=3)
        _expire(store, "k")
        _acquire(store, "k")
        row = _row(store, "k")
        assert (row.holder, row.task_id, row.attempt) == (None, None, None)

    # Renew

    def test_a_renewal_gives_a_full_window_from_now_and_keeps_the_fence(self, store: LockStore) -> None:
        grant = _acquire(store, "k", ttl=60)
        for _ in range(3):
            assert _renew(store, grant, ttl=60) == {grant.lock_id: True}
        row = _row(store, "k")
        assert 59 < row.remaining <= 60, "the windows added up"
        assert (row.fence, row.acquired_at) == (grant.fence, grant.acquired_at)

    def test_a_renewal_may_shorten(self, store: LockStore) -> None:
        grant = _acquire(store, "k", ttl=60)
        _renew(store, grant, ttl=5)
        assert 4 < _row(store, "k").remaining <= 5

    def test_many_are_renewed_at_once_and_the_lost_are_missing(self, store: LockStore) -> None:
        live = [_acquire(store, f"live:{number}", ttl=5) for number in range(50)]
        released = _acquire(store, "released")
        _release(store, released)
        taken = _acquire(store, "taken", ttl=0.05)
        _expire(store, "taken")
        thief = _acquire(store, "taken")
        assert _renew(store, *live, released, taken) == {grant.lock_id: True for grant in live}
        assert all(row.remaining > 50 for row in store.locks() if row.key.startswith("live:"))
        assert _row(store, "taken").lock_id == thief.lock_id

    def test_nothing_to_renew_is_nothing_renewed(self, store: LockStore) -> None:
        assert store.renew([]) == {}

    def test_a_lease_may_be_renewed_after_its_expiry_while_nobody_took_it(self, store: LockStore) -> None:
        grant = _acquire(store, "k", ttl=0.05)
        _expire(store, "k")
        assert _renew(store, grant) == {grant.lock_id: True}
        assert _row(store, "k").fence == grant.fence
        assert isinstance(_ask(store, "k"), Held)

    def test_a_renewal_with_anothers_key_or_lock_id_renews_nothing(self, store: LockStore) -> None:
        ours, theirs = _acquire(store, "ours", ttl=60), _acquire(store, "theirs", ttl=60)
        assert store.renew([Renewal(key="theirs", lock_id=ours.lock_id, ttl=900.0)]) == {}
        assert store.renew([Renewal(key="ours", lock_id=theirs.lock_id, ttl=900.0)]) == {}
        assert all(row.remaining <= 60 for row in store.locks())

    # Release

    def test_a_release_frees_once(self, store: LockStore) -> None:
        grant = _acquire(store, "k")
        assert _release(store, grant) is True
        assert _release(store, grant) is False
        assert store.locks("k") == []
        _acquire(store, "k")

    def test_a_release_by_an_old_holder_does_nothing(self, store: LockStore) -> None:
        old = _acquire(store, "k", ttl=0.05)
        _expire(store, "k")
        new = _acquire(store, "k")
        assert _release(store, old) is False
        assert _row(store, "k").lock_id == new.lock_id

    def test_a_release_with_a_right_lock_id_and_a_wrong_key_does_nothing(self, store: LockStore) -> None:
        grant, other = _acquire(store, "k"), _acquire(store, "other")
        assert store.release(Release(key="other", lock_id=grant.lock_id)) is False
        assert {row.lock_id for row in store.locks()} == {grant.lock_id, other.lock_id}

    def test_the_same_holder_acquiring_again_gives_the_old_lease_no_power(self, store: LockStore) -> None:
        """ABA: holder, process and task are equal, only lock_id and fence tell the leases apart."""
        same = {"holder": "me", "process": "p:1", "task_id": "t", "attempt": 0}
        old = _acquire(store, "k", ttl=0.05, **same)
        _expire(store, "k")
        new = _acquire(store, "k", ttl=60, **same)
        assert _renew(store, old, ttl=900) == {}
        assert _release(store, old) is False
        row = _row(store, "k")
        assert (row.lock_id, row.fence) == (new.lock_id, new.fence)
        assert row.remaining <= 60

    def test_min_hold_keeps_the_key_for_so_long_after_the_acquire(self, store: LockStore) -> None:
        grant = _acquire(store, "k", ttl=60, holder="me", task_id="t")
        assert _release(store, grant, min_hold=0.5) is True
        held = _ask(store, "k")
        assert isinstance(held, Held)
        assert held.remaining <= 0.5
        assert held.holder == "me"
        assert poll(lambda: answer if isinstance(answer := _ask(store, "k"), Grant) else None).fence > grant.fence

    def test_min_hold_that_has_passed_frees_at_once(self, store: LockStore) -> None:
        grant = _acquire(store, "k")
        poll(lambda: _row(store, "k").since > 0.02)
        assert _release(store, grant, min_hold=0.01) is True
        _acquire(store, "k")

    def test_a_renewal_under_way_does_not_prolong_a_min_hold(self, store: LockStore) -> None:
        grant = _acquire(store, "k")
        _release(store, grant, min_hold=5.0)
        assert _renew(store, grant, ttl=900) == {}
        assert _row(store, "k").remaining <= 5

    def test_a_min_hold_is_not_a_death(self, store: LockStore) -> None:
        for _ in range(3):
            grant = _acquire(store, "k", task_id="t", max_deaths=1)
            _release(store, grant, min_hold=0.05)
            _expire(store, "k")

    # Fences

    def test_fences_rise_across_release_expiry_and_prune(self, store: LockStore) -> None:
        fences = [_acquire(store, "k", ttl=0.05).fence]
        _expire(store, "k")
        fences.append((grant := _acquire(store, "k")).fence)
        _release(store, grant)
        for _ in range(3):
            fences.append((grant := _acquire(store, "k")).fence)
            _release(store, grant)
            poll(lambda: store.prune(older=0.0, counters=True).counters)
        fences.append(_acquire(store, "k").fence)
        assert fences == sorted(set(fences))

    def test_a_fence_fits_into_fifteen_digits(self, store: LockStore) -> None:
        assert 0 < _acquire(store, "k").fence < 10**15

    # Processes and deaths

    def test_release_process_frees_that_process_and_no_other(self, store: LockStore) -> None:
        mine = [_acquire(store, f"mine:{number}", process="p:1") for number in range(3)]
        theirs = [_acquire(store, "theirs", process="p:12"), _acquire(store, "nobody's")]
        assert store.release_process("p:1") == Buried(len(mine))
        assert {row.lock_id for row in store.locks()} == {grant.lock_id for grant in theirs}
        assert store.release_process("p:1") == Buried(0)

    def test_a_task_whose_process_dies_again_and_again_is_dead(self, store: LockStore) -> None:
        for _ in range(2):
            _acquire(store, "k", process="p:1", task_id="t", max_deaths=2)
            store.release_process("p:1")
        assert _ask(store, "k", task_id="t", max_deaths=2) == Dead(deaths=2)
        assert isinstance(_ask(store, "k", task_id="other", max_deaths=2), Grant)

    def test_an_expiry_in_mid_task_counts_as_a_death(self, store: LockStore) -> None:
        for _ in range(2):
            _acquire(store, "k", ttl=0.05, task_id="t", max_deaths=2)
            _expire(store, "k")
        assert _ask(store, "k", task_id="t", max_deaths=2) == Dead(deaths=2)

    def test_a_process_that_asks_lives_so_its_expired_lease_is_no_death(self, store: LockStore) -> None:
        for _ in range(3):
            _acquire(store, "k", ttl=0.05, process="p:1", task_id="t", max_deaths=1)
            _expire(store, "k")
        _acquire(store, "k", process="p:1", task_id="t", max_deaths=1)

    def test_who_was_taken_for_dead_and_ends_its_lease_after_all_takes_that_death_back(self, store: LockStore) -> None:
        for _ in range(3):
            paused = _acquire(store, "k", ttl=0.05, process="p:1", task_id="t", max_deaths=2)
            _expire(store, "k")
            other = _acquire(store, "k", process="p:2", task_id="t", max_deaths=2)
            assert _release(store, paused, task_id="t") is False
            assert _release(store, paused, task_id="t") is False, "and not twice, if the answer got lost"
            _release(store, other, task_id="t")
        # The control: those that come back no more.
        for _ in range(2):
            _acquire(store, "k", process="p:3", task_id="t", max_deaths=2)
            store.release_process("p:3")
        assert _ask(store, "k", task_id="t", max_deaths=2) == Dead(deaths=2)

    def test_an_attempt_that_ends_by_itself_ends_the_row_of_deaths(self, store: LockStore) -> None:
        for number in range(6):
            grant = _acquire(store, "k", process="p:1", task_id="t", max_deaths=2)
            if number % 2:
                _release(store, grant, task_id="t", attempt_done=True)
            else:
                store.release_process("p:1")

    def test_a_key_on_which_every_process_dies_is_not_given_to_new_tasks_for_ever(self, store: LockStore) -> None:
        for number in range(4):
            _acquire(store, "k", process="p:1", task_id=f"t{number}", max_deaths=2)
            store.release_process("p:1")
        assert _ask(store, "k", task_id="new", max_deaths=2) == Dead(deaths=4, of_task=False)
        _acquire(store, "another", task_id="new", max_deaths=2)
        grant = _acquire(store, "k", task_id="patient", max_deaths=3)
        _release(store, grant, task_id="patient", attempt_done=True)
        _acquire(store, "k", task_id="new", max_deaths=2)

    def test_a_release_is_not_a_death(self, store: LockStore) -> None:
        for _ in range(3):
            _release(store, _acquire(store, "k", process="p:1", task_id="t", max_deaths=1))
        assert store.release_process("p:1") == Buried(0)
        _acquire(store, "k", task_id="t", max_deaths=1)

    def test_release_process_ends_the_claim_that_a_lease_of_it_made(self, store: LockStore) -> None:
        """Nobody else can: the message says nothing of it, and the lease that tells of a dead worker is gone."""
        _acquire(store, "k", process="p:1", task_id="t", claim_key="c", claim_ttl=60.0)
        _acquire(store, "other", process="p:2", task_id="other", claim_key="theirs", claim_ttl=60.0)
        assert _look(store, "c").task_id == "t"
        assert store.release_process("p:1") == Buried(1)
        assert store.claim("c", task_id="next", ttl=60.0).ours
        assert _look(store, "theirs").task_id == "other"

    def test_release_process_keeps_the_claim_of_a_message_that_may_come_again(self, store: LockStore) -> None:
        store.claim("c", task_id="t", ttl=60.0)
        poll(lambda: _look(store, "c").age > 0.005)
        _acquire(store, "k", process="p:1", task_id="t", claim_key="c", claim_ttl=900.0)
        store.release_process("p:1")
        assert _look(store, "c").task_id == "t"

    def test_release_process_ends_no_claim_of_another_task(self, store: LockStore) -> None:
        _acquire(store, "k", process="p:1", task_id="t", claim_key="c", claim_ttl=60.0)
        store.unclaim("c", task_id="t")
        store.claim("c", task_id="other", ttl=60.0)
        store.release_process("p:1")
        assert _look(store, "c").task_id == "other"

    # Completions

    def test_a_completed_run_answers_the_next_acquire(self, store: LockStore) -> None:
        _release(store, _acquire(store, "k", task_id="t"), task_id="t", run_key="run:t", run_ttl=60.0)
        done = _ask(store, "k", task_id="t", run_keys=("run:t",))
        assert isinstance(done, Done)
        assert (done.run_key, done.task_id) == ("run:t", "t")
        assert 0 <= done.age < 10
        assert isinstance(_ask(store, "k", run_keys=("run:other",)), Grant)

    def test_a_running_holder_comes_before_a_completion(self, store: LockStore) -> None:
        _release(store, _acquire(store, "k"), run_key="run", run_ttl=60.0)
        _acquire(store, "k")
        assert isinstance(_ask(store, "k", run_keys=("run",)), Held)

    def test_a_completion_is_forgotten_after_its_ttl(self, store: LockStore) -> None:
        _release(store, _acquire(store, "k"), run_key="run", run_ttl=0.05)
        poll(lambda: isinstance(_ask(store, "k", run_keys=("run",)), Grant))

    def test_a_lost_lease_completes_nothing(self, store: LockStore) -> None:
        old = _acquire(store, "k", ttl=0.05)
        _expire(store, "k")
        new = _acquire(store, "k")
        assert _release(store, old, run_key="run", run_ttl=60.0) is False
        _release(store, new)
        assert isinstance(_ask(store, "k", run_keys=("run",)), Grant)

    def test_a_run_that_ended_well_under_its_lease_is_completed_however_late_that_is_written(
        self, store: LockStore
    ) -> None:
        old = _acquire(store, "k", ttl=0.05, task_id="t")
        _expire(store, "k")
        new = _acquire(store, "k")
        assert _release(store, old, task_id="t", run_key="run", run_ttl=60.0, attempt_done=True) is False
        _release(store, new)
        done = _ask(store, "k", run_keys=("run",))
        assert isinstance(done, Done)
        assert done.task_id == "t"

    def test_a_copy_of_a_running_attempt_is_answered_when_that_is_done(self, store: LockStore) -> None:
        grant = _acquire(store, "k", task_id="t", attempt=1)
        assert isinstance(_ask(store, "k", task_id="t", attempt=1, run_keys=("attempt:t:1",)), Held)
        _release(store, grant, task_id="t", attempt_done=True)
        assert isinstance(_ask(store, "k", task_id="t", attempt=1, run_keys=("attempt:t:1",)), Done)
        assert isinstance(_ask(store, "k", task_id="t", attempt=2, run_keys=("attempt:t:2",)), Grant)

    def test_an_attempt_without_a_copy_leaves_nothing(self, store: LockStore) -> None:
        grant = _acquire(store, "k", task_id="t", attempt=1)
        assert isinstance(_ask(store, "k", task_id="t", attempt=2), Held)
        _release(store, grant, task_id="t", attempt_done=True)
        assert isinstance(_ask(store, "k", task_id="t", attempt=1, run_keys=("attempt:t:1",)), Grant)

    def test_an_attempt_that_died_lets_its_copy_run(self, store: LockStore) -> None:
        _acquire(store, "k", process="p:1", task_id="t", attempt=1)
        assert isinstance(_ask(store, "k", task_id="t", attempt=1, run_keys=("attempt:t:1",)), Held)
        store.release_process("p:1")
        assert isinstance(_ask(store, "k", task_id="t", attempt=1, run_keys=("attempt:t:1",)), Grant)

    # Claims

    def test_a_claim_is_given_once_and_the_second_task_learns_whose_it_is(self, store: LockStore) -> None:
        first = store.claim("c", task_id="t1", ttl=60.0, holder="me")
        assert (first.key, first.task_id, first.ours) == ("c", "t1", True)
        second = store.claim("c", task_id="t2", ttl=900.0, holder="you")
        assert (second.key, second.task_id, second.ours, second.holder) == ("c", "t1", False, "me")
        assert 0 <= second.age < 10
        assert 50 < second.remaining <= 60, "a duplicate prolonged the claim"

    def test_a_claim_is_re_entrant_for_its_task(self, store: LockStore) -> None:
        store.claim("c", task_id="t", ttl=5.0)
        again = store.claim("c", task_id="t", ttl=60.0)
        assert again.ours
        assert 50 < again.remaining <= 60
        assert store.claim("c", task_id="t", ttl=1.0).remaining > 50, "a repeat shortened the claim"

    def test_an_expired_claim_may_be_claimed_by_another(self, store: LockStore) -> None:
        store.claim("c", task_id="t1", ttl=0.05)
        claim = poll(lambda: one if (one := store.claim("c", task_id="t2", ttl=60.0)).ours else None)
        assert claim.task_id == "t2"
        assert claim.age < 10
        assert store.unclaim("c", task_id="t1") is False

    def test_a_confirmed_claim_lasts_from_when_it_was_made(self, store: LockStore) -> None:
        store.claim("c", task_id="t", ttl=5.0)
        assert store.confirm([("c", "t", 60.0), ("c", "other", 900.0), ("none", "t", 900.0)]) == 1
        assert 50 < _look(store, "c").remaining <= 60
        assert store.confirm([("c", "t", 1.0)]) == 1
        assert _look(store, "c").remaining > 50, "a confirmation shortened the claim"

    def test_only_its_task_ends_a_claim(self, store: LockStore) -> None:
        store.claim("c", task_id="t1", ttl=60.0)
        assert store.unclaim("c", task_id="t2") is False
        assert store.unclaim("c", task_id="t1") is True
        assert store.unclaim("c", task_id="t1") is False
        assert store.claim("c", task_id="t2", ttl=60.0).ours

    def test_an_acquire_keeps_its_claim_alive(self, store: LockStore) -> None:
        store.claim("c", task_id="t", ttl=5.0)
        _acquire(store, "k", task_id="t", claim_key="c", claim_ttl=60.0)
        assert 50 < _look(store, "c").remaining <= 60

    def test_a_claim_lives_as_long_as_its_task_waits_for_the_lock(self, store: LockStore) -> None:
        _acquire(store, "k")
        store.claim("c", task_id="t", ttl=5.0)
        assert isinstance(_ask(store, "k", task_id="t", claim_key="c", claim_wait=60.0), Held)
        assert _look(store, "c").remaining > 50
        assert isinstance(_ask(store, "k", task_id="other", claim_key="c", claim_wait=900.0), Held)
        assert _look(store, "c").remaining <= 60, "prolonged by somebody else"

    def test_a_task_that_is_to_run_again_comes_next_when_the_claims_owner_starts(self, store: LockStore) -> None:
        store.claim("c", task_id="waits", ttl=60.0)
        assert store.claim("c", task_id="again", ttl=60.0, again=True).task_id == "waits"
        start: dict[str, Any] = {"claim_key": "c", "claim_wait": 60.0}
        _acquire(store, "k", task_id="waits", **start)
        assert _look(store, "c").task_id == "again"
        _acquire(store, "k2", task_id="again", **start)
        assert store.claim("c", task_id="new", ttl=60.0).ours

    def test_a_task_that_came_next_and_has_started_or_is_over_comes_next_no_more(self, store: LockStore) -> None:
        start: dict[str, Any] = {"claim_key": "c", "claim_wait": 60.0}
        for number, end in enumerate((lambda: store.unclaim("c", task_id="again"), None)):
            store.claim("c", task_id="waits", ttl=60.0)
            store.claim("c", task_id="again", ttl=60.0, again=True)
            if end is not None:
                end()
            else:
                _acquire(store, f"again {number}", task_id="again", **start)
            _acquire(store, f"waits {number}", task_id="waits", **start)
            assert store.claim("c", task_id="new", ttl=60.0).ours
            store.unclaim("c", task_id="new")

    def test_a_claim_and_a_completion_tell_the_fingerprint_of_their_arguments(self, store: LockStore) -> None:
        store.claim("c", task_id="t", ttl=60.0, fingerprint="one")
        assert store.claim("c", task_id="t", ttl=60.0).fingerprint == "one"
        assert store.claim("c", task_id="other", ttl=60.0, fingerprint="two").fingerprint == "one"
        _release(store, _acquire(store, "k"), run_key="run", run_ttl=60.0, fingerprint="one")
        done = _ask(store, "k", run_keys=("run",))
        assert isinstance(done, Done)
        assert done.fingerprint == "one"

    def test_an_acquire_without_a_claim_ttl_ends_its_claim(self, store: LockStore) -> None:
        store.claim("c", task_id="t", ttl=60.0)
        _acquire(store, "k", task_id="t", claim_key="c")
        assert store.claim("c", task_id="other", ttl=60.0).ours

    def test_an_acquire_does_not_touch_the_claim_of_another(self, store: LockStore) -> None:
        store.claim("c", task_id="other", ttl=5.0)
        _acquire(store, "a", task_id="t", claim_key="c")
        _acquire(store, "b", task_id="t", claim_key="c", claim_ttl=60.0)
        assert _look(store, "c").task_id == "other"
        assert _look(store, "c").remaining <= 5

    def test_a_release_ends_its_claim_even_if_the_lease_was_lost(self, store: LockStore) -> None:
        for key in ("kept", "lost"):
            store.claim(key, task_id="t", ttl=60.0)
            grant = _acquire(store, key, task_id="t")
            if key == "lost":
                _release(store, grant)
            assert _release(store, grant, task_id="t", claim_key=key) is (key == "kept")
            assert store.claim(key, task_id="other", ttl=60.0).ours

    # Lists, prune, waiting, life

    def test_locks_are_listed_oldest_first(self, store: LockStore) -> None:
        for key in ("c", "a", "b"):
            _acquire(store, key)
            poll(lambda key=key: _row(store, key).since > 0.002)  # type: ignore[misc]
        assert [row.key for row in store.locks()] == ["c", "a", "b"]
        assert [row.key for row in store.locks(limit=2)] == ["c", "a"]
        assert [row.key for row in store.locks("a")] == ["a"]
        assert store.locks("none") == []

    def test_prune_deletes_what_has_been_over_for_long_and_nothing_else(self, store: LockStore) -> None:
        _acquire(store, "live")
        _acquire(store, "over", ttl=0.05)
        store.claim("live", task_id="t", ttl=60.0)
        store.claim("over", task_id="t", ttl=0.05)
        _release(store, _acquire(store, "run"), run_key="live", run_ttl=60.0)
        _release(store, _acquire(store, "run"), run_key="over", run_ttl=0.05)
        _expire(store, "over")
        assert store.prune(older=60.0).locks == 0
        total: Counter[str] = Counter()

        def all_gone() -> bool:
            pruned = store.prune(older=0.0)
            total.update(locks=pruned.locks, completions=pruned.completions, claims=pruned.claims)
            return total["completions"] > 0 and total["claims"] > 0

        poll(all_gone)
        assert total == {"locks": 1, "completions": 1, "claims": 1}
        assert [row.key for row in store.locks()] == ["live"]
        assert not store.claim("live", task_id="other", ttl=60.0).ours
        assert isinstance(_ask(store, "run", run_keys=("live",)), Done)

    def test_prune_takes_the_claim_of_a_dead_holder_with_its_lease(self, store: LockStore) -> None:
        """By the expired lease the next publisher would have told that the claim is over."""
        for key in ("dead", "alive", "another's", "started"):
            claim_ttl = None if key == "started" else 60.0
            _acquire(store, key, ttl=60.0 if key == "alive" else 0.05, task_id="t", claim_key=key, claim_ttl=claim_ttl)
            if key in ("another's", "started"):
                store.unclaim(key, task_id="t")
                store.claim(key, task_id="t" if key == "started" else "other", ttl=60.0)
        poll(lambda: len(store.locks()) == 1)
        assert store.prune(older=60.0).claims == 0
        locks = claims = 0
        while locks < 3:
            pruned = store.prune(older=0.0)
            locks, claims = locks + pruned.locks, claims + pruned.claims
        assert (locks, claims) == (3, 1)
        assert store.claim("dead", task_id="next", ttl=60.0).ours
        assert _look(store, "alive").task_id == "t"
        assert _look(store, "another's").task_id == "other"
        assert _look(store, "started").task_id == "t"

    def test_prune_keeps_the_counter_of_a_live_lock(self, store: LockStore) -> None:
        grant = _acquire(store, "k")
        poll(lambda: _row(store, "k").since > 0.01)
        assert store.prune(older=0.0, counters=True).counters == 0
        assert _renew(store, grant) == {grant.lock_id: True}

    def test_a_waiter_hears_the_release(self, store: LockStore) -> None:
        grant = _acquire(store, "k")
        heard: list[bool] = []
        waiter = threading.Thread(target=lambda: heard.append(store.wait("k", 20.0)))
        started = time.monotonic()
        waiter.start()
        # Until the waiter is there, a release is not heard by anybody: so release and acquire until it is.
        while waiter.is_alive():
            assert time.monotonic() - started < 15, "the waiter heard nothing"
            waiter.join(0.2)
            _release(store, grant)
            grant = _acquire(store, "k")
        assert heard == [True]

    def test_waiting_for_a_lock_that_stays_is_bounded(self, store: LockStore) -> None:
        _acquire(store, "k")
        assert store.wait("k", 0.05) is False

    def test_waiting_for_a_free_key_ends_at_once(self, store: LockStore) -> None:
        started = time.monotonic()
        assert store.wait("free", 30.0) is True
        assert time.monotonic() - started < 10

    def test_closing_may_be_repeated(self, store: LockStore) -> None:
        _acquire(store, "k")
        store.close()
        store.close()

    # Races

    def test_of_32_threads_exactly_one_wins_every_round(self, store: LockStore) -> None:
        _assert_one_winner(race_threads(store, threads=32, rounds=self.rounds), contenders=32)

    def test_of_8_processes_exactly_one_wins_every_round(self, reopen: Callable[[], LockStore]) -> None:
        _assert_one_winner(race_processes(reopen, processes=8, rounds=self.rounds), contenders=8)

    def test_fences_rise_in_the_order_of_the_grants_under_contention(self, store: LockStore) -> None:
        order: list[int] = []

        def run() -> None:
            for _ in range(40):
                grant = poll(lambda: answer if isinstance(answer := _ask(store, "k"), Grant) else None)
                order.append(grant.fence)  # nobody else holds the lock here
                _release(store, grant)

        workers = [threading.Thread(target=run) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(order) == 160
        assert order == sorted(set(order))


def _look(store: LockStore, key: str) -> Claim:
    """Who has the claim; asked as a task that does not exist."""
    claim = store.claim(key, task_id="looker", ttl=0.001)
    assert not claim.ours
    return claim


def _assert_one_winner(rounds: Iterable[Sequence[object]], contenders: int) -> None:
    for answers in rounds:
        assert len(answers) == contenders
        grants = [answer for answer in answers if isinstance(answer, Grant)]
        assert len(grants) == 1, f"{len(grants)} winners"
        blockers = {answer.lock_id for answer in answers if isinstance(answer, Held)}
        assert blockers == {grants[0].lock_id}, "a loser was told that somebody else holds"
