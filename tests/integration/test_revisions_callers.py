"""Revisions take part in the transaction of every kind of connection that a caller may have, and in nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import orm

from celery_syncguard import revisions
from celery_syncguard.postgres.adapters import NotInTransaction, adapter_for

Begin = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def dsn(pg_server) -> Iterator[str]:
    """One database for all tests here: each has owners of its own."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    pg_server.execute(f"create database {name}")
    with psycopg.connect(pg_server.dsn(name)) as connection:
        connection.execute(revisions.POSTGRES_MIGRATION_SQL)
        connection.execute(
            "create table notes (id uuid primary key, owner_id uuid, deleted_at timestamptz, revision bigint)"
        )
    yield pg_server.dsn(name)
    pg_server.execute(f"drop database {name} with (force)")


@contextmanager
def psycopg_connection(dsn: str) -> Iterator[Begin]:
    with closing(psycopg.connect(dsn)) as connection:

        @contextmanager
        def begin():
            with connection.transaction():
                yield connection

        yield begin


@contextmanager
def psycopg_autocommit_connection(dsn: str) -> Iterator[Begin]:
    with closing(psycopg.connect(dsn, autocommit=True, row_factory=dict_row)) as connection:

        @contextmanager
        def begin():
            with connection.transaction():
                yield connection

        yield begin


@contextmanager
def psycopg_raw_cursor(dsn: str) -> Iterator[Begin]:
    with closing(psycopg.connect(dsn, cursor_factory=psycopg.RawCursor)) as connection:

        @contextmanager
        def begin():
            with connection.transaction(), connection.cursor() as cursor:
                yield cursor

        yield begin


@contextmanager
def psycopg_pipeline(dsn: str) -> Iterator[Begin]:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection, connection.pipeline():

        @contextmanager
        def begin():
            with connection.transaction():
                connection.execute("select 1")  # not answered yet when our statement is sent
                yield connection

        yield begin


@contextmanager
def engine_of(dsn: str, **options: Any) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), **options)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def sqlalchemy_connection(dsn: str) -> Iterator[Begin]:
    with engine_of(dsn) as engine:
        yield engine.begin


@contextmanager
def sqlalchemy_session(dsn: str) -> Iterator[Begin]:
    with engine_of(dsn) as engine:
        yield orm.sessionmaker(engine).begin


@contextmanager
def sqlalchemy_scoped_session(dsn: str) -> Iterator[Begin]:
    with engine_of(dsn) as engine:
        sessions = orm.scoped_session(orm.sessionmaker(engine))

        @contextmanager
        def begin():
            with sessions.begin():
                yield sessions

        yield begin
        sessions.remove()


@contextmanager
def django_alias(dsn: str) -> Iterator[str]:
    """Add the database to those of Django, under a name of its own, whatever other tests have configured."""
    import django
    from django.conf import settings
    from django.db import ConnectionHandler, connections

    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
    django.setup()
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    alias = f"test_{uuid.uuid4().hex[:8]}"
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": info["dbname"],
        "USER": info.get("user", ""),
        "PASSWORD": info.get("password", ""),
        "HOST": info.get("host", ""),
        "PORT": info.get("port", ""),
    }
    connections.databases[alias] = ConnectionHandler({"default": database}).databases["default"]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections.databases[alias]


@contextmanager
def django_connection(dsn: str) -> Iterator[Begin]:
    from django.db import connections, transaction

    with django_alias(dsn) as alias:

        @contextmanager
        def begin():
            with transaction.atomic(using=alias):
                yield connections[alias]

        yield begin


@contextmanager
def django_name(dsn: str) -> Iterator[Begin]:
    from django.db import transaction

    with django_alias(dsn) as alias:

        @contextmanager
        def begin():
            with transaction.atomic(using=alias):
                yield alias

        yield begin


KINDS = [
    psycopg_connection,
    psycopg_autocommit_connection,
    psycopg_raw_cursor,
    psycopg_pipeline,
    sqlalchemy_connection,
    sqlalchemy_session,
    sqlalchemy_scoped_session,
    django_connection,
    django_name,
]


class Stop(Exception):
    """Rolls a transaction back."""


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def begin(request: pytest.FixtureRequest, dsn: str) -> Iterator[Begin]:
    with request.param(dsn) as begin:
        yield begin


@pytest.mark.parametrize(
    "spell", [lambda owner: owner, str, lambda owner: str(owner).upper()], ids=["uuid", "text", "TEXT"]
)
def test_the_first_revision_is_1_and_they_rise_by_1(begin, spell):
    owner = spell(uuid.uuid4())
    with begin() as conn:
        revisions.ensure_owner(conn, owner)
        assert revisions.current_revision(conn, owner) == 0
        assert revisions.next_revision(conn, owner) == 1
    with begin() as conn:
        assert [revisions.next_revision(conn, owner) for _ in range(3)] == [2, 3, 4]
        assert revisions.current_revision(conn, owner) == 4
        assert revisions.current_revision_for_update(conn, owner) == 4


def test_a_rollback_returns_the_number(begin):
    owner = uuid.uuid4()
    with begin() as conn:
        revisions.ensure_owner(conn, owner)
    with pytest.raises(Stop), begin() as conn:
        assert revisions.next_revision(conn, owner) == 1
        raise Stop
    with begin() as conn:
        assert revisions.next_revision(conn, owner) == 1


def test_a_rollback_to_a_savepoint_returns_the_number_and_the_owner(dsn):
    """Somebody else allocates meanwhile; who goes on after the rollback and allocates again comes after that."""
    owner = uuid.uuid4()
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        revisions.ensure_owner(first, owner)
        first.commit()
        with first.transaction():
            with pytest.raises(Stop), first.transaction():
                assert revisions.next_revision(first, owner) == 1
                raise Stop
            with second.transaction():
                second.execute("set local lock_timeout = '1s'")
                assert revisions.next_revision(second, owner) == 1
            assert revisions.next_revision(first, owner) == 2


def test_ensure_owner_again_never_resets(begin):
    owner = uuid.uuid4()
    with begin() as conn:
        revisions.ensure_owner(conn, owner)
        revisions.next_revision(conn, owner)
        revisions.ensure_owner(conn, owner)
        assert revisions.next_revision(conn, owner) == 2


def test_an_unknown_owner_is_an_error_to_allocate_and_none_to_read(begin):
    owner = uuid.uuid4()
    with begin() as conn:
        assert revisions.current_revision(conn, owner) is None
        assert revisions.current_revision_for_update(conn, owner) is None
        for refuse in (
            lambda: revisions.next_revision(conn, owner),
            lambda: revisions.next_revisions(conn, [owner]),
            lambda: revisions.guard_pull(conn, owner, 0),
        ):
            with pytest.raises(revisions.UnknownOwner) as caught:
                refuse()
            assert caught.value.owner_ids == (owner,)


def test_several_owners_get_one_revision_each(begin):
    owners = [uuid.uuid4() for _ in range(5)]
    with begin() as conn:
        for owner in owners:
            revisions.ensure_owner(conn, owner)
        revisions.next_revision(conn, owners[2])
        assert revisions.next_revisions(conn, [*owners, str(owners[0])]) == {
            owner: 2 if owner == owners[2] else 1 for owner in owners
        }
        assert revisions.next_revisions(conn, []) == {}


def test_one_unknown_owner_among_several_allocates_for_none(begin):
    known, unknown = uuid.uuid4(), uuid.uuid4()
    with begin() as conn:
        revisions.ensure_owner(conn, known)
        with pytest.raises(revisions.UnknownOwner) as caught:
            revisions.next_revisions(conn, [known, unknown])
        assert caught.value.owner_ids == (unknown,)
        assert revisions.current_revision(conn, known) == 0


def test_pull_and_purge_work_in_the_callers_transaction(begin):
    owner = uuid.uuid4()
    with begin() as conn:
        revisions.ensure_owner(conn, owner)
        revision = revisions.next_revision(conn, owner)
        adapter_for(conn).rows(
            "insert into notes values (%s, %s, now(), %s)", [str(uuid.uuid4()), str(owner), revision]
        )
        assert revisions.guard_pull(conn, owner, 0) == 1
    with begin() as conn:
        assert revisions.purge_tombstones(conn, "notes", older_than=0) == revisions.PurgedBatch(1, {owner: 1})
    with begin() as conn:
        assert revisions.guard_pull(conn, owner, 1) == 1


# --- autocommit -----------------------------------------------------------------------------------------------------


@contextmanager
def autocommit_psycopg(dsn: str) -> Iterator[Any]:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        yield connection


@contextmanager
def autocommit_psycopg_cursor(dsn: str) -> Iterator[Any]:
    with autocommit_psycopg(dsn) as connection:
        yield connection.cursor()


@contextmanager
def autocommit_psycopg_pipeline(dsn: str) -> Iterator[Any]:
    with autocommit_psycopg(dsn) as connection, connection.pipeline():
        connection.execute("select 1")
        yield connection


@contextmanager
def autocommit_sqlalchemy(dsn: str) -> Iterator[Any]:
    with engine_of(dsn) as engine, engine.connect() as connection:
        yield connection.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def autocommit_sqlalchemy_with_begin(dsn: str) -> Iterator[Any]:
    with engine_of(dsn, isolation_level="AUTOCOMMIT") as engine, engine.begin() as connection:
        yield connection


@contextmanager
def autocommit_sqlalchemy_session(dsn: str) -> Iterator[Any]:
    with engine_of(dsn, isolation_level="AUTOCOMMIT") as engine, orm.Session(engine) as session:
        yield session


@contextmanager
def autocommit_django(dsn: str) -> Iterator[Any]:
    from django.db import connections

    with django_alias(dsn) as alias:
        yield connections[alias]


@contextmanager
def autocommit_django_after_atomic(dsn: str) -> Iterator[Any]:
    from django.db import transaction

    with django_alias(dsn) as alias:
        with transaction.atomic(using=alias):
            pass
        yield alias


AUTOCOMMIT = [
    autocommit_psycopg,
    autocommit_psycopg_cursor,
    autocommit_psycopg_pipeline,
    autocommit_sqlalchemy,
    autocommit_sqlalchemy_with_begin,
    autocommit_sqlalchemy_session,
    autocommit_django,
    autocommit_django_after_atomic,
]


@pytest.mark.parametrize("kind", AUTOCOMMIT, ids=lambda kind: kind.__name__)
def test_autocommit_without_a_transaction_is_refused_before_any_write(dsn, kind):
    owner = uuid.uuid4()
    counters = "select owner_id, last_revision, xmin::text, xmax::text from sync_revisions order by owner_id"
    with psycopg.connect(dsn) as connection:
        revisions.ensure_owner(connection, owner)
        before = connection.execute(counters).fetchall()
    with kind(dsn) as conn:
        for operation in (
            lambda: revisions.ensure_owner(conn, uuid.uuid4()),
            lambda: revisions.next_revision(conn, owner),
            lambda: revisions.next_revisions(conn, [owner]),
            lambda: revisions.current_revision(conn, owner),
            lambda: revisions.current_revision_for_update(conn, owner),
            lambda: revisions.guard_pull(conn, owner, 0),
            lambda: revisions.purge_tombstones(conn, "notes", older_than=0),
        ):
            with pytest.raises(NotInTransaction, match="autocommit") as caught:
                operation()
            assert caught.value.what in str(caught.value)
        with psycopg.connect(dsn) as connection:
            assert connection.execute(counters).fetchall() == before
        # The control: without the refusal, the same connection would have written, and committed at once.
        adapter_for(conn).rows("update sync_revisions set last_revision = 9 where owner_id = %s", [str(owner)])
        with psycopg.connect(dsn) as connection:
            assert revisions.current_revision(connection, owner) == 9


def test_a_connection_that_begins_by_itself_is_in_a_transaction(dsn):
    owner = uuid.uuid4()
    with engine_of(dsn) as engine:
        for conn in (psycopg.connect(dsn), engine.connect(), orm.Session(engine)):
            with closing(conn):
                revisions.ensure_owner(conn, owner)
                assert revisions.next_revision(conn, owner) == 1
                conn.rollback()


def test_transaction_opens_one_that_commits_and_nests_as_a_savepoint(dsn):
    owner = uuid.uuid4()
    with engine_of(dsn) as engine, django_alias(dsn) as alias:
        with engine.connect() as connection, orm.Session(engine) as session, autocommit_psycopg(dsn) as plain:
            for count, conn in enumerate((plain, connection, session, alias)):
                adapter = adapter_for(conn)
                with adapter.transaction():
                    revisions.ensure_owner(conn, owner)
                    assert revisions.next_revision(conn, owner) == count + 1
                    with pytest.raises(Stop), adapter.transaction():
                        revisions.next_revision(conn, owner)
                        raise Stop
                with psycopg.connect(dsn) as other:
                    assert revisions.current_revision(other, owner) == count + 1


@pytest.mark.parametrize("owner", ["", "nonsense", "00000000-0000-0000-0000-00000000000g"])
def test_text_that_is_no_uuid_is_refused_before_any_statement(dsn, owner):
    with psycopg.connect(dsn) as conn, pytest.raises(ValueError, match="owner id"):
        revisions.next_revision(conn, owner)
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.UNKNOWN  # closed, without an open transaction


@pytest.mark.parametrize("owner", [None, 7, b"0" * 16])
def test_what_is_neither_uuid_nor_text_is_refused(dsn, owner):
    with psycopg.connect(dsn) as conn, pytest.raises(TypeError, match="owner id"):
        revisions.ensure_owner(conn, owner)


def test_what_is_no_connection_to_postgresql_is_refused_by_name():
    with sqlalchemy.create_engine("sqlite://").connect() as lite:
        with pytest.raises(TypeError, match="sqlite"):
            revisions.next_revision(lite, uuid.uuid4())
        with pytest.raises(TypeError, match=r"Engine"):
            revisions.next_revision(lite.engine, uuid.uuid4())
    with pytest.raises(TypeError, match=r"builtins\.object"):
        revisions.next_revision(object(), uuid.uuid4())


async def _refused_in_asyncio(dsn: str) -> str:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        with pytest.raises(TypeError) as caught:
            revisions.next_revision(connection, uuid.uuid4())
    return str(caught.value)


def test_asyncio_connections_are_refused_by_name(dsn):
    import asyncio

    assert "asyncio" in asyncio.run(_refused_in_asyncio(dsn))
