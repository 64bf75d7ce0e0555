"""lock_on_held="retry": the message comes back, with a count and a backoff of its own, and all of them get their turn."""

import re
import statistics
import time

import pytest

from celery_syncguard import SyncGuard
from tests.fixtures import soak
from tests.fixtures.leftovers import NOTHING, rows_left
from tests.fixtures.polling import poll

MODULE = "tests.acceptance.apps.coming_back"


@pytest.mark.both_brokers
def test_a_message_counts_how_often_it_came_back_one_by_one(celery_setup, broker, pg_dsn, history):
    setup = celery_setup(MODULE)
    setup.start_worker(concurrency=2)
    with SyncGuard(pg_dsn) as guard, guard.hold("a"):
        result = setup.module.counted.delay("a")
        history.wait_for("delivered", count=5, task_id=result.id)
        assert history.count("start") == 0
    count = result.get(timeout=30)
    deliveries = history.events("delivered", task_id=result.id)
    # None is left out, none is counted twice, and the count is no attempt.
    assert [row.note for row in deliveries] == [str(number) for number in range(count + 1)]
    assert {row.attempt for row in deliveries} == {0}
    assert count >= 4
    assert [(row.note, row.attempt) for row in history.events("start")] == [(str(count), 0)]
    # The control: one that met no lock counts nothing.
    assert setup.module.counted.delay("a").get(timeout=30) == 0


@pytest.mark.both_brokers
def test_a_task_with_one_retry_has_it_whoever_was_blocked_or_failed_before_it(celery_setup, broker, pg_dsn, history):
    """In the only child of a worker: neither waiting nor retrying leaves anything on the task object."""
    setup = celery_setup(MODULE)
    worker = setup.start_worker(concurrency=1)
    task = setup.module.retried
    # Celery itself keeps the options of a task there when it publishes its first retry.
    untouched = task.delay("first", 1).get(timeout=30)
    assert untouched[-1] == 1
    with SyncGuard(pg_dsn) as guard, guard.hold("held"):
        blocked = task.delay("held", 1)

        def came_back_more_often_than_it_may_be_retried():
            assert worker.logs().count(f"[{blocked.id}] not run, comes back") >= 3

        poll(came_back_more_often_than_it_may_be_retried)
        # Another one, at once behind it, has its whole retry; and one that needs two has one.
        after = task.delay("free", 1)
        assert after.get(timeout=30) == untouched
        too_often = task.delay("too often", 2)
        with pytest.raises(task.MaxRetriesExceededError):
            too_often.get(timeout=30)
    assert blocked.get(timeout=30) == untouched
    assert task.delay("last", 1).get(timeout=30) == untouched
    attempts = {key: [row.attempt for row in history.events("start", key=key)] for key in ("held", "free", "too often")}
    assert attempts == {"held": [0, 1], "free": [0, 1], "too often": [0, 1]}
    assert len({row.pid for row in history.events("start")}) == 1
    poll(lambda: rows_left(pg_dsn) == NOTHING)


#: How many messages wait for one key.
WAITERS = soak.rounds(120, soak=300)


@pytest.mark.both_brokers
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_messages_that_wait_for_one_key_all_run_and_ask_the_database_ever_more_rarely(
    celery_setup, broker, pg_dsn, private_pg, private_dsn, private_app_dsn
):
    """Across processes and in the default way of waiting. The server's own log says what it was asked."""
    private_pg.reload(log_statement="all")
    setup = celery_setup(MODULE, dsn=private_app_dsn)
    for _ in range(2):
        setup.start_worker(concurrency=2)

    with SyncGuard(private_dsn) as guard:
        poll(lambda: private_pg.execute("show log_statement") == [("all",)])
        before = asked(private_pg)
        with guard.hold("a"):
            with setup.app.producer_or_acquire() as producer:
                results = [
                    setup.module.queued.apply_async(("a",), producer=producer, lock_retry_delay=(1, 8))
                    for _ in range(WAITERS)
                ]
            poll(lambda: len(delays(setup)) == WAITERS, timeout=60, interval=0.2)
            poll(lambda: min(map(len, delays(setup).values())) >= 4, timeout=120, interval=0.2)
        released_at = time.monotonic()
        bodies = sorted(result.get(timeout=100) for result in results)
        poll(lambda: not guard.locks())
    for (_, ended, _), (began, _, _) in zip(bodies, bodies[1:], strict=False):
        assert ended <= began, "two bodies at once"
    # The longest delay is 8 s; whoever comes then may meet another one's body, which is over at once.
    assert bodies[-1][1] - released_at < 60

    waits = delays(setup)
    came_back = sum(map(len, waits.values()))
    assert sum(count for _, _, count in bodies) == came_back <= 8 * WAITERS
    # To be expected are 1.5, 2.5, 4.5 and 4.5 s, however fast the machine is. What asks as often as before has 1.5.
    means = [statistics.mean(one[nth] for one in waits.values()) for nth in range(4)]
    assert means[0] < means[1] < means[2]
    assert min(means[2:]) > 2 * means[0]
    # A delivery asks one question and a body one more, and nobody asks beside that. (The one in front is the test's own.)
    after = asked(private_pg)
    assert after["acquire"] - before["acquire"] == 1 + came_back + WAITERS
    assert after["release"] - before["release"] == 1 + WAITERS
    assert after["all"] - before["all"] < came_back + 2 * WAITERS + 200


def delays(setup):
    """For how long each message was sent away, time after time, by its task id."""
    found = {}
    lines = [line for worker in setup.worker_cluster for line in worker.logs().splitlines() if "not run, comes" in line]
    for line in sorted(lines):  # they begin with the time
        match = re.search(r"queued\[(\S+)\] not run, comes back in ([\d.]+) s", line)
        found.setdefault(match[1], []).append(float(match[2]))
    return found


def asked(server):
    """How many statements the server was given for our database, by what they call."""
    lines = [
        line
        for line in server.log_text().splitlines()
        if " syncguard " in line and re.search(r"LOG:  (statement|execute)", line)
    ]
    return {
        "acquire": sum("syncguard_acquire(" in line for line in lines),
        "release": sum("syncguard_release(" in line for line in lines),
        "all": len(lines),
    }
