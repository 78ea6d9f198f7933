"""Which parameters are gathered together, and on which axes: read off the plan, and checked, before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import Layout, format_layout, sharded_dim
from executor.resolve.fqns import module_fqns
from executor.resolve.parameter_uses import ParameterUse
from executor.resolve.place_parameters import stored_layouts
from planner.errors import KeyConflictError, PlanKeyError, PlanLayoutError
from planner.plan.patterns import resolve_keys, unmatched
from planner.plan.reshard import ReshardAfter, reshard_modes
from planner.plan.sharding_plan import ShardingPlan

_FIELD = "fully_shard"

Slot = tuple[nn.Module, str]
"""A module, and the attribute that one of its own parameters goes by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter of a group.

    Attributes:
        fqn: of the parameter, from the root.
        slots: where it is registered; a parameter that is tied within its group has several.
        stored: layout at rest.
        compute: layout at use: that of ``stored`` but whole on the group's axes.
        accumulated: layout that its gradient is left in by every backward: ``stored``, but for sums over other axes
            that are taken once a step.
        dim: of the tensor, that ``stored`` splits on the group's axes.
    """

    fqn: str
    slots: tuple[Slot, ...]
    stored: Layout
    compute: Layout
    accumulated: Layout
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherGroup:
    """Parameters that are gathered in one collective, when the module ``fqn`` needs them.

    Attributes:
        axes: of the mesh, one or several that follow each other, over which they are gathered as if these were one.
        keeping: how long they stay so.
    """

    fqn: str
    axes: tuple[int, ...]
    members: tuple[Member, ...]
    keeping: ReshardAfter = ReshardAfter.FORWARD


def gather_groups(module: nn.Module, plan: ShardingPlan) -> tuple[GatherGroup, ...]:
    """Return a group for every module that the plan's ``fully_shard`` names; innermost modules first.

    Args:
        module: plain or placed, as long as its parameters are where they were.
        plan: it has passed ``validate``, and its layouts divide their parameters.

    Raises:
        UnmatchedKeyError: a module or parameter that does not exist.
        KeyConflictError: a parameter in two groups, or used outside of its own.
        PlanKeyError: a module that cannot gather, or keeps what it does not, or a parameter that has no gradient.
        PlanLayoutError: layouts that torch's ``fully_shard`` does not have.
    """
    found = resolve_keys(plan.fully_shard, module_fqns(module), field=_FIELD, what="module")
    reader = _Reader(module, plan)
    groups = [reader.group(fqn, names) for fqn, names in found.items()]
    return tuple(sorted(groups, key=lambda group: -len(_components(group.fqn))))


def members_of(groups: Collection[GatherGroup]) -> frozenset[nn.Parameter]:
    """Return the parameters, as they are registered now, that ``groups`` gather."""
    found = (owner._parameters[name] for owner, name in _slots(groups))
    return frozenset(parameter for parameter in found if parameter is not None)


def unfinished_gradients(groups: Collection[GatherGroup]) -> dict[nn.Parameter, Layout]:
    """Return the layout of each gathered parameter's gradient that its group leaves as a sum over other axes."""
    left: dict[nn.Parameter, Layout] = {}
    for group in groups:
        for member in group.members:
            owner, name = member.slots[0]
            parameter = owner._parameters[name]
            if member.accumulated != member.stored and parameter is not None:
                left[parameter] = member.accumulated
    return left


def uses_outside(
    groups: Collection[GatherGroup], uses: Mapping[nn.Module, tuple[ParameterUse, ...]]
) -> dict[nn.Module, tuple[ParameterUse, ...]]:
    """Return ``uses`` without those of parameters that ``groups`` gather."""
    slots = _slots(groups)
    rest = {owner: tuple(use for use in owned if (owner, use.name) not in slots) for owner, owned in uses.items()}
    return {owner: owned for owner, owned in rest.items() if owned}


def _slots(groups: Collection[GatherGroup]) -> frozenset[Slot]:
    return frozenset(slot for group in groups for member in group.members for slot in member.slots)


def _components(fqn: str) -> list[str]:
    return fqn.split(".") if fqn else []


class _Reader:
    """Reads one group after the other, and remembers what was in those before."""

    def __init__(self, module: nn.Module, plan: ShardingPlan) -> None:
        self._module = module
        self._plan = plan
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._names: dict[nn.Parameter, list[str]] = {}
        for fqn, parameter in self._parameters.items():
            self._names.setdefault(parameter, []).append(fqn)
        self._stored = stored_layouts(module, plan)
        self._compute = resolve_keys(plan.compute_plan, self._parameters, field="compute_plan", what="parameter")
        self._gradient = resolve_keys(plan.gradient_plan, self._parameters, field="gradient_plan", what="parameter")
        self._modes = resolve_keys(
            plan.activation_checkpointing, module_fqns(module), field="activation_checkpointing", what="module"
        )
        self._kept = reshard_modes(plan, module_fqns(module))
        self._taken: dict[nn.Parameter, str] = {}

    def group(self, fqn: str, names: tuple[str, ...]) -> GatherGroup:
        """Return the group of the module ``fqn``, of the parameters that are called ``names`` inside it."""
        self._check_module(fqn)
        paths = [f"{fqn}.{name}" if fqn else name for name in names]
        members: dict[nn.Parameter, Member] = {}
        axes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            if path not in self._parameters:
                raise unmatched(path, self._parameters, field=_FIELD, what="parameter")
            parameter = self._parameters[path]
            over, member = self._member(path, parameter)
            self._check_whose(parameter, fqn, paths)
            axes[path] = over
            if members.setdefault(parameter, member).compute != member.compute:
                raise _wrong_layout(path, "is tied, and its names have different compute layouts")
        first = paths[0]
        for path, over in axes.items():
            if over != axes[first]:
                detail = f"is gathered on {self._names_of(over)}, but {first!r} on {self._names_of(axes[first])}"
                raise _wrong_layout(path, detail)
        self._check_dtypes(fqn, members)
        keeping = self._kept.get(fqn, ReshardAfter.FORWARD)
        return GatherGroup(fqn=fqn, axes=axes[first], members=tuple(members.values()), keeping=keeping)

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
            if block in self._modes:
                raise KeyConflictError(
                    f"fully_shard names {fqn!r}, which is inside {block!r}, a checkpointed block.",
                    field=_FIELD,
                    key=fqn,
                    other=block,
                    what_to_do=f"Gather its parameters with those of {block!r}.",
                )

    def _check_dtypes(self, fqn: str, members: Iterable[nn.Parameter]) -> None:
        first, *others = members
        for other in others:
            if other.dtype != first.dtype:
                names = [f"{self._names[parameter][0]!r} ({parameter.dtype})" for parameter in (first, other)]
                raise PlanKeyError(
                    f"fully_shard gathers {names[0]} together with {names[1]}.",
                    field=_FIELD,
                    key=fqn,
                    what_to_do="Gather parameters of one dtype together, and leave the others to themselves.",
                )

    def _check_whose(self, parameter: nn.Parameter, fqn: str, paths: Collection[str]) -> None:
        names = self._names[parameter]
        if self._taken.setdefault(parameter, fqn) != fqn:
            raise KeyConflictError(
                f"fully_shard gathers {names[0]!r} with {self._taken[parameter]!r} and with {fqn!r}.",
                field=_FIELD,
                key=fqn,
                other=self._taken[parameter],
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

    def _member(self, path: str, parameter: nn.Parameter) -> tuple[tuple[int, ...], Member]:
        if not parameter.requires_grad:
            raise PlanKeyError(
                f"fully_shard gathers {path!r}, which needs no gradient.",
                field=_FIELD,
                key=path,
                what_to_do="Leave frozen parameters out of fully_shard.",
            )
        if parameter not in self._stored:
            raise _wrong_layout(path, "has no stored layout")
        stored = self._stored[parameter]
        compute = self._compute.get(path, stored)
        axes, dim = self._axes_and_dim(path, stored, compute)
        accumulated = self._gradient.get(path, ())
        if not _is_left_by_reduction(accumulated, stored, axes):
            text = ", ".join(format_layout(stored))
            raise _wrong_layout(
                path, f"is reduced in every backward, so gradient_plan must give it ({text}), P(sum) for R at most"
            )
        slots = []
        for name in self._names[parameter]:
            owner, _, attribute = name.rpartition(".")
            slots.append((self._module.get_submodule(owner), attribute))
        member = Member(fqn=path, slots=tuple(slots), stored=stored, compute=compute, accumulated=accumulated, dim=dim)
        return axes, member

    def _axes_and_dim(self, path: str, stored: Layout, compute: Layout) -> tuple[tuple[int, ...], int]:
        mesh = self._plan.mesh
        axes = tuple(axis for axis, (a, b) in enumerate(zip(stored, compute, strict=True)) if a != b)
        texts = f"({', '.join(format_layout(stored))}) and computed in ({', '.join(format_layout(compute))})"
        if not axes or axes != tuple(range(axes[0], axes[-1] + 1)):
            raise _wrong_layout(
                path, f"is stored in {texts}: they differ on {len(axes)} axes, not on one or on some in a row"
            )
        place = stored[axes[0]]
        # A strided shard is a Shard too.
        if type(place) is not Shard or any(stored[a] != place or compute[a] != Replicate() for a in axes):
            raise _wrong_layout(path, f"is stored in {texts}: on {self._names_of(axes)} that is not S(d) and R")
        for inner in range(axes[-1] + 1, len(mesh.shape)):
            if sharded_dim(compute[inner]) == place.dim and mesh.shape[inner] > 1:
                detail = f"is stored in {texts}: {mesh.names[inner]}, which is further in, splits dim {place.dim} too"
                raise _wrong_layout(path, detail)
        for axis in axes:
            if mesh.shape[axis] == 1:
                raise _wrong_layout(path, f"is gathered on {mesh.names[axis]}, which has one rank")
        return axes, place.dim

    def _names_of(self, axes: tuple[int, ...]) -> str:
        return ",".join(self._plan.mesh.names[axis] for axis in axes)


def _is_left_by_reduction(accumulated: Layout, stored: Layout, axes: tuple[int, ...]) -> bool:
    """Tell whether a gradient may be so once it is scattered over ``axes``: as the parameter is, or to be summed."""
    return len(accumulated) == len(stored) and all(
        found == rests or (index not in axes and rests == Replicate() and found == Partial("sum"))
        for index, (found, rests) in enumerate(zip(accumulated, stored, strict=True))
    )


def _wrong_layout(path: str, detail: str) -> PlanLayoutError:
    return PlanLayoutError(
        f"fully_shard gathers {path!r}, which {detail}.",
        field=_FIELD,
        key=path,
        what_to_do="Store it in S(d) and compute it in R on one axis, or on some in a row, the same for all parameters "
        "of the module; or leave it out of fully_shard.",
    )
