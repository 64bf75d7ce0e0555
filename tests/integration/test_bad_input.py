"""What cannot be meant is refused at the front door, before a connection is opened.

The dsn leads to a listener that notes who comes.
"""

import math
import socket
from datetime import timedelta

import pytest

from celery_syncguard import SyncGuard, errors

BAD_TTLS = [
    0,
    -1,
    -0.001,
    0.49,
    math.nan,
    math.inf,
    -math.inf,
    1e9,
    10**400,
    timedelta(0),
    timedelta(days=2),
    "30",
    True,
]
BAD_WAITS = [-1, math.nan, math.inf, 1e9, timedelta(seconds=-1), "30", True]
BAD_KEYS = ["", "a\0b", "\ud800", "k" * 513, 7, b"k", "__syncguard_x"]


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as one:
        one.setblocking(False)
        yield one


@pytest.fixture
def guard(listener):
    address = f"postgresql://somebody@127.0.0.1:{listener.getsockname()[1]}/nowhere"
    with SyncGuard(address, timeout=0.3) as one:
        yield one


def nobody_came(listener):
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return True
    connection.close()
    return False


CALLS = [
    *[("try_acquire", "k", {"ttl": ttl}, errors.ImproperlyConfigured, "ttl is") for ttl in BAD_TTLS],
    *[("hold", "k", {"ttl": ttl}, errors.ImproperlyConfigured, "ttl is") for ttl in BAD_TTLS],
    *[("hold", "k", {"wait": wait}, errors.ImproperlyConfigured, "wait is") for wait in BAD_WAITS],
    *[("try_acquire", key, {}, errors.InvalidKey, "key") for key in BAD_KEYS],
    *[("hold", key, {}, errors.InvalidKey, "key") for key in BAD_KEYS],
    ("try_acquire", "k", {"holder": 7}, errors.ImproperlyConfigured, "holder is text"),
]


@pytest.mark.parametrize(("call", "key", "arguments", "error", "message"), CALLS, ids=lambda value: f"{value!r:.30}")
def test_bad_input_is_a_clear_error_and_no_connection(guard, listener, call, key, arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        if call == "hold":
            with guard.hold(key, **arguments):
                pytest.fail("it was accepted")
        else:
            guard.try_acquire(key, **arguments)
    assert "between" in str(caught.value) or "got" in str(caught.value) or error is errors.InvalidKey
    assert nobody_came(listener)


@pytest.mark.parametrize("call", ["try_acquire", "hold"])
def test_good_input_does_lead_to_the_listener(guard, listener, call):
    """The control: there a connection is tried, and the error is about that."""
    with pytest.raises(errors.StoreUnavailable):
        if call == "hold":
            with guard.hold("k", ttl=30, wait=0.1):
                pytest.fail("it was granted")
        else:
            guard.try_acquire("k", ttl=0.5)
    assert not nobody_came(listener)
