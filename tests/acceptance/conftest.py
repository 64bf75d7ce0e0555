"""Fixtures of more than one module here."""

from collections.abc import Iterator

import kombu
import pytest

from celery_syncguard.tasks import publishing
from tests.fixtures.cluster import Broker


@pytest.fixture
def redelivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test publishes under one task id is one message to whoever gets it, as if a broker delivered it again."""
    monkeypatch.setattr(publishing, "new_call_id", lambda *_: None)


@pytest.fixture
def second_queue(broker: Broker) -> Iterator[str]:
    """Name of one more queue of this test, for a worker that is to get other messages than the rest."""
    name = f"{broker.queue}-second"
    yield name
    if broker.kind == "rabbitmq":
        with kombu.Connection(broker.url, connect_timeout=4) as connection:
            connection.channel().queue_delete(name)
