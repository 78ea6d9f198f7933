"""The frameworks that rows ran on: their defaults, their choices at a date, and the configuration of a row."""
