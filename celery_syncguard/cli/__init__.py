"""The command line: `celery -A proj syncguard …` and `celery-syncguard …`.

`commands` are about locks, `beat` about the leader, `doctor` has the checks, `console` what all of them share. Not here:
anything that a command does beyond asking and printing.
"""

from celery_syncguard.cli.commands import main, syncguard

__all__ = ["main", "syncguard"]
