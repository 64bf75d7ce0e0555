"""PostgreSQL: connections of our own, the callers' transactions, the store, waiting for a release, migrations.

Not here: what a lease is (`core`), and the SQL itself (`migrations/`). Knows nothing of Celery.
"""
