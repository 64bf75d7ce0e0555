"""What a lease is: keys, fences, clocks, loops, renewing, leadership, the protocol of a store, and the memory store.

Not here: PostgreSQL (`postgres`), Celery (`tasks`, `beat`), and the front door (`guard`). Knows neither of the two libraries.
"""
