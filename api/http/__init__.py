"""The HTTP service: routes, authentication, limits, answers."""
