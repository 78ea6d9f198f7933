"""Recurrent modules of torch keep their parameters in a list of their own, which is made anew before each forward."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


def read_recurrent_weights(root: nn.Module) -> None:
    """Let each `nn.LSTM`, `nn.GRU` and `nn.RNN` in ``root`` use the parameters that it shows when it is called."""
    for module in root.modules():
        if isinstance(module, nn.RNNBase):
            module.forward = functools.wraps(module.forward)(_CurrentWeights(module))


class _CurrentWeights:
    """A recurrent module's forward, which first lists the parameters that are registered now."""

    def __init__(self, module: nn.RNNBase) -> None:
        self._module, self._forward = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self._module._flat_weights_names
        self._module._flat_weights = [getattr(self._module, name, None) for name in names]
        return self._forward(*args, **kwargs)
