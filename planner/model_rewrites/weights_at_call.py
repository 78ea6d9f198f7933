"""Weights that a module reads anew at each call, after a plan has shown it its parameters.

Recurrent modules of torch keep their parameters in a list of their own. `torch.nn.utils.weight_norm` and
``spectral_norm`` compute the weight in a hook, which runs before parameters are gathered for a forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def read_weights_at_call(root: nn.Module) -> None:
    """Let recurrent modules, and those with a hook that computes a weight, use the parameters they have at a call."""
    for module in root.modules():
        if isinstance(module, nn.RNNBase):
            module.forward = functools.wraps(module.forward)(_CurrentWeights(module))
        hooks = module._forward_pre_hooks
        computing = [key for key, hook in hooks.items() if isinstance(hook, (WeightNorm, SpectralNorm))]
        if computing:
            found = [hooks.pop(key) for key in computing]
            module.forward = functools.wraps(module.forward)(_ComputedWeights(module, found))


class _CurrentWeights:
    """A recurrent module's forward, which first lists the parameters that are registered now."""

    def __init__(self, module: nn.RNNBase) -> None:
        self._module, self._forward = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self._module._flat_weights_names
        self._module._flat_weights = [getattr(self._module, name, None) for name in names]
        return self._forward(*args, **kwargs)


class _ComputedWeights:
    """A module's forward, which first computes weights."""

    def __init__(self, module: nn.Module, hooks: list[Callable[..., Any]]) -> None:
        self._module, self._forward, self._hooks = module, module.forward, hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self._hooks:
            hook(self._module, args)
        return self._forward(*args, **kwargs)
