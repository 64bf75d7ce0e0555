"""Keys of tasks: computed once, when the message is published, equal for all forms of a call, and refused clearly."""

import datetime
import decimal
import enum
import functools
import inspect
import json
import uuid
import zoneinfo

import pytest
from asgiref.sync import async_to_sync
from celery import Celery, Task
from kombu.exceptions import EncodeError

from celery_syncguard import ImproperlyConfigured, InvalidKey, LockedTask
from celery_syncguard.dedup import send_task
from celery_syncguard.tasks import app_state
from celery_syncguard.tasks.header import Header


@pytest.fixture
def app():
    app = Celery("keys", broker="memory://", set_as_current=False)
    app.conf.update(syncguard_dsn="memory://", task_default_queue=uuid.uuid4().hex)
    app.task = functools.partial(app.task, shared=False)
    yield app
    app.close()


def published(app):
    """The messages in the queue: (headers, arguments)."""
    found = []
    with app.connection_for_read() as connection, connection.SimpleQueue(app.conf.task_default_queue) as queue:
        while queue.qsize():
            message = queue.get_nowait()
            message.ack()
            message.accept = ["application/json", "application/x-python-serialize"]
            found.append((message.headers, message.decode()))
    return found


def published_keys(app):
    return [headers["syncguard"]["key"] for headers, _ in published(app)]


def eager(app):
    """Run tasks here and now; answers with the keys that are locked while a body asks."""
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True
    guard = app_state.guard_for(app)
    return lambda: [row.key for row in guard.locks()]


class Colour(enum.Enum):
    RED = "red"


def test_positional_keyword_and_default_forms_of_a_call_make_one_key(app):

    @app.task(base=LockedTask, lock_key="f:{a}:{b}")
    def f(a, b=2, *, c=None):
        """Nothing runs it."""

    for args, kwargs in [((1,), {}), ((1, 2), {}), ((), {"a": 1}), ((), {"b": 2, "a": 1}), ((1,), {"c": 5})]:
        f.apply_async(args, kwargs)
    assert published_keys(app) == ["f:1:2"] * 5


def test_a_key_without_arguments_is_one_lock_for_the_task(app):
    """ "name only" """

    @app.task(base=LockedTask, lock_key="nightly {{sic}}")
    def f(a):
        """Nothing runs it."""

    f.delay(1)
    f.delay(2)
    assert published_keys(app) == ["nightly {sic}"] * 2


@pytest.mark.parametrize("kind", ["bound", "unbound", "class", "class with __init__", "static run", "variadic"])
def test_neither_self_nor_its_address_is_part_of_a_key(app, kind):

    def register():
        options = {"base": LockedTask, "lock_key": "f:{a}"}

        def bound(self, a):
            seen.append(locked())

        def unbound(a):
            seen.append(locked())

        def variadic(*_, **kwargs):
            seen.append(locked())

        functions = {"bound": bound, "unbound": unbound, "variadic": variadic}
        if kind in functions:
            return app.task(name="f", bind=kind == "bound", **options)(functions[kind])

        class Plain(LockedTask):
            name = "f"
            lock_key = "f:{a}"

            def run(self, a):
                seen.append(locked())

        class WithInit(Plain):
            def __init__(self):
                self.seen = seen

            def run(self, a):
                self.seen.append(locked())

        class Static(LockedTask):
            name = "f"
            lock_key = "f:{a}"

            @staticmethod
            def run(a):
                seen.append(locked())

        return app.register_task({"class": Plain, "class with __init__": WithInit, "static run": Static}[kind]())

    seen = []
    locked = eager(app)
    task = register()
    task.delay(a=7)
    assert seen == [["f:7"]]
    assert locked() == []
    if kind != "variadic":
        task.apply_async([7])
        assert seen == [["f:7"]] * 2


@pytest.mark.parametrize(
    "value",
    [
        uuid.UUID(int=7),
        decimal.Decimal("1.10"),
        datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
        datetime.datetime(2026, 1, 2),  # noqa: DTZ001 - naive is the case
        datetime.date(2026, 1, 2),
        b"bytes",
        float("nan"),
        float("inf"),
        "ünï",
        (1, (2, [3])),
        {"b": [uuid.UUID(int=1), None], "a": (True,)},
        None,
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("option", ["lock_key", "dedup_key"])
def test_a_key_is_the_same_before_and_after_the_serializer(app, value, option):
    """What a worker computes for a message without our header is what the publisher would have."""
    template = "{value}" if option == "lock_key" else True

    @app.task(base=LockedTask, bind=True, lock_key=None, **({} if option == "lock_key" else {"dedup_key": True}))
    def f(self, value):
        """Nothing runs it."""

    overrides = {"lock_key": template} if option == "lock_key" else {}
    before, _ = f.task_keys().complete(f, Header(), (value,), {}, overrides)
    app.send_task(f.name, [value])
    ((headers, (args, kwargs, _)),) = published(app)
    assert "syncguard" not in headers
    after, _ = f.task_keys().complete(f, Header(), args, kwargs, overrides)
    assert before.lock_key or before.claim_key
    assert before == after


def test_an_enum_counts_by_its_value_and_what_cannot_be_sent_is_refused_as_it_would_be(app):

    @app.task(base=LockedTask, lock_key="{value}")
    def f(value):
        """Nothing runs it."""

    @app.task(base=LockedTask, lock_key=None, dedup_key=True)
    def g(value):
        """Nothing runs it."""

    header, _ = f.task_keys().complete(f, Header(), (Colour.RED,), {}, {})
    assert header.lock_key == "red"
    for value in [object(), {1, 2, object()}]:
        with pytest.raises(EncodeError):
            g.delay(value)
    assert published(app) == []


def test_dict_order_does_not_matter_and_a_body_may_change_its_arguments(app):
    keys = []
    locked = eager(app)

    @app.task(base=LockedTask, lock_key="{payload[x]}", dedup_key=True)
    def f(payload):
        keys.append(locked())
        payload.pop("x")
        payload["y"] = object

    for payload in [{"x": 1, "z": 2}, {"z": 2, "x": 1}]:
        result = f.delay(payload)
        # The claim of the first is gone, although the arguments that made it are.
        assert result.successful()
        assert not result.duplicate
    assert keys == [["1"], ["1"]]
    assert locked() == []


def test_a_callable_makes_the_key_from_the_task_and_its_arguments(app):
    def by_customer(task, args, kwargs):
        return f"{task.name}:{args[0]['customer']}"

    class Base(LockedTask):
        abstract = True

        def lock_key(self, args, kwargs):
            return f"method:{args[0]['customer']}"

    @app.task(base=LockedTask, name="f", lock_key=by_customer)
    def f(order):
        """Nothing runs it."""

    @app.task(base=Base, name="g")
    def g(order):
        """Nothing runs it."""

    f.delay({"customer": 7})
    g.delay({"customer": 8})
    assert published_keys(app) == ["f:7", "method:8"]


def test_keys_and_options_of_one_call_travel_in_the_message(app):
    @app.task(base=LockedTask, lock_key="f:{a}")
    def f(a):
        """Nothing runs it."""

    f.apply_async([1], lock_key="g:{a}", lock_ttl=datetime.timedelta(seconds=9), lock_on_held="skip")
    f.s(2).set(lock_key="h:{a}", lock_wait=3).delay()
    f.apply_async([3], lock_key=lambda task, args, kwargs: f"callable:{args[0]}", headers={"mine": 1})
    f.apply_async([4], lock_key=None)
    headers = [one for one, _ in published(app)]
    assert [(one["syncguard"].get("key"), one["syncguard"].get("options")) for one in headers] == [
        ("g:1", {"lock_ttl": 9.0, "lock_on_held": "skip"}),
        ("h:2", {"lock_wait": 3}),
        ("callable:3", None),
        (None, {"lock_key": None}),
    ]
    assert headers[2]["mine"] == 1
    json.dumps(headers)


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("x" * 513 + "\0", "512"),
        ("a\ud800b", "surrogate"),
        ("__syncguard_beat", "reserved"),
        (7, "not text"),
        (None, "not text"),
        (b"bytes", "not text"),
    ],
    ids=["empty", "NUL", "long, with NUL", "surrogate", "reserved", "number", "none", "bytes"],
)
def test_a_key_that_cannot_be_is_refused_before_anything_is_sent(app, key, complaint):
    @app.task(base=LockedTask, lock_key=lambda task, args, kwargs: key)
    def f():
        """Nothing runs it."""

    with pytest.raises(InvalidKey, match=complaint):
        f.delay()
    assert published(app) == []


def test_arguments_that_do_not_make_a_key_are_refused_before_anything_is_sent(app):
    @app.task(base=LockedTask, lock_key="{order[customer]}:{order[n]:03d}")
    def f(order):
        """Nothing runs it."""

    for args in [[{}], [{"customer": 1, "n": "text"}], [None], [], [1, 2]]:
        with pytest.raises((InvalidKey, TypeError)):
            f.apply_async(args)
    with pytest.raises(TypeError, match="list or tuple"):
        f.apply_async("text")
    assert published(app) == []
    f.delay({"customer": 1, "n": 7})
    assert published_keys(app) == ["1:007"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lock_key": "f:{b}"}, "uses 'b', but the task takes argument"),
        ({"lock_key": "f:{argumen}"}, "did you mean 'argument'"),
        ({"lock_key": "f:{}"}, "name the argument"),
        ({"lock_key": "f:{0}"}, "name the argument"),
        ({"lock_key": "f:{"}, "not a format string"),
        ({"lock_key": ""}, "empty"),
        ({"lock_key": 7}, "a template, a callable or None"),
        ({}, "needs lock_key"),
        ({"lock_key": "f", "lock_tll": 5}, "did you mean 'lock_ttl'"),
        ({"lock_key": "f", "lock_ttl": 0}, "lock_ttl"),
        ({"lock_key": "f", "lock_ttl": -1}, "lock_ttl"),
        ({"lock_key": "f", "lock_ttl": float("nan")}, "lock_ttl"),
        ({"lock_key": "f", "lock_ttl": float("inf")}, "lock_ttl"),
        ({"lock_key": "f", "lock_ttl": 1e12}, "lock_ttl"),
        ({"lock_key": "f", "lock_ttl": "30"}, "lock_ttl"),
        ({"lock_key": "f", "lock_ttl": True}, "lock_ttl"),
        ({"lock_key": "f", "lock_ttl": 0.01}, "lock_ttl"),
        ({"lock_key": "f", "lock_wait": -1}, "lock_wait"),
        ({"lock_key": "f", "lock_on_held": "ignore"}, "lock_on_held is one of"),
        ({"lock_key": "f", "lock_retry_delay": (5, 1)}, "lock_retry_delay"),
        ({"lock_key": "f", "lock_max_deaths": 0}, "lock_max_deaths"),
        ({"lock_key": None, "lock_min_hold": 5}, "lock_min_hold needs a lock_key"),
        (
            {"lock_key": "f", "lock_on_held": "skip", "dedup_key": "f", "dedup_until": "start"},
            "would skip the run that has to see what changed.*: use",
        ),
        (
            {"run_once": "f", "dedup_key": "f", "dedup_until": "start"},
            "would answer the run that has to see what changed.*: use",
        ),
        ({"lock_key": None, "lock_max_deaths": 3}, "lock_max_deaths needs a lock_key or run_once"),
        ({"dedup_key": "f", "lock_max_deaths": 3}, "lock_max_deaths needs a lock_key or run_once"),
        ({"lock_key": "f", "dedup_until": "later"}, "dedup_until is one of"),
        ({"lock_key": "f", "run_once_ttl": 0}, "run_once_ttl"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_meant_is_refused_when_the_task_is_registered(app, options, complaint):
    with pytest.raises(ImproperlyConfigured, match=complaint):

        @app.task(base=LockedTask, lazy=False, **options)
        def f(argument):
            """Nothing runs it."""


def test_an_option_that_cannot_be_meant_is_refused_when_it_is_given_for_a_call(app):
    @app.task(base=LockedTask, lock_key="f")
    def f(argument):
        """Nothing runs it."""

    for options, complaint in [
        ({"lock_tll": 5}, "did you mean 'lock_ttl'"),
        ({"lock_ttl": 0}, "lock_ttl"),
        ({"lock_key": "{arg}"}, "but the task takes argument"),
        ({"lock_on_held": "wait"}, "is one of"),
        ({"dedup_kye": "x"}, "did you mean 'dedup_key'"),
    ]:
        with pytest.raises(ImproperlyConfigured, match=complaint):
            f.apply_async([1], **options)
        with pytest.raises(ImproperlyConfigured, match=complaint):
            f.s(1).set(**options).apply_async()
        with pytest.raises(ImproperlyConfigured, match=complaint):
            f.apply([1], **options)
    assert published(app) == []


def test_a_plain_task_takes_none_of_our_options(app):
    """The negative control: what Celery does with an option that nobody understands."""

    @app.task(base=Task, lock_key="f")
    def f(argument):
        """Nothing runs it."""

    f.delay(1)
    assert "syncguard" not in published(app)[0][0]


# What a decorator does to the parameters


def injects(function):
    """As a decorator does that opens a session."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function("the session", *args, **kwargs)

    return wrapper


def injects_after_the_task(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, "the session", *args, **kwargs)

    return wrapper


def injects_by_setting(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        args = ("the session", *args)
        return function(*args, **kwargs)

    return wrapper


def injects_by_partial(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return functools.partial(function, "the session")(*args, **kwargs)

    return wrapper


def injects_by_a_function_within(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        def attempt(*args, **kwargs):
            return function(*args, **kwargs)

        return attempt("the session", *args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "decorator",
    [injects, injects_after_the_task, injects_by_setting, injects_by_partial, injects_by_a_function_within],
)
@pytest.mark.parametrize("required", [True, False])
def test_an_argument_that_a_decorator_puts_in_shifts_no_key(app, decorator, required):
    def with_required(session, account):
        """Nothing runs it."""

    def with_default(session, account=None):
        """Nothing runs it."""

    def bound(self, session, account=None):
        """Nothing runs it."""

    bind = decorator is injects_after_the_task
    function = bound if bind else with_required if required else with_default
    f = app.task(base=LockedTask, bind=bind, name="sync", lock_key="sync:{account}")(decorator(function))
    for account in (1, 2):
        with pytest.raises(
            InvalidKey, match="'account' was not given by its name.*as a keyword argument, or make lock_key a"
        ):
            f.delay(account)
    f.delay(account=1)
    f.delay(account=2)
    assert published_keys(app) == ["sync:1", "sync:2"]


def test_bound_to_the_function_inside_such_arguments_would_make_one_key(app, monkeypatch):
    """The negative control: by the signature that `functools.wraps` shows."""
    monkeypatch.setattr("celery_syncguard.tasks.body._hands_on", lambda wrapper: True)

    @app.task(base=LockedTask, name="sync", lock_key="sync:{account}")
    @injects
    def f(session, account=None):
        """Nothing runs it."""

    f.delay(1)
    f.delay(2)
    assert published_keys(app) == ["sync:None"] * 2


def test_a_decorator_that_shows_another_signature_than_it_has_is_not_looked_into(app):
    def narrows(function):
        @functools.wraps(function)
        def wrapper(n):
            return function(n)

        wrapper.__signature__ = inspect.signature(lambda *args, **kwargs: None)
        return wrapper

    @app.task(base=LockedTask, lock_key="f:{n}", lazy=False)
    @narrows
    def f(n):
        """Does not run."""

    f.delay(n=1)
    assert published_keys(app) == ["f:1"]


def test_a_decorator_s_own_parameters_are_those_of_the_task(app):
    def injects_and_names(function):
        @functools.wraps(function)
        def wrapper(account, region="eu"):
            return function("the session", account, region)

        return wrapper

    @app.task(base=LockedTask, lock_key="sync:{account}:{region}")
    @injects_and_names
    def f(session, account, region):
        """Nothing runs it."""

    f.delay(1)
    f.delay(2, "us")
    assert published_keys(app) == ["sync:1:eu", "sync:2:us"]


def hands_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if kwargs.get("dry"):
            return None
        return function(*args, **kwargs)

    return wrapper


def hands_on_with_the_task(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapper


@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("kind", ["hands on", "twice", "with the task", "Django's atomic", "pydantic"])
def test_a_decorator_that_hands_its_arguments_on_changes_no_key(app, bind, kind):
    from django.db import transaction

    def unbound(account, region="eu"):
        """Nothing runs it."""

    def bound(self, account, region="eu"):
        """Nothing runs it."""

    if kind == "with the task" and not bind:
        return
    options = {"pydantic": True} if kind == "pydantic" else {}
    decorate = {
        "hands on": hands_on,
        "twice": lambda function: hands_on(hands_on(function)),
        "with the task": hands_on_with_the_task,
        "Django's atomic": transaction.atomic,
        "pydantic": lambda function: function,
    }[kind]
    f = app.task(base=LockedTask, bind=bind, lock_key="sync:{account}:{region}", **options)(
        decorate(bound if bind else unbound)
    )
    f.delay(1)
    f.delay(1, "us")
    f.delay(region="us", account=2)
    assert published_keys(app) == ["sync:1:eu", "sync:1:us", "sync:2:us"]


# One form of the arguments


class Text(str):
    __slots__ = ()


SENT_IN_ANOTHER_FORM = [
    (1, 2),
    [(1, 2)],
    {1: "a", None: "b"},
    {"a": (1, (2,))},
    datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
    datetime.date(2026, 1, 2),
    decimal.Decimal("1.10"),
    uuid.UUID(int=7),
    Text("text"),
    True,
    1.5,
]


@pytest.mark.parametrize("value", SENT_IN_ANOTHER_FORM, ids=repr)
@pytest.mark.parametrize("serializer", ["json", "pickle", None])
def test_a_key_is_the_same_for_every_attempt_and_every_way_to_publish(app, value, serializer):
    def compare(source):
        @app.task(base=LockedTask, bind=True, lazy=False, name=f"f {source}", lock_key=source)
        def f(self, n):
            """Nothing runs it."""

        options = {"serializer": serializer} if serializer else {}
        f.apply_async([value], **options)
        ((headers, (args, kwargs, _)),) = published(app)
        keys = [headers["syncguard"]["key"]]
        # A retry with other arguments, back to these. In a worker the request has what came with the message.
        f.push_request(id="t", args=["other"], kwargs={}, headers=headers, called_directly=False, delivery_info={})
        for given in ([value], args):
            keys.append(f.signature_from_request(args=tuple(given)).options["headers"]["syncguard"]["key"])
        f.pop_request()
        # Sent by name, without our header.
        app.send_task(f.name, [value], **options)
        ((_, (args, kwargs, _)),) = published(app)
        header, _ = f.task_keys().complete(f, Header(serializer=serializer), tuple(args), kwargs, {})
        keys.append(header.lock_key)
        assert len(set(keys)) == 1, keys

    compare(lambda task, args, kwargs: f"x:{args}:{kwargs}")
    compare("x:{n!r}")
    compare("x:{n}")


def test_without_the_serializer_s_form_attempts_differ(app, monkeypatch):
    """The negative control."""
    monkeypatch.setattr("celery_syncguard.tasks.keys.as_sent", lambda args, kwargs, serializer: (args, kwargs))

    @app.task(base=LockedTask, lock_key=lambda task, args, kwargs: f"x:{args[0]}")
    def f(n):
        """Nothing runs it."""

    f.delay((1, 2))
    ((headers, (args, kwargs, _)),) = published(app)
    again, _ = f.task_keys().complete(f, Header(), tuple(args), kwargs, {})
    assert (headers["syncguard"]["key"], again.lock_key) == ("x:(1, 2)", "x:[1, 2]")


def test_plain_arguments_are_not_serialized_for_their_key(app, monkeypatch):
    @app.task(base=LockedTask, lock_key=lambda task, args, kwargs: f"x:{args}:{kwargs}")
    def f(*args, **kwargs):
        """Nothing runs it."""

    monkeypatch.setattr("celery_syncguard.tasks.arguments.serialization.dumps", lambda *args, **kwargs: 1 / 0)
    header, _ = f.task_keys().complete(f, Header(), (1, "a", None, 1.5, True), {"n": 2}, {})
    assert header.lock_key == "x:(1, 'a', None, 1.5, True):{'n': 2}"


# Long keys


LONG = "https://example.org/" + "é" * 600


def test_a_key_that_is_too_long_keeps_its_beginning_and_the_difference(app):
    options = {"lock_key": "{url}", "dedup_key": lambda task, args, kwargs: args[0], "run_once": "{url}"}

    @app.task(base=LockedTask, **options)
    def f(url):
        """Nothing runs it."""

    f.delay(LONG)
    f.delay(LONG + "1")
    first, second = (headers["syncguard"] for headers, _ in published(app))
    assert first["key"] == first["claim"] == first["run"]
    assert first["key"] != second["key"]
    assert first["key"].startswith(LONG[:240])
    assert all(500 < len(header["key"].encode()) <= 512 for header in (first, second))
    # A producer that has not the code, and gives what the task would make.
    send_task(app, f.name, [LONG], lock_key=LONG, dedup_key="other")
    assert published_keys(app) == [first["key"]]


def test_a_task_s_name_may_be_long_too(app):
    @app.task(base=LockedTask, lock_key=None, dedup_key=True, name="任務" * 150)
    def f(n):
        """Nothing runs it."""

    f.delay(1)
    f.delay(2)
    claims = [headers["syncguard"]["claim"] for headers, _ in published(app)]
    assert len(set(claims)) == 2
    assert claims[0].startswith("任務" * 33)


def test_a_long_run_key_makes_a_lock_of_its_own(app):
    keys = []
    locked = eager(app)

    @app.task(base=LockedTask, run_once="{url}")
    def f(url):
        keys.extend(locked())

    for url in ("x" * 511 + "1", "x" * 511 + "2"):
        f.delay(url)
    assert len(set(keys)) == 2


def test_a_body_that_shows_no_parameters_needs_keyword_arguments(app):
    """Django's `async_to_sync`, for example."""

    class T(LockedTask):
        name = "t"
        lock_key = "sync:{account}"

        @async_to_sync
        async def run(self, account):
            """Nothing runs it."""

    f = app.register_task(T())
    f.delay(account=1)
    assert published_keys(app) == ["sync:1"]
    with pytest.raises(InvalidKey, match="as a keyword argument"):
        f.delay(1)
