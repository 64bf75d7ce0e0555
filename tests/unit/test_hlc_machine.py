"""Hybrid logical clocks against their definition: several clocks, skewed and stepping, exchange stamps at random.

The same machine, given clocks that lack one rule each, must find the fault: those are the negative controls.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from celery_syncguard.hlc import HlcError, HybridLogicalClock, Timestamp, compare, decode, encode

NAMES = ("a", "b", "c")
DRIFT_MS = 5000
SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def defined(state: tuple[int, int], physical: int, remote: tuple[int, int] | None) -> tuple[int, int]:
    """The definition, told by sets: the highest wall time wins; whoever is at it already has used its counters."""
    wall = max([physical, state[0]] + ([remote[0]] if remote else []))
    used = [counter for at, counter in [state] + ([remote] if remote else []) if at == wall]
    counter = max(used) + 1 if used else 0
    return (wall + 1, 0) if counter == 1000 else (wall, counter)


class Clocks(RuleBasedStateMachine):
    make = staticmethod(HybridLogicalClock.from_json)
    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.physical = dict.fromkeys(NAMES, 10_000)
        self.highest_physical = 10_000
        self.events = 0
        self.last = dict.fromkeys(NAMES, 0)
        self.state = dict.fromkeys(NAMES, (0, 0))
        self.pairs: set[tuple[int, str]] = set()
        self.clocks = {name: self.open(name, None) for name in NAMES}

    def open(self, name: str, text: str | None) -> HybridLogicalClock:
        return self.make(text, device_id=name, max_drift=DRIFT_MS / 1000, physical=lambda: self.physical[name])

    def stamped(self, name: str, stamp: int, remote: int | None) -> int:
        self.events += 1
        assert stamp > self.last[name], "not monotone"
        assert remote is None or stamp > remote, "does not come after what it observed"
        expected = defined(self.state[name], self.physical[name], decode(remote) if remote else None)
        assert stamp == encode(*expected), "not what the definition says"
        assert isinstance(stamp, Timestamp)
        assert (stamp, name) not in self.pairs
        self.pairs.add((stamp, name))
        self.last[name] = stamp
        self.state[name] = decode(stamp)
        return stamp

    @rule(name=st.sampled_from(NAMES), step=st.integers(-8000, 8000))
    def time_moves(self, name: str, step: int) -> None:
        self.physical[name] = max(0, self.physical[name] + step)
        self.highest_physical = max(self.highest_physical, self.physical[name])

    @rule(target=sent, name=st.sampled_from(NAMES), burst=st.sampled_from([1] * 15 + [1001]))
    def send(self, name: str, burst: int) -> int:
        return [self.stamped(name, self.clocks[name].now(), None) for _ in range(burst)][-1]

    @rule(target=sent, name=st.sampled_from(NAMES), remote=sent)
    def receive(self, name: str, remote: int) -> int:
        ahead = decode(remote)[0] - self.physical[name]
        before = self.clocks[name].to_json()
        try:
            stamp = self.clocks[name].observe(remote)
        except HlcError:
            assert ahead > DRIFT_MS, "refused without need"
            assert self.clocks[name].to_json() == before
            return remote
        assert ahead <= DRIFT_MS, "believed a stamp from too far ahead"
        return self.stamped(name, stamp, remote)

    @rule(name=st.sampled_from(NAMES), remote=st.one_of(st.integers(max_value=0), st.integers(2**53), st.text()))
    def receive_nonsense(self, name: str, remote: object) -> None:
        before = self.clocks[name].to_json()
        with pytest.raises(HlcError):
            self.clocks[name].observe(remote)
        assert self.clocks[name].to_json() == before

    @rule(name=st.sampled_from(NAMES))
    def physical_clock_breaks(self, name: str) -> None:
        before, good = self.clocks[name].to_json(), self.physical[name]
        self.physical[name] = -1
        with pytest.raises(HlcError):
            self.clocks[name].now()
        self.physical[name] = good
        assert self.clocks[name].to_json() == before

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        text = self.clocks[name].to_json()
        self.clocks[name] = self.open(name, text)
        assert self.clocks[name].to_json() == text
        assert json.loads(text) == {
            "wallTimeMs": self.state[name][0],
            "counter": self.state[name][1],
            "deviceId": name,
        }

    @rule(left=sent, right=sent, first=st.sampled_from(NAMES), second=st.sampled_from(NAMES))
    def pairs_have_a_total_order(self, left: int, right: int, first: str, second: str) -> None:
        forth, back = compare((left, first), (right, second)), compare((right, second), (left, first))
        assert forth == -back
        assert (forth == 0) == ((left, first) == (right, second))

    @invariant()
    def nobody_is_ahead_of_the_fastest_physical_clock(self) -> None:
        # Beyond it only the counters carry: one millisecond for each 1000 events, and the one that has begun.
        limit = self.highest_physical + self.events // 1000 + 1
        assert all(wall <= limit for wall, _ in self.state.values())


TestClocks = Clocks.TestCase
TestClocks.settings = SETTINGS


class WallClock(HybridLogicalClock):
    """Stamps with the physical time alone, as `updated_at` does."""

    def now(self):
        return encode(self._physical(), 0)


class Deaf(HybridLogicalClock):
    """Does not listen to others."""

    def observe(self, remote):
        decode(remote)
        return self.now()


class Trusting(HybridLogicalClock):
    """Believes any future."""

    def __init__(self, device_id, *, max_drift=None, **options):
        super().__init__(device_id, **options)


class Hasty(HybridLogicalClock):
    """Moves before it has read its physical clock."""

    def now(self):
        self._state = type(self._state)(self._state.wall_ms + 1, 0)
        return super().now()


@pytest.mark.parametrize("broken", [WallClock, Deaf, Trusting, Hasty])
def test_the_machine_finds_the_fault_of_a_clock_that_lacks_a_rule(broken):
    class Machine(Clocks):
        make = staticmethod(broken.from_json)

    # No shrinking: that it is found is enough.
    searching = settings(
        SETTINGS, max_examples=1000, database=None, report_multiple_bugs=False, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=searching)
