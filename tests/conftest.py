"""Hypothesis without its deadline: how long one example takes on a shared machine proves nothing."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
