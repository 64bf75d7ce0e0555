"""What the commands share: which database they ask, how they print, and how an error ends.

A command asks its `Target` for settings, a guard or a connection, and prints a `table` for people or `as_json` for
programs. An error of this library or of the database ends as one line on stderr and exit code 1, without a traceback.

Every `celery` command loads this through its entry point, so a driver is imported only where it is needed. Not here: the
commands (`commands`, `beat`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import click

from celery_syncguard.errors import ImproperlyConfigured, SyncGuardError, one_line

if TYPE_CHECKING:
    from celery_syncguard.core.config import Settings
    from celery_syncguard.guard import SyncGuard
    from celery_syncguard.postgres.connection import Connection

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_META = "celery_syncguard.target"

#: `--json` as every command has it.
json_option = click.option("--json", "json_wanted", is_flag=True, help="Print JSON with stable keys, for programs.")


class Commands(click.Group):
    """A group whose commands end with one line on an error of the database, the configuration or a key."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SyncGuardError as exc:
            fail(exc)


def fail(problem: object) -> NoReturn:
    """End the command with one line on stderr and exit code 1."""
    cause = problem if isinstance(problem, BaseException) else None
    raise click.ClickException(" ".join(str(problem).split())) from cause


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Which database a command is for. `dsn` and `schema` override the settings of `app`.

    `app` is a Celery application, the name of one (loaded when needed), or None; `app_named` is true if the user named it,
    false if it is only Celery's default.
    """

    app: Any = None
    dsn: str | None = None
    schema: str | None = None
    app_named: bool = False

    def settings(self) -> Settings:
        """The checked settings. Raises `ImproperlyConfigured`; connects to nothing."""
        from celery_syncguard.core.config import Settings

        chosen = {"syncguard_dsn": self.dsn, "syncguard_schema": self.schema}
        if self.app is None:
            return Settings.from_mapping(chosen)
        from celery_syncguard.tasks.app_state import settings_for

        settings = settings_for(load_app(self.app))
        schema = settings.schema if self.schema is None else self.schema
        return dataclasses.replace(settings, dsn=self.dsn or settings.dsn, schema=schema)

    def database(self) -> Settings:
        """The settings, if they lead to a database. Raises `ImproperlyConfigured` for no dsn, or the memory store's."""
        from celery_syncguard.postgres.connection import connection_parameters

        settings = self.settings()
        if settings.in_memory:
            raise ImproperlyConfigured("memory:// lives inside each process: name a database with --dsn")
        connection_parameters(settings.dsn, timeout=settings.timeout)
        return settings

    @contextmanager
    def guard(self) -> Iterator[SyncGuard]:
        """A guard, closed afterwards."""
        from celery_syncguard.guard import SyncGuard

        # The driver's pool logs each attempt. A command says it once, at its end.
        logging.getLogger("psycopg").addHandler(logging.NullHandler())
        guard = SyncGuard(settings=self.database())
        try:
            yield guard
        finally:
            guard.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection in autocommit. Errors of the driver become this library's."""
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

    from celery_syncguard.postgres.facts import fact

    try:
        yield
    except psycopg.Error as exc:
        raise fact(exc, dsn=settings.dsn, schema=settings.schema) from exc


def target(ctx: click.Context, chosen: Target | None = None) -> Target:
    """The target that the group's options named; a group sets it before its command runs."""
    if chosen is not None:
        ctx.meta[_META] = chosen
    found = ctx.meta.get(_META)
    return found if isinstance(found, Target) else Target()


def load_app(app: Any) -> Any:
    """The Celery application of this name, found as `celery -A` finds it, or `ImproperlyConfigured`; or the one given."""
    if not isinstance(app, str):
        return app
    from celery.app.utils import find_app

    try:
        return find_app(app)
    except Exception as exc:  # the application's own code, which may fail in any way
        raise ImproperlyConfigured(f"cannot load the application {app!r}: {type(exc).__name__}: {exc}") from exc


def as_json(value: Any) -> None:
    """Print a value for programs: seconds as numbers, instants in ISO 8601."""
    click.echo(json.dumps(value, indent=2, default=datetime.isoformat))


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows for people, aligned; nothing is cut off."""
    lines = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def printable(value: object) -> str:
    """Text that cannot move the cursor or break a line, whatever a key or a holder contains. None becomes `-`."""
    return "-" if value is None else one_line(str(value))


def duration(seconds: float) -> str:
    """Seconds for people: `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def seconds_of(text: str) -> float:
    """`30s`, `15m`, `12h` or `7d` in seconds, or `click.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if match is None:
        raise click.BadParameter(f"expected a duration such as 30s, 15m, 12h or 7d, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]
