"""The command behind scripts/bench: run the rows, print the table, write the figures and the plots."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import math
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import report
from benchmarks.measure import Estimate, Figure, revived
from benchmarks.report import number as _number
from benchmarks.rig import ROOT, machine, rig

ROWS = (
    "task_overhead",
    "floor",
    "python_cost",
    "held",
    "throughput",
    "hot_key",
    "renew",
    "scale",
    "takeover",
    "connections",
    "worker",
)
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Compare celery-syncguard with its peers and with what the server can do. Starts its own servers.",
    )
    parser.add_argument("--quick", action="store_true", help="a few repetitions of everything, in under a minute or so")
    parser.add_argument("--only", action="append", choices=ROWS, metavar="NAME", help=f"one of {', '.join(ROWS)}")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures here (default for a whole run: results/)"
    )
    parser.add_argument(
        "--publish", action="store_true", help="with --only: put these rows in the place of those in results/"
    )
    options = parser.parse_args()
    if options.publish and not options.only:
        parser.error("--publish goes with --only: a whole run is published anyway")
    logging.disable(logging.WARNING)  # a renewal that comes late on a busy machine is seen in the figures

    figures: list[Figure] = []
    failed: list[str] = []
    began = time.monotonic()
    with rig(quick=options.quick) as servers:
        facts = machine(servers)
        for name in options.only or ROWS:
            print(f"bench: {name} …", file=sys.stderr, flush=True)
            try:
                found = importlib.import_module(f"benchmarks.{name}").run(servers)
            except Exception:
                # The other rows are worth having all the same.
                traceback.print_exc()
                failed.append(name)
                continue
            figures += found
            _print(found)
    facts["seconds"] = round(time.monotonic() - began)
    facts["measured_at"] = datetime.now(tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")

    published = options.publish or not (options.quick or options.only or options.json)
    target = options.json or (RESULTS / "latest.json" if published else ROOT / "benchmarks" / "out" / "latest.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    measured = figures
    # Rows may come from several runs, and the machine was not the same in each: every row says when, and under what load.
    runs = {row: {"measured_at": facts["measured_at"], "load": facts["load"]} for row in {one.row for one in figures}}
    if options.publish and target.exists():
        former = json.loads(target.read_text())
        before = [revived(one) for one in former["figures"] if one["row"] not in options.only]
        runs = {**former["runs"], **runs}
        figures = sorted([*before, *figures], key=lambda figure: ROWS.index(figure.row))
    listed = [{**dataclasses.asdict(figure), "met": figure.met} for figure in figures]
    target.write_text(_as_json({"machine": facts, "runs": runs, "figures": listed}))
    from benchmarks import plots

    plots.draw(figures, target.parent)
    if published:
        report.write()
    with_goal = [figure for figure in measured if figure.goal is not None]
    met = sum(figure.met is True for figure in with_goal)
    print(f"bench: {met} of {len(with_goal)} goals met, {facts['seconds']} s, figures in {_shown(target)}")
    if failed:
        print(f"bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _print(figures: Iterable[Figure]) -> None:
    for figure in figures:
        goal = "" if figure.goal is None else f"goal {figure.goal}: {'met' if figure.met else 'MISSED'}"
        print(f"{figure.row:14} {figure.what:58} {_text(figure.value, figure.unit):>30}  {goal}")
        for name, part in figure.parts.items():
            print(f"{'':14}   {name:56} {_text(part, figure.part_unit):>30}")
    sys.stdout.flush()


def _text(value: Estimate, unit: str) -> str:
    interval = "" if value.low == value.high else f" [{_number(value.low)}, {_number(value.high)}]"
    return f"{_number(value.median)}{interval} {unit}".rstrip()


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _as_json(value: object) -> str:
    def plain(one: object) -> object:
        if isinstance(one, float):
            return round(one, 4) if math.isfinite(one) else None
        if isinstance(one, dict):
            return {key: plain(item) for key, item in one.items()}
        if isinstance(one, Sequence) and not isinstance(one, str):
            return [plain(item) for item in one]
        return one

    return json.dumps(plain(value), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
