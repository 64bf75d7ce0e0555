"""Both stores pass the same contract, with the same test ids; and the contract's races find a store that breaks it."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.managers import BaseManager
from typing import Any

import psycopg
import pytest

from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.core.store import Acquire, Grant, Held, LockStore
from celery_syncguard.postgres.migrate import migrate
from celery_syncguard.postgres.store import PostgresStore
from tests.contract.store_contract import StoreContract
from tests.fixtures import soak
from tests.fixtures.races import race_processes, race_threads

_TABLES = "syncguard_locks, syncguard_fence_counters, syncguard_completions, syncguard_claims, syncguard_deaths"


@pytest.fixture(scope="module")
def shared_dsn(pg_server: Any) -> Iterator[str]:
    """One database for all tests here, which is quicker to empty than to make."""
    name = f"contract_{uuid.uuid4().hex[:12]}"
    pg_server.execute(f"create database {name}")
    migrate(pg_server.dsn(name))
    yield pg_server.dsn(name)
    pg_server.execute(f"drop database {name} with (force)")


@pytest.mark.soak
class TestStore(StoreContract):
    """The parameter is the store."""

    rounds = soak.rounds(200, soak=1000)

    @pytest.fixture(params=["memory", "postgres"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def store(self, kind: str, request: pytest.FixtureRequest) -> Iterator[LockStore]:
        store = MemoryStore() if kind == "memory" else open_postgres(empty(request.getfixturevalue("shared_dsn")))
        yield store
        store.close()

    @pytest.fixture
    def reopen(self, kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], LockStore]]:
        if kind == "postgres":
            yield functools.partial(open_postgres, empty(request.getfixturevalue("shared_dsn")))
            return
        # One store in a process of its own, served to the others.
        with Served() as manager:
            yield functools.partial(connect, manager.address, bytes(manager._authkey))


class TestNegativeControl:
    """The races are not a formality: a store that looks before it writes fails them."""

    def test_threads_break_a_store_that_reads_and_then_writes(self, pg_dsn: str) -> None:
        store = ReadThenWrite(pg_dsn, pool_size=9)
        rounds = race_threads(store, threads=8, rounds=100)
        store.close()
        assert max(map(winners, rounds)) > 1

    def test_processes_break_a_store_that_reads_and_then_writes(self, pg_dsn: str) -> None:
        rounds = race_processes(functools.partial(ReadThenWrite, pg_dsn), processes=4, rounds=200)
        assert max(map(winners, rounds)) > 1


class ReadThenWrite(PostgresStore):
    """What many locks do: ask whether it is free, then take it."""

    def acquire(self, request: Acquire) -> Grant | Held:
        def work(conn: psycopg.Connection[Any]) -> Grant | Held:
            if conn.execute("select 1 from syncguard_locks where key = %s", (request.key,)).fetchone():
                return Held(key=request.key, lock_id="", fence=0, since=0.0, remaining=0.0)
            conn.execute(
                "insert into syncguard_locks as l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)"
                " values (%s, %s, 0, 0, '', '') on conflict (key) do update set lock_id = excluded.lock_id",
                (request.key, request.lock_id),
            )
            epoch = psycopg.TimestampFromTicks(0)
            return Grant(key=request.key, lock_id=request.lock_id, fence=1, acquired_at=epoch, expires_at=epoch)

        return self.run(work)


def winners(answers: list[object]) -> int:
    return sum(isinstance(answer, Grant) for answer in answers)


def empty(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        connection.execute(f"truncate {_TABLES}".encode())
    return dsn


def open_postgres(dsn: str) -> PostgresStore:
    return PostgresStore(dsn, pool_size=9)


class Served(BaseManager):
    """Serves one MemoryStore to many processes."""


def connect(address: Any, authkey: bytes) -> LockStore:
    manager = Served(address, authkey)
    manager.connect()
    store: LockStore = manager.the_store()  # type: ignore[attr-defined]
    return store


_served: list[MemoryStore] = []


def the_store() -> MemoryStore:
    if not _served:
        _served.append(MemoryStore())
    return _served[0]


Served.register("the_store", the_store)
