"""The command line: `celery -A proj syncguard …` and `celery-syncguard …`.

`commands` are for locks and the schema, `beat` for the leader, `doctor` and `server_checks` for one installation;
`console` is what all of them share. Not here: anything that a command does beyond asking and printing.
"""

from celery_syncguard.cli.commands import main, syncguard

__all__ = ["main", "syncguard"]
