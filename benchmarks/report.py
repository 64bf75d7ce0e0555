"""The table in README.md, written from results/latest.json after a whole run, and again by `python -m benchmarks.report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["number", "write"]

FOLDER = Path(__file__).resolve().parent
_BEGIN, _END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write() -> None:
    """Replace what is between the marks."""
    readme = FOLDER / "README.md"
    head, _, rest = readme.read_text().partition(_BEGIN)
    tail = rest.partition(_END)[2]
    readme.write_text(
        head + _BEGIN + _table(json.loads((FOLDER / "results" / "latest.json").read_text())) + _END + tail
    )


def _table(results: dict[str, Any]) -> str:
    machine = results["machine"]
    settings = machine["postgresql"]
    where = (
        f"On {machine['cores']} cores ({machine['cpu']}), which clients and servers share; "
        f"Python {machine['python']}, Celery {machine['celery']}, psycopg {machine['psycopg']}, PostgreSQL "
        f"{settings['server_version']} (fsync {settings['fsync']}, synchronous_commit {settings['synchronous_commit']}), "
        f'Redis protocol {machine["redis"]} without persistence. "Run" says when a row was measured, and the machine\'s load average when that run began.'
    )
    lines = [
        where,
        "",
        "| row | what | goal | measured | 95 % interval | | contestants, medians | run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in results["figures"]:
        run = results["runs"][figure["row"]]
        value, unit = figure["value"], figure["unit"].replace("times", "x")
        goal = ""
        if figure["goal"] is not None:
            most = figure["goal"]["at_most"]
            goal = f"≤ {most:g}" if most is not None else f"≥ {figure['goal']['at_least']:g}"
        verdict = {True: "met", False: "**missed**", None: ""}[figure["met"]]
        interval = "" if value["low"] == value["high"] else f"{number(value['low'])} to {number(value['high'])}"
        parts = ", ".join(f"{name}: {number(part['median'])}" for name, part in figure["parts"].items())
        parts += f" {figure['part_unit']}" if parts else ""
        cells = (
            figure["row"],
            figure["what"],
            goal,
            f"{number(value['median'])} {unit}".strip(),
            interval,
            verdict,
            parts,
            f"{run['measured_at']}, load {run['load']}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write()
