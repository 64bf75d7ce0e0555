"""Exact fencing in the transactions of psycopg, SQLAlchemy and Django: proved there, ended there."""

import contextlib
import json
import pickle
import threading
import uuid

import kombu.serialization
import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from celery_syncguard import Fence, LeaseLost, SyncGuard
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.store import Acquire, Held
from celery_syncguard.errors import NoLease, SchemaBehind
from celery_syncguard.postgres.adapters import NotInTransaction
from tests.fixtures.polling import poll


@pytest.fixture
def guard(pg_dsn):
    with SyncGuard(pg_dsn) as guard:
        yield guard


@pytest.fixture
def rows(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        connection.execute("create table rows (n int)")
        yield lambda: [n for (n,) in connection.execute("select n from rows order by n")]


INSERT = "insert into rows values (1)"


class Psycopg:
    autocommit = False

    def __init__(self, dsn):
        self.connection = self.target = psycopg.connect(dsn, autocommit=self.autocommit)

    def begin(self):
        return self.connection.transaction()

    def insert(self):
        self.connection.execute(INSERT)

    def close(self):
        self.connection.close()


class PsycopgAutocommit(Psycopg):
    autocommit = True


class PsycopgCursor(Psycopg):
    def __init__(self, dsn):
        super().__init__(dsn)
        self.target = self.connection.cursor()


class SqlalchemyConnection:
    def __init__(self, dsn, **options):
        # The driver name tells SQLAlchemy to use psycopg 3.
        self.engine = sqlalchemy.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"), **options)
        self.target = self.engine.connect()

    def begin(self):
        return self.target.begin()

    def insert(self):
        self.target.execute(sqlalchemy.text(INSERT))

    def close(self):
        self.target.close()
        self.engine.dispose()


class SqlalchemySession(SqlalchemyConnection):
    def __init__(self, dsn):
        super().__init__(dsn)
        self.target.close()
        self.target = orm.Session(self.engine)


class Django:
    by_alias = False

    def __init__(self, dsn):
        import django
        from django.conf import settings
        from django.db import connections

        if not settings.configured:
            settings.configure(DATABASES={}, INSTALLED_APPS=[], USE_TZ=True)
            django.setup()
        self.alias = f"db{uuid.uuid4().hex[:8]}"
        host, _, name = dsn.rpartition("/")
        connections.databases[self.alias] = connections.configure_settings(
            {
                "default": {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": name,
                    "HOST": "127.0.0.1",
                    "PORT": host.rpartition(":")[2],
                    "USER": "postgres",
                }
            }
        )["default"]
        self.connection = connections[self.alias]
        self.target = self.alias if self.by_alias else self.connection

    def begin(self):
        from django.db import transaction

        return transaction.atomic(using=self.alias)

    def insert(self):
        with self.connection.cursor() as cursor:
            cursor.execute(INSERT)

    def close(self):
        from django.db import connections

        self.connection.close()
        del connections[self.alias]
        del connections.databases[self.alias]


class DjangoAlias(Django):
    by_alias = True


CALLERS = [Psycopg, PsycopgAutocommit, PsycopgCursor, SqlalchemyConnection, SqlalchemySession, Django, DjangoAlias]


@pytest.fixture(params=CALLERS, ids=lambda kind: kind.__name__)
def caller(request, pg_dsn):
    caller = request.param(pg_dsn)
    yield caller
    caller.close()


def expire(guard, lease, dsn):
    """As if the holder had been frozen: its row expires, and it has not noticed."""
    guard._renewer.stop()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("update syncguard_locks set expires_at_ms = 1 where key = %s", (lease.key,))


def take_over(guard, key):
    return guard.store.acquire(Acquire(key=key, lock_id=new_lock_id(), ttl=30))


def test_a_held_lease_lets_its_transaction_commit(guard, caller, rows):
    lease = guard.try_acquire("k")
    with caller.begin():
        lease.fenced(caller.target)
        caller.insert()
    assert rows() == [1]
    with lease.transaction(caller.target):
        caller.insert()
    assert rows() == [1, 1]


@pytest.mark.parametrize("how", ["expired", "taken over", "released by hand"])
def test_a_lost_lease_lets_nothing_commit(guard, caller, rows, pg_dsn, how):
    lease = guard.try_acquire("k")
    if how == "released by hand":
        guard._renewer.stop()
        guard.release("k", lock_id=lease.lock_id)
    else:
        expire(guard, lease, pg_dsn)
    if how == "taken over":
        assert not isinstance(take_over(guard, "k"), Held)
    lease.check()  # this process still believes in it: only the database knows
    with pytest.raises(LeaseLost), caller.begin():
        caller.insert()
        lease.fenced(caller.target)
    with pytest.raises(LeaseLost), lease.transaction(caller.target):
        raise AssertionError("the block was entered")
    assert rows() == []
    assert lease.lost


def test_without_the_proof_a_late_transaction_commits(guard, caller, rows, pg_dsn):
    """The negative control."""
    lease = guard.try_acquire("k")
    expire(guard, lease, pg_dsn)
    take_over(guard, "k")
    with caller.begin():
        lease.check()
        caller.insert()
    assert rows() == [1]


def test_nobody_takes_the_lock_over_until_the_transaction_ends_and_is_told_held(guard, caller, rows, pg_dsn):
    lease = guard.try_acquire("k")
    with caller.begin():
        lease.fenced(caller.target)
        caller.insert()
        expire(guard, lease, pg_dsn)
        answer = take_over(guard, "k")
        assert isinstance(answer, Held)
        assert answer.lock_id == lease.lock_id
    assert rows() == [1]
    granted = take_over(guard, "k")
    assert not isinstance(granted, Held)
    assert granted.fence > lease.fence


@pytest.mark.parametrize("kind", [Psycopg, SqlalchemySession, Django], ids=lambda kind: kind.__name__)
def test_a_transaction_that_lasts_longer_than_the_ttl_does_not_stop_renewals(guard, pg_dsn, rows, kind):
    caller = kind(pg_dsn)
    lease = guard.try_acquire("k", ttl=3)
    with caller.begin():
        lease.fenced(caller.target)
        first = guard.inspect("k").expires_at
        poll(lambda: guard.inspect("k").since > 4)
        lease.check()
        assert guard.inspect("k").expires_at > first
        caller.insert()
        lease.fenced(caller.target)
    assert rows() == [1]
    caller.close()


def test_a_rollback_undoes_a_completion_and_a_commit_keeps_it(guard, caller, rows):
    lease = guard.try_acquire("k")
    with pytest.raises(NoLease, match="run_once"), caller.begin():
        lease.complete(caller.target)
    lease.run_key, lease.run_ttl = "once", 60.0
    with pytest.raises(LookupError), caller.begin():
        assert lease.complete(caller.target) is True
        caller.insert()
        raise LookupError
    assert rows() == []
    with caller.begin():
        assert lease.complete(caller.target) is True
        caller.insert()
    with pytest.raises(LookupError), caller.begin():
        # Somebody with the same run key under another lock came first: False says so.
        assert lease.complete(caller.target) is False
        caller.insert()
        raise LookupError
    assert rows() == [1]


def test_two_runs_of_one_key_under_different_locks_complete_once(guard, pg_dsn, rows):
    """They are not kept apart by a lock; the second's completion waits for the first's transaction, and says False."""
    answers = []
    inserted = threading.Event()

    def run(key, wait):
        lease = guard.try_acquire(key)
        lease.run_key, lease.run_ttl = "once", 60.0
        with contextlib.suppress(LookupError), psycopg.connect(pg_dsn) as connection:
            done = lease.complete(connection)
            answers.append(done)
            if not done:
                raise LookupError
            connection.execute(INSERT)
            inserted.set()
            if wait:
                _until_somebody_waits(pg_dsn)

    first = threading.Thread(target=run, args=("a", True))
    first.start()
    assert inserted.wait(10)
    run("b", False)
    first.join(10)
    assert answers == [True, False]
    assert rows() == [1]


def _until_somebody_waits(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        waiting = "select count(*) from pg_locks where not granted"
        poll(lambda: connection.execute(waiting).fetchone()[0] > 0)


@pytest.mark.parametrize("kind", [PsycopgAutocommit, Django], ids=lambda kind: kind.__name__)
def test_autocommit_without_a_transaction_is_refused(guard, pg_dsn, kind):
    caller = kind(pg_dsn)
    lease = guard.try_acquire("k")
    for work in (lease.fenced, lease.complete):
        lease.run_key, lease.run_ttl = "once", 60.0
        with pytest.raises(NotInTransaction, match="autocommit"):
            work(caller.target)
    caller.close()


def test_sqlalchemys_autocommit_is_refused(guard, pg_dsn):
    caller = SqlalchemyConnection(pg_dsn, isolation_level="AUTOCOMMIT")
    lease = guard.try_acquire("k")
    with pytest.raises(NotInTransaction, match="AUTOCOMMIT"), caller.begin():
        lease.fenced(caller.target)
    caller.close()


def test_a_connection_to_another_database_is_told_from_a_lost_lease(guard, empty_dsn):
    lease = guard.try_acquire("k")
    with (
        psycopg.connect(empty_dsn) as connection,
        pytest.raises(SchemaBehind, match="database in which the locks live"),
    ):
        lease.fenced(connection)


def test_a_proof_works_from_a_savepoint(guard, pg_dsn, rows):
    lease = guard.try_acquire("k")
    with psycopg.connect(pg_dsn) as connection:
        connection.execute(INSERT)
        with lease.transaction(connection):
            connection.execute(INSERT)
    assert rows() == [1, 1]


# --- the number itself ----------------------------------------------------------------------------------------------


def test_a_fence_travels_as_a_number_and_compares_as_text(guard, pg_dsn):
    fence = guard.try_acquire("k").fence
    assert isinstance(fence, Fence)
    assert len(str(fence)) == len(f"{fence}") == 15
    assert sorted(["000000000000010", str(Fence(9))]) == [str(Fence(9)), str(Fence(10))]
    assert json.loads(json.dumps({"fence": fence})) == {"fence": int(fence)}
    assert fence < 2**53, "JavaScript could not read it"
    for serializer in ("json", "pickle"):
        content_type, encoding, payload = kombu.serialization.dumps(fence, serializer=serializer)
        assert kombu.serialization.loads(payload, content_type, encoding, accept=[content_type]) == fence
    assert pickle.loads(pickle.dumps(fence)) == fence
    assert str(pickle.loads(pickle.dumps(fence))) == str(fence)
    with psycopg.connect(pg_dsn) as connection:
        assert connection.execute("select %s::bigint, %s::text", (fence, str(fence))).fetchone() == (fence, str(fence))
        connection.execute("create table fences (fence bigint)")
        connection.execute("insert into fences values (%s)", (Fence(7),))
        with connection.cursor() as cursor, cursor.copy("copy fences from stdin") as copy:
            copy.write_row((Fence(8),))
        assert connection.execute("select sum(fence) from fences").fetchone() == (15,)
