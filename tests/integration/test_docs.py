"""Every Python snippet of the README and of docs/ runs as it stands, or is named here with the reason why it does not."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psycopg
import pytest
import redis
import sqlalchemy
from celery import Celery
from celery.exceptions import Reject
from sqlalchemy import orm

from celery_syncguard import SKIPPED, LockedTask, SyncGuard, hlc, revisions
from celery_syncguard.tasks import app_state
from tests.fixtures.callers import django_database
from tests.fixtures.cluster import ROOT

DSN = "postgresql://user@host/database"  # as the README writes it
SNIPPET = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def snippets(page: str, language: str = "python") -> list[str]:
    found = SNIPPET.findall((ROOT / page).read_text())
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, lang, text in found if lang == language]


PAGES = sorted(
    str(page.relative_to(ROOT)) for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if snippets(str(page))
)


class Page:
    """A page whose snippets are run one by one, by what each begins with. They share what they define."""

    def __init__(self, page: str, **names: Any) -> None:
        self.page = page
        self.names = {"__name__": "proj", **names}
        self._left = snippets(page)

    def take(self, start: str) -> str:
        (text,) = [one for one in self._left if one.startswith(start)]
        self._left.remove(text)
        return text

    def run(self, start: str, /, **names: Any) -> None:
        """Run it; what it needs and the page does not define is given by `names`."""
        self.names.update(names)
        exec(compile(self.take(start), f"{self.page}: {start}", "exec"), self.names)

    def show(self, start: str, *, because: str) -> None:
        """Do not run it. It is Python, nevertheless."""
        assert because
        compile(self.take(start), f"{self.page}: {start}", "exec")

    def done(self) -> None:
        assert self._left == []

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


class App(Celery):
    """Its tasks are not shared with every other application of this process."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **{"shared": False, **options})


@pytest.fixture
def eager(pg_dsn: str) -> Iterator[Callable[..., Celery]]:
    """Applications that run their tasks at once."""
    apps = []

    def make(dsn: str = pg_dsn) -> Celery:
        app = App("proj", set_as_current=False)
        app.conf.update(
            syncguard_dsn=dsn,
            task_always_eager=True,
            task_eager_propagates=True,
            task_store_eager_result=True,
            broker_url="memory://",
            result_backend="cache+memory://",
        )
        apps.append(app)
        return app

    yield make
    for app in apps:
        app_state.state_of(app).close()


@pytest.fixture
def connection(pg_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with closing(psycopg.connect(pg_dsn, autocommit=True)) as connection:
        yield connection


@pytest.fixture
def django_default(pg_dsn: str) -> Iterator[None]:
    """Django's connection "default" leads to our database."""
    import django
    from django.db import connections

    django.setup()
    with django_database(pg_dsn) as alias:
        usual = connections["default"]
        connections["default"] = connections[alias]
        yield
        connections["default"] = usual


def readme(eager: Any, connection: Any, pg_dsn: str, django_default: None) -> Page:
    connection.execute("create table invoices (id int primary key, state text)")
    connection.execute("insert into invoices values (42, 'open')")
    state = "select state from invoices"
    page = Page("README.md", app=eager(), bank=mock.Mock())
    first = snippets("README.md")[0]
    page.run("from celery_syncguard import LockedTask\n")
    page["charge"].apply((42,))
    assert connection.execute(state).fetchone() == ("charged",)
    assert page["bank"].charge.call_args.args == (42,)
    connection.execute("update invoices set state = 'open'")
    page.names["connection"] = connection  # psycopg's
    page["charge"].apply((42,))
    assert connection.execute(state).fetchone() == ("charged",)
    page.show("app.conf.syncguard_dsn", because="a setting")
    page._left = [one.replace(DSN, pg_dsn) for one in page._left]
    page.run("from celery_syncguard import SyncGuard")
    page["guard"].close()
    page.names["app"] = eager()
    exec(first, page.names)
    page.names["connection"] = connection
    page.run("app.conf.update(task_always_eager")
    assert repr(app_state.guard_for(page["app"]).store) == "<MemoryStore>"
    return page


def fencing(guard: SyncGuard, connection: Any, pg_dsn: str, django_default: None, redis_url: str) -> Page:
    from django.db import IntegrityError, models, transaction

    class Invoice(models.Model):
        paid = models.BooleanField()

        class Meta:
            app_label, db_table, managed = "docs", "invoices", False

        def __str__(self) -> str:
            return f"invoice {self.pk}"

    connection.execute("create table invoices (id int primary key, paid boolean)")
    connection.execute("create table reports (id int primary key, body text)")
    connection.execute("create table ledger (account_id int, fence bigint)")
    for text in snippets("docs/fencing.md", "sql"):
        if "trigger" in text:
            connection.execute(text)
    connection.execute("insert into invoices values (1, false); insert into reports values (1, 'old', 1)")

    def paid() -> bool:
        (row,) = connection.execute("update invoices set paid = false returning (select paid from invoices)").fetchall()
        return bool(row[0])

    lease = guard.try_acquire("k")
    assert lease is not None
    page = Page("docs/fencing.md", lease=lease, connection=connection, invoice=1)
    page.run("with lease.transaction(connection)")
    assert paid()
    engine = sqlalchemy.create_engine(pg_dsn.replace("postgresql://", "postgresql+psycopg://"))
    with orm.Session(engine) as session:
        page.run("with lease.transaction(session)", session=session, text=sqlalchemy.text)
    engine.dispose()
    assert paid()
    page.run('with lease.transaction("default")', Invoice=Invoice)
    assert paid()
    page.run("with transaction.atomic()", transaction=transaction, IntegrityError=IntegrityError)
    assert paid()

    task = SimpleNamespace(fence=lease.fence)
    page.run('connection.execute("update reports', self=task, report_id=1, body="new")
    assert connection.execute("select body from reports").fetchone() == ("new",)
    http = mock.Mock()
    http.put.return_value.status_code = 412
    with pytest.raises(Reject):
        page.run("response = http.put", http=http, url="", Reject=Reject)
    s3 = mock.Mock()
    s3.head_object.return_value = {"Metadata": {"fence": "7"}, "ETag": "e"}
    page.run("head = s3.head_object", s3=s3, bucket="", name="n", LateWriter=LookupError)
    assert s3.put_object.call_args.kwargs["IfMatch"] == "e"
    (lua,) = snippets("docs/fencing.md", "lua")
    with redis.Redis.from_url(redis_url) as client:
        name = uuid.uuid4().hex
        page.run("if not script(", script=client.register_script(lua), name=name, value="v")
        assert client.hget(name, "value") == b"v"
        client.hset(name, "fence", str(lease.fence + 1))
        with pytest.raises(LookupError):
            exec(snippets("docs/fencing.md")[-1], page.names)
    return page


def dedup(eager: Any, connection: Any) -> Page:
    app = eager()
    app.conf.task_always_eager = False
    page = Page("docs/dedup.md", app=app, LockedTask=LockedTask, connection=connection)
    page.run("@app.task(base=LockedTask, dedup_key=")
    assert page["second"].duplicate
    page.run("from celery_syncguard.dedup import send_task")
    connection.execute("create table accounts (id text, balance int); insert into accounts values ('a', 0)")
    page.run("@app.task(base=LockedTask, bind=True, run_once=")
    for _ in range(2):
        page["deposit"].apply(("payment", "a", 5))
    assert connection.execute("select balance from accounts").fetchone() == (5,)
    return page


def skipped(eager: Any) -> Page:
    app = eager()
    page = Page("docs/skipped.md", app=app, LockedTask=LockedTask, SKIPPED=SKIPPED)
    with app_state.guard_for(app).hold("report:monday"):
        page.run("@app.task(base=LockedTask, lock_key=")
    assert page["marker"].key == "report:monday"
    page.run("import celery_syncguard.skipped")
    return page


def beat(eager: Any, guard: SyncGuard, connection: Any) -> Page:
    page = Page("docs/beat.md", app=eager(), guard=guard, connection=connection)
    page.run("@app.task(bind=True)")
    page["report"].push_request(syncguard_due_at="2026-03-29T01:30:00+00:00", syncguard_term=1)  # as a worker does
    page["report"].run()
    rounds = []

    def relay_rows(conn: Any, *, fence: int) -> None:
        rounds.append(fence)
        if len(rounds) == 2:
            page["leadership"].step_down()

    page.run("with guard.leadership(", relay_rows=relay_rows)
    assert len(rounds) == 2
    return page


def clocks(eager: Any, connection: Any) -> Page:
    connection.execute("create table notes (id int, body text, hlc bigint, device_id text)")
    connection.execute("insert into notes values (1, 'old', 1, 'phone')")
    page = Page("docs/hlc.md", app=eager(), LockedTask=LockedTask, connection=connection)
    page.run("app.conf.syncguard_hlc")
    page["rename"].apply((1, "new"))
    assert connection.execute("select body from notes").fetchone() == ("new",)
    stamp = hlc.HybridLogicalClock("other").now()
    page.run("from celery_syncguard.hlc import", stamp_from_elsewhere=stamp, other=stamp)
    connection.execute("update notes set hlc = %s", [hlc.encode(page["clock"].now().wall_ms + 10**9, 0)])
    page.run("def repair(")
    page["repair"](connection, page["clock"])
    assert connection.execute("select device_id from notes").fetchone() == ("phone-17",)
    return page


def order(eager: Any, connection: Any) -> Page:
    connection.execute(revisions.POSTGRES_MIGRATION_SQL)
    for text in snippets("docs/revisions.md", "sql"):
        connection.execute(text)
    # As the page says of rows that move.
    connection.execute("alter table notes drop constraint notes_pkey, add primary key (owner_id, id)")
    alice, bob, note = (str(uuid.uuid4()) for _ in range(3))
    with connection.transaction():
        revisions.ensure_owner(connection, alice)
        revisions.ensure_owner(connection, bob)
    connection.execute("insert into notes (id, owner_id, revision, body) values (%s, %s, 0, 'old')", [note, alice])
    page = Page("docs/revisions.md", app=eager(), connection=connection, UUID=uuid.UUID)
    page.run("from celery_syncguard import LockedTask, revisions")
    page["rename"].apply((alice, note, "new"))
    page.run("def pull(")
    page.run("def pull_page(")
    (rows, bound), paged = page["pull"](alice, 0), page["pull_page"](alice, 0)
    assert [row[1:] for row in rows] == [("new", False)]
    assert (len(paged[0]), paged[1], paged[2]) == (1, bound, None)
    page.run("def move(")
    page["move"](note, alice, bob)
    assert [row[1:] for row in page["pull"](alice, bound)[0]] == [("", True)]
    assert [row[1:] for row in page["pull"](bob, 0)[0]] == [("new", False)]
    connection.execute("update notes set deleted_at = deleted_at - interval '100 days'")
    page.run("@app.task\ndef purge")
    page["purge"].apply()
    assert connection.execute("select count(*) from notes where deleted_at is not null").fetchone() == (0,)
    return page


def operations() -> Page:
    page = Page("docs/operations.md")
    page.show("app.conf.syncguard_dsn", because="settings")
    return page


RUNNERS = {
    "README.md": readme,
    "docs/beat.md": beat,
    "docs/dedup.md": dedup,
    "docs/fencing.md": fencing,
    "docs/hlc.md": clocks,
    "docs/operations.md": operations,
    "docs/revisions.md": order,
    "docs/skipped.md": skipped,
}


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_of_a_page_runs_as_it_stands(page: str, request: pytest.FixtureRequest) -> None:
    assert page in RUNNERS, "a page with snippets that nothing runs"
    runner = RUNNERS[page]
    needed = runner.__code__.co_varnames[: runner.__code__.co_argcount]
    runner(*map(request.getfixturevalue, needed)).done()


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir()))
def test_the_commands_of_an_example_name_the_folder_that_they_run_in(example: str) -> None:
    text = (ROOT / "examples" / example / "README.md").read_text()
    if f"-A examples.{example}.app" in text:
        assert "from the root of this repository" in text
    else:
        commands = text.index("    cd examples/" + example + "\n")
        assert commands < min(text.index(one) for one in ("-A app", "python app.py") if one in text)


def test_a_snippet_that_fails_and_one_that_was_forgotten_are_found() -> None:
    """The negative control."""
    page = Page("docs/skipped.md")
    with pytest.raises(NameError):
        page.run("@app.task(base=LockedTask")  # without what it needs
    with pytest.raises(AssertionError):
        page.done()
