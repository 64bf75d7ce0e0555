"""`send_task` with a claim, for whoever publishes by name. The rest of dedup is the tasks' own (`tasks.dedup`)."""

from celery_syncguard.tasks.publishing import send_task

__all__ = ["send_task"]
