"""``SyncBatchNorm`` as ``BatchNorm``: a sharded module's statistics are those of the whole batch in any case."""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norm_for_sync(module: nn.Module) -> None:
    """Make every ``SyncBatchNorm`` in ``module`` compute as a ``BatchNorm``, in place; it would communicate itself."""
    for submodule in module.modules():
        if isinstance(submodule, nn.SyncBatchNorm):
            submodule.forward = functools.partial(_BatchNorm.forward, submodule)  # type: ignore[method-assign]
