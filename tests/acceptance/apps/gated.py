"""Plain tasks, to test the fixtures themselves."""

from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record_task

app = make_app(__name__)


@app.task(bind=True, acks_late=True)
def body(self, key, gate_name=None):
    record_task("start", self, key=key)
    if gate_name:
        gate.wait_at(gate_name)
    record_task("end", self, key=key)
    return key
