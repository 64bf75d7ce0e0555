"""What the audience sees: a live table with rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from celery_syncguard.demo import Check

__all__ = ["View", "make_view"]


class View:
    """Plain lines. Also the interface of the live one."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def scene(self, title: str) -> None:
        print(f"\n== {title}", flush=True)

    def say(self, text: str) -> None:
        self.event("", "", text, None)

    def event(self, worker: str, event: str, key: str, fence: int | None) -> None:
        print(f"   {worker:>4} {event:<9} {key}" + (f"  fence {fence}" if fence is not None else ""), flush=True)

    def show_checks(self, checks: Sequence[Check]) -> None:
        width = max((len(check.statement) for check in checks), default=0)
        print()
        for check in checks:
            print(f"{'ok  ' if check.held else 'FAIL'} {check.statement:<{width}}  {check.found}")
        print()


class LiveView(View):
    """The last events of the running scene, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._mutex = threading.Lock()
        self._title = "starting PostgreSQL, Valkey and two workers"
        self._lines: deque[tuple[str, str, str, str]] = deque(maxlen=14)
        self._live = Live(self._events(), console=self._console, refresh_per_second=8)

    def __enter__(self) -> View:
        self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._live.__exit__(*details)

    def _events(self) -> Any:
        table = _table(self._title, "worker", "event", "key", "fence", expand=True)
        styles = {"refused": "bold red", "lost": "bold red", "killed": "red", "frozen": "cyan", "end": "green"}
        for line in self._lines:
            table.add_row(*line, style=styles.get(line[1], ""))
        return table

    def scene(self, title: str) -> None:
        with self._mutex:
            self._title = title
            self._lines.clear()
            self._live.update(self._events())

    def event(self, worker: str, event: str, key: str, fence: int | None) -> None:
        with self._mutex:
            self._lines.append((worker, event, key, "" if fence is None else str(fence)))
            self._live.update(self._events())

    def show_checks(self, checks: Sequence[Check]) -> None:
        table = _table("what the history says", "", "check", "found")
        for check in checks:
            mark, style = ("✓", "") if check.held else ("✗", "bold red")
            table.add_row(mark, check.statement, check.found, style=style)
        self._console.print(table)


def _table(title: str, *columns: str, **options: Any) -> Any:
    from rich.table import Table

    return Table(*columns, title=title, title_justify="left", **options)


def make_view() -> View:
    """A live one on a terminal that rich can draw on, else plain lines."""
    if sys.stdout.isatty():
        try:
            return LiveView()
        except ImportError:
            pass
    return View()
