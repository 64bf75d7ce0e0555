"""Tests that several processes share are all run, and run once."""

from dataclasses import dataclass

import pytest

from tests.fixtures.dealing import brokers_for, dealt


@dataclass(frozen=True)
class Item:
    nodeid: str
    slow: bool = False

    def get_closest_marker(self, name: str) -> bool:
        return name == "slow" and self.slow


REAL = [Item(f"tests/acceptance/test_{n}.py", slow=n % 7 == 0) for n in range(100)]
OTHERS = [Item(f"tests/unit/test_{n}.py") for n in range(333)]


@pytest.mark.parametrize("hands", [1, 2, 3, 6, 16])
@pytest.mark.parametrize("items", [REAL + OTHERS, REAL, OTHERS, REAL[:2] + OTHERS, [], REAL[:3]], ids=len)
def test_every_test_is_dealt_once_and_those_without_processes_keep_their_order(items, hands):
    after = dealt(items, hands)
    assert sorted(after, key=items.index) == items
    assert [item for item in after if item in OTHERS] == [item for item in items if item in OTHERS]


def test_each_hand_has_its_share_of_real_processes_slow_ones_early_and_ends_quickly():
    hands = 6
    after = dealt(REAL + OTHERS, hands)
    size = len(after) // hands
    early = late = 0
    for hand in (after[n * size : (n + 1) * size] for n in range(hands)):
        real = [item for item in hand if item in REAL]
        assert len(REAL) // hands <= len(real) + 1
        assert hand[-1] in OTHERS
        early += sum(item.slow for item in real[: len(real) // 2])
        late += sum(item.slow for item in real[len(real) // 2 :])
    assert early > 2 * late


def test_a_test_has_one_broker_for_good_unless_it_needs_both():
    names = [f"test_promise_{n}" for n in range(200)]
    chosen = [brokers_for(name, both=False) for name in names]
    assert chosen == [brokers_for(name, both=False) for name in names]
    assert 60 < chosen.count(["redis"]) == 200 - chosen.count(["rabbitmq"]) < 140
    assert brokers_for(names[0], both=True) == ["redis", "rabbitmq"]
