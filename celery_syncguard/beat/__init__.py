"""The beat of which many run and one leads.

    scheduler       who leads, when it acts, how it ends        inner_schedule  the scheduler class inside
    agenda          what has to be sent in a term               timetable       when a slot is due; timekeeper: what time it is
    slot_sender     sends one slot: claim, publish, mark        broker          whether it takes messages
    slots           what stands in the database, kept by postgres_slots or memory_slots
    entry_rows      entries that are rows of a table            django_schedule django-celery-beat's table, with its edits

Not here: leadership itself (`core.leadership`), and the commands about it (`cli.beat`).
"""

from celery_syncguard.beat.scheduler import LeaderScheduler

__all__ = ["LeaderScheduler"]
