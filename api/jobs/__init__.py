"""Planning jobs: their store, their queue, and the workers that solve them.

the jobs                                    store.JobStore, tables
jobs as they are read, their places         records
the database                                database.Database, migrations
workers in the server; on other machines    embedded_workers.JobRunner, remote_worker.work
one job, supervised                         supervisor, solver_process, solve
comparisons of plans                        comparisons.comparison_rows
progress events                             events.read_news
settings                                    settings.ServerSettings
"""
