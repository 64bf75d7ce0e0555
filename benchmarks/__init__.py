"""What celery-syncguard costs, measured beside its peers; see README.md. Run by scripts/bench.

`measure` holds the statistics, `rig` the servers and the in-process worker, and every other module one row of the table.
"""
