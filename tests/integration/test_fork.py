"""After a fork a child starts afresh, and the parent does not notice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.proxy import Proxy

_PROGRAM = """
import os, sys, threading, traceback
from celery_syncguard import SyncGuard, LeaseLost, LockHeld
from celery_syncguard.core import clock

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
    """Over TLS a shared connection would be noticed at the first byte."""
    dsn = pg_dsn if transport == "plain" else tls_proxy.dsn(pg_dsn) + "?sslmode=require"
    done = subprocess.run([sys.executable, "-c", _PROGRAM, dsn], capture_output=True, text=True, timeout=90)
    assert done.stdout == f"{[0] * 8}\n", done.stderr
    assert done.stderr == ""


def test_without_starting_afresh_the_children_would_speak_over_the_parents_connection(
    pg_dsn: str, tls_proxy: Proxy
) -> None:
    """The negative control: the same program, in which nothing is told of the fork."""
    careless = _PROGRAM.replace(
        "def child(",
        "import celery_syncguard.core.process\ncelery_syncguard.core.process._forgetful.clear()\ndef child(",
    ).replace("timeout=30", "timeout=3")
    dsn = tls_proxy.dsn(pg_dsn) + "?sslmode=require"
    done = subprocess.run([sys.executable, "-c", careless, dsn], capture_output=True, text=True, timeout=110)
    assert done.stdout != f"{[0] * 8}\n"
    assert "StoreUnavailable" in done.stderr


_BUSY_PROGRAM = """
import os, signal, sys, threading, traceback
from celery import Celery
from celery_syncguard.tasks import app_state, claims
from celery_syncguard.core.loop import Bell

app = Celery("busy", broker="memory://", set_as_current=False)
app.conf.syncguard_dsn = sys.argv[1]
ours = app_state.state_of(app)
lease = ours.guard.try_acquire("parent", ttl=60)
lease.renew()
claims.end(ours.guard, "claim", claims.Outcome.VOID, task_id="nobody's", later=True)
ours.guard.flush()

seen, locks = set(), []
KINDS = (type(threading.Lock()), type(threading.RLock()))

def walk(item):
    if id(item) in seen: return
    seen.add(id(item))
    if isinstance(item, Bell): return  # its gate is closed at rest, by nobody
    if isinstance(item, threading.Condition): item = item._lock
    if isinstance(item, KINDS): locks.append(item)
    elif isinstance(item, (list, tuple, set)): [walk(one) for one in item]
    elif isinstance(item, dict): [walk(one) for one in item.values()]
    elif type(item).__module__.startswith("celery_syncguard"):
        names = [*getattr(item, "__dict__", ()), *(name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ()))]
        [walk(getattr(item, name, None)) for name in names]

walk(ours)
taken, go_on = threading.Event(), threading.Event()

def be_everywhere():
    for lock in locks: assert lock.acquire(timeout=5), lock
    taken.set()
    go_on.wait()
    for lock in locks: lock.release()

thread = threading.Thread(target=be_everywhere)
thread.start()
assert taken.wait(20)
pid = os.fork()
if pid == 0:
    signal.alarm(15)  # a child that hangs is killed
    try:
        with app_state.guard_for(app).hold("child") as own:
            assert own.renew()
        claims.end(ours.guard, "claim", claims.Outcome.VOID, task_id="nobody's", later=True)
        ours.guard.flush()
        assert not ours.guard.outbox.waiting
        ours.close()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
go_on.set()
thread.join()
lease.release()
ours.close()
print(len(locks) > 5, code)
"""


def test_a_child_works_wherever_another_thread_was_when_it_was_forked(pg_dsn: str) -> None:
    """A worker replaces a dead child while its other threads are at work."""
    done = subprocess.run([sys.executable, "-c", _BUSY_PROGRAM, pg_dsn], capture_output=True, text=True, timeout=90)
    assert (done.stdout, done.stderr) == ("True 0\n", "")


def test_with_the_locks_of_its_parents_threads_a_child_hangs(pg_dsn: str) -> None:
    """The negative control."""
    careless = _BUSY_PROGRAM.replace(
        "pid = os.fork()", "from celery_syncguard.core import process\nprocess._forgetful.clear()\npid = os.fork()"
    ).replace("alarm(15)", "alarm(3)")
    done = subprocess.run([sys.executable, "-c", careless, pg_dsn], capture_output=True, text=True, timeout=90)
    assert done.stdout == "True -14\n"
