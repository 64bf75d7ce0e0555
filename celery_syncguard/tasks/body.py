"""The body of a task as Celery calls it, and the parameters that the arguments of a message are bound to.

A decorator that uses `functools.wraps` shows the parameters of the function inside, but Celery calls the decorator's, and that
may put arguments in. So the function inside counts only where the decorator's source shows that it hands its arguments on as
they came.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from celery import Task

from celery_syncguard.errors import ImproperlyConfigured

__all__ = ["body_of", "signature_of"]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_UNKNOWN = inspect.Signature([inspect.Parameter("args", _VARIADIC[0]), inspect.Parameter("kwargs", _VARIADIC[1])])

#: Modules whose decorators pass arguments on unchanged, though their source does not show it: Celery's for pydantic=True, and
#: the `retry` of two packages.
_TRUSTED = frozenset({"backoff._sync", "celery.app.base", "tenacity"})

#: Methods of a dict that do not change it.
_READS = frozenset({"copy", "get", "items", "keys", "values"})


def body_of(task: type) -> Any:
    """What the class has as its body: `run`, or else its own `__call__`. As `inspect.getattr_static`."""
    run = inspect.getattr_static(task, "run")
    if run is not Task.__dict__["run"]:
        return run
    return next((call for call in map(_written_call, task.__mro__) if call is not None), run)


def _written_call(cls: type) -> Any:
    """The `__call__` of this class, if it is neither Celery's nor ours."""
    call = cls.__dict__.get("__call__")
    while call is not None and _module_of(call) == "celery_syncguard.tasks.gate":
        call = getattr(call, "__wrapped__", None)
    return None if _module_of(call).split(".")[0] in ("celery", "celery_syncguard") else call


def _module_of(function: Any) -> str:
    """Where a function was written. Its `__module__` is that of the function which it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def signature_of(task: type, own: Any = None) -> inspect.Signature:
    """Of the body, without the task itself: the names that arguments have when Celery calls it.

    Arguments:
        own: what was set as `run` on the task itself, whose class has none.

    Raises:
        ImproperlyConfigured: the body is no function or method, or a coroutine's.
    """
    body = body_of(task) if own is None else staticmethod(own)
    function = body.__func__ if isinstance(body, (staticmethod, classmethod)) else body
    if not callable(function):
        raise ImproperlyConfigured(f"{task.__name__}: run must be a method or a function, got {type(body).__name__}")
    if _is_async(function):
        raise ImproperlyConfigured(
            f"{task.__name__}: its body is async, and Celery would run it after the lock has ended: make it an ordinary function "
            f"that calls asyncio.run(...)"
        )
    takes_task = not isinstance(body, staticmethod) and hasattr(type(body), "__get__")
    while True:
        try:
            signature = inspect.signature(function, follow_wrapped=False)
        except ValueError:
            # Of an object that only shows what it wraps, or of compiled code.
            signature = _UNKNOWN
        parameters = list(signature.parameters.values())
        if takes_task and parameters and parameters[0].kind not in _VARIADIC:
            del parameters[0]
        inner = getattr(function, "__wrapped__", None)
        if inner is None or {one.kind for one in parameters} != set(_VARIADIC) or not _hands_on(function):
            return signature.replace(parameters=parameters)
        function = inner


def _is_async(function: Any) -> bool:
    called = type(function).__call__ if callable(function) else None
    return any(
        check(one) for check in (inspect.iscoroutinefunction, inspect.isasyncgenfunction) for one in (function, called)
    )


def _hands_on(wrapper: Any) -> bool:
    """Whether a wrapper's source shows that it calls what it wraps with its own arguments as they came, and only so."""
    if _module_of(wrapper) in _TRUSTED:
        return True
    try:
        # Of the code: of a function it would be that of the one inside.
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(wrapper.__code__))).body
        held = inspect.getclosurevars(wrapper).nonlocals
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return False
    if not isinstance(definition, ast.FunctionDef):
        return False
    own = definition.args
    if own.vararg is None or own.kwarg is None:
        # It shows another signature (`__signature__`) than it has.
        return False
    names = {name for name, value in held.items() if value is wrapper.__wrapped__}
    handed = [one.arg for one in (*own.posonlyargs, *own.args)]
    written = f"({', '.join([*handed, '*' + own.vararg.arg, '**' + own.kwarg.arg])})"
    as_they_came = {ast.dump(ast.parse(name + written, mode="eval").body) for name in names}
    nodes = [node for statement in definition.body for node in ast.walk(statement)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    return (
        0 < len(calls) == len(uses)
        and all(ast.dump(call) in as_they_came for call in calls)
        and not names.union(handed, (own.vararg.arg, own.kwarg.arg)).intersection(_changed(nodes))
    )


def _changed(nodes: list[ast.AST]) -> Iterator[str]:
    """The variables that some code sets, or of whose values it may change a part."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg  # of a function within
        elif isinstance(node, ast.Subscript):
            if not isinstance(node.ctx, ast.Load):
                yield getattr(node.value, "id", "")
        elif isinstance(node, ast.Attribute) and node.attr not in _READS:
            yield getattr(node.value, "id", "")
