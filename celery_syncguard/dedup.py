"""`send_task` with a claim, for a program that publishes by name. The rest of dedup is in `tasks.publishing`."""

from celery_syncguard.tasks.publishing import send_task

__all__ = ["send_task"]
