"""The state of beat keeps the same promises in PostgreSQL and in memory."""

import concurrent.futures
import itertools
from datetime import datetime, timedelta, timezone

import psycopg
import pytest

from celery_syncguard import SyncGuard
from celery_syncguard.beat.postgres_slots import open_slots
from celery_syncguard.beat.slots import PRUNED_AT_MOST, Slot
from celery_syncguard.core.config import Settings
from celery_syncguard.core.leader_key import leader_lock_key
from celery_syncguard.core.lease import Lease
from celery_syncguard.core.store import Acquire, Release
from celery_syncguard.errors import StoreUnavailable
from celery_syncguard.postgres.connection import Connection
from tests.fixtures.polling import poll

DUE = datetime(2025, 6, 1, 12, tzinfo=timezone.utc)
TEXT = "every 10 s"


@pytest.fixture(params=["memory", "postgres"])
def guard(request):
    if request.param == "memory":
        dsn, store = "memory://", None
    else:
        dsn, store = request.getfixturevalue("pg_dsn"), None
    with SyncGuard(settings=Settings(dsn=dsn), store=store) as guard:
        yield guard


@pytest.fixture
def slots(guard):
    return open_slots(guard.store, "beat")


def elect(guard, ttl=30.0, lock_id="A" * 22):
    lease = guard.acquire(Acquire(key=leader_lock_key("beat"), lock_id=lock_id, ttl=ttl, holder="a beat"))
    assert isinstance(lease, Lease)
    return lease


def oust(guard, lease):
    """Somebody deletes the leader's row; it does not know yet."""
    assert guard.store.release(Release(key=lease.key, lock_id=lease.lock_id))


def test_a_slot_is_claimed_and_sent_once(guard, slots):
    lease = elect(guard)
    slots.enter(lease, {"a": TEXT})
    slot = Slot("a", DUE)
    assert slots.claim(lease, slot, schedule=TEXT, next_due_at=None).outcome == "claimed"
    slots.sent(slot, term=int(lease.fence))
    assert slots.claim(lease, slot, schedule=TEXT, next_due_at=None).outcome == "taken"
    assert slots.unsent() == []
    (row,) = slots.recent()
    assert (row.entry, row.due_at, row.term, row.task_id) == ("a", DUE, int(lease.fence), slot.task_id("beat"))
    assert row.late > 0


def test_the_next_leader_finds_and_sends_what_was_claimed_and_not_sent(guard, slots):
    first = elect(guard)
    slots.enter(first, {"a": TEXT})
    slot = Slot("a", DUE)
    slots.claim(first, slot, schedule=TEXT, next_due_at=None)
    oust(guard, first)
    second = elect(guard, lock_id="B" * 22)
    assert slots.unsent() == [slot]
    assert slots.claim(second, slot, schedule=TEXT, next_due_at=None).outcome == "claimed"
    slots.sent(slot, term=int(second.fence))
    (row,) = slots.recent()
    assert (row.term, row.task_id) == (int(second.fence), slot.task_id("beat"))


def test_who_lost_the_lease_claims_nothing(guard, slots):
    old = elect(guard)
    slots.enter(old, {"a": TEXT})
    oust(guard, old)
    assert slots.claim(old, Slot("a", DUE), schedule=TEXT, next_due_at=None).outcome == "lost"
    assert slots.enter(old, {"a": "another"}) is None
    new = elect(guard, lock_id="B" * 22)
    assert slots.claim(old, Slot("a", DUE), schedule=TEXT, next_due_at=None).outcome == "lost"
    assert slots.recent() == []
    assert slots.enter(new, {"a": TEXT}).entries["a"].schedule == TEXT


def test_of_many_claims_of_one_slot_by_one_leader_each_is_answered_alike_until_it_is_sent(guard, slots):
    lease = elect(guard)
    slots.enter(lease, {"a": TEXT})
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: slots.claim(lease, Slot("a", DUE), schedule=TEXT, next_due_at=None).outcome, range(40))
        )
    assert set(answers) == {"claimed"}
    assert len(slots.recent()) == 1


def test_a_dropped_slot_is_not_sent_any_more(guard, slots):
    lease = elect(guard)
    slots.enter(lease, {"a": TEXT})
    slots.claim(lease, Slot("a", DUE), schedule=TEXT, next_due_at=None)
    slots.drop(Slot("a", DUE), term=int(lease.fence))
    assert slots.unsent() == []
    assert slots.claim(lease, Slot("a", DUE), schedule=TEXT, next_due_at=None).outcome == "taken"
    assert slots.recent()[0].dropped_at is not None


def test_an_entry_remembers_its_place_and_its_count(guard, slots):
    lease = elect(guard)
    entered = slots.enter(lease, {"a": TEXT})
    row = entered.entries["a"]
    assert row.last_due_at <= row.since_at <= entered.now
    assert entered.now - row.last_due_at < timedelta(seconds=2)
    due = row.last_due_at + timedelta(seconds=10)
    slots.claim(lease, Slot("a", due), schedule=TEXT, next_due_at=due + timedelta(seconds=10))
    again = slots.enter(lease, {"a": TEXT}).entries["a"]
    assert (again.last_due_at, again.since_at, again.runs) == (due, row.since_at, 1)


def test_another_schedule_begins_now_and_a_short_absence_changes_nothing(guard, slots):
    """Two schedules may alternate during a rolling deploy."""
    lease = elect(guard)
    before = slots.enter(lease, {"a": TEXT, "b": TEXT}).entries
    slots.enter(lease, {"a": TEXT})
    back = slots.enter(lease, {"a": TEXT, "b": TEXT}).entries
    assert back == before
    # Another text each time: memory's clock may show the same millisecond.
    numbers = itertools.count(20)
    changed = poll(
        lambda: (
            (found := slots.enter(lease, {"a": f"every {next(numbers)} s", "b": TEXT})).entries["a"].since_at
            > before["a"].since_at
            and found
        )
    )
    assert changed.entries["a"].since_at > before["a"].since_at
    assert changed.entries["a"].last_due_at == before["a"].last_due_at
    assert changed.entries["b"] == before["b"]


def test_terms_tell_who_led_and_how_it_went(guard, slots):
    first = elect(guard)
    slots.enter(first, {})
    slots.seen(int(first.fence), failure="the broker is away", sent=False)
    (term,) = slots.terms()
    assert (term.term, term.holder, term.failure) == (int(first.fence), "a beat", "the broker is away")
    assert term.failing_since is not None
    slots.seen(int(first.fence), failure=None, sent=True, ended=True)
    (term,) = slots.terms()
    assert (term.failing_since, term.failure) == (None, None)
    assert term.last_sent_at == term.ended_at
    oust(guard, first)
    second = elect(guard, lock_id="B" * 22)
    slots.enter(second, {})
    assert [row.term for row in slots.terms(limit=5)] == [int(second.fence), int(first.fence)]


def test_old_slots_are_deleted_and_young_ones_stay(guard, slots):
    lease = elect(guard)
    slots.enter(lease, {"a": TEXT})
    for number in range(3):
        slots.claim(lease, Slot("a", DUE + timedelta(hours=number)), schedule=TEXT, next_due_at=None)
    assert slots.prune(older=3600) == 0
    deleted = []  # they become old one after the other
    poll(lambda: deleted.append(slots.prune(older=0.001)) or sum(deleted) == 3)
    assert slots.recent() == []


def test_the_id_of_a_slots_task_depends_on_the_leader_key_the_entry_and_the_instant_alone():
    slot = Slot("a", DUE)
    elsewhere = DUE.astimezone(timezone(timedelta(hours=5)))
    assert slot.task_id("beat") == Slot("a", elsewhere).task_id("beat") == "38f764ea-bf7c-5a03-9a59-c2c816a3cf3b"
    others = {
        slot.task_id("other"),
        Slot("b", DUE).task_id("beat"),
        Slot("a", DUE + timedelta(microseconds=1)).task_id("beat"),
    }
    assert len(others | {slot.task_id("beat")}) == 4


def test_entries_of_a_clock_that_was_ahead_go_back_and_what_was_sent_stays_sent(guard, slots):
    lease = elect(guard)
    now = slots.enter(lease, {"a": TEXT, "b": TEXT}).now.replace(microsecond=0)
    early = now + timedelta(hours=1)
    slots.enter(lease, {"a": TEXT, "b": TEXT, "new": TEXT}, now=early)
    for due_at in (now, early):
        slots.claim(lease, Slot("a", due_at), schedule=TEXT, next_due_at=None)
        slots.sent(Slot("a", due_at), term=int(lease.fence))
    before = slots.enter(lease, {"b": TEXT}).entries["b"]
    assert slots.turn_back(lease, now=now + timedelta(seconds=3, microseconds=5))
    entries = slots.enter(lease, {"a": TEXT, "b": TEXT, "new": TEXT}).entries
    assert entries["a"].last_due_at == now
    assert entries["a"].since_at < now + timedelta(seconds=1)
    assert entries["b"] == before
    assert entries["new"].last_due_at == now + timedelta(seconds=3)
    assert entries["new"].since_at == now + timedelta(seconds=3, microseconds=5)
    assert slots.claim(lease, Slot("a", early), schedule=TEXT, next_due_at=None).outcome == "taken"
    oust(guard, lease)
    assert not slots.turn_back(lease, now=now)


# PostgreSQL alone


def test_two_leader_keys_share_a_database_without_sharing_anything(pg_dsn):
    with SyncGuard(pg_dsn) as guard:
        for key in ("one", "two"):
            lease = guard.acquire(Acquire(key=leader_lock_key(key), lock_id=key[0] * 22, ttl=30.0, holder=key))
            slots = open_slots(guard.store, key)
            slots.enter(lease, {"a": TEXT})
            assert slots.claim(lease, Slot("a", DUE), schedule=TEXT, next_due_at=None).outcome == "claimed"
            assert len(slots.recent()) == 1


def test_a_deleted_entry_row_is_written_again_by_the_next_slot(pg_dsn):
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn, autocommit=True) as conn:
        slots = open_slots(guard.store, "beat")
        lease = elect(guard)
        slots.enter(lease, {"a": TEXT})
        conn.execute("delete from syncguard_beat_entries")
        slots.claim(lease, Slot("a", DUE), schedule=TEXT, next_due_at=None)
        assert conn.execute("select entry, last_due_at from syncguard_beat_entries").fetchall() == [("a", DUE)]


def test_an_entry_that_was_away_for_long_begins_afresh(pg_dsn):
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn, autocommit=True) as conn:
        slots = open_slots(guard.store, "beat")
        lease = elect(guard)
        before = slots.enter(lease, {"a": TEXT}).entries["a"]
        slots.enter(lease, {})
        conn.execute("update syncguard_beat_entries set removed_at = removed_at - interval '2 hours'")
        assert slots.enter(lease, {"a": TEXT}).entries["a"].since_at > before.since_at


def test_an_entry_tells_its_last_slot_its_next_one_and_how_often_it_was_sent(guard, slots):
    lease = elect(guard)
    soon = datetime.now(timezone.utc) + timedelta(minutes=1)
    slots.enter(lease, {"a": TEXT, "b": TEXT})
    new = [(row.entry, row.runs, row.last_due_at, row.next_due_at) for row in slots.entries()]
    assert new == [("a", 0, None, None), ("b", 0, None, None)]
    for number in range(3):
        due_at = soon + timedelta(seconds=10 * number)
        slot, following = Slot("a", due_at), due_at + timedelta(seconds=10)
        assert slots.claim(lease, slot, schedule=TEXT, next_due_at=following).outcome == "claimed"
        slots.sent(slot, term=int(lease.fence))
    row, _ = slots.entries()
    assert (row.schedule, row.runs, row.last_due_at, row.next_due_at) == (TEXT, 3, due_at, following)
    # A slot that is sent once more was counted before.
    slots.claim(lease, slot, schedule=TEXT, next_due_at=None)
    assert slots.entries()[0] == row


def test_an_entry_whose_schedule_was_changed_has_no_next_slot_until_it_is_sent(guard, slots):
    lease = elect(guard)
    due_at = slots.enter(lease, {"a": TEXT, "b": TEXT}).now + timedelta(milliseconds=1)
    slots.claim(lease, Slot("a", due_at), schedule=TEXT, next_due_at=due_at + timedelta(seconds=10))
    poll(lambda: slots.enter(lease, {"a": TEXT, "b": TEXT}).now > due_at)
    assert slots.entries()[0].next_due_at == due_at + timedelta(seconds=10)
    slots.enter(lease, {"a": "every 99 s"})
    changed, removed = slots.entries()
    assert (changed.schedule, changed.runs, changed.last_due_at, changed.next_due_at) == ("every 99 s", 1, due_at, None)
    assert removed.removed_at is not None
    later = due_at + timedelta(seconds=99)
    slots.claim(lease, Slot("a", later), schedule="every 99 s", next_due_at=later + timedelta(seconds=99))
    assert slots.entries()[0].next_due_at == later + timedelta(seconds=99)


def test_a_takeover_waits_for_a_claim_that_is_being_committed(pg_dsn):
    """Between the proof and the commit nobody else can be elected, so no slot is claimed by two."""
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn) as conn:
        slots = open_slots(guard.store, "beat")
        lease = elect(guard, ttl=0.6)
        slots.enter(lease, {"a": TEXT})
        lease.end()  # no more renewals
        guard._renewer.remove(lease)
        claim = "select outcome from syncguard_beat_claim('beat', %s, %s, %s, 'a', %s, %s, null, 'task')"
        parameters = (lease.key, lease.lock_id, int(lease.fence), TEXT, DUE)
        assert conn.execute(claim, parameters).fetchone() == ("claimed",)
        request = Acquire(key=lease.key, lock_id="B" * 22, ttl=30.0)
        poll(lambda: not guard.store.locks(lease.key))
        assert not isinstance(guard.acquire(request), Lease), "expired, and still not to be had"
        conn.commit()
        assert poll(lambda: isinstance(guard.acquire(request), Lease))


TELLING = {
    "an election": lambda slots, lease: slots.enter(lease, {"a": TEXT}),
    "a sign of life": lambda slots, lease: slots.seen(int(lease.fence), failure=None, sent=False),
}


@pytest.mark.parametrize("told", TELLING.values(), ids=TELLING)
def test_a_mark_that_the_database_did_not_hear_is_told_before_anything_else(pg_dsn, pg_proxy, told):
    with SyncGuard(pg_proxy.dsn(pg_dsn), timeout=0.5) as guard:
        slots = open_slots(guard.store, "beat")
        lease = elect(guard)
        slots.enter(lease, {"a": TEXT})
        slots.claim(lease, Slot("a", DUE), schedule=TEXT, next_due_at=None)
        pg_proxy.refuse()
        pg_proxy.cut()
        slots.sent(Slot("a", DUE), term=int(lease.fence))
        with pytest.raises(StoreUnavailable):
            slots.enter(lease, {"a": TEXT})
        assert slots.unrecorded() == [Slot("a", DUE)]
        pg_proxy.accept()
        assert poll(lambda: told(slots, lease))
        assert slots.unrecorded() == slots.unsent() == []
        assert slots.recent()[0].sent_at is not None


def test_one_prune_deletes_no_more_than_it_says_and_the_next_one_goes_on(pg_dsn):
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO syncguard_beat_slots (leader_key, entry, due_at, task_id, term, claimed_at) "
            "SELECT 'beat', 'a', %s + n * INTERVAL '1 second', n::text, 1, %s FROM generate_series(1, %s) n",
            (DUE, DUE, PRUNED_AT_MOST + 1),
        )
        slots = open_slots(guard.store, "beat")
        assert [slots.prune(older=3600) for _ in range(3)] == [PRUNED_AT_MOST, 1, 0]


def test_of_many_slots_that_were_not_sent_none_is_left_out(pg_dsn):
    with SyncGuard(pg_dsn) as guard, psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO syncguard_beat_slots (leader_key, entry, due_at, task_id, term, claimed_at) "
            "SELECT 'beat', 'e' || n, %s + (n / 700) * INTERVAL '1 second', n::text, 1, %s FROM generate_series(1, 2500) n",
            (DUE, DUE),
        )
        unsent = open_slots(guard.store, "beat").unsent()
        assert len(unsent) == len(set(unsent)) == 2500
        assert unsent == sorted(unsent, key=lambda slot: (slot.due_at, slot.entry))
        # The negative control: a page is shorter.
        assert conn.execute("SELECT count(*) FROM syncguard_beat_unsent('beat')").fetchone() == (1000,)


#: What an administrator may set for a role or a database, for reasons of others.
SETTINGS = {
    "DateStyle": ["German", "SQL, DMY", "Postgres"],
    "TimeZone": ["Asia/Kathmandu", "<+03>-3"],
    "IntervalStyle": ["sql_standard"],
    "bytea_output": ["escape"],
    "lc_messages": ["C"],
    "lc_time": ["C"],
    "lc_numeric": ["C"],
    "extra_float_digits": ["-5"],
    "standard_conforming_strings": ["off"],
    "array_nulls": ["off"],
    "transform_null_equals": ["on"],
    "client_encoding": ["LATIN1"],
    "default_transaction_isolation": ["serializable", "repeatable read"],
    "default_transaction_deferrable": ["on"],
    "plan_cache_mode": ["force_generic_plan"],
    "search_path": ["nowhere, public"],
    "statement_timeout": ["2s"],
    "lock_timeout": ["1s"],
    "idle_session_timeout": ["2s"],
    "idle_in_transaction_session_timeout": ["2s"],
    "synchronous_commit": ["off"],
}


def lead_and_send(dsn):
    """Every statement of a leader, for an entry and a slot; whether all came back as it was said."""
    with SyncGuard(dsn) as guard:
        slots = open_slots(guard.store, "beat")
        lease = elect(guard)
        entered = slots.enter(lease, {"ä": TEXT})
        assert abs(entered.now - datetime.now(timezone.utc)) < timedelta(seconds=10)
        slot = Slot("ä", entered.entries["ä"].last_due_at + timedelta(seconds=10, microseconds=7))
        following = slot.due_at + timedelta(seconds=10)
        assert slots.claim(lease, slot, schedule=TEXT, next_due_at=following).outcome == "claimed"
        assert slots.unsent() == [slot]
        slots.sent(slot, term=int(lease.fence))
        assert abs(slots.seen(int(lease.fence), failure=None, sent=True) - entered.now) < timedelta(seconds=10)
        (row,), (entry,), (term,) = slots.recent(), slots.entries(), slots.terms()
        assert (row.due_at, entry.last_due_at, entry.next_due_at) == (slot.due_at, slot.due_at, following)
        assert term.last_sent_at is not None
        assert slots.prune(older=3600) == 0
        return slot


def test_no_setting_of_a_role_or_a_database_changes_what_beat_does(pg_dsn):
    seen = {}
    for name, value in [(name, value) for name, values in SETTINGS.items() for value in values]:
        set_default(pg_dsn, name, value)
        with psycopg.connect(pg_dsn, autocommit=True) as conn:
            assert value in conn.execute(f"SHOW {name}").fetchone()[0].replace('"', "")
        try:
            lead_and_send(pg_dsn)
        except Exception as exc:
            seen[name, value] = exc
        with psycopg.connect(pg_dsn, autocommit=True) as conn:
            conn.execute(f"ALTER DATABASE {conn.info.dbname} RESET ALL")
            conn.execute("TRUNCATE syncguard_beat_slots, syncguard_beat_entries")
    assert seen == {}


def test_read_as_text_an_instant_depends_on_the_role(pg_dsn, monkeypatch):
    """The negative control."""
    right = Connection.execute
    monkeypatch.setattr(Connection, "execute", lambda *args, binary=False, **kwargs: right(*args, **kwargs))
    lead_and_send(pg_dsn)
    set_default(pg_dsn, "DateStyle", "German")
    with pytest.raises(Exception, match="DateStyle"):
        lead_and_send(pg_dsn)


def test_a_role_that_may_only_read_is_told_why_it_cannot_lead(pg_dsn):
    set_default(pg_dsn, "default_transaction_read_only", "on")
    with pytest.raises(StoreUnavailable, match="default_transaction_read_only"):
        lead_and_send(pg_dsn)


def set_default(dsn, name, value):
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            f"ALTER DATABASE {conn.info.dbname} SET {name} = {value if name == 'search_path' else repr(value)}"
        )
