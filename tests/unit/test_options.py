"""The options of a task: declared once, the same everywhere, and refused when a name or a value is wrong."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from datetime import timedelta
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import pytest
from celery import Celery, Task
from kombu import Producer

from celery_syncguard import ImproperlyConfigured, LockedTask, LockOptions
from celery_syncguard.tasks import options
from celery_syncguard.tasks.options import DEFAULTS, OPTIONS, OptionDefaults, TaskOptions
from tests.fixtures.cluster import ROOT


@pytest.fixture
def app() -> Celery:
    app = Celery("options", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", broker_url="memory://")
    return app


def register(app: Celery, **given: Any) -> Any:
    @app.task(base=LockedTask, lazy=False, shared=False, name=f"task {len(app.tasks)}", **given)
    def f(argument: object) -> None:
        """Nothing runs it."""

    return f


def options_of(app: Celery, cls: type) -> TaskOptions:
    task = app.register_task(cls())
    task.bind(app)
    return task.task_keys().options


# One table


def without_class_var(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is ClassVar else hint


def test_the_class_the_call_and_the_checked_options_have_the_same_names_and_types() -> None:
    declared = {name: without_class_var(hint) for name, hint in get_type_hints(OptionDefaults).items()}
    assert declared == get_type_hints(LockOptions)
    assert list(declared) == [field.name for field in dataclasses.fields(TaskOptions)] == list(options._CHECKS)
    assert declared.keys() == OPTIONS


def test_every_option_is_seen_on_the_class_with_its_default_and_a_line_about_it() -> None:
    assert set(dir(LockedTask)) >= OPTIONS
    (tree,) = ast.parse(inspect.getsource(OptionDefaults)).body
    described = {
        row.target.id: text.value.value
        for row, text in itertools.pairwise(tree.body)
        if isinstance(row, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert described.keys() == OPTIONS
    durations = [name for name, hint in get_type_hints(OptionDefaults).items() if "timedelta" in str(hint)]
    assert len(durations) == 6
    assert not [name for name in durations if "econds" not in described[name]], "a unit is missing"


def test_the_defaults_pass_their_own_checks() -> None:
    given = {name: getattr(LockedTask, name) for name in OPTIONS - {"lock_key"}}
    assert DEFAULTS.replace(given) == DEFAULTS


def test_the_readme_s_table_has_the_names_and_the_defaults_of_the_class() -> None:
    table = (ROOT / "README.md").read_text().split("### Options of a task")[1].split("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, flags=re.MULTILINE))
    assert list(rows) == list(OptionDefaults.__annotations__)
    assert rows.pop("lock_key") == "required"
    words = {"none": None, "7 days": timedelta(days=7).total_seconds()}
    written = {name: words[text] if text in words else ast.literal_eval(text.strip("`")) for name, text in rows.items()}
    assert written == {name: getattr(LockedTask, name) for name in rows}


def test_a_checker_is_told_all_that_celery_s_and_kombu_s_documents_name_for_a_call() -> None:
    documented = set()
    for function in (Task.apply_async, Producer.publish):
        documented |= set(re.findall(r"^ +(\w+) \([^)]*\): ", inspect.getdoc(function) or "", flags=re.MULTILINE))
    assert {"countdown", "eta", "queue", "delivery_mode"} <= documented
    ours = inspect.signature(LockedTask.apply_async).parameters.keys() | options.CallOptions.__optional_keys__
    assert documented - ours == {"body"}


def test_no_name_of_celery_s_is_taken_for_a_misspelt_option() -> None:
    celerys = options.CeleryOptions.__optional_keys__ | set(dir(Task))
    assert [name for name in celerys if options._is_misspelt(name) or options._is_misspelt(name, is_code=True)] == []


# What is given and what is default


def test_what_any_class_but_the_table_says_is_given(app: Celery) -> None:
    """Also by a class that comes after `LockedTask`, whose default would hide it from `getattr`."""

    class Mixin:
        lock_ttl = 7
        lock_max_deaths = 3

    class First(Mixin, LockedTask):
        lock_key = "first"

        def run(self) -> None: ...

    class Last(LockedTask, Mixin):
        lock_key = "last"

        def run(self) -> None: ...

    class Neither(LockedTask):
        lock_key = "neither"

        def run(self) -> None: ...

    app.conf.syncguard_lock_ttl = 9
    assert [options_of(app, cls).lock_ttl for cls in (First, Last, Neither)] == [7, 7, 9]


def test_a_default_that_is_given_counts_as_given(app: Celery) -> None:
    app.conf.syncguard_lock_ttl = 9
    assert register(app, lock_key="f", lock_ttl=30).task_keys().options.lock_ttl == 30
    with pytest.raises(ImproperlyConfigured, match="lock_max_deaths needs a lock_key"):
        register(app, lock_key=None, lock_max_deaths=LockedTask.lock_max_deaths)
    register(app, lock_key=None)


def test_a_dataclass_may_hold_options(app: Celery) -> None:
    @dataclasses.dataclass
    class Shared:
        lock_ttl: float = 7
        lock_on_held: str = "skip"

    class Report(Shared, LockedTask):
        lock_key = "report"

        def run(self) -> None: ...

    found = options_of(app, Report)
    assert (found.lock_ttl, found.lock_on_held) == (7, "skip")
    with pytest.raises(ImproperlyConfigured, match="lock_ttl cannot be set"):
        Report(lock_ttl=9)


def test_celery_s_annotations_of_tasks_may_give_options(app: Celery) -> None:
    app.conf.task_annotations = {"*": {"lock_ttl": 7}}
    assert register(app, lock_key="f").task_keys().options.lock_ttl == 7
    app.conf.task_annotations = {"*": {"lock_ttl": "7"}}
    del app.annotations
    with pytest.raises(ImproperlyConfigured, match="lock_ttl is a number"):
        register(app, lock_key="g")


# Refused at registration

WRONG = {
    "lock_key": [7, True, b"k", ["k"]],
    "lock_ttl": ["30", None, True, 0, 1e9, [30], float("nan")],
    "lock_wait": ["0", None, False, -1, timedelta(days=2)],
    "lock_on_held": ["wait", None, True, "RETRY", ["retry"]],
    "lock_retry_delay": ["1", None, True, (5, 1), (1, 2, 3), ("1", "60"), (True, 60), 0],
    "lock_on_lost": ["stop", None, True],
    "lock_on_unavailable": ["skip", None, False],
    "lock_min_hold": ["1", None, True, -1],
    "lock_max_deaths": ["5", None, True, 0, 5.0],
    "dedup_key": [7, b"k"],
    "dedup_until": ["later", None, True],
    "dedup_ttl": ["3600", None, True, 0],
    "dedup_on_duplicate": ["skip", None, True],
    "run_once": [1, b"k"],
    "run_once_ttl": ["1", None, True, 0],
}


def test_every_option_has_wrong_values_here() -> None:
    assert WRONG.keys() == OPTIONS


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_at_registration_and_for_a_call(app: Celery, name: str, value: object) -> None:
    with pytest.raises(ImproperlyConfigured, match=rf"^f: {name}.* (got|is a|is one of|is between) "):
        register(app, **{"lock_key": "f", name: value})
    task = register(app, lock_key="f")
    with pytest.raises(ImproperlyConfigured, match=rf"^apply_async: {name}"):
        task.apply_async(("a",), **{name: value})


def test_an_option_that_is_a_property_is_refused(app: Celery) -> None:
    class Report(LockedTask):
        @property
        def lock_key(self) -> str:
            return "report"

        def run(self) -> None: ...

    with pytest.raises(ImproperlyConfigured, match="lock_key is a template, a callable or None, got property"):
        app.register_task(Report())


MISSPELT = [
    ("lock_tll", 5, "lock_ttl"),
    ("lokc_ttl", 5, "lock_ttl"),
    ("lockttl", 5, "lock_ttl"),
    ("lock_on_hold", "skip", "lock_on_held"),
    ("dedupe_key", "k", "dedup_key"),
    ("runonce", True, "run_once"),
    ("run_once_tll", 5, "run_once_ttl"),
    ("dedup_keys", lambda task, args, kwargs: "k", "dedup_key"),
    ("dedup_kye", staticmethod(lambda task, args, kwargs: "k"), "dedup_key"),
    ("run_onec", property(lambda self: "k"), "run_once"),
]


@pytest.mark.parametrize(("name", "value", "meant"), MISSPELT, ids=[name for name, _, _ in MISSPELT])
def test_a_misspelt_option_is_refused_with_a_suggestion(app: Celery, name: str, value: object, meant: str) -> None:
    complaint = rf"unknown option {name}; did you mean '{meant}'\?"
    with pytest.raises(ImproperlyConfigured, match="^f: " + complaint):
        register(app, **{"lock_key": "f", name: value})
    task = register(app, lock_key="f")
    with pytest.raises(ImproperlyConfigured, match="^apply_async: " + complaint):
        task.apply_async(("a",), **{name: value})


def test_methods_and_attributes_of_the_task_s_own_are_none_of_ours(app: Celery) -> None:
    class Transfer(LockedTask):
        lock_key = "transfer"
        locks = ("a", "b")
        dedup = False
        ledger = "main"

        def lock_accounts(self) -> None: ...

        @property
        def run_once_a_day(self) -> bool:
            return True

        def run(self) -> None: ...

    assert options_of(app, Transfer).lock_key == "transfer"


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_that_is_set_too_late_is_refused(app: Celery, name: str) -> None:
    """It would be ignored: options are read from the class."""
    task = register(app, lock_key="f")
    with pytest.raises(
        ImproperlyConfigured, match=rf"{name} cannot be set on a task that exists.*apply_async\({name}="
    ):
        setattr(task, name, "another")
    task.max_retries = 5
