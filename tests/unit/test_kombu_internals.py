"""Kombu and amqp without one of their undocumented parts: a fallback, and a line in the log where it may cost something."""

from types import SimpleNamespace

import amqp
import kombu
import pytest
from amqp import exceptions

from celery_syncguard.tasks import kombu_internals


@pytest.fixture
def live():
    """An open connection to RabbitMQ with one open channel, as the driver has them before it has sent anything."""
    connection = amqp.Connection()
    connection.channels = {0: connection, 1: amqp.Channel.__new__(amqp.Channel)}
    return connection


@pytest.fixture
def connection(live, monkeypatch):
    connection = kombu.Connection("amqp://")
    monkeypatch.setattr(type(connection), "connected", True)
    connection._connection = live
    return connection


def test_what_is_open_and_what_is_opened_later_waits_for_an_answer_once_it_is_wanted(connection, live):
    assert not kombu_internals.answers(connection, wanted=False)
    assert kombu_internals.answers(connection, wanted=True)
    assert live.confirm_publish is True
    assert live.channels[1].basic_publish == live.channels[1].basic_publish_confirm
    assert connection.transport_options[kombu_internals.OPTION] is True


@pytest.mark.parametrize("gone", ["confirm_publish", "channels", "basic_publish_confirm"])
def test_of_an_unknown_driver_what_is_open_is_left_alone_and_that_is_said_once(
    connection, live, monkeypatch, caplog, gone
):
    monkeypatch.setattr(kombu_internals, "_told", set())
    if gone == "basic_publish_confirm":
        monkeypatch.delattr(amqp.Channel, gone)
    else:
        delattr(live, gone)
    for _ in range(2):
        assert not kombu_internals.answers(connection, wanted=True)
    (line,) = [one.message for one in caplog.records]
    assert line.startswith("connections that are open do not wait for the broker's answer: celery-syncguard ")
    assert gone in line
    assert not getattr(live, "confirm_publish", False)
    assert connection.transport_options[kombu_internals.OPTION] is True, "for those to come"


def test_a_transport_that_does_not_name_its_driver_answers_by_itself(connection, monkeypatch):
    assert kombu_internals.can_answer(connection)
    monkeypatch.delattr(type(connection.transport), "driver_name")
    monkeypatch.setattr(kombu.transport.base.Transport, "driver_name", None)
    assert not kombu_internals.can_answer(connection)
    assert not kombu_internals.can_answer(None)


@pytest.mark.parametrize("name", ["ChannelError", "MessageNacked"])
def test_a_refusal_of_an_unknown_kind_counts_as_trouble(monkeypatch, name):
    refusal = getattr(exceptions, name)()
    wrapped = kombu.exceptions.OperationalError()
    wrapped.__cause__ = refusal
    assert kombu_internals.is_refusal(refusal)
    assert kombu_internals.is_refusal(wrapped)
    assert not kombu_internals.is_refusal(OSError())
    monkeypatch.delattr(exceptions, name)
    assert not kombu_internals.is_refusal(refusal)


def test_a_connection_that_cannot_be_collected_is_released():
    said = []
    kombu_internals.discard(SimpleNamespace(release=lambda: said.append("released")))
    assert said == ["released"]
    connection = kombu.Connection("memory://")
    connection.connect()
    kombu_internals.discard(connection)
    assert not connection.connected
