"""Parameters into their stored layouts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from cost_model.layouts.layout import Layout, replicated
from planner.errors import KeyConflictError
from planner.plan.patterns import match_keys, resolve_keys
from planner.plan.ports import input_key
from planner.plan.sharding_plan import ShardingPlan


def stored_layouts(module: nn.Module, plan: ShardingPlan) -> dict[nn.Parameter, Layout]:
    """Return the stored layout of every parameter that becomes a DTensor; a tied one may go by any of its names.

    A parameter that the plan does not name, but that meets tensors that are split, is replicated: beside them a plain
    one would be left with the gradient of this rank's part. That is, each in a module with a parameter that is named,
    and every one where the plan says how the model's inputs lie. Parameters that a Sharder is for are left to it.

    Raises:
        PlanKeyError: a key matches no parameter, or two keys disagree.
    """
    entries = {key: value for key, value in plan.plan.items() if not isinstance(value, str)}
    layouts = parameter_layouts(module, entries, field="plan")
    if not entries:
        return layouts
    named, whole = set(layouts), replicated(len(plan.mesh.shape))
    everywhere = input_key("") in plan.input_plan
    theirs = _of_sharders(module, plan)
    for part in module.modules():
        own = [parameter for parameter in part.parameters(recurse=False) if parameter not in theirs]
        if everywhere or any(parameter in named for parameter in own):
            for parameter in own:
                layouts.setdefault(parameter, whole)
    return layouts


def _of_sharders(module: nn.Module, plan: ShardingPlan) -> set[nn.Parameter]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    modules = dict(module.named_modules(remove_duplicate=False))
    keys = [key for key, value in plan.plan.items() if isinstance(value, str)]
    names = {name for found in match_keys(keys, [*parameters, *modules]).values() for name in found}
    found = {parameters[name] for name in names if name in parameters}
    return found.union(*(modules[name].parameters() for name in names if name in modules))


def parameter_layouts(module: nn.Module, entries: Mapping[str, Layout], *, field: str) -> dict[nn.Parameter, Layout]:
    """Return parameter -> layout for FQN patterns ``entries`` of the plan's ``field``.

    Raises:
        UnmatchedKeyError: a key matches no parameter.
        KeyConflictError: two keys, or two names of a tied parameter, disagree.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    layouts: dict[nn.Parameter, Layout] = {}
    named: dict[nn.Parameter, str] = {}
    for fqn, layout in resolve_keys(entries, parameters, field=field, what="parameter").items():
        parameter = parameters[fqn]
        if layouts.setdefault(parameter, layout) != layout:
            raise KeyConflictError(
                f"{field} gives {named[parameter]!r} and {fqn!r} different layouts, but they are one tied parameter.",
                field=field,
                key=fqn,
                other=named[parameter],
                what_to_do="Give both the same layout, or name only one of them.",
            )
        named.setdefault(parameter, fqn)
    return layouts


def place_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan,
    *,
    src_data_rank: int | None = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Make every parameter that is not a Sharder's a DTensor in its stored layout. ``check_plan`` must have passed.

    Args:
        module: its tied parameters stay tied; parameters on the meta device stay there.
        mesh: of all ranks that call this.
        plan: its ``plan`` entries that are layouts.
        src_data_rank: the rank, counted along each axis, whose values count; None takes each rank's own piece of
            its own values without any communication (all ranks hold the same values, or do not care).
        dtype: that floating-point parameters rest in; None: their own.
    """
    layouts = stored_layouts(module, plan)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for parent in module.modules():
        for name, parameter in list(parent._parameters.items()):
            if parameter is None or parameter not in layouts:
                continue
            if parameter not in placed:
                placed[parameter] = _placed(parameter, mesh, layouts[parameter], src_data_rank, dtype)
            parent.register_parameter(name, placed[parameter])


def _placed(
    parameter: nn.Parameter, mesh: DeviceMesh, layout: Layout, src_data_rank: int | None, dtype: torch.dtype | None
) -> nn.Parameter:
    # A tensor without storage has no values to send.
    source = None if parameter.is_meta else src_data_rank
    # Scattering needs contiguous memory, which a transposed parameter lacks.
    data = parameter.detach().contiguous()
    if dtype is not None and data.is_floating_point():
        data = data.to(dtype)
    tensor = distribute_tensor(data, mesh, layout, src_data_rank=source)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
