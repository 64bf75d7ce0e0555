"""The beat of which any number run and one schedules: the scheduler, the sending of slots, slots, the timetable, and
django-celery-beat.

Not here: leadership itself (`core.leadership`), and the commands about it (`cli.beat`).
"""

from celery_syncguard.beat.scheduler import LeaderScheduler

__all__ = ["LeaderScheduler"]
