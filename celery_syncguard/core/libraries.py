"""Finds parts of other libraries that those do not document, when they are used; the error if they are gone.

The modules `*_internals` name them, one module per library. Nothing here imports such a library by itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from celery_syncguard.errors import ImproperlyConfigured

__all__ = ["find", "require", "unfit"]

_MISSING = object()


def find(path: str, missing: Any = None) -> Any:
    """What `module` or `module:attribute.attribute` names, or `missing`."""
    module, _, attributes = path.partition(":")
    try:
        found = importlib.import_module(module)
        for name in filter(None, attributes.split(".")):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return missing
    return found


def require(library: str, *paths: str) -> None:
    """Raises ImproperlyConfigured unless all these are there."""
    for path in paths:
        if find(path, _MISSING) is _MISSING:
            raise unfit(library, f"{path.replace(':', '.')} does not exist")


def unfit(library: str, reason: str) -> ImproperlyConfigured:
    """The error for a version of a library that this one cannot be used with."""
    ours, theirs = _version("celery-syncguard"), _version(library)
    return ImproperlyConfigured(
        f"celery-syncguard {ours} does not work with {library} {theirs} ({reason}): install another version of one of them"
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
