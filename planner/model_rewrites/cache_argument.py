"""The KV cache argument of transformers: ``cache`` since 5.24, ``past_key_values`` before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn

_NAMES = ("cache", "past_key_values")


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of the KV cache in the arguments and the output of ``module.forward``; None without one."""
    names = signature(module.forward).parameters
    return next((name for name in _NAMES if name in names), None)


def without_cache(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments of a training call of ``forward``, without a cache unless they ask for one.

    transformers returns a cache unless told not to. In training it has no reader, and no plan has its collectives.
    """
    names = list(signature(forward).parameters)
    caches = [name for name in _NAMES if name in names]
    if not caches or "use_cache" not in names[len(args) :] or any(kwargs.get(name) is not None for name in caches):
        return kwargs
    return {"use_cache": False, **kwargs}


def is_cache(value: object) -> bool:
    """Return whether ``value`` is a KV cache of transformers."""
    return any(base.__name__ in ("Cache", "EncoderDecoderCache") for base in type(value).__mro__)
