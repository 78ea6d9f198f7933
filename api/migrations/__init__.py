"""The versions of the database's tables, run by `api.database.Database.migrate`."""
