"""The migrations of the database's tables, run by `api.jobs.database.Database.migrate`."""
