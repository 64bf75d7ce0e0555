"""Keys, lock ids and fences."""

from __future__ import annotations

import enum
import pickle
import re
import unicodedata

import pytest

from celery_syncguard import errors
from celery_syncguard.core.key import MAX_KEY_BYTES, Fence, new_lock_id, normalize_key, public_key, shortened, task_key
from celery_syncguard.guard import SyncGuard

#: Nothing listens there: whatever is refused with this dsn was refused before any I/O.
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=2"


@pytest.mark.parametrize(
    "key", ["a", "Invoice:7", "a b\n", "ключ", "🔒", "k" * 512, "é" * 256, "''; drop table x --", "%s"]
)
def test_text_of_up_to_512_bytes_is_a_key(key: str) -> None:
    assert normalize_key(key) == unicodedata.normalize("NFC", key)


def test_two_spellings_of_one_text_are_one_key() -> None:
    assert normalize_key("e\u0301") == normalize_key("\u00e9")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "empty"),
        ("k" * 513, "513"),
        ("é" * 257, "514"),
        ("a\0b", "NUL"),
        ("é\0", "NUL"),
        ("\ud800", "surrogate"),
        ("a\udcff", "surrogate"),
        (None, "NoneType"),
        (7, "int"),
        (b"bytes", "bytes"),
        (["a"], "list"),
        ("__syncguard_beat", "reserved"),
    ],
)
@pytest.mark.parametrize("entry", ["try_acquire", "hold"])
def test_what_cannot_be_a_key_is_refused_before_any_io(key: object, says: str, entry: str) -> None:
    """The error is clear, and a server that does not exist is not noticed."""
    with SyncGuard(NOWHERE) as guard, pytest.raises(errors.InvalidKey, match=says) as caught:
        if entry == "hold":
            with guard.hold(key):  # type: ignore[arg-type]
                pass
        else:
            guard.try_acquire(key)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_the_dsn_of_these_tests_leads_nowhere() -> None:
    """The control: with a good key the same call does reach for the server."""
    with SyncGuard(NOWHERE, timeout=0.2) as guard, pytest.raises(errors.StoreUnavailable) as caught:
        guard.try_acquire("good")
    assert caught.value.sent is False


def test_reserved_keys_may_be_looked_at() -> None:
    assert normalize_key("__syncguard_beat") == "__syncguard_beat"
    with SyncGuard("memory://") as guard:
        assert guard.inspect("__syncguard_beat") is None


def test_an_enum_that_is_text_is_its_value() -> None:
    class Kind(str, enum.Enum):
        REPORT = "report:daily"

    assert type(public_key(Kind.REPORT)) is str
    assert public_key(Kind.REPORT) == "report:daily"


def test_a_huge_key_makes_a_short_message() -> None:
    with pytest.raises(errors.InvalidKey) as caught:
        normalize_key("k" * 10_000_000)
    assert len(str(caught.value)) < 300


def test_lock_ids_are_22_base64url_characters_and_never_the_same() -> None:
    ids = {new_lock_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", one) for one in ids)


def test_a_fence_is_a_number_whose_text_sorts_like_it() -> None:
    fences = [Fence(number) for number in (0, 9, 10, 1_795_963_753_873, 900_000_000_000_000)]
    assert [str(fence) for fence in fences] == sorted(str(fence) for fence in fences)
    assert {len(str(fence)) for fence in fences} == {15}
    assert f"{fences[1]}" == "000000000000009"
    assert f"{fences[1]:d}" == "9"
    assert fences[1] + 1 == 10
    assert isinstance(pickle.loads(pickle.dumps(fences[2])), Fence)


def test_max_key_bytes_is_the_other_clients_limit() -> None:
    assert MAX_KEY_BYTES == 512


@pytest.mark.parametrize("character", ["k", "é", "任", "🔒", "e\u0301"])
def test_a_long_key_is_cut_between_characters_and_told_by_its_hash(character: str) -> None:
    for length in range(100, 700):
        key = character * length
        made = task_key(key)
        assert len(made.encode()) <= MAX_KEY_BYTES
        normal = unicodedata.normalize("NFC", key)
        if len(normal.encode()) <= MAX_KEY_BYTES:
            assert made == normal, "the TypeScript client's key for the same text"
        else:
            head, _, digest = made.rpartition("#")
            assert normal.startswith(head)
            assert re.fullmatch("[0-9a-f]{32}", digest)
            assert len(made.encode()) > MAX_KEY_BYTES - 4
            assert task_key(key) == made != task_key(key + "x")


def test_two_spellings_of_one_long_text_are_one_key() -> None:
    assert task_key("e\u0301" * 600) == task_key("\u00e9" * 600)


def test_what_is_no_key_for_another_reason_is_not_shortened() -> None:
    for key in ("\ud800" * 600, "a\0" * 600):
        assert shortened(key) == key
        with pytest.raises(errors.InvalidKey):
            task_key(key)
