"""The figures as pictures: one PNG per row that has something to see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.measure import Estimate, Figure

__all__ = ["draw"]


def draw(figures: Sequence[Figure], folder: Path) -> None:
    """Write goals.png, and bars or lines of the rows with parts or points."""
    _goals([figure for figure in figures if figure.goal is not None], folder / "goals.png")
    for row in dict.fromkeys(figure.row for figure in figures):
        own = [figure for figure in figures if figure.row == row]
        lines = next((figure for figure in reversed(own) if len(next(iter(figure.points.values()), [])) > 1), None)
        if lines is not None:
            _lines(lines, folder / f"{row}.png")
        elif own[0].parts:
            _bars(own[0], folder / f"{row}.png")


def _goals(figures: Sequence[Figure], path: Path) -> None:
    """How much of each goal's allowance is used: left of the line is met."""
    names, used = [], []
    for figure in figures:
        bound = figure.goal.at_most
        value = figure.value.median
        if bound:
            used.append(value / bound)
        elif figure.goal.at_least and value:
            used.append(figure.goal.at_least / value)
        else:
            continue  # a goal of nothing has no scale
        names.append(f"{figure.row}: {figure.what}")
    if not names:
        return
    fig, axes = plt.subplots(figsize=(10, 0.32 * len(names) + 1.2), layout="constrained")
    colours = ["tab:green" if one <= 1 else "tab:red" for one in used]
    axes.barh(names[::-1], [min(one, 3.0) for one in used[::-1]], color=colours[::-1])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("share of the goal's allowance (cut at 3)")
    axes.tick_params(axis="y", labelsize=7)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _bars(figure: Figure, path: Path) -> None:
    parts = dict(figure.parts)
    fig, axes = plt.subplots(figsize=(7, 0.4 * len(parts) + 1.2), layout="constrained")
    names = list(parts)[::-1]
    axes.barh(
        names, [parts[name].median for name in names], xerr=_errors([parts[name] for name in names]), color="tab:blue"
    )
    axes.set_title(f"{figure.row}: {figure.what}", fontsize=9)
    axes.set_xlabel(figure.part_unit)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _errors(values: Sequence[Estimate]) -> list[list[float]]:
    return [
        [max(0.0, value.median - value.low) for value in values],
        [max(0.0, value.high - value.median) for value in values],
    ]


def _lines(figure: Figure, path: Path) -> None:
    fig, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in figure.points.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_title(f"{figure.row}: {figure.what}", fontsize=9)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend()
    fig.savefig(path, dpi=110)
    plt.close(fig)
