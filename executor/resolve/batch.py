"""The slice of a global batch that a rank feeds to the sharded module."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, divides, format_layout, sharded_dim
from executor.resolve.fqns import path_text
from executor.resolve.sharded_as import sharded_as
from planner.errors import PlanLayoutError, UnmatchedKeyError
from planner.plan.ports import ports_of
from planner.plan.sharding_plan import ShardingPlan


def root_layouts(plan: ShardingPlan) -> dict[str, Layout]:
    """Return argument name -> layout of that argument of the root module; "" is the first argument."""
    spec = plan.input_plan.get("input", plan.input_plan.get(""))
    return {} if spec is None else {name: port.layout for name, port in ports_of(spec)}


@overload
def local_batch(batch: Any, device_mesh: nn.Module) -> Any: ...


@overload
def local_batch(batch: Any, device_mesh: DeviceMesh, plan: ShardingPlan) -> Any: ...


def local_batch(batch: Any, device_mesh: DeviceMesh | nn.Module, plan: ShardingPlan | None = None) -> Any:
    """Return this rank's slice of a global micro-batch; with a sharded module, on the module's device.

    Args:
        batch: a tuple of positional or a dict of keyword arguments of the root module, as the plan names them. Every
            rank passes the same values.
        device_mesh: a mesh with the shape of the plan's mesh; or the sharded module, which knows its mesh and plan.
        plan: its input ports of the root have the layout of each tensor. None: the plan of the sharded module.

    Raises:
        PlanError: the module was not sharded.
        UnmatchedKeyError: the plan does not name a tensor of the batch.
        PlanLayoutError: the layout of a tensor does not divide the tensor evenly.
    """
    device = None
    if isinstance(device_mesh, nn.Module):
        known = sharded_as(device_mesh)
        device_mesh, plan = known.device_mesh, known.plan
        device = device_mesh.device_type
    if plan is None:
        raise TypeError("local_batch() needs a plan with a device mesh; or give the sharded module alone")
    layouts = root_layouts(plan)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None, "this process is no rank of the mesh"
    first = next(iter(batch), "") if isinstance(batch, dict) else "0"
    shape = tuple(device_mesh.shape)

    def local_slice(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name = path_text(path)
        layout = layouts.get(name, layouts.get("") if name == first else None)
        if layout is None:
            raise UnmatchedKeyError(
                f"The batch has a tensor {name!r}, but the plan has no layout for that input of the root.",
                field="input_plan",
                key=name,
                what_to_do=f"Pass the arguments that the plan was made for: {', '.join(map(repr, layouts)) or 'none'}.",
            )
        part = slice_of(leaf, layout, shape, tuple(coordinate), name)
        return part if device is None else part.to(device)

    return pytree.tree_map_with_path(local_slice, batch)


def slice_of(
    tensor: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], name: str
) -> torch.Tensor:
    """Return the shard of ``tensor`` in ``layout`` that the rank at ``coordinate`` of the mesh holds.

    Args:
        tensor: the global tensor.
        layout: its layout on the mesh; a partial placement counts as replicated.
        mesh_shape: sizes of the mesh's axes.
        coordinate: index of the rank along each axis.
        name: name of the tensor in the error message.

    Raises:
        PlanLayoutError: ``layout`` does not divide the tensor evenly.
    """
    if not divides(tensor.shape, layout, mesh_shape):
        raise PlanLayoutError(
            f"The input {name!r} of shape {tuple(tensor.shape)} does not divide under "
            f"({', '.join(format_layout(layout))}) on the mesh {mesh_shape}.",
            field="input_plan",
            key=name,
            what_to_do="Feed the batch size and sequence length that the plan was made for.",
        )
    for placement, size, index in zip(layout, mesh_shape, coordinate, strict=True):
        dim = sharded_dim(placement)
        if dim is not None:
            length = tensor.shape[dim] // size
            tensor = tensor.narrow(dim, index * length, length)
    return tensor.contiguous()
