"""Insides of other libraries are touched in one module per library, and importing ours never fails for one that is gone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import celery_syncguard
from celery_syncguard.core import libraries
from celery_syncguard.errors import ImproperlyConfigured

PACKAGE = Path(celery_syncguard.__file__).parent
CELERY, KOMBU, BILLIARD = (f"tasks/{name}_internals.py" for name in ("celery", "kombu", "billiard"))
PSYCOPG = "postgres/psycopg_internals.py"

#: Modules that their library does not document, with what is below them, and who may import them.
MODULES = {
    "amqp": KOMBU,
    "billiard": BILLIARD,
    "celery.app.trace": CELERY,
    "celery.app.utils": CELERY,
    "celery.apps": CELERY,
    "celery.backends": CELERY,
    "celery.concurrency": CELERY,
    "celery.local": CELERY,
    "celery.utils": CELERY,
    "celery.worker.state": CELERY,
    "kombu.transport": KOMBU,
    "kombu.utils.imports": KOMBU,
    "kombu.utils.objects": KOMBU,
    "psycopg._": PSYCOPG,
    "psycopg.generators": PSYCOPG,
    "psycopg.waiting": PSYCOPG,
    "vine": KOMBU,
}

#: Names that a library does not document, and where they may stand, as attributes, names, arguments or text.
NAMES = {
    CELERY: {
        "LocalTimezone",
        "_already_cancelled",
        "_already_revoked",
        "_call_task_errbacks",
        "_do_sync",
        "_orig_run",
        "_protected",
        "_retry_worker_lost",
        "event_t",
        "f_locals",
        "request_dict",
        "request_stack",
        "schedstate",
        "send_task_message",
        "task_has_custom",
    },
    KOMBU: {"MessageNacked", "basic_publish_confirm", "collect", "driver_name"},
    BILLIARD: {"ExceptionWithTraceback", "TERM_SIGNAL", "_parent_pid"},
    PSYCOPG: {"error_from_result", "wait_selector"},
    "postgres/adapters.py": {"_from_testcase", "_trans_context_manager"},
}


def modules() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))
    ]


def imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found


def named(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("attr", "id", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                found.add(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def strays(sources: list[tuple[str, ast.Module]]) -> list[str]:
    found = []
    for where, tree in sources:
        for module in imported(tree):
            for inside, home in MODULES.items():
                below = module.startswith(inside) if inside.endswith("_") else f"{module}.".startswith(f"{inside}.")
                if below and where != home:
                    found.append(f"{where} imports {module}")
        for home, names in NAMES.items():
            found += [f"{where}: {name}" for name in named(tree) & names if where != home]
    return sorted(found)


def test_insides_of_other_libraries_are_touched_in_one_module_each():
    assert strays(modules()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import billiard",
        "from celery.utils.threads import get_ident",
        "from celery import concurrency",
        "from psycopg import generators",
        "import psycopg._struct",
        "request._protected = 1",
        "getattr(request, '_already_revoked')",
        "def f(*, send_task_message): pass",
    ],
)
def test_a_stray_is_found(source):
    assert strays([("guard.py", ast.parse(source))]) != []


def test_every_home_uses_what_is_its_own():
    """So that a name which is gone does not stay in the list."""
    trees = dict(modules())
    texts = {home: (PACKAGE / home).read_text() for home in NAMES}
    assert {name for home, names in NAMES.items() for name in names if name not in texts[home]} == set()
    assert {home for home in MODULES.values() if home not in trees} == set()


#: What is looked up at run time only so that a process without it does not import it.
DOCUMENTED = {
    "celery.app.task",
    "celery.beat",
    "celery.schedules",
    "celery.schedules:schedule",
    "psycopg",
    "psycopg.errors",
}


def insides() -> list[str]:
    """Every path that is looked up at run time."""
    found = set()
    for where, tree in modules():
        if where.endswith("_internals.py"):
            found |= {name for name in named(tree) if re.fullmatch(r"[a-z]\w*(\.\w+)*:\w+(\.\w+)*", name)}
    found |= {path.partition(":")[0] for path in found} - {
        "celery.beat",
        "celery.schedules",
        "celery.app.task",
        "psycopg",
    }
    return sorted(
        found - DOCUMENTED | {"celery.utils.time", "psycopg:Connection.wait", "psycopg.generators", "psycopg.waiting"}
    )


IMPORTS = """
import importlib, os, pkgutil, sys, traceback
for name in ("celery.app.trace celery.backends.base celery.worker.request celery.worker.state celery.apps.beat celery.result "
             "celery.concurrency celery.schedules kombu amqp billiard.einfo billiard.process billiard.common psycopg psycopg_pool "
             "psycopg.generators psycopg.waiting").split():
    importlib.import_module(name)

def remove(path):
    module, _, attributes = path.partition(":")
    *owners, last = attributes.split(".") if attributes else module.split(".")
    if not attributes:
        sys.modules[module] = None
        owner = sys.modules[".".join(owners)]
    else:
        owner = sys.modules[module]
        for name in owners:
            owner = getattr(owner, name)
    delattr(owner, last)

for path in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            remove(path)
            import celery_syncguard
            for found in pkgutil.walk_packages(celery_syncguard.__path__, "celery_syncguard."):
                if not found.name.startswith("celery_syncguard.demo") and found.name != "celery_syncguard.beat.django_schedule":
                    importlib.import_module(found.name)
        except BaseException:
            print(path, traceback.format_exc(), flush=True)
            os._exit(1)
        os._exit(0)
    os.wait()
print(len(sys.argv) - 1, "removed")
"""


def test_importing_never_fails_for_an_inside_that_is_gone():
    paths = insides()
    assert len(paths) > 25
    done = subprocess.run([sys.executable, "-c", IMPORTS, *paths], capture_output=True, text=True, timeout=250)
    assert done.stdout == f"{len(paths)} removed\n", done.stdout + done.stderr


def test_what_is_there_and_none_is_there():
    libraries.require("celery", "celery.app.task:Task.request_stack")
    with pytest.raises(
        ImproperlyConfigured, match=r"celery-syncguard \S+ does not work with celery \S+ \(celery.nothing does"
    ):
        libraries.require("celery", "celery:nothing")
    assert libraries.find("celery.nothing") is libraries.find("nothing:at.all") is None
    assert "of unknown version" in str(libraries.unfit("no such library", "gone"))
