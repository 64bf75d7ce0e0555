"""Fixtures of more than one module here."""

import pytest
from celery import Celery
from django.conf import settings

from celery_syncguard.tasks import app_state

# Django can be configured once per process: for all of these tests in the same way, whichever comes first.
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=[],
    USE_TZ=True,
)


@pytest.fixture(params=["memory", "postgresql"])
def eager_app(request):
    """An application that runs its tasks here and now, on each of the two stores."""
    app = Celery("eager", set_as_current=False)
    dsn = "memory://" if request.param == "memory" else request.getfixturevalue("pg_dsn")
    app.conf.update(syncguard_dsn=dsn, task_always_eager=True, broker_url="memory://", result_backend="cache+memory://")
    yield app
    app_state.state_of(app).close()
