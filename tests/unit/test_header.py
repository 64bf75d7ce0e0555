"""The header of a message: one form to read and to write, and what a message of any sender may carry in it."""

from __future__ import annotations

import json

import pytest
from celery import Celery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_syncguard import LockedTask, errors
from celery_syncguard.tasks.arguments import _formatter
from celery_syncguard.tasks.header import _ENTRIES, HEADER, VERSION, Header

FULL = Header(
    lock_key="l",
    run_key="r",
    claim_key="c",
    call_id="call",
    claimed=True,
    fingerprint="f",
    options={"lock_ttl": 5},
    held=3,
    given=("key", "run"),
    serializer="json",
    unknown={"new": {"a": [1, None]}},
)


def read(**entries):
    return Header.of({HEADER: entries})


@pytest.fixture
def app():
    app = Celery("headers", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, syncguard_dsn="memory://")
    return app


@pytest.fixture
def task(app):
    @app.task(base=LockedTask, shared=False, lock_key="n:{n}", dedup_key="d:{n}", run_once="r:{n}")
    def body(n):
        return n

    return body


# --- one form ---------------------------------------------------------------------------------------------------------


def test_the_names_on_the_wire_are_these():
    """Messages of other versions and of other languages have them."""
    assert FULL.into(None)[HEADER] == {
        "v": 1,
        "key": "l",
        "run": "r",
        "claim": "c",
        "call": "call",
        "claimed": True,
        "print": "f",
        "options": {"lock_ttl": 5},
        "held": 3,
        "given": ["key", "run"],
        "serializer": "json",
        "new": {"a": [1, None]},
    }
    names = set(Header._fields)
    assert all(getattr(FULL, name) != getattr(Header(), name) for name in names - {"version"}), "an entry is not tested"


def test_the_table_of_entries_is_in_the_order_of_the_attributes():
    assert [attribute for attribute, _, _ in _ENTRIES.values()] == [
        name for name in Header._fields if name != "unknown"
    ]


def test_only_what_is_set_is_written():
    assert Header().into(None) == {HEADER: {"v": VERSION}}


def test_the_other_headers_stay_and_are_not_changed():
    headers = {"x-mine": 1, HEADER: {"key": "before"}}
    assert Header(lock_key="l").into(headers) == {"x-mine": 1, HEADER: {"v": 1, "key": "l"}}
    assert headers == {"x-mine": 1, HEADER: {"key": "before"}}


@pytest.mark.parametrize("headers", [None, {}, {"x-mine": 1}, {HEADER: None}, {HEADER: {}}, {HEADER: {"key": None}}])
def test_a_message_without_our_header_has_an_empty_one(headers):
    assert Header.of(headers) == Header()


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40).filter(
    lambda text: not text.startswith("__syncguard_")
)
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())
NAMES = st.text(max_size=8).filter(lambda name: name not in FULL.into(None)[HEADER])


def normal(text):
    return None if text is None else read(key=text).lock_key


# A machine that is busy with other things draws slowly.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Header,
        lock_key=(st.none() | KEYS).map(normal),
        run_key=(st.none() | KEYS).map(normal),
        claim_key=(st.none() | KEYS).map(normal),
        call_id=(st.none() | KEYS).map(normal),
        claimed=st.booleans(),
        fingerprint=(st.none() | KEYS).map(normal),
        options=st.dictionaries(st.text(), VALUES).filter(
            lambda options: not options.keys() & {"lock_key", "dedup_key", "run_once"}
        ),
        held=st.integers(min_value=0),
        given=st.lists(st.sampled_from(["key", "run", "claim"])).map(tuple),
        serializer=st.none() | st.text(min_size=1),
        version=st.just(VERSION),
        unknown=st.dictionaries(NAMES, VALUES),
    )
)
def test_what_was_written_is_read_again(header):
    sent = json.loads(json.dumps(header.into({"id": "t"})))
    assert Header.of(sent) == header
    assert Header.of(sent).into(sent) == sent


def test_a_header_is_not_changed_after_it_was_read():
    with pytest.raises(AttributeError):
        FULL.lock_key = "other"
    assert not hasattr(FULL, "__dict__")


def test_an_attempt_with_other_arguments_keeps_the_keys_that_were_given_and_no_other():
    after = FULL.for_other_arguments()
    assert after == FULL._replace(claim_key=None, claimed=False, fingerprint=None)
    assert FULL._replace(given=("claim",)).for_other_arguments().claim_key == "c"


def test_fingerprints_differ_if_both_are_known_and_not_the_same():
    assert FULL.differs("other")
    assert not FULL.differs("f")
    assert not FULL.differs(None)
    assert not Header().differs("f")


# --- versions ---------------------------------------------------------------------------------------------------------


def test_entries_of_a_newer_publisher_are_kept():
    header = read(key="k", priority_class=[1])
    assert header.unknown == {"priority_class": [1]}
    assert header._replace(held=1).into(None)[HEADER] == {
        "v": 1,
        "key": "k",
        "held": 1,
        "priority_class": [1],
    }


def test_a_higher_version_is_refused_before_its_entries_are_looked_at():
    with pytest.raises(errors.ImproperlyConfigured, match="version 2.*upgrade the workers before the publishers"):
        Header.of({HEADER: {"key": ["of", "another", "type"], "v": VERSION + 1}})


def test_a_message_of_a_higher_version_fails_its_task_and_ends_its_claim(app, task):
    """Of such a header, the claim alone is read."""
    sent = {HEADER: {"v": VERSION + 1, "claim": "c", "claimed": True}}
    assert Header.claim_in(sent) == "c"
    result = super(LockedTask, task).apply((7,), headers=sent)
    assert result.state == "FAILURE"
    assert "upgrade the workers" in str(result.result)


# --- hostile senders --------------------------------------------------------------------------------------------------

WRONG = [
    *[
        (entry, value, errors.InvalidKey)
        for entry in ("key", "run", "claim", "call", "print")
        for value in (5, ["a"], "")
    ],
    *[(entry, "x" * 5000, errors.InvalidKey) for entry in ("key", "run", "claim", "call", "print")],
    *[("key", value, errors.InvalidKey) for value in (True, b"k", "a\0", "\ud800", "__syncguard_leader:beat")],
    *[("claimed", value, errors.ImproperlyConfigured) for value in (None, 1, "yes", {})],
    *[("options", value, errors.ImproperlyConfigured) for value in (5, [], "zz", None, True)],
    *[("held", value, errors.ImproperlyConfigured) for value in (None, -1, True, 1.5, "1", [])],
    *[("given", value, errors.ImproperlyConfigured) for value in (None, "key", {"key": 1}, [1], [None])],
    *[("serializer", value, errors.ImproperlyConfigured) for value in (5, {}, b"json", True)],
    *[("v", value, errors.ImproperlyConfigured) for value in (None, 0, -1, True, "1", 1.0, [])],
]


@pytest.mark.parametrize(("entry", "value", "error"), WRONG, ids=lambda value: f"{value!r:.20}")
def test_an_entry_of_a_wrong_type_fails_the_task_with_the_entry_s_name(task, entry, value, error):
    with pytest.raises(error, match=f"{entry} in the header of a message") as raised:
        read(**{entry: value})
    assert len(str(raised.value)) < 250
    result = super(LockedTask, task).apply((7,), headers={HEADER: {entry: value}})
    assert (result.state, type(result.result)) == ("FAILURE", error)
    assert str(result.result) == str(raised.value)


@pytest.mark.parametrize("entries", [5, "zz", [], [("key", "k")], True])
def test_a_header_that_is_no_mapping_is_refused(entries):
    with pytest.raises(errors.ImproperlyConfigured, match="'syncguard' of a message is a mapping"):
        Header.of({HEADER: entries})


@pytest.mark.parametrize("headers", [None, {}, *({HEADER: entries} for entries in (None, 5, "zz", [], {"claim": "c"}))])
def test_a_claim_that_was_not_made_is_not_found(headers):
    assert Header.claim_in(headers) is None


@pytest.mark.parametrize(
    ("entry", "value"), [(entry, value) for entry, value, _ in WRONG if entry not in ("claim", "claimed")]
)
def test_the_claim_of_a_message_is_found_whatever_else_is_wrong_with_it(entry, value):
    assert Header.claim_in({HEADER: {"claim": "c", "claimed": True, entry: value}}) == "c"


@pytest.mark.parametrize("claim", [5, None, [], {}])
def test_what_is_no_text_is_no_claim_and_no_error(claim):
    assert Header.claim_in({HEADER: {"claim": claim, "claimed": True}}) is None


@pytest.mark.parametrize("name", ["lock_key", "dedup_key", "run_once"])
def test_a_template_is_the_tasks_and_never_the_messages(name):
    with pytest.raises(errors.InvalidKey, match="template"):
        read(options={name: "{n:99999999}"})


def test_a_template_from_a_message_would_make_a_text_of_any_size():
    """The negative control: what such a template does, whatever becomes of its text."""
    assert len(_formatter.format("{n:9999999}", n=1)) == 9_999_999


def test_what_publishers_really_send_is_accepted(task):
    carried = {"lock_ttl": 5, "lock_key": None, "dedup_key": True, "run_once": False}
    assert read(options=carried).options == carried
    _, options = task.task_keys().complete(task, read(options={"lock_ttl": 5}), (1,), {}, {})
    assert options.lock_ttl == 5.0


def test_a_template_given_per_call_is_one_of_the_publishers_code(task):
    assert task.apply((7,), lock_key="other:{n}").get() == 7


@pytest.mark.parametrize(("refused", "attempts"), [(True, 0), (False, 3)])
def test_a_message_that_cannot_be_read_is_not_retried(app, refused, attempts):
    """The next attempt could not be published with it. The control is a message that can be read."""
    ran = []

    @app.task(
        base=LockedTask,
        shared=False,
        lock_key="k",
        autoretry_for=(Exception,),
        retry_kwargs={"max_retries": 2, "countdown": 0},
    )
    def fails():
        ran.append(1)
        raise RuntimeError("in the body")

    result = fails.apply(headers={HEADER: {"key": 5 if refused else "own"}})
    assert result.state == "FAILURE"
    assert isinstance(result.result, errors.InvalidKey if refused else RuntimeError)
    assert len(ran) == attempts
