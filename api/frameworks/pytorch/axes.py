"""`AxisRoles`: the mesh axes of a plan in torch's terms: replicas, FSDP shards, tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from api.frameworks.expressed import Row
from cost_model.layouts.layout import Layout
from planner.plan.patterns import match_keys
from planner.plan.ports import Port, ports_of
from planner.plan.sharding_plan import ShardingPlan

Value = TypeVar("Value")
R = Replicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayouts:
    """Stored and compute layout of one parameter, and the layout of its gradient in every micro-batch (None: as is)."""

    stored: Layout
    compute: Layout
    gradient: Layout | None


def by_name(entries: Mapping[str, Value], names: Iterable[str] | None) -> dict[str, Value]:
    """Return FQN -> value of ``entries``, whose keys are patterns; without ``names`` the patterns stand for FQNs."""
    if names is None:
        return dict(entries)
    return {fqn: entries[key] for key, fqns in match_keys(entries, names).items() for fqn in fqns}


def parameter_layouts(plan: ShardingPlan, module: nn.Module | None) -> dict[str, ParameterLayouts]:
    """Return FQN, or pattern without a module, -> layouts of each parameter that the plan names."""
    parameters = {} if module is None else dict(module.named_parameters(remove_duplicate=False))
    names = None if module is None else list(parameters)
    stored = {name: value for name, value in by_name(plan.plan, names).items() if not isinstance(value, str)}
    compute, gradient = by_name(plan.compute_plan, names), by_name(plan.gradient_plan, names)
    # A tied parameter of whose names no op reads one has its compute layout under the other.
    used = {id(parameters[name]): layout for name, layout in compute.items() if name in parameters}
    compute = {name: used[id(item)] for name, item in parameters.items() if id(item) in used} | compute
    return {
        name: ParameterLayouts(stored=layout, compute=compute.get(name, layout), gradient=gradient.get(name))
        for name, layout in stored.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRoles:
    """The role of each axis of a plan's mesh.

    Attributes:
        replicate, shard: indices of the axes that hold replicas, and over which FSDP shards parameters.
        tensor: index of the axis of tensor parallelism; None: there is none.
        unsaid: axes whose tensor parallelism cannot be said, so that FSDP shards over them instead.
        names: names of the plan's axes.
        sizes: their ranks.
    """

    replicate: tuple[int, ...]
    shard: tuple[int, ...]
    tensor: int | None
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    unsaid: tuple[int, ...] = field(default=())

    @property
    def data(self) -> tuple[int, ...]:
        """Axes that split the batch."""
        return (*self.replicate, *self.shard)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Name and ranks of the axes of the script's mesh, outermost first; axes of one role are one axis there."""
        groups = (self.replicate, self.shard, () if self.tensor is None else (self.tensor,))
        return tuple(
            ("_".join(self.names[axis] for axis in group), math.prod(self.sizes[axis] for axis in group))
            for group in groups
            if group
        )

    def axis_name(self, group: tuple[int, ...]) -> str:
        """Return the name, in the script, of the axes of one role."""
        return "_".join(self.names[axis] for axis in group)

    def row(self) -> Row:
        """Return what the script says of the mesh."""
        order = [*self.data, *(() if self.tensor is None else (self.tensor,))]
        text = ", ".join(f"{name}={size}" for name, size in self.axes)
        if len(order) != len(self.axes) or order != sorted(order):
            planned = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
            return Row(field="mesh", outcome="approximated", detail=f"{planned} becomes {text}")
        return Row(field="mesh", outcome="expressed", detail=f"init_device_mesh with {text}")


def axis_roles(plan: ShardingPlan, layouts: Mapping[str, ParameterLayouts], *, can_shard_tensors: bool) -> AxisRoles:
    """Return the roles of the axes of ``plan``.

    Args:
        plan: the plan.
        layouts: `parameter_layouts` of the plan.
        can_shard_tensors: whether torch's styles can say the layouts of the innermost axis.
    """
    mesh = plan.layout_mesh
    axes = range(len(mesh.shape))
    wanted = [axis for axis in axes if _is_tensor_parallel(plan, layouts, axis)]
    said = [axis for axis in wanted if can_shard_tensors and not _is_fsdp_too(plan, layouts, axis)][-1:]
    unsaid = [axis for axis in wanted if axis not in said]
    shard = [
        axis
        for axis in axes
        if axis not in said and (axis in unsaid or any(item.stored[axis] != R for item in layouts.values()))
    ]
    return AxisRoles(
        replicate=tuple(axis for axis in axes if axis not in said and axis not in shard),
        shard=tuple(shard),
        tensor=said[0] if said else None,
        names=tuple(mesh.names),
        sizes=tuple(mesh.shape),
        unsaid=tuple(unsaid),
    )


def inner_ports(plan: ShardingPlan) -> Iterator[tuple[str, str, Port]]:
    """Yield (key, name of the tensor, port) of all ports except those of the root's arguments."""
    for entries in (plan.input_plan, plan.output_plan):
        for key, spec in entries.items():
            if key not in ("input", ""):
                for name, port in ports_of(spec):
                    yield key, name, port


def _is_tensor_parallel(plan: ShardingPlan, layouts: Mapping[str, ParameterLayouts], axis: int) -> bool:
    """Return whether an axis does more than split the batch."""
    if plan.layout_mesh.shape[axis] == 1:
        return False
    if any(item.compute[axis] != R for item in layouts.values()):
        return True
    return any(moves(port, axis) for _, _, port in inner_ports(plan))


def moves(port: Port, axis: int) -> bool:
    """Return whether a port does more, on ``axis``, than keep a batch split, split one or gather one."""
    return any(place not in (None, R, Shard(0)) for place in _places(port, axis))


def gathers_batch(port: Port, axis: int) -> bool:
    """Return whether a port gathers, on ``axis``, a batch that is split: what follows runs on all samples."""
    return _places(port, axis) == (Shard(0), R)


def _places(port: Port, axis: int) -> tuple[Placement | None, Placement]:
    """Return the placements from which and to which a port redistributes; None: its source is not known."""
    return None if port.source is None else port.source[axis], port.layout[axis]


def _is_fsdp_too(plan: ShardingPlan, layouts: Mapping[str, ParameterLayouts], axis: int) -> bool:
    """Return whether an FSDP group is gathered over ``axis`` as well."""
    names = by_name({f"{key}.{name}".lstrip("."): None for key, of in plan.fully_shard.items() for name in of}, layouts)
    return any(layouts[name].stored[axis] != R and layouts[name].compute[axis] == R for name in names)
