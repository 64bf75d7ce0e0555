"""Hybrid logical clocks: the format and the rules, by baukit's vectors, and what happens at every edge."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest

from celery_syncguard import hlc
from celery_syncguard.hlc import HybridLogicalClock, compare, decode, encode


def clock_at(physical: int, *, wall: int = 0, counter: int = 0, **options) -> HybridLogicalClock:
    text = json.dumps({"wallTimeMs": wall, "counter": counter, "deviceId": "a"})
    return HybridLogicalClock.from_json(text, device_id="a", physical=lambda: physical, **options)


def state(clock: HybridLogicalClock) -> tuple[int, int]:
    data = json.loads(clock.to_json())
    return data["wallTimeMs"], data["counter"]


# --- the format -----------------------------------------------------------------------------------------------------

ENCODED = [
    ((0, 0), 1),
    ((0, 999), 1000),
    ((1, 0), 1001),
    ((1700000000123, 42), 1700000000123043),
    ((9007199254740, 990), 9007199254740991),
]


@pytest.mark.parametrize(("parts", "stamp"), ENCODED)
def test_encode_and_decode_match_the_shared_vectors(parts, stamp):
    assert encode(*parts) == stamp
    assert decode(stamp) == parts


def test_a_stamp_above_what_json_can_carry_is_refused():
    with pytest.raises(hlc.ExceedsSafeInteger) as caught:
        encode(9007199254740, 991)
    assert (caught.value.wall_ms, caught.value.counter) == (9007199254740, 991)


@pytest.mark.parametrize("parts", [(-1, 0), (0, -1), (0, 1000), (1.0, 0), (0, "1"), (True, 0), (None, 0)])
def test_parts_out_of_range_are_refused(parts):
    with pytest.raises(hlc.InvalidComponent) as caught:
        encode(*parts)
    assert (caught.value.wall_ms, caught.value.counter) == parts


NO_STAMPS = [0, -1, 2**53, 2**63, 1.0, "1000", None, True, [1]]


@pytest.mark.parametrize("value", NO_STAMPS)
def test_what_is_no_stamp_is_refused_everywhere(value):
    clock = clock_at(5)
    for refuse in (
        decode,
        hlc.Timestamp,
        clock.observe,
        lambda v: compare(v, 1),
        lambda v: compare((1, "a"), (v, "a")),
    ):
        with pytest.raises(hlc.InvalidTimestamp) as caught:
            refuse(value)
        assert caught.value.value == value


def test_a_stamp_is_an_int_for_json_and_knows_its_parts():
    stamp = clock_at(1700000000123).now()
    assert isinstance(stamp, int)
    assert json.loads(json.dumps(stamp)) == stamp == 1700000000123001
    assert (stamp.wall_ms, stamp.counter) == (1700000000123, 0)
    assert pickle.loads(pickle.dumps(stamp)) == stamp


def test_compare_orders_stamps_and_breaks_ties_by_device():
    assert [compare(1, 2), compare(2, 2), compare(3, 2)] == [-1, 0, 1]
    assert compare((1, "b"), (2, "a")) == -1
    assert compare((2, "a"), (2, "b")) == -1
    assert compare((2, "b"), (2, "a")) == 1
    assert compare((2, "a"), (2, "a")) == 0
    with pytest.raises(TypeError):
        compare(1, (1, "a"))


# --- the rules ------------------------------------------------------------------------------------------------------

OBSERVED = [
    ((1000, 2), 900, 1000006, 1000007, (1000, 6)),
    ((1000, 7), 900, 999901, 1000009, (1000, 8)),
    ((1000, 7), 1300, 1200004, 1300001, (1300, 0)),
    ((1000, 999), 1000, 999001, 1001001, (1001, 0)),
    ((900, 1), 800, 1001000, 1001001, (1001, 0)),
]


@pytest.mark.parametrize(("before", "physical", "remote", "stamp", "after"), OBSERVED)
def test_observe_matches_the_shared_vectors(before, physical, remote, stamp, after):
    clock = clock_at(physical, wall=before[0], counter=before[1])
    assert clock.observe(remote) == stamp
    assert state(clock) == after


def test_a_fresh_clock_starts_with_the_physical_time():
    assert clock_at(1000).now() == 1000001


def test_stamps_rise_while_the_physical_clock_stalls_and_goes_back():
    physical = 1000
    clock = HybridLogicalClock("a", physical=lambda: physical)
    first, second = clock.now(), clock.now()
    physical = 900
    third = clock.now()
    assert first < second < third
    assert decode(third) == (1000, 2)


def test_the_counter_rolls_into_the_next_millisecond():
    clock = clock_at(1000, wall=1000, counter=999)
    assert clock.now() == 1001001
    assert state(clock) == (1001, 0)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", [-1, 2**53, 1.5, "1", None, True])
def test_an_invalid_physical_clock_is_reported_and_changes_nothing(reading):
    clock = clock_at(reading, wall=1000, counter=2)
    for call in (clock.now, lambda: clock.observe(5_000_000)):
        with pytest.raises(hlc.InvalidPhysicalClock) as caught:
            call()
        assert caught.value.value == reading
    assert state(clock) == (1000, 2)


def test_a_physical_clock_that_raises_changes_nothing():
    def broken() -> int:
        raise OSError("no clock")

    clock = HybridLogicalClock("a", physical=broken)
    for call in (clock.now, lambda: clock.observe(5_000_000)):
        with pytest.raises(OSError, match="no clock"):
            call()
    assert state(clock) == (0, 0)


def test_the_last_stamp_exhausts_the_clock_and_changes_nothing():
    clock = clock_at(0, wall=9007199254740, counter=990)
    for call in (clock.now, lambda: clock.observe(1), lambda: clock.observe(hlc.MAX_STAMP)):
        with pytest.raises(hlc.ExceedsSafeInteger):
            call()
    assert state(clock) == (9007199254740, 990)


def test_an_invalid_remote_stamp_changes_nothing():
    clock = clock_at(5, wall=1000, counter=2)
    for value in NO_STAMPS:
        with pytest.raises(hlc.InvalidTimestamp):
            clock.observe(value)
    assert state(clock) == (1000, 2)


@pytest.mark.parametrize("device_id", ["", "  ", "\t\n"])
def test_a_blank_device_id_is_refused(device_id):
    with pytest.raises(hlc.EmptyDeviceId):
        HybridLogicalClock(device_id)


def test_every_error_is_an_hlc_error_that_survives_pickling():
    kinds = [
        hlc.InvalidComponent,
        hlc.InvalidTimestamp,
        hlc.ExceedsSafeInteger,
        hlc.InvalidPhysicalClock,
        hlc.EmptyDeviceId,
        hlc.TooFarAhead,
    ]
    assert all(issubclass(kind, hlc.HlcError) and issubclass(kind, ValueError) for kind in kinds)
    with pytest.raises(hlc.TooFarAhead) as caught:
        clock_at(0, max_drift=1).observe(5_000_001)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.stamp, copy.ahead, copy.max_drift) == (str(caught.value), 5_000_001, 5.0, 1.0)


# --- drift ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_drift", [60, 60.0, timedelta(minutes=1)])
def test_a_stamp_further_ahead_than_max_drift_is_refused_and_changes_nothing(max_drift):
    clock = clock_at(1_000_000, wall=7, counter=7, max_drift=max_drift)
    with pytest.raises(hlc.TooFarAhead):
        clock.observe(encode(1_060_001, 0))
    assert state(clock) == (7, 7)
    assert clock.observe(encode(1_060_000, 999)) > encode(1_060_000, 999)


def test_without_max_drift_the_same_stamp_is_believed():
    clock = clock_at(1_000_000)
    clock.observe(encode(1_060_001, 0))
    assert state(clock) == (1_060_001, 1)


@pytest.mark.parametrize("max_drift", [-1, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_a_drift_that_cannot_be_meant_is_refused(max_drift):
    with pytest.raises(ValueError, match="max_drift"):
        HybridLogicalClock("a", max_drift=max_drift)


# --- state ----------------------------------------------------------------------------------------------------------


def test_state_goes_through_json_under_baukits_names():
    clock = clock_at(900, wall=1000, counter=2)
    text = clock.to_json()
    assert json.loads(text) == {"wallTimeMs": 1000, "counter": 2, "deviceId": "a"}
    restored = HybridLogicalClock.from_json(text, device_id="a", physical=lambda: 900)
    assert restored.now() == clock.now() == 1000004


@pytest.fixture
def no_collection():
    """At the bottom of a recursion there is no room for the destructors of what other tests have left."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        b"\xff",
        "[]",
        "1",
        "null",
        "[" * 100_000,
        '{"wallTimeMs": 1000, "counter": 2}',
        '{"wallTimeMs": 1000, "counter": 2, "deviceId": "b"}',
        '{"wallTimeMs": 1000, "counter": 1000, "deviceId": "a"}',
        '{"wallTimeMs": -1, "counter": 0, "deviceId": "a"}',
        '{"wallTimeMs": 1000.0, "counter": 0, "deviceId": "a"}',
        '{"wallTimeMs": true, "counter": 0, "deviceId": "a"}',
        '{"wallTimeMs": 9007199254740991, "counter": 0, "deviceId": "a"}',
    ],
)
def test_foreign_or_corrupt_state_starts_from_zero(text, no_collection):
    clock = HybridLogicalClock.from_json(text, device_id="a", physical=lambda: 10)
    assert state(clock) == (0, 0)
    assert clock.now() == 10001


# --- sharing --------------------------------------------------------------------------------------------------------


def stamps_of_threads(clock: HybridLogicalClock, *, threads: int = 8, each: int = 1500) -> list[list[int]]:
    taken: list[list[int]] = [[] for _ in range(threads)]
    barrier = threading.Barrier(threads)

    def take(mine: list[int]) -> None:
        barrier.wait()
        for n in range(each):
            mine.append(clock.observe(1000 * n + 1) if n % 3 == 0 else clock.now())

    workers = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch as often as possible
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    return taken


def test_threads_never_get_the_same_stamp():
    taken = stamps_of_threads(HybridLogicalClock("a", physical=lambda: 1000))
    together = [stamp for mine in taken for stamp in mine]
    assert len(set(together)) == len(together) == 8 * 1500
    assert all(mine == sorted(mine) for mine in taken)


def test_threads_do_get_the_same_stamp_without_the_lock():
    """The control of the test above: its threads do collide when nothing keeps them apart."""
    for _ in range(20):
        clock = HybridLogicalClock("a", physical=lambda: 1000)
        clock._lock = nullcontext()
        together = [stamp for mine in stamps_of_threads(clock) for stamp in mine]
        if len(set(together)) < len(together):
            return
    pytest.fail("no collision in 20 rounds: the test above would prove nothing")


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import gevent
from celery_syncguard.hlc import HybridLogicalClock

def physical():
    gevent.sleep(0)  # another greenlet runs in the middle of every call
    return 1000

class Naive:
    stamp = 0
    def now(self):
        stamp = self.stamp + 1
        physical()
        self.stamp = stamp
        return stamp

def duplicates(clock):
    jobs = [gevent.spawn(lambda: [clock.now() for _ in range(100)]) for _ in range(20)]
    taken = [job.get() for job in jobs]
    assert all(mine == sorted(mine) for mine in taken)
    return 2000 - len({stamp for mine in taken for stamp in mine})

print(duplicates(HybridLogicalClock("a", physical=physical)), duplicates(Naive()) > 0)
"""


def test_greenlets_never_get_the_same_stamp():
    """With its control in the same process: a clock that reads and writes around a switch gives stamps twice."""
    done = subprocess.run([sys.executable, "-c", GREENLETS], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "True"]


FORK = """
import json, os, threading
from celery_syncguard.hlc import HybridLogicalClock

clock = HybridLogicalClock("host", physical=lambda: 1000)
before = clock.now()
held = threading.Event()

def hold():
    with clock._lock:
        held.set()
        threading.Event().wait(60)

threading.Thread(target=hold, daemon=True).start()
held.wait()  # a thread that the children will not have holds the lock
children = []
for _ in range(2):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps([clock.device_id, clock.now()]).encode())
        os._exit(0)
    os.close(writer)
    children.append(json.loads(os.fdopen(reader).read()))
    os.wait()
print(json.dumps({"parent": [clock.device_id, before], "children": children}))
os._exit(0)
"""


def test_a_forked_child_has_a_device_id_of_its_own_and_goes_on_from_the_parents_stamps():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=30)
    found = json.loads(done.stdout)
    device_id, before = found["parent"]
    assert device_id == "host"
    ids = [child_id for child_id, _ in found["children"]]
    assert len({device_id, *ids}) == 3
    assert all(child_id.startswith("host.") for child_id in ids)
    assert all(stamp > before for _, stamp in found["children"])
    # The children's stamps are alike: what tells them apart is the device id, hence the total order is by pairs.
    (first_id, first), (second_id, second) = found["children"]
    assert first == second
    assert compare((first, first_id), (second, second_id)) != 0


def test_hlc_needs_neither_psycopg_nor_celery():
    code = (
        "import sys; sys.modules.update(psycopg=None, celery=None, kombu=None); "
        "from celery_syncguard import hlc; print(hlc.HybridLogicalClock('a').now() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "True"


# A clock that was far ahead

YEAR_MS = 365 * 86_400_000


class Time:
    """A machine's time that can be set wrong and right again."""

    def __init__(self):
        self.ms = 1_700_000_000_000

    def __call__(self):
        return self.ms


def poisoned(max_drift=60):
    time = Time()
    clock = HybridLogicalClock("phone", max_drift=max_drift, physical=time)
    time.ms += YEAR_MS
    clock.now()
    time.ms -= YEAR_MS
    return clock, time


@pytest.mark.parametrize("max_drift", [60, None])
def test_a_clock_that_is_far_ahead_says_so_once(caplog, max_drift):
    clock, _ = poisoned(max_drift)
    assert caplog.records == [], "while it agrees with its machine nobody can know"
    for _ in range(3):
        clock.now()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "31536000 s ahead" in record.getMessage()
    assert clock.ahead == pytest.approx(YEAR_MS / 1000)


def test_it_is_told_too_where_a_sender_or_saved_state_was_ahead(caplog):
    clock, time = poisoned()
    restarted = HybridLogicalClock.from_json(clock.to_json(), device_id="phone", max_drift=60, physical=time)
    restarted.now()
    open_hearted = HybridLogicalClock("server", physical=time)
    open_hearted.observe(restarted.now())
    assert ["phone" in caplog.text, "server" in caplog.text] == [True, True]


def test_a_clock_that_follows_honest_ones_says_nothing(caplog):
    time = Time()
    clock = HybridLogicalClock("phone", max_drift=60, physical=time)
    for ahead_ms in (0, 10, 59_000):
        clock.observe(encode(time.ms + ahead_ms, 0))
        clock.now()
    assert caplog.records == []
    assert clock.ahead == pytest.approx(59)


def test_a_reset_clock_is_heard_again_and_told_again():
    clock, time = poisoned()
    server = HybridLogicalClock("server", max_drift=60, physical=time)
    with pytest.raises(hlc.TooFarAhead):
        server.observe(clock.now())  # the control: what it stamps is refused, for a year
    clock.reset()
    assert clock.ahead == 0.0
    stamp = clock.now()
    assert stamp.wall_ms == time.ms
    assert server.observe(stamp) > stamp
    again = HybridLogicalClock.from_json(clock.to_json(), device_id="phone", physical=time)
    assert again.now().wall_ms == time.ms
