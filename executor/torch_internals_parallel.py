"""Internals of torch that calls of ``parallelize_module`` need; checked with torch 2.13."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, _mesh_resources


def current_mesh() -> DeviceMesh | None:
    """Return the mesh whose context (``with mesh:``) is the innermost; None outside of all."""
    stack = _mesh_resources.mesh_stack
    return stack[-1] if stack else None
