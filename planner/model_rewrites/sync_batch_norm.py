"""Normalizations with running statistics, as a sharded module computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


def batch_norm_for_sync(module: nn.Module) -> None:
    """Make every ``SyncBatchNorm`` in ``module`` compute as a ``BatchNorm``, in place; it would communicate itself.

    A sharded module's statistics are those of the whole batch in any case.
    """
    for submodule in module.modules():
        if isinstance(submodule, nn.SyncBatchNorm):
            submodule.forward = functools.partial(_BatchNorm.forward, submodule)  # type: ignore[method-assign]


def norms_in_dtype_of_statistics(module: nn.Module) -> None:
    """Make the normalizations in ``module`` compute with weight and bias in the dtype of their running statistics.

    In a job of half precision, parameters are cast and buffers are not. torch's kernels take them in one dtype only.
    """
    for submodule in module.modules():
        if isinstance(submodule, _NormBase):
            forward = functools.partial(_in_dtype_of_statistics, submodule, submodule.forward)
            submodule.forward = functools.wraps(submodule.forward)(forward)


def _in_dtype_of_statistics(module: _NormBase, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    statistics, shown = module.running_mean, dict(module._parameters)
    if statistics is not None:
        for name, parameter in shown.items():
            if parameter is not None and parameter.dtype != statistics.dtype:
                module._parameters[name] = parameter.to(statistics.dtype)  # type: ignore[assignment]
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(shown)
