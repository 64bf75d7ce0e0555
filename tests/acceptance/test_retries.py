"""Retries: the next attempt always runs, waiting for a lock is not a retry, and nothing is left behind."""

import time

import pytest
from celery import chord, group

from celery_syncguard import SyncGuard
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.retrying"


@pytest.mark.both_brokers
@pytest.mark.smoke
def test_every_kind_of_retry_runs_to_its_end_and_leaves_nothing_behind(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=4)
    tasks = setup.module
    at_once = [tasks.retry.delay(f"at-once-{i}", 2, 0) for i in range(4)]
    later = tasks.retry.delay("later", 2, 0.2)
    by_default = tasks.retry_by_default.delay("by-default", 2)
    too_often = tasks.retry.delay("too-often", 3, 0)
    auto = tasks.autoretry.delay("auto", 3)
    auto_too_often = tasks.autoretry.delay("auto-too-often", 4)
    waiting = [tasks.retry_in_wait.delay("one-key", f"name-{i}", 1) for i in range(4)]

    for result in [*at_once, later, by_default]:
        assert result.get(timeout=30) == 2
    for result in waiting:
        assert result.get(timeout=30) == 1
    assert auto.get(timeout=30) == 3
    with pytest.raises(tasks.retry.MaxRetriesExceededError):
        too_often.get(timeout=30)
    with pytest.raises(ValueError, match="auto-too-often"):
        auto_too_often.get(timeout=30)

    attempts = {row.key: [] for row in history.events("start")}
    for row in history.events("start"):
        attempts[row.key].append(row.attempt)
    assert sorted(attempts.pop("one-key")) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert attempts["at-once-0"] == attempts["later"] == attempts["too-often"] == attempts["by-default"] == [0, 1, 2]
    assert attempts["auto"] == attempts["auto-too-often"] == [0, 1, 2, 3]
    assert history.overlaps() == []
    poll(lambda: rows_left(pg_dsn) == NOTHING)


@pytest.mark.both_brokers
@pytest.mark.parametrize("how", ["retry", "requeue", "replace", "in silence"])
def test_what_comes_again_runs_though_its_key_is_held_on_to_for_others(celery_setup, broker, pg_dsn, history, how):
    """`lock_min_hold` and `lock_on_held="skip"`: the next attempt is not thrown away."""
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=1)
    result = setup.module.come_again_under_min_hold.delay("a", how)
    ends = history.wait_for("end", count=2)
    assert {row.task_id for row in ends} == {result.id}
    other = setup.module.come_again_under_min_hold.delay("a", how)
    poll(lambda: other.state == "SKIPPED")


@pytest.mark.parametrize("patience", ["in place", "by coming back"])
def test_an_attempt_that_was_published_before_the_first_ended_runs_after_it(
    celery_setup, broker, pg_dsn, history, patience
):
    setup = celery_setup(MODULE)
    worker = setup.start_worker(concurrency=2)
    result = setup.module.retry_early.delay("a", "go")
    history.wait_for("published")
    if patience == "by coming back":
        worker.wait_for_log("it runs already")
    setup.open_gate("go")
    assert result.get(timeout=30) == 1
    assert [(row.event, row.attempt) for row in history.events()] == [
        ("start", 0),
        ("published", 0),
        ("end", 0),
        ("start", 1),
        ("end", 1),
    ]
    poll(lambda: rows_left(pg_dsn) == NOTHING)


def test_without_a_lock_the_next_attempt_overlaps_the_first(celery_setup, broker, pg_dsn, history):
    """The negative control of the test before."""
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=2)
    setup.module.plain_retry_early.delay("a", "go")
    history.wait_for("start", count=2)
    setup.open_gate("go")
    assert len(history.overlaps()) == 1


@pytest.mark.both_brokers
def test_waiting_for_a_lock_uses_up_no_retries_keeps_the_whole_message_and_stops_at_expires(
    celery_setup, broker, second_queue, pg_dsn, history
):
    setup = celery_setup(
        MODULE, conf={"task_queue_max_priority": 5, "broker_transport_options": {"priority_steps": [0, 3]}}
    )
    setup.start_worker("-Q", f"{broker.queue},{second_queue}", concurrency=1)
    describe, note = setup.module.describe, setup.module.note

    def publish(key):
        single = describe.s(key).set(
            queue=second_queue,
            priority=3,
            expires=600,
            time_limit=300,
            soft_time_limit=200,
            headers={"trace": "t-1"},
            shadow="another name",
            link=note.s(),
            link_error=note.s(),
        )
        chain = describe.s(key) | note.s() | note.s()
        parts = [describe.s(key), note.s(), describe.si(key=key)]

        in_chain = chain.apply_async()
        in_group = group(parts).apply_async()
        in_chord = chord(parts, setup.module.plain_sum.s()).apply_async()
        return [
            single.apply_async(),
            in_chain.parent.parent,
            in_group.results[0],
            in_group.results[2],
            in_chord.parent.results[0],
            in_chord.parent.results[2],
        ], [in_chain, in_group, in_chord]

    straight, ends = publish("free")
    expected = [result.get(timeout=30) for result in straight]
    for end in ends:
        end.get(timeout=30)

    with SyncGuard(pg_dsn) as guard, guard.hold("held"):
        held, ends = publish("held")
        expiring = describe.apply_async(["held"], expires=2)
        expired_at = time.monotonic() + 2

        def every_message_came_back_several_times():
            for result in held:
                assert setup.worker.logs().count(f"[{result.id}] not run, comes back") >= 2

        poll(every_message_came_back_several_times, timeout=30)
        poll(lambda: time.monotonic() > expired_at)
        if broker.kind == "redis":
            # RabbitMQ throws an expired message away by itself, and nobody hears of it.
            poll(lambda: expiring.state == "REVOKED", timeout=30)
        assert not any(result.ready() for result in held)
    found = [result.get(timeout=30) for result in held]
    for end in ends:
        end.get(timeout=30)
    for before, after in zip(expected, found, strict=True):
        assert after.pop("held") >= 2 > before.pop("held")
        for description in (before, after):
            for name in ("group", "root_id", "reply_to", "expires"):
                # Each publish has its own.
                description[name] = description[name] is not None
            description["args"] = description["kwargs"] = None
        assert after == before
    assert history.count("start", key="held", task_id=expiring.id) == 0
    assert history.overlaps() == []
    poll(lambda: rows_left(pg_dsn) == NOTHING)
