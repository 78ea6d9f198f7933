"""FSDP groups: parameters that ``fully_shard`` all-gathers in one collective, resolved from the plan and checked."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import Layout, format_layout, sharded_dim
from executor.resolve.parameter_layouts import ParameterLayouts, Slot
from planner.errors import KeyConflictError, PlanKeyError, PlanLayoutError
from planner.plan.patterns import unmatched
from planner.plan.reshard import ReshardAfter
from planner.plan.sharding_plan import PlanMesh

_FIELD = "fully_shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpParameter:
    """A parameter of an FSDP group.

    Attributes:
        fqn: name from the root; the first one that the plan gives it.
        slots: (module, attribute) pairs that hold the parameter; several where it is tied within its group.
        stored: layout between steps.
        compute: layout at use: ``stored``, but replicated on the axes of the group.
        accumulated: layout in which every backward leaves the gradient: ``stored``, but ``P(sum)`` on each axis outside
            the group on which the gradient is reduced only once a step. ``stored`` for a frozen parameter.
        dim: dim of the tensor that ``stored`` shards on the axes of the group.
    """

    fqn: str
    slots: tuple[Slot, ...]
    stored: Layout
    compute: Layout
    accumulated: Layout
    dim: int

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is registered now."""
        owner, attribute = self.slots[0]
        parameter = owner._parameters[attribute]
        assert parameter is not None
        return parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpGroup:
    """Parameters that are gathered in one all-gather before the module ``fqn`` runs.

    Attributes:
        fqn: FQN of the module; "" is the root.
        axes: adjacent axes of the mesh; the all-gather runs over all of them as if they were one axis.
        parameters: the parameters of the group, each once.
        reshard_after: when the gathered parameters are resharded.
    """

    fqn: str
    axes: tuple[int, ...]
    parameters: tuple[FsdpParameter, ...]
    reshard_after: ReshardAfter = ReshardAfter.FORWARD


def resolve_fsdp_groups(
    names: Mapping[str, tuple[str, ...]],
    module: nn.Module,
    layouts: Mapping[str, ParameterLayouts],
    *,
    mesh: PlanMesh,
    checkpointed: Collection[str],
    reshard_after: Mapping[str, ReshardAfter],
    is_planned: bool,
) -> tuple[FsdpGroup, ...]:
    """Return a group for each module in ``names``, innermost modules first.

    Args:
        names: module FQN -> names of parameters, relative to the module.
        module: the root module.
        layouts: FQN -> layouts of each parameter that becomes a DTensor.
        mesh: the plan's mesh.
        checkpointed: FQNs of checkpointed modules.
        reshard_after: module FQN -> when its parameters are resharded, for modules that do not reshard after forward.
        is_planned: whether shardplan made the plan. It then names the layout of each gradient, but for parameters that
            get none: frozen ones, and those whose results do not lead to the loss.

    Raises:
        UnmatchedKeyError: a parameter that does not exist.
        KeyConflictError: a parameter in two groups, or tied to a name outside its group; a module inside a checkpointed
            block.
        PlanKeyError: a module that is never called, or two dtypes of trained parameters in one group.
        PlanLayoutError: layouts that ``fully_shard`` does not support.
    """
    resolver = _GroupResolver(module, layouts, mesh, checkpointed, is_planned=is_planned)
    groups = [resolver.group(fqn, own, reshard_after.get(fqn, ReshardAfter.FORWARD)) for fqn, own in names.items()]
    return tuple(sorted(groups, key=lambda group: -len(_components(group.fqn))))


def _components(fqn: str) -> list[str]:
    return fqn.split(".") if fqn else []


class _GroupResolver:
    """Resolves one group after another, and remembers the group of each parameter."""

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, ParameterLayouts],
        mesh: PlanMesh,
        checkpointed: Collection[str],
        *,
        is_planned: bool,
    ) -> None:
        self._is_planned = is_planned
        self._module = module
        self._layouts = layouts
        self._mesh = mesh
        self._checkpointed = checkpointed
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._names: dict[nn.Parameter, list[str]] = {}
        for fqn, parameter in self._parameters.items():
            self._names.setdefault(parameter, []).append(fqn)
        self._group_of: dict[nn.Parameter, str] = {}

    def group(self, fqn: str, names: tuple[str, ...], reshard_after: ReshardAfter) -> FsdpGroup:
        """Return the group of the module ``fqn``; ``names`` are names of parameters relative to the module."""
        self._check_module(fqn)
        paths = [f"{fqn}.{name}" if fqn else name for name in names]
        members: dict[nn.Parameter, FsdpParameter] = {}
        axes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            if path not in self._parameters:
                raise unmatched(path, self._parameters, field=_FIELD, what="parameter")
            parameter = self._parameters[path]
            axes[path], member = self._member(path, parameter)
            self._check_one_group(parameter, fqn, paths)
            if members.setdefault(parameter, member).compute != member.compute:
                raise _wrong_layout(path, "is tied, and its names have different compute layouts")
        first = paths[0]
        for path, over in axes.items():
            if over != axes[first]:
                detail = f"is gathered on {self._axis_names(over)}, but {first!r} on {self._axis_names(axes[first])}"
                raise _wrong_layout(path, detail)
        self._check_dtypes(fqn, members)
        return FsdpGroup(fqn=fqn, axes=axes[first], parameters=tuple(members.values()), reshard_after=reshard_after)

    def _check_module(self, fqn: str) -> None:
        submodule = self._module.get_submodule(fqn)
        if isinstance(submodule, (nn.ModuleList, nn.ModuleDict)):
            raise PlanKeyError(
                f"fully_shard names {fqn!r}, but a {type(submodule).__name__} is never called, so it cannot gather.",
                field=_FIELD,
                key=fqn,
                what_to_do="Name the modules in it, or the one around it.",
            )
        components = _components(fqn)
        for length in range(len(components)):
            block = ".".join(components[:length])
            if block in self._checkpointed:
                raise KeyConflictError(
                    f"fully_shard names {fqn!r}, which is inside {block!r}, a checkpointed block.",
                    field=_FIELD,
                    key=fqn,
                    other=block,
                    what_to_do=f"Gather its parameters with those of {block!r}.",
                )

    def _check_dtypes(self, fqn: str, members: Iterable[nn.Parameter]) -> None:
        trained = [parameter for parameter in members if parameter.requires_grad]
        for first, other in itertools.pairwise(trained):
            if other.dtype != first.dtype:
                names = [f"{self._names[parameter][0]!r} ({parameter.dtype})" for parameter in (first, other)]
                raise PlanKeyError(
                    f"fully_shard gathers {names[0]} together with {names[1]}.",
                    field=_FIELD,
                    key=fqn,
                    what_to_do="Gather parameters of one dtype together, and leave the others out of fully_shard.",
                )

    def _check_one_group(self, parameter: nn.Parameter, fqn: str, paths: Collection[str]) -> None:
        """Check that a parameter is in no other group, and that all of its names are in this group."""
        names = self._names[parameter]
        other = self._group_of.setdefault(parameter, fqn)
        if other != fqn:
            raise KeyConflictError(
                f"fully_shard gathers {names[0]!r} with {other!r} and with {fqn!r}.",
                field=_FIELD,
                key=fqn,
                other=other,
                what_to_do="Name it in one group only.",
            )
        outside = next((name for name in names if name not in paths), None)
        if outside is not None:
            inside = next(name for name in names if name in paths)
            raise KeyConflictError(
                f"fully_shard gathers {inside!r} with {fqn!r}, but it is tied to {outside!r}, not in that group.",
                field=_FIELD,
                key=inside,
                other=outside,
                what_to_do="Leave tied parameters out of fully_shard, or name all their names in one group.",
            )

    def _member(self, path: str, parameter: nn.Parameter) -> tuple[tuple[int, ...], FsdpParameter]:
        """Return the axes over which a parameter is all-gathered, and the parameter as a member of its group."""
        layouts = self._layouts.get(path)
        if layouts is None:
            raise _wrong_layout(path, "has no stored layout")
        axes, dim = self._axes_and_dim(path, layouts.stored, layouts.compute)
        has_gradient = parameter.requires_grad and not self._is_planned
        accumulated = layouts.gradient or (() if has_gradient else layouts.stored)
        if not _is_left_by_reduce_scatter(accumulated, layouts.stored, axes):
            text = ", ".join(format_layout(layouts.stored))
            raise _wrong_layout(
                path, f"is reduced in every backward, so gradient_plan must give it ({text}), P(sum) for R at most"
            )
        member = FsdpParameter(
            fqn=path,
            slots=tuple(self._layouts[name].slot for name in self._names[parameter]),
            stored=layouts.stored,
            compute=layouts.compute,
            accumulated=accumulated,
            dim=dim,
        )
        return axes, member

    def _axes_and_dim(self, path: str, stored: Layout, compute: Layout) -> tuple[tuple[int, ...], int]:
        """Return the axes on which ``stored`` and ``compute`` differ, and the dim that ``stored`` shards there."""
        mesh = self._mesh
        axes = tuple(axis for axis, (a, b) in enumerate(zip(stored, compute, strict=True)) if a != b)
        texts = f"({', '.join(format_layout(stored))}) and computed in ({', '.join(format_layout(compute))})"
        if not axes or axes != tuple(range(axes[0], axes[-1] + 1)):
            raise _wrong_layout(
                path, f"is stored in {texts}: they differ on {len(axes)} axes, not on one or on some in a row"
            )
        placement = stored[axes[0]]
        # Compare the type: a strided shard may be an instance of Shard, which depends on the version of torch.
        if type(placement) is not Shard or any(stored[a] != placement or compute[a] != Replicate() for a in axes):
            raise _wrong_layout(path, f"is stored in {texts}: on {self._axis_names(axes)} that is not S(d) and R")
        for inner in range(axes[-1] + 1, len(mesh.shape)):
            if sharded_dim(compute[inner]) == placement.dim and mesh.shape[inner] > 1:
                inner_name = mesh.names[inner]
                raise _wrong_layout(
                    path, f"is stored in {texts}: {inner_name}, which is further in, splits dim {placement.dim} too"
                )
        for axis in axes:
            if mesh.shape[axis] == 1:
                raise _wrong_layout(path, f"is gathered on {mesh.names[axis]}, which has one rank")
        return axes, placement.dim

    def _axis_names(self, axes: tuple[int, ...]) -> str:
        return ",".join(self._mesh.names[axis] for axis in axes)


def _is_left_by_reduce_scatter(accumulated: Layout, stored: Layout, axes: tuple[int, ...]) -> bool:
    """Return whether a gradient can be in ``accumulated`` after its reduce-scatter over ``axes``.

    On each axis the gradient has the placement of the parameter. On an axis outside ``axes`` where the parameter is
    replicated, the gradient may also be a partial sum.
    """
    return len(accumulated) == len(stored) and all(
        gradient == parameter or (axis not in axes and parameter == Replicate() and gradient == Partial("sum"))
        for axis, (gradient, parameter) in enumerate(zip(accumulated, stored, strict=True))
    )


def _wrong_layout(path: str, detail: str) -> PlanLayoutError:
    return PlanLayoutError(
        f"fully_shard gathers {path!r}, which {detail}.",
        field=_FIELD,
        key=path,
        what_to_do="Store it in S(d) and compute it in R on one axis, or on some in a row, the same for all parameters "
        "of the module; or leave it out of fully_shard.",
    )
