"""The name of the KV cache argument in transformers: ``cache`` since 5.24, ``past_key_values`` before."""

from __future__ import annotations

from inspect import signature

from torch import nn

_NAMES = ("cache", "past_key_values")


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of the KV cache in the arguments and the output of ``module.forward``; None without one."""
    names = signature(module.forward).parameters
    return next((name for name in _NAMES if name in names), None)


def is_cache(value: object) -> bool:
    """Return whether ``value`` is a KV cache of transformers."""
    return any(base.__name__ in ("Cache", "EncoderDecoderCache") for base in type(value).__mro__)
