"""Settings: Celery configuration names, defaults, and the check of each value.

Not here: options of one task (`options`).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from celery_syncguard.core.key import normalize_key
from celery_syncguard.core.lease import seconds, ttl_seconds
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey

__all__ = ["CATCH_UP", "DEFAULT_TTL", "Settings", "suggest"]

PREFIX = "syncguard_"
DEFAULT_TTL = 30.0
CATCH_UP = ("one", "skip", "all")


def suggest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The `syncguard_*` settings of one application, checked. Seconds are floats."""

    dsn: str = dataclasses.field(default="", repr=False)  # it may hold a password
    schema: str | None = None
    pool_size: int = 2
    timeout: float = 5.0
    lock_ttl: float = DEFAULT_TTL
    leader_key: str = "beat"
    leader_ttl: float = 15.0
    beat_scheduler: str | None = None
    catch_up: str = "one"
    hlc: bool = False

    @classmethod
    def from_mapping(cls, conf: Mapping[Any, Any], *, namespace: str | None = None) -> Settings:
        """The settings among a Celery configuration's keys, in any case.

        Arguments:
            namespace: of `app.config_from_object(…, namespace=…)`: keys may begin with it, as in CELERY_SYNCGUARD_DSN.

        Raises:
            ImproperlyConfigured: an unknown `syncguard_*` name (with a suggestion), or an invalid value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        prefix = f"{namespace.rstrip('_').lower()}_" if namespace else ""
        for key in conf:
            name = key.lower().removeprefix(prefix) if isinstance(key, str) else ""
            if not name.startswith(PREFIX):
                continue
            name = name.removeprefix(PREFIX)
            if name not in known:
                raise ImproperlyConfigured(
                    f"unknown setting {PREFIX}{name!s}{suggest(PREFIX + name, [PREFIX + one for one in known])}"
                )
            if conf[key] is not None:
                values[name] = conf[key]
        if not values.get("dsn"):
            values["dsn"] = os.environ.get("SYNCGUARD_DSN", "")
        return cls(**values)

    def __post_init__(self) -> None:
        given: Any = self  # what came from a configuration may be anything

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # frozen, set once here

        def require(name: str, what: str, *, valid: bool) -> None:
            if not valid:
                raise ImproperlyConfigured(f"syncguard_{name} is {what}, got {getattr(given, name)!r}")

        if not isinstance(given.dsn, str):
            raise ImproperlyConfigured(f"syncguard_dsn is a connection string, got {type(given.dsn).__name__}")
        check_dsn(given.dsn)
        schema, size = given.schema, given.pool_size
        named = schema is None or (isinstance(schema, str) and schema != "" and "\0" not in schema)
        require("schema", "the name of a schema", valid=named)
        counted = isinstance(size, int) and not isinstance(size, bool) and 2 <= size <= 1000
        require("pool_size", "a number of connections from 2 (one works, one renews) to 1000", valid=counted)
        put("timeout", seconds(given.timeout, what="syncguard_timeout", minimum=0.1, maximum=300.0))
        put("lock_ttl", ttl_seconds(given.lock_ttl, what="syncguard_lock_ttl"))
        put("leader_ttl", seconds(given.leader_ttl, what="syncguard_leader_ttl", minimum=3.0, maximum=3600.0))
        try:
            put("leader_key", normalize_key(given.leader_key, what="syncguard_leader_key"))
        except InvalidKey as exc:
            raise ImproperlyConfigured(str(exc)) from exc
        require("catch_up", f"one of {', '.join(map(repr, CATCH_UP))}", valid=given.catch_up in CATCH_UP)
        require("hlc", "True or False", valid=isinstance(given.hlc, bool))
        scheduler = given.beat_scheduler is None or isinstance(given.beat_scheduler, (str, type))
        require("beat_scheduler", "a scheduler class or its dotted name", valid=scheduler)

    @property
    def in_memory(self) -> bool:
        """Whether the dsn asks for the memory store."""
        return self.dsn.startswith("memory:")


def check_dsn(dsn: str) -> None:
    """Refuse a dsn that is certainly not PostgreSQL's, without connecting and without repeating a password.

    Raises:
        ImproperlyConfigured: the URL is for another kind of database.
    """
    scheme = dsn.partition("://")[0].lower() if "://" in dsn else ""
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        return  # key=value pairs, one of which contains "://"
    if not dsn or scheme in ("", "postgres", "postgresql", "memory"):
        return
    base = scheme.split("+", 1)[0]
    if base in ("postgres", "postgresql"):
        raise ImproperlyConfigured(
            f"syncguard_dsn is a libpq connection string: write postgresql://… instead of {scheme}://…"
        )
    raise ImproperlyConfigured(
        f"syncguard_dsn is for {scheme}, but locks live in PostgreSQL: use postgresql://user@host/database "
        f"(or memory:// in tests)"
    )
