"""Paired measurements: the contestants take turns within one run, so that whatever the machine does meanwhile meets all.

A block is some repetitions by one contestant. A round is one block of each, in an order that alternates (A B, B A, …).
What is compared is compared within its round; over the rounds we report the median, and a 95 % interval of it by
bootstrap. Absolute times are for reading. Only ratios, which the machine cancels out of, are held against goals.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Estimate", "Figure", "Goal", "blocks", "estimate", "paired", "revived"]

_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A median over `rounds`, and the 95 % interval in which it lies."""

    median: float
    low: float
    high: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """`at_most` or `at_least`: the other is None."""

    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    `row` and `what`: which line of the table, and what of it. `value`: what is held against `goal`, in `unit` (the
    default is for ratios). `parts`: the contestants' own medians, by name, in `part_unit`. `floor`: what nobody can be faster than.
    `points`: more than a number, for the plots.
    """

    row: str
    what: str
    value: Estimate
    unit: str = "times"
    goal: Goal | None = None
    parts: Mapping[str, Estimate] = dataclasses.field(default_factory=dict)
    part_unit: str = "µs"
    floor: str = ""
    points: Mapping[str, Sequence[tuple[float, float]]] = dataclasses.field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.goal.met(self.value.median)


def revived(facts: Mapping[str, Any]) -> Figure:
    """A figure that was written as JSON."""
    fields = {name: value for name, value in facts.items() if name != "met"}
    return Figure(
        **{
            **fields,
            "value": Estimate(**facts["value"]),
            "goal": None if facts["goal"] is None else Goal(**facts["goal"]),
            "parts": {name: Estimate(**part) for name, part in facts["parts"].items()},
            "points": {name: [(x, y) for x, y in points] for name, points in facts["points"].items()},
        }
    )


def blocks(
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeat: int,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Microseconds per call of each contestant, a number per round.

    Arguments:
        repeat: calls per block. `warm_up`: rounds that do not count. `clock`: seconds; `time.process_time` for CPU.
    """
    results: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(-warm_up, rounds):
        for name in order:
            call = contestants[name]
            gc.collect()
            began = clock()
            for _ in range(repeat):
                call()
            took = clock() - began
            if number >= 0:
                results[name].append(took / repeat * 1e6)
        order.reverse()
    return results


def estimate(values: Sequence[float]) -> Estimate:
    """The median of one number per round, with its interval."""
    return _bootstrap(list(values), statistics.median)


def paired(top: Sequence[float], bottom: Sequence[float]) -> Estimate:
    """The ratio of two medians, with an interval from resampling whole rounds, so that pairs stay together."""
    return _bootstrap(
        list(zip(top, bottom, strict=True)),
        lambda pairs: statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs),
    )


def _bootstrap(values: list, statistic: Callable[[list], float]) -> Estimate:
    dice = random.Random(1)  # the same numbers give the same interval
    resampled = sorted(statistic(dice.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    low, high = resampled[int(0.025 * _RESAMPLES)], resampled[int(0.975 * _RESAMPLES) - 1]
    return Estimate(statistic(values), low, high, len(values))
