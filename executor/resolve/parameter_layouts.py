"""Stored, compute and gradient layouts of every parameter that becomes a DTensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import Layout, replicated
from planner.errors import KeyConflictError, PlanMismatchError
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan

Slot = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayouts:
    """The layouts of a parameter under one of its names.

    Attributes:
        owner: module in which the parameter is registered.
        attribute: name of the parameter in ``owner``.
        reader: module whose forward reads the parameter: ``owner``, or one around it.
        stored: layout between steps; the same under all names of a tied parameter.
        compute: layout that the forward of ``reader`` needs.
        gradient: layout to which every backward brings the gradient; None leaves it in the layout in which autograd
            gives it, until gradients are reduced at the end of the step.
    """

    owner: nn.Module
    attribute: str
    reader: nn.Module
    stored: Layout
    compute: Layout
    gradient: Layout | None

    @property
    def slot(self) -> Slot:
        """Where the parameter is registered."""
        return self.owner, self.attribute

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is registered now: plain before placement, a DTensor after it."""
        parameter = self.owner._parameters[self.attribute]
        assert parameter is not None
        return parameter

    @property
    def redistributes(self) -> bool:
        """Whether the forward redistributes the parameter, or every backward redistributes its gradient."""
        return self.stored != self.compute or self.gradient is not None


def named_layouts(plan: ShardingPlan, parameters: Collection[str]) -> dict[str, dict[str, Layout]]:
    """Return parameter FQN -> layout for each of the fields ``plan``, ``compute_plan`` and ``gradient_plan``.

    Args:
        plan: a plan; the keys of these fields are FQN patterns.
        parameters: every FQN of every parameter.

    Raises:
        UnmatchedKeyError: a key matches no parameter.
        KeyConflictError: two keys give one name different layouts.
    """
    stored = {key: value for key, value in plan.plan.items() if not isinstance(value, str)}
    fields = {"plan": stored, "compute_plan": plan.compute_plan, "gradient_plan": plan.gradient_plan}
    return {
        field: resolve_keys(layouts, parameters, field=field, what="parameter") for field, layouts in fields.items()
    }


def with_tied_names(names: Collection[str], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return every FQN of the parameters in ``names``; ``parameters`` maps every FQN, tied or not, to a parameter."""
    named_parameters = {parameters[fqn] for fqn in names}
    return [fqn for fqn, parameter in parameters.items() if parameter in named_parameters]


def resolve_parameters(
    module: nn.Module,
    layouts_by_field: Mapping[str, Mapping[str, Layout]],
    read_above: Mapping[str, int],
    *,
    axes: int,
    has_root_inputs: bool,
    replaced: Collection[nn.Module],
) -> dict[str, ParameterLayouts]:
    """Return FQN -> layouts, for every name of every parameter that becomes a DTensor.

    These are the parameters that the plan names, and other parameters that meet sharded tensors: the remaining
    parameters of a module that owns a named parameter, and all parameters of the model if the plan has layouts for the
    inputs of the root. The other parameters are replicated. As plain tensors they would get only the gradient of this
    rank's shard of the batch. Parameters inside a module that a Sharder replaces are left to the Sharder. If the plan
    names no parameter, none becomes a DTensor.

    Args:
        module: the root module, not yet sharded.
        layouts_by_field: the result of ``named_layouts``.
        read_above: FQN -> levels between the parameter's module and its reader; FQNs without any are left out.
        axes: number of axes of the mesh.
        has_root_inputs: whether the plan has layouts for the inputs of the root.
        replaced: modules that Sharders replace.

    Raises:
        KeyConflictError: the names of a tied parameter have different stored layouts.
        PlanMismatchError: a parameter that the plan names is a DTensor already.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    stored = _stored_layouts(parameters, layouts_by_field["plan"])
    if stored:
        in_sharders = {parameter for part in replaced for parameter in part.parameters()}
        named_in_plan = set(stored)
        for part in module.modules():
            own = [parameter for parameter in part.parameters(recurse=False) if parameter not in in_sharders]
            if has_root_inputs or not named_in_plan.isdisjoint(own):
                for parameter in own:
                    # One that is a DTensor already was sharded in a call of its own, and no name asks for it here.
                    if not isinstance(parameter, DTensor):
                        stored.setdefault(parameter, replicated(axes))
    layouts: dict[str, ParameterLayouts] = {}
    for fqn, parameter in parameters.items():
        if parameter not in stored:
            continue
        if isinstance(parameter, DTensor):
            raise PlanMismatchError(
                f"{fqn!r} is a DTensor already.",
                subject="module",
                expected="plain parameters",
                found="DTensor",
                what_to_do="Apply one plan, once, to a plain module.",
            )
        *owner, attribute = fqn.split(".")
        reader = owner[: len(owner) - read_above.get(fqn, 0)]
        layouts[fqn] = ParameterLayouts(
            owner=module.get_submodule(".".join(owner)),
            attribute=attribute,
            reader=module.get_submodule(".".join(reader)),
            stored=stored[parameter],
            compute=layouts_by_field["compute_plan"].get(fqn, stored[parameter]),
            gradient=layouts_by_field["gradient_plan"].get(fqn),
        )
    return layouts


def _stored_layouts(
    parameters: Mapping[str, nn.Parameter], layouts_by_name: Mapping[str, Layout]
) -> dict[nn.Parameter, Layout]:
    """Return the stored layout of each parameter that the plan names, under any of the parameter's FQNs."""
    layouts: dict[nn.Parameter, Layout] = {}
    first_name: dict[nn.Parameter, str] = {}
    for fqn, layout in layouts_by_name.items():
        parameter = parameters[fqn]
        other = first_name.setdefault(parameter, fqn)
        if layouts.setdefault(parameter, layout) != layout:
            raise KeyConflictError(
                f"plan gives {other!r} and {fqn!r} different layouts, but they are one tied parameter.",
                field="plan",
                key=fqn,
                other=other,
                what_to_do="Give both the same layout, or name only one of them.",
            )
    return layouts
