"""Parameters into their stored layouts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from cost_model.layout import Layout
from planner.errors import KeyConflictError
from planner.patterns import resolve_keys
from planner.plan import ShardingPlan


def stored_layouts(module: nn.Module, plan: ShardingPlan) -> dict[nn.Parameter, Layout]:
    """Return the stored layout of every parameter that the plan names; a tied one may go by any of its names.

    Raises:
        PlanKeyError: a key matches no parameter, or two keys disagree.
    """
    entries = {key: value for key, value in plan.plan.items() if not isinstance(value, str)}
    return parameter_layouts(module, entries, field="plan")


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


def place_parameters(module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, src_data_rank: int | None = 0) -> None:
    """Make every parameter that the plan names a DTensor in its stored layout. ``check_plan`` must have passed.

    Args:
        module: its tied parameters stay tied; parameters on the meta device stay there.
        mesh: of all ranks that call this.
        plan: its ``plan`` entries that are layouts.
        src_data_rank: the rank, counted along each axis, whose values count; None takes each rank's own piece of
            its own values without any communication (all ranks hold the same values, or do not care).
    """
    layouts = stored_layouts(module, plan)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for parent in module.modules():
        for name, parameter in list(parent._parameters.items()):
            if parameter is None or parameter not in layouts:
                continue
            if parameter not in placed:
                placed[parameter] = _placed(parameter, mesh, layouts[parameter], src_data_rank)
            parent.register_parameter(name, placed[parameter])


def _placed(parameter: nn.Parameter, mesh: DeviceMesh, layout: Layout, src_data_rank: int | None) -> nn.Parameter:
    # A tensor without storage has no values to send.
    source = None if parameter.is_meta else src_data_rank
    # Scattering needs contiguous memory, which a transposed parameter lacks.
    data = parameter.detach().contiguous()
    tensor = distribute_tensor(data, mesh, layout, src_data_rank=source)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
