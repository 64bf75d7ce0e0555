"""A writer is frozen past its ttl, another one writes meanwhile, and the first one wakes up."""

import time

import psycopg

from examples.fenced_write.app import DSN, TABLES, write, write_elsewhere, write_in_transaction

WRITERS = {
    "write": (write, "pages"),
    "write_in_transaction": (write_in_transaction, "pages"),
    "write_elsewhere": (write_elsewhere, "guarded_pages"),
}

with psycopg.connect(DSN, autocommit=True) as connection:
    connection.execute(TABLES)
    for name, (task, table) in WRITERS.items():
        late = task.delay("home", "by the late one", frozen=4)
        give_up_at = time.monotonic() + 60
        while late.state != "STARTED" and time.monotonic() < give_up_at:
            time.sleep(0.05)
        punctual = task.delay("home", "by the punctual one")
        print(f"{name}: the punctual one: {punctual.get(timeout=60)}")
        outcome = late.get(timeout=60)
        print(f"{name}: the late one: {outcome}")
        (body,) = connection.execute(f"select body from {table} where id = 'home'").fetchone()
        print(f"{name}: the page is {body}")
        assert outcome.startswith("refused")
        assert body == "by the punctual one"
