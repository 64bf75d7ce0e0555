"""Revisions take part in the transaction of every kind of connection that a caller may have, and in nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from celery_syncguard import revisions
from celery_syncguard.postgres.adapters import NotInTransaction, adapter_for
from tests.fixtures.callers import (
    AUTOCOMMIT,
    Open,
    autocommit_psycopg,
    django_alias,
    django_connection,
    django_database,
    engine_of,
    psycopg_autocommit,
    psycopg_connection,
    psycopg_pipeline,
    psycopg_raw_cursor,
    sqlalchemy_connection,
    sqlalchemy_scoped_session,
    sqlalchemy_session,
)


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


KINDS = [
    psycopg_connection,
    psycopg_autocommit,
    psycopg_raw_cursor,
    psycopg_pipeline,
    sqlalchemy_connection,
    sqlalchemy_session,
    sqlalchemy_scoped_session,
    django_connection,
    django_alias,
]


class Stop(Exception):
    """Rolls a transaction back."""


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def begin(request: pytest.FixtureRequest, dsn: str) -> Iterator[Open]:
    with request.param(dsn) as caller:
        yield caller.begin


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
    with engine_of(dsn) as engine, django_database(dsn) as alias:
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
