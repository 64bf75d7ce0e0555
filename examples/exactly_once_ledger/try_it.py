"""Sends forty payments three times each, to workers that die now and then, and looks at the account."""

import uuid

import psycopg

from examples.exactly_once_ledger.app import DSN, TABLES, deposit

account = f"account-{uuid.uuid4().hex[:8]}"
payments = {f"{account}-{n}": n for n in range(1, 41)}

with psycopg.connect(DSN, autocommit=True) as connection:
    connection.execute(TABLES)
    connection.execute("insert into accounts values (%s, 0)", (account,))
    # Different tasks, as when a web hook is called again or a producer is not sure that its message got through.
    results = [deposit.delay(payment, account, amount) for _ in range(3) for payment, amount in payments.items()]
    for result in results:
        result.get(timeout=120)
    (balance,) = connection.execute("select balance from accounts where id = %s", (account,)).fetchone()
    (entries,) = connection.execute("select count(*) from entries where account = %s", (account,)).fetchone()

print(f"{len(results)} messages for {len(payments)} payments: {entries} entries, balance {balance}")
assert entries == len(payments)
assert balance == sum(payments.values())
