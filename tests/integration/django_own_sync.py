"""Somebody's own class of django-celery-beat's scheduler, which writes in a way of its own. Needs Django to be set up."""

from django_celery_beat.schedulers import DatabaseScheduler


class OwnSync(DatabaseScheduler):
    """Each row is read and written outside of a transaction, as in theirs."""

    def sync(self):
        super().sync()
