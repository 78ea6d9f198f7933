"""Placement of parameters: each becomes a DTensor in its stored layout."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from cost_model.layouts.layout import Layout
from executor.resolve.resolved_plan import ResolvedPlan


def place_parameters(
    resolved: ResolvedPlan, *, src_data_rank: int | None = 0, dtype: torch.dtype | None = None
) -> None:
    """Replace every parameter of ``resolved`` by a DTensor in its stored layout; tied parameters stay tied.

    Parameters on the meta device stay there. All ranks of the mesh call this function.

    Args:
        resolved: the resolved plan; its parameters are still plain.
        src_data_rank: index along each axis of the rank whose values are used. None: each rank slices its own values,
            without communication; then all ranks must hold the same values.
        dtype: stored dtype of floating-point parameters; None: their own dtype.
    """
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for layouts in resolved.parameters.values():
        parameter = layouts.parameter
        if isinstance(parameter, DTensor):
            # Placed already, under another name of its module.
            continue
        if parameter not in placed:
            placed[parameter] = _placed(parameter, resolved.device_mesh, layouts.stored, src_data_rank, dtype)
        layouts.owner.register_parameter(layouts.attribute, placed[parameter])


def _placed(
    parameter: nn.Parameter, mesh: DeviceMesh, layout: Layout, src_data_rank: int | None, dtype: torch.dtype | None
) -> nn.Parameter:
    # A tensor without storage has no values to send.
    source = None if parameter.is_meta else src_data_rank
    # distribute_tensor scatters contiguous memory only, which a transposed parameter lacks.
    data = parameter.detach().contiguous()
    if dtype is not None and data.is_floating_point():
        data = data.to(dtype)
    tensor = distribute_tensor(data, mesh, layout, src_data_rank=source)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
