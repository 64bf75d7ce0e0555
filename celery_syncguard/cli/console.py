"""What the commands share: where they are to look, how they print, and how an error ends.

A command asks its `Target` for settings, for a guard or for a connection, and prints a `table` for people or `as_json`
for programs. Errors of this library and of the database end as one line on stderr and exit code 1, never as a traceback.

Loaded by every `celery` command through its entry point, so nothing here imports a driver before it is needed. Not
here: the commands themselves (`cli`, `beat_cli`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from celery_syncguard.errors import ImproperlyConfigured, SyncGuardError, one_line

if TYPE_CHECKING:
    from celery_syncguard.core.config import Settings
    from celery_syncguard.guard import SyncGuard
    from celery_syncguard.postgres.connection import Connection

__all__ = [
    "Commands",
    "Target",
    "as_json",
    "duration",
    "fail",
    "json_option",
    "printable",
    "seconds_of",
    "table",
    "target",
]

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_META = "celery_syncguard.target"


class Commands(click.Group):
    """A group whose commands end with one line when the database, the configuration or a key is at fault."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SyncGuardError as exc:
            fail(exc)


def fail(problem: object) -> NoReturn:
    """End the command with one line on stderr and exit code 1."""
    raise click.ClickException(" ".join(str(problem).split())) from (
        problem if isinstance(problem, BaseException) else None
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Which database a command is about. `dsn` and `schema` win over the settings of `app`.

    `app` is a Celery application, the name of one that is loaded when it is needed, or None; `app_named` tells whether the
    user asked for it, or whether it is only Celery's default.
    """

    app: Any = None
    dsn: str | None = None
    schema: str | None = None
    app_named: bool = False

    def settings(self) -> Settings:
        """The settings to work with, checked.

        Raises:
            ImproperlyConfigured: they cannot be meant. Nothing was connected to.
        """
        from celery_syncguard.core.config import Settings

        chosen = {"syncguard_dsn": self.dsn, "syncguard_schema": self.schema}
        if self.app is None:
            return Settings.from_mapping(chosen)
        from celery_syncguard.tasks.app_state import settings_for

        settings = settings_for(load_app(self.app))
        return dataclasses.replace(
            settings, dsn=self.dsn or settings.dsn, schema=self.schema if self.schema is not None else settings.schema
        )

    def database(self) -> Settings:
        """The settings, if they lead to a database that other processes can see too.

        Raises:
            ImproperlyConfigured: no dsn, or the memory store's.
        """
        from celery_syncguard.postgres.connection import connection_parameters

        settings = self.settings()
        if settings.in_memory:
            raise ImproperlyConfigured("memory:// lives inside each process: there is no database to look at")
        connection_parameters(settings.dsn, timeout=settings.timeout)
        return settings

    @contextmanager
    def guard(self) -> Iterator[SyncGuard]:
        """The front door, closed afterwards."""
        from celery_syncguard.guard import SyncGuard

        # The driver's pool tells each attempt. A command says it once, at its end.
        logging.getLogger("psycopg").addHandler(logging.NullHandler())
        guard = SyncGuard(settings=self.database())
        try:
            yield guard
        finally:
            guard.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection in autocommit. Errors of the database become this library's."""
        from celery_syncguard.postgres.connection import Connection, connection_parameters

        settings = self.database()
        parameters = connection_parameters(settings.dsn, timeout=settings.timeout)
        with (
            database_errors(settings),
            Connection.connect(autocommit=True, prepare_threshold=None, **parameters) as conn,
        ):
            yield conn


@contextmanager
def database_errors(settings: Settings) -> Iterator[None]:
    """Turn the driver's errors into this library's."""
    import psycopg

    from celery_syncguard.postgres.store import fact

    try:
        yield
    except psycopg.Error as exc:
        raise fact(exc, dsn=settings.dsn, schema=settings.schema) from exc


def target(ctx: click.Context) -> Target:
    """The target that the group's options named."""
    found = ctx.meta.get(_META)
    return found if isinstance(found, Target) else Target()


def set_target(ctx: click.Context, chosen: Target) -> None:
    """Called by a group, before its command runs."""
    ctx.meta[_META] = chosen


def load_app(app: Any) -> Any:
    """The Celery application with this name, found as `celery -A` finds it; an application is returned as it is.

    Raises:
        ImproperlyConfigured: it cannot be loaded.
    """
    if not isinstance(app, str):
        return app
    from celery_syncguard.tasks.celery_internals import find_app

    try:
        return find_app(app)
    except Exception as exc:  # the application's own code, which may fail in any way
        raise ImproperlyConfigured(f"cannot load the application {app!r}: {type(exc).__name__}: {exc}") from exc


def json_option(command: F) -> F:
    """`--json` as every command has it."""
    return click.option("--json", "json_wanted", is_flag=True, help="Print JSON with stable keys, for programs.")(
        command
    )


def as_json(value: Any) -> None:
    """Print a value for programs: seconds as numbers, instants in ISO 8601."""
    click.echo(json.dumps(value, indent=2, default=_instant))


def _instant(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows for people, aligned, nothing cut off."""
    lines = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def printable(value: object) -> str:
    """Text that cannot move the cursor or break a line, whatever a key or a holder contains."""
    return "-" if value is None else one_line(str(value))


def duration(seconds: float) -> str:
    """Seconds for people: `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02} h"


def seconds_of(text: str) -> float:
    """`30s`, `15m`, `12h` or `7d` in seconds.

    Raises:
        click.BadParameter: no number with one of these units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time with a unit: 30s, 15m, 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]
