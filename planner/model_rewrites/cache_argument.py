"""The cache of transformers: the argument ``cache`` since 5.24, ``past_key_values`` before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import ModuleType
from typing import Any

from torch import nn

_NAMES = ("cache", "past_key_values")


SHORT_PROMPT = 8
"""Tokens that fill a cache on the meta device where the length does not matter: states have one size after any."""
STATES = ("conv_states", "recurrent_states")
"""What transformers calls the states of a recurrent layer, in the layer's part of a cache."""


KEYS, VALUES = "keys", "values"
"""What transformers calls them in an attention layer's part of a cache."""
CROSS = "cross_attention_cache"
"""What transformers calls the keys and values of an encoder's results, in the cache of an encoder-decoder."""


def is_encoder_decoder(module: nn.Module) -> bool:
    """Return whether ``module`` is an encoder with a decoder of Hugging Face."""
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


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


def transformers_caches(module: nn.Module) -> ModuleType | None:
    """Return transformers' module of caches; None where ``module`` has no config of transformers."""
    config = getattr(module, "config", None)
    return sys.modules.get("transformers.cache_utils") if hasattr(config, "get_text_config") else None


def recurrent_layer_numbers(module: nn.Module) -> list[int]:
    """Return the numbers, in the cache, of the layers of a Hugging Face decoder that keep states of a fixed size."""
    caches = transformers_caches(module)
    if caches is None:
        return []
    layers = caches.DynamicCache(config=module.config).layers
    return [n for n, layer in enumerate(layers) if isinstance(layer, caches.LinearAttentionCacheLayerMixin)]


def has_own_cache(module: nn.Module) -> bool:
    """Return whether a Hugging Face decoder keeps states elsewhere than in transformers' usual cache."""
    takes_usual = getattr(module, "_supports_default_dynamic_cache", None)
    if takes_usual is not None and not takes_usual():
        return True
    return bool(getattr(module, "_is_stateful", False)) and not recurrent_layer_numbers(module)


def layer_number(layer: nn.Module) -> int | None:
    """Return the number of a layer in transformers' cache; None where it says none."""
    for name in ("layer_idx", "layer_id"):
        number = getattr(layer, name, None)
        if isinstance(number, int):
            return number
    return None
