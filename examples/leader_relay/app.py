"""A relay that runs on many hosts and works on one: an outbox whose rows are passed on in their order.

    python app.py            # on every host

It is no Celery program; leadership is for anything that must have one of.
"""

import os
import signal
import threading

import psycopg

from celery_syncguard import LeaseLost, SyncGuard

stopping = threading.Event()


def relay(connection, lease):
    """Pass on the oldest rows, in one transaction that commits only while this process leads."""
    with lease.transaction(connection):
        rows = connection.execute(
            "delete from outbox where id in (select id from outbox order by id limit 10) returning id, body"
        ).fetchall()
        for number, body in sorted(rows):
            # Another system takes the term along, and refuses a lower one than it has seen.
            connection.execute(
                "insert into delivered (id, body, term) values (%s, %s, %s)", (number, body, int(lease.fence))
            )
    return len(rows)


def main():
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with SyncGuard() as guard, guard.leadership("outbox", ttl=float(os.environ.get("TTL", "15"))) as leadership:
        while not stopping.is_set():
            lease = leadership.elect(timeout=0.5)
            if lease is None:
                continue
            print(f"leading, term {leadership.term}", flush=True)
            # prepare_threshold=None is psycopg's way of working behind any pooler.
            dsn = os.environ["SYNCGUARD_DSN"]
            with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
                try:
                    while not stopping.is_set() and not leadership.lost():
                        if not relay(connection, lease):
                            leadership.lost(timeout=0.1)
                except LeaseLost:
                    print("not leading any more", flush=True)


if __name__ == "__main__":
    main()
