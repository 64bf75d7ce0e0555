"""After a fork a child starts afresh, and the parent does not notice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.proxy import Proxy

_PROGRAM = """
import os, sys, threading, traceback
from celery_syncguard import SyncGuard, LeaseLost, LockHeld, clock

dsn, children = sys.argv[1], 8
guard = SyncGuard(dsn, pool_size=3, timeout=30)
lease = guard.try_acquire("parent", ttl=2.0)
assert lease.renew()                                    # the renewer's connection is open
try:                                                    # and the listener's
    with guard.hold("parent", wait=0.3): raise SystemExit("two holders")
except LockHeld:
    pass

def child(number):
    try:
        assert lease.lost and lease.remaining == 0 and not lease.renew() and not lease.release()
        try: lease.check()
        except LeaseLost as error: assert "fork" in str(error), error
        else: raise SystemExit("a fork inherited a lease")
        assert not [t for t in threading.enumerate() if t.name.startswith("syncguard")]
        for turn in range(15):
            with guard.hold(f"child:{number}", ttl=5) as own:
                assert own.renew()
            with guard.hold("shared", wait=30) as own:
                own.check()
        own = guard.try_acquire(f"kept:{number}", ttl=2.0)
        moved = own.deadline
        give_up_at = clock.now() + 20
        while own.deadline == moved:                    # the child has a renewer of its own
            assert clock.now() < give_up_at
            threading.Event().wait(0.02)
        own.check()
        assert own.release()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

pids = []
for number in range(children):
    pid = os.fork()
    if pid == 0:
        child(number)
    pids.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
lease.check()                                           # renewed all the while
assert lease.renew() and guard.inspect("parent").lock_id == lease.lock_id
assert lease.release()
guard.close()
print(codes)
"""


@pytest.mark.parametrize("transport", ["plain", "tls"])
def test_children_of_a_process_with_a_lease_and_open_connections_work_at_once(
    transport: str, pg_dsn: str, tls_proxy: Proxy
) -> None:
    """case 84: over TLS a shared connection would be noticed at the first byte."""
    dsn = pg_dsn if transport == "plain" else tls_proxy.dsn(pg_dsn) + "?sslmode=require"
    done = subprocess.run([sys.executable, "-c", _PROGRAM, dsn], capture_output=True, text=True, timeout=90)
    assert done.stdout == f"{[0] * 8}\n", done.stderr
    assert done.stderr == ""


def test_without_starting_afresh_the_children_would_speak_over_the_parents_connection(
    pg_dsn: str, tls_proxy: Proxy
) -> None:
    """The negative control: the same program, in which nothing is told of the fork."""
    careless = _PROGRAM.replace(
        "def child(", "import celery_syncguard.process\ncelery_syncguard.process._forgetful.clear()\ndef child("
    ).replace("timeout=30", "timeout=3")
    dsn = tls_proxy.dsn(pg_dsn) + "?sslmode=require"
    done = subprocess.run([sys.executable, "-c", careless, dsn], capture_output=True, text=True, timeout=110)
    assert done.stdout != f"{[0] * 8}\n"
    assert "StoreUnavailable" in done.stderr
