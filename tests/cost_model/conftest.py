"""Hypothesis without its deadline: the machine is shared, and how long one example takes proves nothing."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
