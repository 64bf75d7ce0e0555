"""Task keys: the lock, dedup and run-once keys of one task class, for given arguments, and the options of one call.

Made once per task class, so that a publish parses no template and inspects no signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from celery_syncguard.core.config import DEFAULT_TTL
from celery_syncguard.core.key import task_key
from celery_syncguard.errors import ImproperlyConfigured, InvalidKey
from celery_syncguard.tasks.arguments import Parameters, Template, arguments_key, as_sent, fingerprint
from celery_syncguard.tasks.body import signature_of
from celery_syncguard.tasks.header import Header
from celery_syncguard.tasks.options import TaskOptions, portable

__all__ = ["TaskKeys"]

#: Options that are keys: the header's entry for each, and its attribute.
_ENTRIES = {"lock_key": ("key", "lock_key"), "dedup_key": ("claim", "claim_key"), "run_once": ("run", "run_key")}


def _computed(options: TaskOptions) -> list[tuple[str, str, str, Any]]:
    """Option, entry, attribute of the header and source of each key that is made from the arguments."""
    return [
        (name, entry, attribute, source)
        for name, (entry, attribute) in _ENTRIES.items()
        # run_once=True goes by the task's id.
        if (source := getattr(options, name)) and not (name == "run_once" and source is True)
    ]


class TaskKeys:
    """The options of one task class, with its templates parsed."""

    __slots__ = ("_computed", "_parameters", "_templates", "body", "options")

    def __init__(self, options: TaskOptions, signature: inspect.Signature, body: Any) -> None:
        self.options = options
        #: What `run` was.
        self.body = body
        self._parameters = Parameters(signature)
        self._computed = _computed(options)
        self._templates = {
            (name, text): Template(text, self._parameters, what=name)
            for name in _ENTRIES
            if isinstance(text := getattr(options, name), str)
        }

    @classmethod
    def of_class(cls, task: type, *, lock_ttl: float = DEFAULT_TTL, own: Any = None) -> TaskKeys:
        """`lock_ttl` is the default for that option, `own` is as `signature_of` has it.

        Raises:
            ImproperlyConfigured: an invalid option, or a template that does not fit the signature.
        """
        options = TaskOptions.of_class(task, lock_ttl=lock_ttl)
        return cls(options, signature_of(task, own), getattr(task, "run", None) if own is None else own)

    def complete(
        self,
        task: Any,
        header: Header,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        overrides: Mapping[str, Any],
    ) -> tuple[Header, TaskOptions]:
        """The header with the keys that it lacks and with the overrides; the options for this call.

        Raises:
            InvalidKey, ImproperlyConfigured: a key that cannot be made, an invalid option.
            TypeError: the arguments do not fit the task.
        """
        options = self.options
        new: dict[str, Any] = {}
        if overrides or header.options:
            carried = {**header.options, **overrides}
            options = options.replace(carried)
            # A key is computed once, here: what it is made from goes no further.
            new["options"] = {
                name: value
                for name, value in portable(carried).items()
                if not (name in _ENTRIES and isinstance(value, str))
            }
        missing = [
            one
            for one in (self._computed if options is self.options else _computed(options))
            if one[0] in overrides or getattr(header, one[2]) is None
        ]
        if missing:
            serializer = header.serializer or task.serializer or task.app.conf.task_serializer
            if (dump := getattr(task, "_dump_pydantic_arguments", None)) is not None:
                args, kwargs = dump(args, kwargs)
            args, kwargs = as_sent(args, kwargs, serializer)
            for name, entry, attribute, source in missing:
                new[attribute] = self._key(task, name, source, args, kwargs, serializer)
                if entry != "key" and source is not True:
                    new["fingerprint"] = fingerprint(self._parameters, args, kwargs)
                if name in overrides and entry not in header.given:
                    new["given"] = (*new.get("given", header.given), entry)
        if new:
            header = header._replace(**new)
        if "lock_max_deaths" in overrides and not (header.lock_key or header.run_key or options.run_once):
            raise ImproperlyConfigured("apply_async: lock_max_deaths needs a task with a lock_key or run_once")
        return header, options

    def _key(  # noqa: PLR0917 - of one caller
        self, task: Any, name: str, source: Any, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str
    ) -> str:
        if source is True:
            return arguments_key(task.name, serializer, self._parameters.bind(args, kwargs))
        if isinstance(source, str):
            template = self._templates.get((name, source)) or Template(source, self._parameters, what=name)
            return template.render(args, kwargs)
        try:
            key = source(task, args, kwargs)
        except Exception as exc:
            raise InvalidKey(f"{task.name}: the {name} callable raised {exc!r}") from exc
        if not isinstance(key, str):
            raise InvalidKey(f"{task.name}: the {name} callable returned {type(key).__name__}, not text")
        return task_key(key, what=name)
