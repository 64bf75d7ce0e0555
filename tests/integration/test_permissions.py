"""A least-privilege role, as docs/operations.md grants it, can do everything; what is missing is named."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import psycopg
import pytest

from celery_syncguard import SyncGuard
from celery_syncguard.cli.doctor import examine
from celery_syncguard.cli.server_checks import missing_grants
from celery_syncguard.core.config import Settings
from celery_syncguard.core.key import new_lock_id
from celery_syncguard.core.process import process_id
from celery_syncguard.core.store import Acquire, Buried, Grant, Release, Renewal
from celery_syncguard.errors import SchemaBehind, StoreUnavailable
from celery_syncguard.postgres import migrate
from celery_syncguard.postgres.connection import Connection
from celery_syncguard.postgres.store import PostgresStore
from tests.fixtures.polling import poll

OPERATIONS = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")
SCHEMA = "syncguard"


def documented(heading: str) -> str:
    (block,) = re.findall(rf"<!-- {heading} -->\n```sql\n(.*?)```", OPERATIONS, flags=re.DOTALL)
    return block


class Roles:
    """A migrator that owns the schema, a worker with the documented grants, and an outsider."""

    def __init__(self, dsn: str) -> None:
        self.admin_dsn = dsn
        tail = uuid.uuid4().hex[:8]
        self.names = {name: f"{name}_{tail}" for name in ("migrator", "worker", "app", "stranger")}

    def dsn(self, name: str) -> str:
        return psycopg.conninfo.make_conninfo(self.admin_dsn, user=self.names[name])

    def execute(self, text: str, *, role: str | None = None) -> None:
        for name, real in self.names.items():
            text = re.sub(rf"\b{name}\b", real, text)
        with psycopg.connect(self.dsn(role) if role else self.admin_dsn, autocommit=True) as conn:
            conn.execute(text.encode())


@pytest.fixture
def roles(empty_dsn):
    found = Roles(empty_dsn)
    for name in found.names:
        found.execute(f"create role {name} login")
    found.execute(f"create schema {SCHEMA} authorization migrator")
    migrate.migrate(found.dsn("migrator"), schema=SCHEMA)
    found.execute(documented("grants"), role="migrator")
    yield found
    for name in found.names:
        found.execute(f"drop owned by {name} cascade")
        found.execute(f"drop role {name}")


def a_workers_day(dsn: str) -> None:
    """Everything that workers, publishers and prune ask of the database."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        migrate.check(conn, schema=SCHEMA)
    store = PostgresStore(dsn, schema=SCHEMA)
    try:
        first = Acquire("a", new_lock_id(), 0.001, process=process_id(), task_id="t", attempt=0)
        assert isinstance(store.acquire(first), Grant)
        taken = poll(lambda: isinstance(answer := store.acquire(Acquire("a", new_lock_id(), 30.0)), Grant) and answer)
        store.wait("a", 0.01)
        assert store.renew([Renewal("a", taken.lock_id, 30.0)])
        with psycopg.connect(dsn) as conn:
            assert store.fenced(conn, key="a", lock_id=taken.lock_id, fence=taken.fence)
            assert store.complete(conn, run_key="r", task_id="t", ttl=1.0)
        assert store.release(Release("a", taken.lock_id, task_id="t", run_key="r2", run_ttl=1.0, min_hold=0.001))
        assert store.claim("c", task_id="t", ttl=10.0).ours
        assert store.confirm([("c", "t", 20.0)]) == 1
        assert store.unclaim("c", task_id="t")
        assert isinstance(store.acquire(Acquire("b", new_lock_id(), 5.0, process="p:1", task_id="t")), Grant)
        assert store.release_process("p:1") == Buried(1)
        assert store.locks() == []
        store.prune(older=0.0, counters=True)
    finally:
        store.close()


def test_the_documented_grants_are_enough_for_a_workers_day(roles):
    a_workers_day(roles.dsn("worker"))
    with Connection.connect(roles.dsn("worker"), autocommit=True) as conn:
        assert missing_grants(conn, schema=SCHEMA) == []
    assert check(roles, "permissions").status == "ok"


def test_without_any_grant_a_role_can_do_nothing_and_is_told_what_it_needs(roles):
    with (
        SyncGuard(roles.dsn("stranger"), schema=SCHEMA) as guard,
        pytest.raises(StoreUnavailable, match=f"permission denied for schema {SCHEMA}.*GRANT USAGE ON SCHEMA"),
    ):
        guard.try_acquire("a")
    found = check(roles, "schema", role="stranger")
    assert found.status == "fail"
    assert found.fix == f'GRANT USAGE ON SCHEMA "{SCHEMA}" TO "{roles.names["stranger"]}"'


def test_the_default_privileges_cover_tables_of_later_migrations(roles, monkeypatch):
    ours = migrate.migrations()
    more = migrate.Migration("9000_create_more", "create table syncguard_more (x int);")
    monkeypatch.setattr(migrate, "migrations", lambda: [*ours, more])
    assert migrate.migrate(roles.dsn("migrator"), schema=SCHEMA) == [more.name]
    with Connection.connect(roles.dsn("worker"), autocommit=True) as conn:
        assert missing_grants(conn, schema=SCHEMA) == []


def test_a_worker_can_neither_migrate_nor_change_what_is_recorded(roles):
    with psycopg.connect(roles.dsn("worker"), autocommit=True) as conn:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(f"delete from {SCHEMA}.syncguard_migrations")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(f"create table {SCHEMA}.x (x int)")


def check(roles: Roles, name: str, *, role: str = "worker"):
    checks = {one.name: one for one in examine(Settings(dsn=roles.dsn(role), schema=SCHEMA))}
    return checks[name]


TABLES = sorted({table for one in migrate.migrations() for table in one.tables})


@pytest.mark.parametrize("privilege", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_doctor_names_each_grant_that_is_missing(roles, privilege):
    for table in TABLES:
        roles.execute(f"revoke {privilege} on {SCHEMA}.{table} from worker")
        found = check(roles, "permissions")
        assert found.status == "fail"
        assert found.fix == f'GRANT {privilege} ON "{SCHEMA}".{table} TO "{roles.names["worker"]}"'
        roles.execute(found.fix)  # what it prints is the cure
        assert check(roles, "permissions").status == "ok"


@pytest.mark.parametrize(
    "revoke, checked, fix",
    [
        ("usage on schema syncguard", "schema", 'GRANT USAGE ON SCHEMA "syncguard" TO {}'),
        (
            "select on syncguard.syncguard_migrations",
            "schema",
            'GRANT SELECT ON "syncguard".syncguard_migrations TO {}',
        ),
        (
            "execute on function syncguard.syncguard_renew",
            "permissions",
            'GRANT EXECUTE ON FUNCTION "syncguard".syncguard_renew TO {}',
        ),
    ],
)
def test_doctor_names_a_missing_right_to_look_to_read_records_or_to_call(roles, revoke, checked, fix):
    roles.execute(f"revoke {revoke} from worker, public")
    found = check(roles, checked)
    assert found.status == "fail"
    assert found.fix == fix.format(f'"{roles.names["worker"]}"')
    roles.execute(found.fix)
    assert {one.status for one in examine(Settings(dsn=roles.dsn("worker"), schema=SCHEMA))} == {"ok"}


@pytest.mark.parametrize(
    "revoke, named",
    [
        ("insert on syncguard.syncguard_fence_counters", "table syncguard_fence_counters"),
        ("select on syncguard.syncguard_locks", "table syncguard_locks"),
        ("execute on function syncguard.syncguard_acquire", "function syncguard_acquire"),
        ("usage on schema syncguard", "schema syncguard"),
    ],
)
def test_an_operation_without_its_grant_says_which_and_how_to_find_the_rest(roles, revoke, named):
    roles.execute(f"revoke {revoke} from worker, public")
    with (
        SyncGuard(roles.dsn("worker"), schema=SCHEMA) as guard,
        pytest.raises(StoreUnavailable, match=f"permission denied for {named}.*syncguard doctor"),
    ):
        guard.try_acquire("a")


def test_the_documented_grants_are_enough_to_fence_on_another_roles_connection(roles):
    roles.execute(documented("fencing grants"), role="migrator")
    with SyncGuard(roles.dsn("worker"), schema=SCHEMA) as guard, guard.hold("a") as lease:
        with psycopg.connect(roles.dsn("app")) as conn:
            lease.fenced(conn)
        with psycopg.connect(roles.dsn("app"), autocommit=True) as conn:  # and for nothing else
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(f"delete from {SCHEMA}.syncguard_locks")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(f"update {SCHEMA}.syncguard_locks set lock_id = ''")
        with psycopg.connect(roles.dsn("stranger")) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
            lease.fenced(conn)


# Servers that cannot write


def test_a_read_only_role_or_database_is_named_as_such(roles):
    roles.execute("alter role worker set default_transaction_read_only = on")
    with (
        SyncGuard(roles.dsn("worker"), schema=SCHEMA) as guard,
        pytest.raises(StoreUnavailable, match="is read-only"),
    ):
        guard.try_acquire("a")
    found = check(roles, "server")
    assert found.status == "fail"
    assert found.fix.startswith(f'ALTER ROLE "{roles.names["worker"]}" SET default_transaction_read_only = off')
    roles.execute(found.fix.partition(",")[0])
    assert check(roles, "server").status == "ok"


def test_a_standby_is_named_as_such(private_pg):
    private_pg.execute("create database syncguard")
    dsn = private_pg.dsn("syncguard")
    migrate.migrate(dsn)
    private_pg.stop()
    signal = private_pg.data / "standby.signal"
    signal.touch()
    private_pg._chown(signal)
    private_pg.start()
    with SyncGuard(dsn) as guard, pytest.raises(StoreUnavailable, match="is read-only"):
        guard.try_acquire("a")
    checks = {one.name: one for one in examine(Settings(dsn=dsn))}
    assert (checks["server"].status, checks["schema"].status) == ("fail", "ok")
    assert "in recovery" in checks["server"].message
    assert "target_session_attrs" in checks["server"].fix


# Servers without our schema


@pytest.mark.parametrize("schema", [None, "absent"])
def test_a_missing_schema_is_named_with_the_command_that_helps(empty_dsn, schema):
    with SyncGuard(empty_dsn, schema=schema) as guard, pytest.raises(SchemaBehind, match="celery syncguard migrate"):
        guard.try_acquire("a")
    checks = {one.name: one for one in examine(Settings(dsn=empty_dsn, schema=schema))}
    assert (checks["schema"].status, checks["schema"].fix) == ("fail", "celery syncguard migrate")


def test_the_statements_of_the_operations_page_run(pg_dsn):
    blocks = re.findall(r"(?<!-->\n)```sql\n(.*?)```", OPERATIONS, flags=re.DOTALL)
    assert len(blocks) >= 2
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        for block in blocks:
            conn.execute(block.encode())
