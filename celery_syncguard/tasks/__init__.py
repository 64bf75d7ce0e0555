"""Celery's tasks: `LockedTask` and its options, publishing with a claim, a delivery from its acquire to its release, and what a
worker's main process does for its children.

Not here: the schedule (`beat`), and locks without a task (`guard`).
"""
