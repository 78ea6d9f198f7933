"""Internals of torch that modules need which several calls shard; checked with torch 2.13."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources


def current_mesh() -> DeviceMesh | None:
    """Return the mesh whose context (``with mesh:``) is the innermost; None outside of all."""
    stack = _mesh_resources.mesh_stack
    return stack[-1] if stack else None


def post_accumulate_hooks(parameter: torch.Tensor) -> Iterable[Any]:
    """Return the hooks that run when a gradient of ``parameter`` has accumulated."""
    hooks: Mapping[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return () if hooks is None else tuple(hooks.values())
