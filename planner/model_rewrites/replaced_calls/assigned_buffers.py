"""Buffers that a module replaces by new tensors in its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def assigned_buffers_written(root: nn.Module) -> Iterator[None]:
    """Within this context, a buffer that its module replaces by a new tensor is captured as a write to the old one.

    The executor makes new tensors whole when the module's forward ends (`executor.runtime.buffers`).
    """
    before: dict[nn.Module, dict[str, torch.Tensor | None]] = {}

    def remember(module: nn.Module, args: tuple[Any, ...]) -> None:
        before[module] = dict(module._buffers)

    def write(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name, old in before[module].items():
            new = module._buffers.get(name)
            if old is not None and new is not None and new is not old and new.shape == old.shape:
                with torch.no_grad():
                    old.copy_(new)
                module._buffers[name] = old

    with ExitStack() as stack:
        for module in root.modules():
            # torch.export itself captures the root's.
            if module._buffers and module is not root:
                stack.callback(module.register_forward_pre_hook(remember).remove)
                stack.callback(module.register_forward_hook(write).remove)
        yield
