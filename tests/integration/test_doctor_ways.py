"""What `doctor` says of the way to the server: several hosts, and poolers."""

from __future__ import annotations

import socket
from typing import Any

import psycopg
import pytest

from celery_syncguard import SyncGuard, errors
from celery_syncguard.cli import doctor, server_checks
from celery_syncguard.cli.doctor import examine
from celery_syncguard.core.config import Settings
from celery_syncguard.postgres import migrate
from tests.fixtures.polling import poll
from tests.fixtures.servers import PgBouncer


def checks(dsn: str, **settings: Any) -> dict[str, doctor.Check]:
    return {check.name: check for check in examine(Settings(dsn=dsn, **settings))}


def test_each_host_is_looked_at_by_itself(pg_dsn: str) -> None:
    facts = psycopg.conninfo.conninfo_to_dict(pg_dsn)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        port = hanging.getsockname()[1]
        dsn = pg_dsn.replace("@", f"@127.0.0.1:{port},", 1)
        found = checks(f"{dsn}?target_session_attrs=read-write", timeout=1)
    dead = found[f"host 127.0.0.1:{port}"]
    assert (dead.status, "timeout" in dead.message) == ("warn", True)
    assert found[f"host 127.0.0.1:{facts['port']}"].message == "a primary"
    assert {one.status for name, one in found.items() if not name.startswith("host") and name != "settings"} == {"ok"}
    assert not [name for name in checks(pg_dsn) if name.startswith("host")], "nothing to tell of a single one"


def test_a_host_that_takes_clients_and_then_fails_them_is_told_and_the_others_are_looked_at(
    pg_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pooler that has lost its server."""
    real, asked = doctor.value, []

    def value(conn: Any, query: str, *rest: Any) -> Any:
        asked.append(query)
        if len(asked) == 1:
            raise psycopg.OperationalError("server login failed")
        return real(conn, query, *rest)

    monkeypatch.setattr(doctor, "value", value)
    facts = psycopg.conninfo.conninfo_to_dict(pg_dsn)
    found = list(examine(Settings(dsn=pg_dsn.replace("@", f"@{facts['host']}:{facts['port']},", 1))))
    hosts = [(one.status, one.message) for one in found if one.name.startswith("host")]
    assert hosts == [("warn", "server login failed"), ("ok", "a primary")]


def test_a_pooler_in_statement_mode_is_called_by_its_name_everywhere(pg_dsn: str) -> None:
    port = int(psycopg.conninfo.conninfo_to_dict(pg_dsn)["port"])
    with PgBouncer(upstream_port=port, mode="statement") as pooler:
        dsn = pooler.dsn(pg_dsn.rpartition("/")[2])
        found = checks(dsn)
        assert found["pooler"].status == "fail"
        assert "pool_mode = transaction" in found["pooler"].fix
        assert "broke off" not in str(found)
        with SyncGuard(dsn, timeout=5) as guard:
            store: Any = guard.store
            with pytest.raises(errors.StoreUnavailable, match="statement mode.*pool_mode = transaction"):
                store.run(lambda conn: migrate.check(conn, schema=None, where="here"))


def test_a_standby_that_every_commit_waits_for_in_vain_is_told(private_pg: Any, private_dsn: str) -> None:
    assert checks(private_dsn)["durability"].status == "ok"
    private_pg.reload(synchronous_standby_names="nobody")
    poll(lambda: private_pg.execute("show synchronous_standby_names") == [("nobody",)])
    check = checks(private_dsn)["durability"]
    assert (check.status, "no standby is connected" in check.message) == ("fail", True)


class Session:
    """Behind pgpool-II with a standby, where what calls no volatile function may run."""

    def __init__(self, primary: int, standby: int) -> None:
        self._pids = primary, standby
        self._pid = 0

    def execute(self, query: bytes, _parameters: Any = None) -> Session:
        self._pid = self._pids[b"pg_is_in_recovery()" not in query]
        return self

    def fetchone(self) -> tuple[int]:
        return (self._pid,)


def test_a_pooler_that_balances_is_known_by_where_its_reads_go() -> None:
    balanced: Any = [Session(1, 2), Session(3, 4)]
    status, message, _ = server_checks._pooler(server_checks.Server(balanced, Settings(), "here"))
    assert (status, "pgpool" in message) == ("warn", True)
    direct: Any = [Session(1, 1), Session(3, 3)]
    assert server_checks._pooler(server_checks.Server(direct, Settings(), "here"))[0] == "ok"
