"""Where parameters are used, and in which layout and dtype: read off the plan, before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from cost_model.layouts.layout import Layout
from executor.resolve.place_parameters import stored_layouts
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that a job knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """One module's use of one of its own parameters.

    Attributes:
        name: of the attribute.
        stored: layout of the parameter at rest.
        compute: layout that the module's forward needs.
        gradient: layout in which this use hands on its gradient; None is the one it comes in.
        reduce_dtype: in which the gradient is brought to that layout.
    """

    name: str
    stored: Layout
    compute: Layout
    gradient: Layout | None
    reduce_dtype: torch.dtype

    @property
    def is_materialized(self) -> bool:
        """Whether the module needs another tensor than the one that is stored."""
        return self.stored != self.compute or self.gradient is not None


def compute_dtype(plan: ShardingPlan) -> torch.dtype:
    """Return the dtype that parameters are computed in."""
    return _DTYPES[plan.job.dtype]


def reduce_dtype(plan: ShardingPlan) -> torch.dtype:
    """Return the dtype that gradients are reduced in."""
    return _DTYPES[plan.job.reduce_dtype]


def parameter_uses(module: nn.Module, plan: ShardingPlan) -> dict[nn.Module, tuple[ParameterUse, ...]]:
    """Return the uses of every module that owns parameters that the plan places.

    A tied parameter has a use under each of its names, with a compute layout of its own; a module that goes by several
    names uses its parameters under the first.

    Raises:
        PlanKeyError: a key matches no parameter, or two keys disagree about one name.
    """
    stored = stored_layouts(module, plan)
    names = [fqn for fqn, _ in module.named_parameters(remove_duplicate=False)]
    compute = resolve_keys(plan.compute_plan, names, field="compute_plan", what="parameter")
    gradient = resolve_keys(plan.gradient_plan, names, field="gradient_plan", what="parameter")
    uses: dict[nn.Module, tuple[ParameterUse, ...]] = {}
    for owner_fqn, owner in module.named_modules():
        found = []
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter not in stored:
                continue
            fqn = f"{owner_fqn}.{name}" if owner_fqn else name
            layout = stored[parameter]
            found.append(
                ParameterUse(
                    name=name,
                    stored=layout,
                    compute=compute.get(fqn, layout),
                    gradient=gradient.get(fqn),
                    reduce_dtype=reduce_dtype(plan),
                )
            )
        if found:
            uses[owner] = tuple(found)
    return uses
