"""Keys, lock ids and fences: what may name a lock, and what identifies a lease.

Sources: kriasoft/syncguard's rules for keys (NFC, then 1 to 512 UTF-8 bytes), lock ids (16 random bytes, base64url
without padding) and fences (15 digits), so that its TypeScript client and this library agree on every row.
"""

from __future__ import annotations

import base64
import hashlib
import os
import unicodedata
from typing import Any

from celery_syncguard.errors import InvalidKey

MAX_KEY_BYTES = 512
RESERVED_PREFIX = "__syncguard_"


class Fence(int):
    """The number given with a lock. An `int`; `str(fence)` is the 15-digit form, which sorts as text too."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{int(self):015d}"

    def __repr__(self) -> str:
        return f"Fence({int(self)})"

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else int(self).__format__(spec)


def new_lock_id() -> str:
    """22 base64url characters that cannot be guessed: the proof that a lease is ours."""
    return base64.urlsafe_b64encode(os.urandom(16)).decode("ascii")[:22]


def normalize_key(key: Any, *, what: str = "key") -> str:
    """The key in the form that is stored: NFC-normalised text of 1 to 512 UTF-8 bytes.

    Raises:
        InvalidKey: not text, empty, too long, or with a NUL or a lone surrogate, which PostgreSQL cannot store.
    """
    if not isinstance(key, str):
        raise InvalidKey(f"a {what} is text, got {type(key).__name__}: {key!r:.80}", key=key)
    # Exactly text: drivers write the *name* of an enum that is also text, and its str() differs between Pythons.
    text = str.__str__(key)
    if text.isascii():
        size = len(text)
    else:
        text = unicodedata.normalize("NFC", text)
        try:
            size = len(text.encode())
        except UnicodeEncodeError as exc:
            raise InvalidKey(f"a {what} cannot contain a lone surrogate: {text!r:.80}", key=key) from exc
    if not size:
        raise InvalidKey(f"a {what} cannot be empty", key=key)
    if size > MAX_KEY_BYTES:
        raise InvalidKey(
            f"a {what} has at most {MAX_KEY_BYTES} UTF-8 bytes, this one has {size}: {text!r:.80}", key=key
        )
    if "\0" in text:
        raise InvalidKey(f"a {what} cannot contain NUL: {text!r:.80}", key=key)
    return text


def public_key(key: Any, *, what: str = "key") -> str:
    """`normalize_key`, which refuses with `InvalidKey` also the keys that start with `__syncguard_`, the library's own."""
    text = normalize_key(key, what=what)
    if text.startswith(RESERVED_PREFIX):
        raise InvalidKey(f"{what}s that start with {RESERVED_PREFIX!r} are reserved: {text!r:.80}", key=key)
    return text


def shortened(key: str) -> str:
    """The same text if it has at most 512 bytes; else its beginning, `#` and 32 digits of a hash of all of it.

    Text that PostgreSQL cannot store is returned as it is, and `normalize_key` refuses it.
    """
    if len(key) <= MAX_KEY_BYTES // 4:
        return key
    try:
        encoded = unicodedata.normalize("NFC", key).encode()
    except UnicodeEncodeError:
        return key
    if len(encoded) <= MAX_KEY_BYTES or b"\0" in encoded:
        return key
    digest = hashlib.sha256(encoded).hexdigest()[:32]
    # A character that would be cut in two is left out.
    return f"{encoded[: MAX_KEY_BYTES - 33].decode(errors='ignore')}#{digest}"


def task_key(key: Any, *, what: str = "key") -> str:
    """`public_key` of a text of any length, made from a task's arguments."""
    return public_key(shortened(key) if isinstance(key, str) else key, what=what)
