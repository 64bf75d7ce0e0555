"""Billiard without one of its undocumented parts: a fallback."""

import os
import signal

from billiard import common, einfo, process

from celery_syncguard.tasks import billiard_internals


def test_an_exception_is_taken_out_of_what_carries_its_traceback(monkeypatch):
    cause = KeyError("k")
    wrapped = einfo.ExceptionWithTraceback(cause, "")
    assert billiard_internals.cause_of(wrapped) is cause
    assert billiard_internals.cause_of(cause) is cause
    del wrapped.exc
    assert billiard_internals.cause_of(wrapped) is wrapped
    monkeypatch.delattr(einfo, "ExceptionWithTraceback")
    assert billiard_internals.cause_of(wrapped) is wrapped


def test_a_process_that_does_not_know_its_parent_asks_the_system(monkeypatch):
    monkeypatch.setattr(process.current_process(), "_parent_pid", 4711)
    assert billiard_internals.parent_pid() == 4711
    monkeypatch.delattr(process.current_process(), "_parent_pid")
    assert billiard_internals.parent_pid() == os.getppid()
    monkeypatch.delattr(process, "current_process")
    assert billiard_internals.parent_pid() == os.getppid()


def test_a_process_is_ended_by_sigterm_where_billiard_does_not_say(monkeypatch):
    monkeypatch.setattr(common, "TERM_SIGNAL", signal.SIGUSR1)
    assert billiard_internals.term_signal() == signal.SIGUSR1
    monkeypatch.delattr(common, "TERM_SIGNAL")
    assert billiard_internals.term_signal() == signal.SIGTERM
