"""lock_on_lost="interrupt" in real workers: each pool runs bodies in a place of its own kind."""

import time

import pytest

from celery_syncguard import LeaseLost
from tests.fixtures import gate
from tests.fixtures.polling import poll

APP = "tests.acceptance.apps.interrupted"
POOLS = pytest.mark.parametrize(
    ("broker", "pool"),
    [("redis", "prefork"), ("rabbitmq", "solo"), ("redis", "threads"), ("rabbitmq", "gevent")],
    indirect=["broker"],
)


def take_away(guard, key):
    """As a takeover does: the row is not the holder's any more."""
    assert guard.release(key, lock_id=guard.inspect(key).lock_id)


@POOLS
def test_a_body_whose_lease_is_lost_is_interrupted_in_every_pool(celery_setup, broker, pg_dsn, history, guard, pool):
    """Under gevent a call that holds up the hub for longer than the ttl loses the lease, and is told so."""
    setup = celery_setup(APP)
    setup.start_worker(pool=pool)

    # In the middle of a sleep: at once where a signal or a hub can break it, in a thread when the call returns.
    seconds = 3 if pool == "threads" else 60
    result = setup.module.sleep_long.delay("a", seconds)
    poll(lambda: gate.is_open("in-a"), timeout=30)
    started = time.monotonic()
    take_away(guard, "a")
    with pytest.raises(LeaseLost) as caught:
        result.get(timeout=30)
    assert "the lease on 'a'" in str(caught.value)
    assert "its row is gone" in str(caught.value)
    assert history.count("lost", key="a") == 1
    assert time.monotonic() - started < 20

    # In the middle of a C call that nothing can break, longer than the ttl: as soon as it returns.
    result = setup.module.compute.delay("b", 4)
    poll(lambda: gate.is_open("in-b"), timeout=30)
    if pool != "gevent":
        take_away(guard, "b")
    with pytest.raises(LeaseLost):
        result.get(timeout=60)
    history.wait_for("refused", key="b")
    # The body would have gone on for another second.
    (lost,) = history.events("lost", key="b")
    assert float(lost.note) < 0.5
    assert history.count("written") == 0
    assert history.count("end") == 0

    # What comes after is not hit.
    for number in range(20):
        assert setup.module.quick.delay(f"c{number % 3}").get(timeout=30) > 0
    assert setup.module.plain.delay().get(timeout=30) > 0
    poll(lambda: not guard.locks())
