"""Fixtures: servers that start when the first test wants them, and databases and queues that no two tests share.

A server is taken from SYNCGUARD_TEST_DSN, SYNCGUARD_TEST_REDIS_URL or SYNCGUARD_TEST_AMQP_URL where those are set. With
SYNCGUARD_TEST_PGBOUNCER=1 the applications of acceptance tests reach PostgreSQL through pgbouncer in transaction mode,
and tests marked `direct`, which look at the connection itself, are left out.
A test whose server this machine does not have is deselected, and the last lines of the run say so in red; under CI=true
the run fails instead. Nothing is ever skipped. With SYNCGUARD_TEST_WITHOUT=rabbitmq (names of servers) the run does
without them, and says nothing.

Not here: tasks and applications (they lie beside their tests) and the fixtures' own code (`tests/fixtures`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import ssl
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.fixtures import servers, zygote
from tests.fixtures.cluster import Broker, CeleryTestSetup
from tests.fixtures.dealing import brokers_for, dealt
from tests.fixtures.history import History
from tests.fixtures.proxy import Proxy

# Which fixture needs which server. A parametrised broker needs the one in its parameter, see `_servers_of`.
_NEEDS = {
    "pg_server": "pg",
    "private_pg": "pg",
    "redis_url": "redis",
    "amqp_url": "rabbitmq",
    "pgbouncer": "pgbouncer",
}

# Through which of them applications reach PostgreSQL, perhaps by way of a pooler.
_TO_APPS = {"celery_setup", "app_dsn", "private_app_dsn", "empty_app_dsn", "app_proxy", "app_tls_proxy"}

# Whether applications are led through a pooler.
POOLED = os.environ.get("SYNCGUARD_TEST_PGBOUNCER", "") not in ("", "0")

# Which servers this run does without.
WITHOUT = frozenset(os.environ.get("SYNCGUARD_TEST_WITHOUT", "").split())


# --- missing servers ------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background jobs ignore Ctrl-C, and so would everything that is started here and gets one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Fixtures stop what they started when the run is told to end, as they do after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if url := getattr(config, "workerinput", {}).get("amqp_url"):
        os.environ[servers.ENV_VARIABLES["rabbitmq"]] = url
    elif getattr(config.option, "dist", "no") != "no" and not config.option.collectonly:
        _start_shared(config)


def _start_shared(config: pytest.Config) -> None:
    """In the process that leads others (pytest -n): start what is too dear to be started by each of them, for all.

    Each gets a virtual host, so that broadcasts of one reach no worker of another.
    """
    if os.environ.get(servers.ENV_VARIABLES["rabbitmq"]) or "rabbitmq" in WITHOUT or servers.missing("rabbitmq"):
        return
    server = servers.RabbitServer(vhosts=[f"process{number}" for number in range(_VHOSTS)])
    config.add_cleanup(server.close)
    server.start()
    config.stash[_SHARED_RABBIT] = server


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    server = node.config.stash.get(_SHARED_RABBIT, None)
    if server is not None:
        number = int(node.gateway.id.removeprefix("gw")) % _VHOSTS
        node.workerinput["amqp_url"] = server.url(f"process{number}")


# As many as there may be processes, with those that replace crashed ones.
_VHOSTS = 16
_SHARED_RABBIT = pytest.StashKey[servers.RabbitServer]()


@pytest.hookimpl(trylast=True)  # after -k and -m, so that only tests that were asked for are missed
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {name: servers.missing(name) for name in ("pg", "redis", "rabbitmq", "pgbouncer")}
    kept: list[pytest.Item] = []
    missed: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        needs = _servers_of(item)
        if needs & WITHOUT or (POOLED and item.get_closest_marker("direct")):
            dropped.append(item)
        elif any(reasons[name] for name in needs):
            missed.append(item)
        else:
            kept.append(item)
    if missed:
        config.stash[_DROPPED] = (len(missed), [reason for reason in reasons.values() if reason])
    dropped += missed
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = dealt(kept, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_collection_finish() -> None:
    # Thousands of tests and all that they import stay until the end; no collection need look at them again.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count, reasons = config.stash.get(_DROPPED, (0, []))
    if count:
        terminalreporter.write_sep("!", f"{count} TESTS DID NOT RUN: a server is missing", red=True, bold=True)
        for reason in reasons:
            terminalreporter.write_line(reason, red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    dropped = session.config.stash.get(_DROPPED, (0, []))
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # one process of several (pytest -n): the one that reports decides
        output["dropped"] = dropped
    elif dropped[0] and os.environ.get("CI") == "true":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every process collects the same tests, so that one of them speaks for all.
    count, reasons = getattr(node, "workeroutput", {}).get("dropped", (0, []))
    if count:
        node.config.stash[_DROPPED] = (count, list(reasons))


_DROPPED = pytest.StashKey[tuple[int, list[str]]]()


def pytest_unconfigure() -> None:
    zygote.close()


def _servers_of(item: pytest.Item) -> set[str]:
    names = {_NEEDS[name] for name in getattr(item, "fixturenames", ()) if name in _NEEDS}
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    for fixture in ("broker", "private_broker"):
        if fixture in parameters:
            names |= {parameters[fixture], "redis"}  # results go to Redis with either broker
    if POOLED and _TO_APPS.intersection(getattr(item, "fixturenames", ())):
        names.add("pgbouncer")
    return names


# --- PostgreSQL -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pg_server() -> Iterator[servers.PostgresServer | servers.GivenPostgres]:
    """The server that the tests share. A test that restarts it, changes its settings or reads its log takes
    `private_pg`."""
    if dsn := os.environ.get("SYNCGUARD_TEST_DSN"):
        yield servers.GivenPostgres(dsn)
        return
    with servers.PostgresServer() as server:
        yield server


@pytest.fixture
def private_pg() -> Iterator[servers.PostgresServer]:
    """A server for this test alone, ready in a second: restart it, kill it, freeze it, read its log."""
    with servers.PostgresServer() as server:
        yield server


@pytest.fixture
def private_dsn(private_pg: servers.PostgresServer) -> str:
    """A migrated database on `private_pg`."""
    private_pg.execute("create database syncguard")
    dsn = private_pg.dsn("syncguard")
    _migrate(dsn)
    return dsn


@pytest.fixture(scope="session")
def _template(pg_server: servers.PostgresServer) -> Iterator[str]:
    name = f"template_{uuid.uuid4().hex[:12]}"
    pg_server.execute(f"create database {name}")
    _migrate(pg_server.dsn(name))
    yield name
    pg_server.execute(f"drop database if exists {name} with (force)")


@pytest.fixture
def pg_dsn(pg_server: servers.PostgresServer, _template: str) -> Iterator[str]:
    """A database for this test alone, with our schema."""
    yield from _database(pg_server, template=_template)


@pytest.fixture
def empty_dsn(pg_server: servers.PostgresServer) -> Iterator[str]:
    """A database for this test alone, without our schema."""
    yield from _database(pg_server, template="template1")


@pytest.fixture(scope="session")
def pgbouncer(pg_server: servers.PostgresServer) -> Iterator[servers.PgBouncer]:
    """A pooler in transaction mode in front of `pg_server`, with two server connections for each database."""
    with servers.PgBouncer(upstream_port=pg_server.port) as pooler:
        yield pooler


@pytest.fixture
def pgbouncer_dsn(pg_dsn: str, pgbouncer: servers.PgBouncer) -> str:
    """The database of `pg_dsn` as seen through `pgbouncer`."""
    return pgbouncer.dsn(pg_dsn.rpartition("/")[2])


@pytest.fixture
def app_dsn(request: pytest.FixtureRequest, pg_dsn: str) -> str:
    """`pg_dsn` as an application is to reach it: through a pooler where that was asked for."""
    return str(request.getfixturevalue("pgbouncer_dsn")) if POOLED else pg_dsn


@pytest.fixture
def empty_app_dsn(request: pytest.FixtureRequest, empty_dsn: str) -> str:
    """As `app_dsn`, for `empty_dsn`."""
    if not POOLED:
        return empty_dsn
    return str(request.getfixturevalue("pgbouncer").dsn(empty_dsn.rpartition("/")[2]))


@pytest.fixture
def private_app_dsn(private_pg: servers.PostgresServer, private_dsn: str) -> Iterator[str]:
    """As `app_dsn`, for `private_dsn`."""
    if not POOLED:
        yield private_dsn
        return
    with servers.PgBouncer(upstream_port=private_pg.port) as pooler:
        yield pooler.dsn("syncguard")


def _port_for_apps(request: pytest.FixtureRequest, pg_server: servers.PostgresServer | servers.GivenPostgres) -> int:
    return int(request.getfixturevalue("pgbouncer").port) if POOLED else pg_server.port


@pytest.fixture
def app_proxy(
    request: pytest.FixtureRequest, pg_server: servers.PostgresServer | servers.GivenPostgres
) -> Iterator[Proxy]:
    """As `pg_proxy`, in front of what applications reach, perhaps a pooler: `app_proxy.dsn(app_dsn)`."""
    with Proxy(_port_for_apps(request, pg_server)) as proxy:
        yield proxy


@pytest.fixture
def pg_proxy(pg_server: servers.PostgresServer) -> Iterator[Proxy]:
    """A TCP proxy in front of `pg_server` that can cut, stall, refuse and swallow; see `pg_proxy.dsn(pg_dsn)`."""
    with Proxy(pg_server.port) as proxy:
        yield proxy


@pytest.fixture
def history(pg_dsn: str) -> Iterator[History]:
    """The append-only record of what task bodies did, in the database of `pg_dsn`."""
    with History(pg_dsn) as record:
        record.create()
        yield record


@pytest.fixture
def guard(pg_dsn: str) -> Iterator[Any]:
    """A guard of the test's own process on `pg_dsn`. It sees what is in the tables: it goes through no pooler."""
    from celery_syncguard import SyncGuard

    with SyncGuard(pg_dsn) as guard:
        yield guard


def _migrate(dsn: str) -> None:
    from celery_syncguard.postgres.migrate import migrate

    migrate(dsn)


def _database(server: servers.PostgresServer, *, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    server.execute(f"create database {name} template {template}")
    yield server.dsn(name)
    server.execute(f"drop database if exists {name} with (force)")


# --- brokers and Celery ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of the Redis-protocol server that the tests share, without a database number."""
    if url := os.environ.get("SYNCGUARD_TEST_REDIS_URL"):
        yield url.rstrip("/").removesuffix("/0")
        return
    with servers.ValkeyServer() as server:
        yield server.url().removesuffix("/0")


@pytest.fixture(scope="session")
def amqp_url() -> Iterator[str]:
    """URL of the RabbitMQ node that the tests share."""
    if url := os.environ.get("SYNCGUARD_TEST_AMQP_URL"):
        yield url
        return
    with servers.RabbitServer() as server:
        yield server.url()


@pytest.fixture
def redis_db(redis_url: str) -> Iterator[str]:
    """URL of a Redis database that no other test uses, empty before and after."""
    import redis

    with redis.Redis.from_url(f"{redis_url}/0") as client:
        databases = int(client.config_get("databases")["databases"])
    url = f"{redis_url}/{1 + next(_redis_databases) % (databases - 1)}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


_redis_databases = itertools.count()


@pytest.fixture
def broker(request: pytest.FixtureRequest, redis_db: str) -> Broker:
    """A broker, with a queue (and a Redis database) of this test's own. Results go to Redis.

    RabbitMQ for one half of the tests and Redis for the other, since to most promises it does not matter which. A test
    to which it does says `@pytest.mark.both_brokers`, and runs twice. A test for one of them says
    `@pytest.mark.parametrize("broker", ["redis"], indirect=True)`.
    """
    queue = f"test-{uuid.uuid4().hex[:12]}"
    url = redis_db if request.param == "redis" else request.getfixturevalue("amqp_url")
    return Broker(kind=request.param, url=url, queue=queue, result_backend=redis_db)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "broker" not in metafunc.fixturenames:
        return
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        if "broker" in [name.strip() for name in names]:
            return
    both = not POOLED and metafunc.definition.get_closest_marker("both_brokers") is not None
    metafunc.parametrize("broker", brokers_for(metafunc.function.__name__, both=both), indirect=True)


@pytest.fixture
def broker_url(broker: Broker) -> str:
    """URL of `broker`."""
    return broker.url


@pytest.fixture(params=["redis", "rabbitmq"])
def private_broker(request: pytest.FixtureRequest, redis_db: str) -> Iterator[Broker]:
    """Like `broker`, on a server for this test alone, as `private_broker.server`: restart it, kill it, freeze it."""
    kind = servers.ValkeyServer if request.param == "redis" else servers.RabbitServer
    with kind() as server:
        queue = f"test-{uuid.uuid4().hex[:12]}"
        yield Broker(kind=request.param, url=server.url(), queue=queue, result_backend=redis_db, server=server)


class StartSetup(Protocol):
    """What `celery_setup` gives: a function that takes what `CeleryTestSetup` takes, with defaults."""

    def __call__(self, module: str, **options: Any) -> CeleryTestSetup: ...


@pytest.fixture
def celery_setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartSetup]:
    """Make the setup of this test: `setup = celery_setup("tests.acceptance.apps.retrying", conf={...})`.

    Unless told otherwise (`broker=`, `dsn=`) it uses the fixtures `broker` and `pg_dsn` (perhaps through a pooler), which
    the test has to request, since they decide how often it runs and what it needs. Nodes are killed when the test ends,
    and their logs are shown when it failed.
    """
    with contextlib.ExitStack() as stack:

        def requested(name: str) -> Any:
            assert name in request.fixturenames, f"request the fixture `{name}`, or pass {name.removeprefix('pg_')}="
            return request.getfixturevalue(name)

        def start(module: str, **options: Any) -> CeleryTestSetup:
            if "broker" not in options:
                options["broker"] = requested("broker")
            if "pg_dsn" in request.fixturenames:
                options.setdefault("history_dsn", requested("pg_dsn"))
            if "dsn" not in options:
                requested("pg_dsn")
                options["dsn"] = request.getfixturevalue("app_dsn")
            options.setdefault("folder", tmp_path)
            setup = CeleryTestSetup(module, **options)
            stack.callback(lambda: print(setup.logs()))
            return stack.enter_context(setup)

        yield start


# --- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tls_proxy(pg_server: servers.PostgresServer) -> Iterator[Proxy]:
    """A proxy in front of `pg_server` that speaks TLS with its clients: `tls_proxy.dsn(pg_dsn) + "?sslmode=require"`."""
    with Proxy(pg_server.port, tls=_tls_context()) as proxy:
        yield proxy


@pytest.fixture
def app_tls_proxy(
    request: pytest.FixtureRequest, pg_server: servers.PostgresServer | servers.GivenPostgres
) -> Iterator[Proxy]:
    """As `tls_proxy`, in front of what applications reach, perhaps a pooler: `app_tls_proxy.dsn(app_dsn) + "?…"`."""
    with Proxy(_port_for_apps(request, pg_server), tls=_tls_context()) as proxy:
        yield proxy


def _tls_context() -> ssl.SSLContext:
    import trustme

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    return context
