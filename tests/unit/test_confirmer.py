"""Claims are settled in the background; the rest is in `tests/integration/test_claims.py`."""

from __future__ import annotations

import threading

import pytest

from celery_syncguard.core.memory import MemoryStore
from celery_syncguard.tasks.confirmer import Confirmer
from tests.fixtures.polling import poll


def test_a_process_that_had_no_thread_left_for_a_moment_settles_its_claims_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    for key in ("first", "second"):
        store.claim(key, task_id=key, ttl=60, holder="test")
    confirmer = Confirmer(store)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            confirmer.end("first", task_id="first", ttl=60)
    confirmer.end("second", task_id="second", ttl=60)
    # Whoever claims them now has them.
    poll(lambda: all(store.claim(key, task_id="other", ttl=60, holder="test").ours for key in ("first", "second")))
    confirmer.close()
