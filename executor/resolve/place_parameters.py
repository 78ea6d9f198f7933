"""Placement of parameters and buffers: parameters become DTensors in their stored layouts, buffers stay whole."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from cost_model.layouts.layout import Layout
from executor.resolve.resolved_plan import ResolvedPlan
from executor.torch_internals.dtensor import local_of


def place_parameters(
    resolved: ResolvedPlan,
    *,
    src_data_rank: int | None = 0,
    dtype: torch.dtype | None = None,
    frozen_dtype: torch.dtype | None = None,
    values_from_source: bool = False,
) -> frozenset[nn.Parameter]:
    """Replace every parameter of ``resolved`` by a DTensor in its stored layout; tied parameters stay tied.

    Returns the frozen parameters that are in another dtype now.

    Parameters on the meta device stay there, unless the source rank has values for them. All ranks of the mesh call
    this function.

    Args:
        resolved: the resolved plan; its parameters are still plain.
        src_data_rank: index along each axis of the rank whose values are used. None: each rank slices its own values,
            without communication; then all ranks must hold the same values.
        dtype: stored dtype of floating-point parameters; None: their own dtype.
        frozen_dtype: stored dtype of frozen ones whose own dtype is wider; None: their own dtype.
        values_from_source: whether the source rank has values for all parameters, and other ranks may be on meta.
    """
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for layouts in resolved.parameters.values():
        parameter = layouts.parameter
        if isinstance(parameter, DTensor):
            # Placed already, under another name of its module.
            continue
        if parameter not in placed:
            values = _with_storage(parameter, resolved.device_mesh) if values_from_source else parameter.detach()
            is_wider = frozen_dtype is not None and parameter.dtype.itemsize > frozen_dtype.itemsize
            stored_dtype = frozen_dtype if is_wider and not parameter.requires_grad else dtype
            mesh, layout = resolved.device_mesh, layouts.stored
            placed[parameter] = _placed(parameter, values, mesh, layout, src_data_rank, stored_dtype)
        layouts.owner.register_parameter(layouts.attribute, placed[parameter])
    return frozenset(own for given, own in placed.items() if not own.requires_grad and own.dtype != given.dtype)


def _placed(
    parameter: nn.Parameter,
    values: torch.Tensor,
    mesh: DeviceMesh,
    layout: Layout,
    src_data_rank: int | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    # A tensor without storage has no values to send.
    source = None if values.is_meta else src_data_rank
    # distribute_tensor scatters contiguous memory only, which a transposed parameter lacks.
    data = values.contiguous()
    if dtype is not None and data.is_floating_point():
        data = data.to(dtype)
    tensor = distribute_tensor(data, mesh, layout, src_data_rank=source)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _with_storage(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``tensor`` outside autograd, on the type of device of ``mesh``; one without values if it is on meta."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return torch.empty_like(tensor, device=mesh.device_type)
    return tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)


def place_buffers(
    module: nn.Module,
    mesh: DeviceMesh,
    src_data_rank: int | None,
    *,
    outside: Collection[nn.Module] = (),
    values_from_source: bool = False,
) -> None:
    """Give all ranks the buffers of one rank, persistent or not, on their devices. All ranks call this function.

    They stay plain. Those on the meta device stay there, unless the source rank has values for them. DTensors stay as
    they are.

    Args:
        module: the root module.
        mesh: mesh of the ranks that run the module.
        src_data_rank: index along each axis of the rank whose values are used. None: each rank keeps its own values.
        outside: modules whose buffers are left alone, because a Sharder has made them.
        values_from_source: whether the source rank has values for all buffers, and other ranks may be on meta.
    """
    excluded = {item for replacement in outside for item in replacement.modules()}
    placed: dict[torch.Tensor, torch.Tensor] = {}
    for owner in module.modules():
        if owner in excluded:
            continue
        for name, buffer in owner._buffers.items():
            if buffer is None or (buffer.is_meta and not values_from_source) or isinstance(buffer, DTensor):
                continue
            if buffer not in placed:
                values = _with_storage(buffer, mesh)
                placed[buffer] = values if src_data_rank is None else _sent(values, mesh, src_data_rank)
            owner._buffers[name] = placed[buffer]


def _sent(buffer: torch.Tensor, mesh: DeviceMesh, src_data_rank: int) -> torch.Tensor:
    """Return ``buffer`` with the values of the source rank; it is itself unless its elements may share memory."""
    # As bytes, because not every backend sends every dtype.
    data = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
    replicated = [Replicate()] * mesh.ndim
    received = local_of(distribute_tensor(data, mesh, replicated, src_data_rank=src_data_rank))
    values = received.view(buffer.dtype).view(buffer.shape)
    if not buffer.is_contiguous():
        return values
    with torch.no_grad():
        return buffer.copy_(values)
