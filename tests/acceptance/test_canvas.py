"""Workflows with a member whose lock is held: nothing waits for ever, and nothing that ended well becomes a failure."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import redis
from celery import chain, chord, group
from celery.exceptions import ChordError

from celery_syncguard import SKIPPED, InvalidKey, LockHeld, Skipped
from tests.fixtures.cluster import ROOT
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.canvas_steps"


@pytest.fixture
def held(celery_setup, broker, pg_dsn, history):
    """A worker, and a task on it that holds the lock "held" until the gate "release" is opened."""
    setup = celery_setup(MODULE)
    worker = setup.start_worker(concurrency=4)
    holder = setup.module.hold.delay("held")
    history.wait_for("holds")
    return SimpleNamespace(setup=setup, worker=worker, holder=holder, history=history, tasks=setup.module)


def shapes(tasks, on_held):
    """Every workflow by name, with the member that meets the held lock in different places."""

    def blocked(tag):
        return tasks.step.s(key="held", tag=tag).set(lock_on_held=on_held)

    def free(tag):
        return tasks.step.s(key=f"free {tag}", tag=tag)

    def plain(tag):
        return tasks.plain.s(tag=tag)

    def replaced(signature, key):
        return tasks.replaced_by.s(key=key, signature=signature)

    return {
        "chain, first": chain(blocked("chain-1"), plain("chain-1-b"), free("chain-1-c")),
        "chain, middle": chain(plain("chain-2-a"), blocked("chain-2"), plain("chain-2-c")),
        "chain, last": chain(plain("chain-3-a"), blocked("chain-3")),
        "chain before chord": chain(
            blocked("chain-4"), chord([plain("p"), plain("q")], tasks.collect.s(tag="chain-4"))
        ),
        "chain before group": chain(blocked("chain-5"), group(plain("r"), plain("s"))),
        "group": group(free("group-a"), blocked("group")),
        "chord": chord([free("chord-a"), blocked("chord")], tasks.collect.s(tag="chord")),
        "chord of chains": chord(
            [chain(blocked("chains-a"), plain("chains-b")), chain(plain("chains-c"), blocked("chains-d"))],
            tasks.collect.s(tag="chains"),
        ),
        "nested chord": chord(
            [chord([plain("inner-a"), blocked("inner-b")], tasks.collect.s(tag="inner")), plain("outer-b")],
            tasks.collect.s(tag="outer"),
        ),
        "chord body": chord([plain("body-a"), plain("body-b")], blocked("body")),
        "replace": replaced(blocked("replace"), "replaced"),
        "replace in chord": chord(
            [replaced(blocked("replace-a"), "replaced in chord"), plain("replace-b")],
            tasks.collect.s(tag="replace"),
        ),
        "replace in chain": chain(replaced(blocked("replace-c"), "replaced in chain"), plain("replace-d")),
        "replace under one key": replaced(tasks.step.s(key="one key", tag="one key"), "one key"),
        "link": blocked("link").set(link=[tasks.linked.s(tag="link")], link_error=[tasks.linked.s(tag="link_error")]),
        "callback": plain("callback").set(link=[blocked("linked")]),
    }


#: How many of the members above meet the lock.
BLOCKED = 16


def start(held, on_held):
    return {name: shape.apply_async() for name, shape in shapes(held.tasks, on_held).items()}


def linked(held):
    return {row.note for row in held.history.events("linked")}


@pytest.mark.both_brokers
@pytest.mark.smoke
def test_a_workflow_whose_member_waits_for_a_lock_runs_to_its_end(held, pg_dsn):
    results = start(held, "retry")

    def all_wait():
        assert len(set(re.findall(r"step\[(\S+)\] not run, comes back", held.worker.logs()))) == BLOCKED

    poll(all_wait, timeout=60)
    held.setup.open_gate("release")
    found = {name: result.get(timeout=60) for name, result in results.items()}
    assert found == {
        "chain, first": "chain-1-c",
        "chain, middle": "chain-2-c",
        "chain, last": "chain-3",
        "chain before chord": ["p", "q"],
        "chain before group": ["r", "s"],
        "group": ["group-a", "group"],
        "chord": ["chord-a", "chord"],
        "chord of chains": ["chains-b", "chains-d"],
        "nested chord": [["inner-a", "inner-b"], "outer-b"],
        "chord body": "body",
        "replace": "replace",
        "replace in chord": ["replace-a", "replace-b"],
        "replace in chain": "replace-d",
        "replace under one key": "one key",
        "link": "link",
        "callback": "callback",
    }
    held.history.wait_for("linked")
    assert linked(held) == {"link"}
    poll(lambda: "linked" in {row.note for row in held.history.events("step")}, timeout=30)
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_a_workflow_with_a_skipped_member_ends_and_says_so(held, pg_dsn):
    results = start(held, "skip")
    ignored = chord([held.tasks.ignored.s(), held.tasks.plain.s(tag="x")], held.tasks.collect.s(tag="never")).delay()

    def is_marker(value):
        value = value.as_dict() if isinstance(value, Skipped) else value
        return value["key"] == "held" and value["task_id"] == held.holder.id and value["since"] > 0 and value["holder"]

    skipped = ["chain, first", "chain, middle", "chain, last", "chain before chord", "replace", "replace in chain"]
    for name in [*skipped, "link", "chord body"]:
        assert is_marker(results[name].get(timeout=30)), name
        assert results[name].state == "SKIPPED", name
        assert not results[name].successful(), name
        assert not results[name].failed(), name
    assert results["chain, first"].parent.state == results["chain, first"].parent.parent.state == "SKIPPED"
    assert results["chain, middle"].parent.parent.get(timeout=30) == "chain-2-a"
    assert results["chain before chord"].parent.ready()
    assert all(is_marker(value) for value in results["chain before group"].get(timeout=30))

    found = results["group"].get(timeout=30)
    assert found[0] == "group-a"
    assert is_marker(found[1])
    found = results["chord"].get(timeout=30)
    assert results["chord"].state == "SUCCESS"
    assert found[0] == "chord-a"
    assert is_marker(found[1])
    assert all(is_marker(value) for value in results["chord of chains"].get(timeout=30))
    inner, outer = results["nested chord"].get(timeout=30)
    assert inner[0] == "inner-a"
    assert is_marker(inner[1])
    assert outer == "outer-b"
    found = results["replace in chord"].get(timeout=30)
    assert is_marker(found[0])
    assert found[1] == "replace-b"
    assert results["replace under one key"].get(timeout=30) == "one key"
    assert results["callback"].get(timeout=30) == "callback"
    assert results["callback"].state == "SUCCESS"
    poll(lambda: results["callback"].children and results["callback"].children[0].state == "SKIPPED")

    # No link of a skipped task is called, neither kind; and no step behind it has run.
    assert linked(held) == set()
    ran = {row.note for row in held.history.events("plain")}
    assert ran.isdisjoint({"chain-1-b", "chain-2-c", "p", "q", "r", "s", "chains-b", "replace-d"})
    # The negative control: Celery's own way to end a task without a result leaves a chord waiting.
    assert not ignored.ready()
    assert held.worker.logs().count("skipped: 'held' is held by") == BLOCKED
    held.setup.open_gate("release")
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_a_workflow_whose_member_raises_fails_as_if_its_body_had(held, pg_dsn):
    results = start(held, "raise")
    for name in ["chain, first", "chain, middle", "chain, last", "group", "replace", "replace in chain", "link"]:
        with pytest.raises(LockHeld, match="'held' is held by"):
            results[name].get(timeout=30)
    for name in ["chord", "chord of chains", "nested chord", "replace in chord"]:
        # As Celery has it: the error of the part, or that of the body which it kept from running.
        with pytest.raises((ChordError, LockHeld), match="LockHeld|'held' is held by"):
            results[name].get(timeout=30)
    with pytest.raises(LockHeld):
        results["chord body"].get(timeout=30)
    assert results["replace under one key"].get(timeout=30) == "one key"
    assert results["callback"].get(timeout=30) == "callback"
    assert results["callback"].state == "SUCCESS"
    held.history.wait_for("linked")
    assert linked(held) == {"link_error"}
    held.setup.open_gate("release")
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_a_callback_whose_key_cannot_be_made_fails_itself_and_not_its_parent(held, pg_dsn):
    parent = held.tasks.plain.s(tag="parent").set(link=[held.tasks.picky.s()]).apply_async()
    in_chain = (held.tasks.plain.s(tag="parent") | held.tasks.picky.s()).apply_async()
    assert parent.get(timeout=30) == in_chain.parent.get(timeout=30) == "parent"
    with pytest.raises(InvalidKey):
        in_chain.get(timeout=30)
    with pytest.raises(InvalidKey):
        poll(lambda: parent.children)[0].get(timeout=30)
    held.setup.open_gate("release")
    poll(lambda: rows_left(pg_dsn) == NOTHING)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_result_backend_that_looks_for_the_end_of_a_chord_finds_it(celery_setup, broker, pg_dsn, history, tmp_path):
    """Unlike Redis, which counts parts as they come in."""
    results = tmp_path / "results"
    results.mkdir()
    setup = celery_setup(MODULE, conf={"result_backend": results.as_uri(), "result_chord_retry_interval": 0.2})
    setup.start_worker(concurrency=2)
    tasks = setup.module
    tasks.hold.delay("held")
    history.wait_for("holds")
    blocked = tasks.step.s(key="held", tag="never").set(lock_on_held="skip")
    marker, free = chord([blocked, tasks.plain.s(tag="free")], tasks.collect.s(tag="all")).apply_async().get(timeout=60)
    assert marker["key"] == "held"
    assert free == "free"
    assert isinstance(chain(blocked, tasks.plain.s(tag="never")).apply_async().get(timeout=30), Skipped)
    setup.open_gate("release")


@pytest.mark.parametrize(
    ("broker", "backend"),
    [("redis", "redis"), ("rabbitmq", "rpc"), ("redis", "database")],
    indirect=["broker"],
)
def test_the_result_of_a_skipped_task_says_what_the_document_says(
    celery_setup, broker, pg_dsn, history, tmp_path, backend
):
    """docs/skipped.md, where results are kept in different ways."""
    urls = {"redis": broker.result_backend, "rpc": "rpc://", "database": f"db+sqlite:///{tmp_path}/results.sqlite"}
    setup = celery_setup(MODULE, conf={"result_backend": urls[backend]})
    worker = setup.start_worker(concurrency=2)
    tasks = setup.module
    holder = tasks.hold.delay("held")
    history.wait_for("holds")
    links = {"link": [tasks.linked.s(tag="link")], "link_error": [tasks.linked.s(tag="link_error")]}
    blocked = tasks.step.s(key="held", tag="never").set(lock_on_held="skip", **links)

    skipped = blocked.apply_async()
    marker = skipped.get(timeout=30)
    assert isinstance(marker, Skipped)
    assert (marker.key, marker.task_id) == ("held", holder.id)
    assert marker.holder.startswith(f"{tasks.hold.name}[{holder.id}] ")
    assert 0 < marker.since < 60
    assert skipped.state == SKIPPED == "SKIPPED"
    assert skipped.result == skipped.get(timeout=30) == marker
    assert skipped.ready()
    assert not skipped.successful()
    assert not skipped.failed()
    assert skipped.traceback is None
    worker.wait_for_log(rf"step\[{skipped.id}\] skipped: 'held' is held by")

    # The control: a task that succeeds has its link called, after which those of the skipped one would have been.
    plain = tasks.plain.s(tag="control").set(link=[tasks.linked.s(tag="control")]).apply_async()
    assert plain.get(timeout=30) == "control"
    assert plain.successful()
    history.wait_for("linked")
    assert [row.note for row in history.events("linked")] == ["control"]
    setup.open_gate("release")


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_process_that_has_none_of_our_tasks_reads_a_skipped_result_when_it_is_told_of_the_state(held, broker):
    skipped = held.tasks.step.s(key="held", tag="never").set(lock_on_held="skip").apply_async()
    marker = skipped.get(timeout=30)
    program = """
import sys
from celery import Celery
if sys.argv[3:]:
    import celery_syncguard.skipped
    celery_syncguard.skipped.register()
result = Celery(backend=sys.argv[1]).AsyncResult(sys.argv[2])
print(result.ready(), result.state, result.get(timeout=5).holder)
"""

    def read(*register):
        command = [sys.executable, "-c", program, broker.result_backend, skipped.id, *register]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    told = read("register")
    assert told.stdout == f"True SKIPPED {marker.holder}\n", told.stderr
    # The negative control.
    assert read().returncode != 0
    held.setup.open_gate("release")


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_an_eager_chain_gives_the_marker_of_a_skipped_step_to_the_next_one(held):
    """Eagerly, where it is Celery that calls the next step with what `get()` returns: see docs/skipped.md."""
    blocked = held.tasks.step.s(key="held", tag="never").set(lock_on_held="skip")
    result = chain(held.tasks.plain.s(tag="before"), blocked).apply()
    assert result.state == SKIPPED
    assert result.get().task_id == held.holder.id
    seen = chain(blocked, held.tasks.told.s()).apply().get()
    assert isinstance(seen, Skipped)
    eager = chord([blocked, held.tasks.plain.s(tag="free")], held.tasks.collect.s(tag="all")).apply().get()
    assert eager[0]["task_id"] == held.holder.id
    assert eager[1] == "free"
    held.setup.open_gate("release")


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("backend", [None, "of the broker"])
def test_a_skip_whose_result_nobody_wants_is_logged_and_nothing_is_stored(
    celery_setup, broker, pg_dsn, history, backend
):
    conf = {"result_backend": None} if backend is None else {"task_ignore_result": True}
    setup = celery_setup(MODULE, conf=conf)
    worker = setup.start_worker(concurrency=2)
    tasks = setup.module
    holder = tasks.hold.delay("held")
    history.wait_for("holds")
    skipped = tasks.step.s(key="held", tag="never").set(lock_on_held="skip")
    chain(skipped, tasks.step.s(key="free", tag="never")).apply_async()
    worker.wait_for_log(rf"skipped: 'held' is held by \S*hold\[{holder.id}\]")
    tasks.step.delay(key="free", tag="next")
    history.wait_for("step", key="free")
    assert [row.note for row in history.events("step")] == ["next"]
    assert "Traceback" not in worker.logs()
    if backend is not None:
        with redis.Redis.from_url(broker.result_backend) as client:
            assert list(client.scan_iter("celery-task-meta-*")) == []
    setup.open_gate("release")
