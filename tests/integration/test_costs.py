"""What each thing costs, counted on the wire: requests to PostgreSQL, and bytes in its log. No clock is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.rig import application, loop
from celery_syncguard import Lease, LockedTask, SyncGuard
from celery_syncguard.tasks import app_state
from tests.fixtures.polling import poll
from tests.fixtures.proxy import Proxy
from tests.fixtures.servers import PostgresServer


class Meter(Proxy):
    """Says what a piece of work costs."""

    def cost(self, work: Callable[[], object]) -> int:
        before = self.requests
        work()
        return self.requests - before


@pytest.fixture
def meter(pg_server: Any) -> Iterator[Meter]:
    with Meter(pg_server.port) as proxy:
        yield proxy


def body(number: int) -> None:
    """Nothing is the least that a task can do."""


@pytest.mark.parametrize(
    ("options", "round_trips"),
    [
        ({"lock_key": "{number}"}, 2),
        ({"lock_key": "{number}", "run_once": True}, 2),
        ({"lock_key": "{number}", "dedup_key": "{number}"}, 4),
        ({"lock_key": "{number}", "dedup_key": "{number}", "run_once": True}, 4),
        ({"dedup_key": "{number}"}, 3),
        ({"lock_key": None}, 0),
    ],
    ids=["lock", "lock + run_once", "lock + dedup", "all three", "dedup", "nothing"],
)
def test_from_publish_to_end_a_lock_costs_two_round_trips_and_dedup_two_more(
    meter: Meter, pg_dsn: str, options: dict[str, Any], round_trips: int
) -> None:
    """A message of its own and a run as a worker's. What a worker confirms again is not waited for, so not counted here."""
    app = application(meter.dsn(pg_dsn))
    with loop(app) as worker:
        task = app.task(base=LockedTask, shared=False, name="work", **options)(body)
        call = worker.call(task)
        for _ in range(3):
            call()  # connects, and prepares its statements
        outbox = app_state.guard_for(app).outbox
        outbox.flush()
        outbox._loop.stop()
        outbox.start = lambda: None  # whatever it sends is none of this
        assert [meter.cost(call) for _ in range(5)] == [round_trips] * 5


def test_a_held_attempt_costs_one_round_trip(meter: Meter, pg_dsn: str) -> None:
    app = application(meter.dsn(pg_dsn))
    with loop(app) as worker, SyncGuard(pg_dsn) as other:
        task = app.task(base=LockedTask, shared=False, name="work", lock_key="taken", lock_on_held="skip")(body)
        call = worker.call(task)
        for _ in range(3):
            call()
        assert meter.cost(call) == 2, "the control: it can run"
        with other.hold("taken"):
            assert [meter.cost(call) for _ in range(5)] == [1] * 5


def test_a_held_attempt_writes_no_byte_to_the_log(private_pg: PostgresServer, private_dsn: str) -> None:
    def written(guard: SyncGuard, work: Callable[[], object]) -> int:
        """The least of some tries: the server's own processes write a little now and then."""
        return min(_written(private_pg, work) for _ in range(5))

    numbers = itertools.count()
    with SyncGuard(private_dsn) as guard, SyncGuard(private_dsn) as other, other.hold("taken"):
        assert guard.try_acquire("taken") is None
        assert written(guard, lambda: [guard.try_acquire("taken") for _ in range(20)]) == 0
        leases: list[Lease | None] = []
        assert written(guard, lambda: leases.append(guard.try_acquire(f"free:{next(numbers)}"))) > 0, "a deaf meter"


def _written(server: PostgresServer, work: Callable[[], object]) -> int:
    before = _log_position(server)
    work()
    return _log_position(server) - before


def _log_position(server: PostgresServer) -> int:
    return int(server.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])


def test_a_round_of_renewals_costs_one_statement_however_many_leases(meter: Meter, pg_dsn: str) -> None:
    with SyncGuard(meter.dsn(pg_dsn)) as guard:
        warm = guard.try_acquire("warm")
        assert warm is not None
        assert warm.renew()  # connects
        leases = [guard.try_acquire(f"k:{number}", ttl=6.0) for number in range(50)]
        first = [lease.deadline for lease in leases if lease is not None]
        assert len(first) == 50

        def a_round() -> None:
            poll(lambda: all(lease.deadline > before for lease, before in zip(leases, first, strict=True)), timeout=20)

        # One, and one more if acquiring them took so long that the first ones were due before the last ones came.
        assert meter.cost(a_round) <= 2
        assert meter.cost(lambda: [lease.renew() for lease in leases if lease is not None]) >= 50, "the control"
