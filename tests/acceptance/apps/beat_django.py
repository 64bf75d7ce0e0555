"""An application whose schedule lies in django-celery-beat's tables, in the same database as ours."""

import json
import os

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

from tests.fixtures.app import make_app
from tests.fixtures.cluster import CONF_VARIABLE

facts = conninfo_to_dict(json.loads(os.environ[CONF_VARIABLE])["syncguard_dsn"])
if not settings.configured:
    settings.configure(
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": facts["dbname"],
                "USER": facts["user"],
                "HOST": facts["host"],
                "PORT": facts["port"],
            }
        },
        INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
        USE_TZ=True,
    )
    django.setup()

app = make_app(__name__, syncguard_beat_scheduler="django")


@app.task
def note(name):
    """Its message is what the test looks at."""
