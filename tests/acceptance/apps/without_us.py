"""An application that has nothing of ours: what Celery itself takes."""

from tests.fixtures import gate
from tests.fixtures.app import make_app
from tests.fixtures.history import record

app = make_app(__name__)


@app.task
def hold(key, gate_name):
    record("start", key=key)
    gate.wait_at(gate_name)
    record("end", key=key)
