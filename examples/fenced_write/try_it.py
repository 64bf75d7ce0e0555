"""A writer is frozen past its ttl, another one writes meanwhile, and the first one wakes up."""

import time

import psycopg

from examples.fenced_write.app import DSN, TABLES, write, write_elsewhere

with psycopg.connect(DSN, autocommit=True) as connection:
    connection.execute(TABLES)
    for task, table in ((write, "pages"), (write_elsewhere, "guarded_pages")):
        late = task.delay("home", "by the late one", frozen=4)
        give_up_at = time.monotonic() + 60
        while late.state != "STARTED" and time.monotonic() < give_up_at:
            time.sleep(0.05)
        punctual = task.delay("home", "by the punctual one")
        print(f"{table}: the punctual one: {punctual.get(timeout=60)}")
        outcome = late.get(timeout=60)
        print(f"{table}: the late one: {outcome}")
        (body,) = connection.execute(f"select body from {table} where id = 'home'").fetchone()
        print(f"{table}: the page is {body}")
        assert outcome.startswith("refused")
        assert body == "by the punctual one"
