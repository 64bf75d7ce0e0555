"""Empty tasks: plain, with our locks, and with the peers'. All take one argument and return nothing."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_syncguard import LockedTask

__all__ = ["locked", "once", "plain", "singleton"]


def plain(app: Celery) -> Any:
    return app.task(name="bench.plain")(_body())


def locked(app: Celery, name: str = "lock", **options: Any) -> Any:
    options.setdefault("lock_key", "bench:{number}")
    return app.task(name=f"bench.{name}", base=LockedTask, **options)(_body())


def once(app: Celery, redis_url: str) -> Any:
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": redis_url, "default_timeout": 3600},
    }
    return app.task(name="bench.once", base=QueueOnce)(_body())


def singleton(app: Celery, redis_url: str) -> Any:
    app.conf.singleton_backend_url = redis_url
    return app.task(name="bench.singleton", base=Singleton)(_body())


def _body() -> Any:
    def body(number: int) -> None:
        pass

    return body
