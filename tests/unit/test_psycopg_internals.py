"""Psycopg without one of its undocumented parts, or with another one: a fallback, or a refusal that names the versions."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
import pytest
from psycopg import pq

from celery_syncguard import SyncGuard
from celery_syncguard.errors import ImproperlyConfigured
from celery_syncguard.postgres import adapters, psycopg_internals
from celery_syncguard.postgres.connection import Connection


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (psycopg.Connection, "wait"),
        (psycopg.generators, "execute"),
        (psycopg.waiting, "wait_selector"),
        (psycopg.errors, "error_from_result"),
    ],
)
def test_without_what_every_statement_needs_nothing_is_connected(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    expected = (
        rf"^celery-syncguard \S+ does not work with psycopg \S+ \(\S+\.{name} does not exist\): install another version"
    )
    with pytest.raises(ImproperlyConfigured, match=expected):
        SyncGuard("postgresql://127.0.0.1:1/none")


def unconnected(kind: type = Connection) -> Any:
    return kind(pq.PGconn.connect_start(b"closed"))


def test_a_connection_that_cannot_be_taken_out_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    conn = unconnected(psycopg.Connection)
    before = conn.pgconn
    taken = psycopg_internals.detach(conn)
    assert taken is before is not conn.pgconn

    class Sealed(psycopg.Connection[Any]):
        @property  # type: ignore[override]
        def pgconn(self) -> Any:
            return self.__dict__["inner"]

    sealed = Sealed.__new__(Sealed)
    sealed.__dict__["inner"] = before
    assert before.pgconn_ptr is not None
    assert psycopg_internals.detach(sealed) is before
    assert before.pgconn_ptr is None  # libpq has closed it


def test_a_pool_with_other_log_lines_says_more(caplog: pytest.LogCaptureFixture) -> None:
    psycopg_internals.quieten_pool("ours of a test", Connection)
    log = logging.getLogger("psycopg.pool")
    with caplog.at_level("WARNING", "psycopg.pool"):
        log.warning("error connecting in %r: %s", "ours of a test", "no")
        log.warning(f"error connecting in {'ours of a test'!r}: no")  # noqa: G004 - as psycopg_pool 3.2.0
        log.warning("discarding closed connection: %s", unconnected())
        assert caplog.messages == []
        log.warning("error connecting in %r: %s", "another pool", "no")
        log.warning("discarding closed connection of %s: %s", "ours of a test", unconnected())
    assert len(caplog.messages) == 2


def test_a_block_of_django_without_its_mark_is_the_codes_own() -> None:
    from django.db.transaction import Atomic

    block = Atomic("default", savepoint=True, durable=False)
    assert not adapters._is_of_a_test_case(block)
    block._from_testcase = True  # type: ignore[attr-defined]
    assert adapters._is_of_a_test_case(block)
    del block._from_testcase  # type: ignore[attr-defined]
    assert not adapters._is_of_a_test_case(block)


def test_a_connection_of_sqlalchemy_without_its_mark_is_in_no_block() -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    with sqlalchemy.create_engine("sqlite://").connect() as connection:
        assert not adapters._is_in_begin_block(connection)
        with connection.begin():
            assert adapters._is_in_begin_block(connection)
            held, connection._trans_context_manager = connection._trans_context_manager, None
            assert not adapters._is_in_begin_block(connection)
            connection._trans_context_manager = held
