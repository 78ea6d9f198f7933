"""The client of the HTTP service, as a planner."""
