"""What transformers calls a key-value cache: ``cache`` from 5.24 on, ``past_key_values`` before."""

from __future__ import annotations

from inspect import signature

from torch import nn

_NAMES = ("cache", "past_key_values")


def cache_argument(module: nn.Module) -> str | None:
    """Return the argument of a model's forward that is a cache, which its output calls the same; None without one."""
    names = signature(module.forward).parameters
    return next((name for name in _NAMES if name in names), None)
