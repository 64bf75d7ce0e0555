"""What a message of somebody else's may carry in our header, and what it may not."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_syncguard import LockedTask, errors
from celery_syncguard.message import carried_options
from celery_syncguard.options import _formatter


@pytest.fixture
def task():
    app = Celery("headers", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, task_eager_propagates=True, syncguard_dsn="memory://")

    @app.task(base=LockedTask, shared=False, lock_key="n:{n}", dedup_key="d:{n}", run_once="r:{n}")
    def body(n):
        return n

    return body


@pytest.mark.parametrize("name", ["lock_key", "dedup_key", "run_once"])
def test_a_template_is_the_tasks_and_never_the_messages(task, name):
    with pytest.raises(errors.InvalidKey, match="template"):
        task.plan().complete(task, {"options": {name: "{n:99999999}"}}, (1,), {}, {})


def test_a_template_from_a_message_would_make_a_text_of_any_size():
    """The negative control: what such a template does, whatever becomes of its text."""
    assert len(_formatter.format("{n:9999999}", n=1)) == 9_999_999


@pytest.mark.parametrize("options", [5, [], "zz", None, True])
def test_options_that_are_no_mapping_are_refused_with_a_reason(task, options):
    with pytest.raises(errors.ImproperlyConfigured, match="mapping"):
        task.plan().complete(task, {"options": options}, (1,), {}, {})


def test_what_publishers_really_send_is_accepted(task):
    carried = {"lock_ttl": 5, "lock_key": None, "dedup_key": True, "run_once": False}
    assert carried_options({"options": carried}) == carried
    assert task.plan().complete(task, {"options": {"lock_ttl": 5}}, (1,), {}, {}).lock_ttl == 5.0


def test_a_template_given_per_call_is_one_of_the_publishers_code(task):
    assert task.apply((7,), lock_key="other:{n}").get() == 7
