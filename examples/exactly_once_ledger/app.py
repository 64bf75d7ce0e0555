"""Payments that arrive more than once, on workers that die: each is booked exactly once."""

import os
import random
import signal

import psycopg
from celery import Celery

from celery_syncguard import LockedTask

DSN = os.environ.get("SYNCGUARD_DSN", "postgresql://localhost/postgres")

app = Celery(
    "exactly_once_ledger",
    broker=os.environ.get("BROKER_URL", "redis://localhost"),
    backend=os.environ.get("RESULT_BACKEND", "redis://localhost"),
)
app.conf.syncguard_dsn = DSN

# In your application this is a migration.
TABLES = """
create table if not exists accounts (id text primary key, balance bigint not null);
create table if not exists entries (payment text not null, account text not null, amount bigint not null);
"""


def lose_power(*, now_and_then):
    """For the demonstration: the process ends as if its host had."""
    if random.random() < now_and_then:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(
    base=LockedTask,
    bind=True,
    run_once="deposit:{payment}",  # what is remembered: not the message, the payment
    lock_ttl=2,
    lock_retry_delay=(0.1, 0.5),
    lock_max_deaths=100,
    acks_late=True,  # a message whose worker died is delivered again: at least once …
    reject_on_worker_lost=True,
)
def deposit(self, payment, account, amount):
    """Book a payment."""
    lose_power(now_and_then=0.1)
    with psycopg.connect(DSN) as connection:
        # … and at most once: the completion and the entries commit together or not at all.
        if not self.lease.complete(connection):
            connection.rollback()
            return "booked before"
        connection.execute("insert into entries values (%s, %s, %s)", (payment, account, amount))
        connection.execute("update accounts set balance = balance + %s where id = %s", (amount, account))
    # Booked, but neither acknowledged nor released: the moment at which others book twice.
    lose_power(now_and_then=0.1)
    return "booked"
