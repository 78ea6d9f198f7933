"""Explanation of a parameter's layout: the price of each other layout, with all other layouts planned again."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import Layout, format_layout
from planner.errors import UnmatchedKeyError
from planner.formulation.decision import Decision
from planner.formulation.estimate import estimate
from planner.graph.example_inputs import GivenInputs
from planner.graph.op_graph import Value
from planner.graph.trace_module import with_fused_projections
from planner.liveness.parameter_classes import ParameterClass
from planner.liveness.structure import Structure
from planner.plan.estimate import Estimate
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.storage_options import stored_layouts
from planner.progress import AlternativePricing, Progress
from planner.regions.regions import Region
from planner.run.baselines import Restriction
from planner.strategies.enumerate import Strategy
from planner.writing.reprice import PricingContext, open_for_pricing

Aspect = Literal["stored", "computed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One possible layout of the explained parameter, and the best plan with it.

    Mesh, micro-batches and checkpointing are those of the explained plan.

    Attributes:
        aspect: "stored" for the stored layout, "computed" for the compute layout.
        layout: placements as text, one per mesh axis.
        chosen: whether the explained plan has the layout.
        estimate: estimate of the best plan with the layout; None: no plan has the layout.
        fits: whether the peak of that plan is within the memory cap.
    """

    aspect: Aspect
    layout: tuple[str, ...]
    chosen: bool
    estimate: Estimate | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan's layouts of a parameter, and the price of each alternative.

    Attributes:
        parameter: FQN.
        names: FQNs of all parameters that share its layouts: the same parameter of equal blocks, and tied parameters.
        plan: estimate of the plan, computed again.
        memory_bytes: cap on the peak per device.
        tolerance_s: seconds of step time by which the solver may miss the optimum.
        alternatives: one per stored layout, then one per compute layout. Of each kind, layouts that fit the memory come
            first, and among them the fastest.
    """

    parameter: str
    names: tuple[str, ...]
    plan: Estimate
    memory_bytes: int
    tolerance_s: float
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        """Return the tables that ``shardplan explain`` prints."""
        return str(importlib.import_module("api.render.explanation").explanation_text(self))


def explain(
    model: nn.Module,
    plan: ShardingPlan,
    parameter: str,
    *,
    example_inputs: GivenInputs = None,
    cluster: ClusterSpec | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Return the price of every layout of ``parameter``, on the plan's mesh, micro-batches and checkpointing.

    For each layout, the integer program chooses all other layouts again.

    Args:
        parameter: FQN of a parameter.

    Raises:
        UnmatchedKeyError: the model has no such parameter, or no op uses it.
        PlanMismatchError: the plan is for another model, or the model cannot run in the plan's layouts.
    """
    if plan.job.fused_projections:
        model = with_fused_projections(model)
    parameter_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if parameter not in parameter_names:
        close = ", ".join(difflib.get_close_matches(parameter, parameter_names, n=3, cutoff=0.5)) or parameter_names[0]
        raise UnmatchedKeyError(
            f"the model has no parameter {parameter!r}.",
            field="plan",
            key=parameter,
            what_to_do=f"Give the full name of one, such as {close}.",
        )
    context = open_for_pricing(model, plan, example_inputs=example_inputs, cluster=cluster)
    plan_contents = context.plan_contents
    subject = _Subject(plan_contents.structure, parameter)
    own = estimate(plan_contents.formulator, plan_contents.structure, plan_contents.decision)
    alternatives = list(_alternatives(context, subject, plan_contents.decision, own, progress))
    order = {"stored": 0, "computed": 1}
    alternatives.sort(
        key=lambda a: (
            order[a.aspect],
            not a.fits,
            a.estimate is None,
            a.estimate.step_time_s if a.estimate else 0.0,
            not a.chosen,
        )
    )
    return Explanation(
        parameter=parameter,
        names=subject.names,
        plan=own,
        memory_bytes=context.search.memory_bytes,
        tolerance_s=own.step_time_s * plan.job.mip_gap,
        alternatives=tuple(alternatives),
    )


class _Subject:
    """The explained parameter and its parameter class."""

    def __init__(self, structure: Structure, parameter: str) -> None:
        names = structure.regions.graph.parameters
        owners = [i for i, p in enumerate(structure.parameters) if any(parameter in names[v] for v in p.values)]
        if not owners:
            raise UnmatchedKeyError(
                f"the model computes nothing with {parameter!r}.",
                field="plan",
                key=parameter,
                what_to_do="It rests replicated; ask for a parameter that is used.",
            )
        (self.index,) = owners
        self.structure = structure
        self.parameter: ParameterClass = structure.parameters[self.index]
        self.names = tuple(name for value in self.parameter.values for name in names[value])

    @property
    def value(self) -> Value:
        return self.structure.regions.graph.values[self.parameter.values[0]]

    def computed(self, decision: Decision) -> Layout | None:
        index, slot = next(iter(self.parameter.uses))
        return decision.strategies[index].forward[slot]

    def restrict(self, aspect: Aspect, layout: Layout) -> Restriction:
        """Return the restriction to plans in which the parameter has this layout."""

        def accepts(region: Region, strategy: Strategy) -> bool:
            return aspect != "computed" or all(
                strategy.forward[i] == layout for i, slot in enumerate(region.slots) if slot.parameter in self.names
            )

        def accepts_stored(value: Value, names: object, stored: Layout) -> bool:
            return aspect != "stored" or value.name not in self.parameter.values or stored == layout

        return Restriction(accepts=accepts, accepts_stored=accepts_stored)


def _alternatives(
    context: PricingContext, subject: _Subject, decision: Decision, own: Estimate, progress: Progress | None
) -> Iterator[Alternative]:
    mesh, rounded = context.plan_contents.run.mesh.shape, context.search.model.graph.rounded
    options: list[tuple[Aspect, Layout, bool]] = [
        ("stored", layout, layout == decision.stored[subject.index].stored)
        for layout in stored_layouts(subject.value, mesh, _computed(context, subject), rounded)
    ]
    options += [("computed", layout, layout == subject.computed(decision)) for layout in _computed(context, subject)]
    for aspect, layout, chosen in options:
        text = tuple(format_layout(layout))
        if progress is not None:
            progress(AlternativePricing(aspect=aspect, layout=text))
        if chosen:
            fits = own.peak_memory_bytes <= context.search.memory_bytes
            yield Alternative(aspect=aspect, layout=text, chosen=True, estimate=own, fits=fits)
            continue
        run, restriction = context.plan_contents.run, subject.restrict(aspect, layout)
        candidate = context.search.solve(run, restriction, memory_bytes=context.search.memory_bytes)
        fits = candidate is not None
        if candidate is None:
            candidate = context.search.solve(run, restriction, memory_bytes=None)
        estimate_with_layout = None if candidate is None else candidate.estimate
        yield Alternative(aspect=aspect, layout=text, chosen=chosen, estimate=estimate_with_layout, fits=fits)


def _computed(context: PricingContext, subject: _Subject) -> list[Layout]:
    """Return the possible compute layouts of the parameter at its first use."""
    formulator, _ = context.search.formulator(context.plan_contents.run)
    index, slot = next(iter(subject.parameter.uses))
    layouts = (strategy.forward[slot] for strategy in formulator.strategies(index))
    return list(dict.fromkeys(layout for layout in layouts if layout is not None))


def difference(alternative: Estimate, plan: Estimate) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the seconds by which an alternative exceeds the plan, by part of the step and by collective.

    The first mapping has the parts of a step; they add up to the difference in step time. The second has communication
    by kind and axis, overlapped or exposed. The largest absolute difference comes first in each.
    """
    parts = {
        "computing": alternative.compute_s - plan.compute_s,
        "exposed communication": alternative.exposed_communication_s - plan.exposed_communication_s,
        "optimizer": alternative.optimizer_s - plan.optimizer_s,
    }
    collectives: dict[str, float] = {}
    for estimated, sign in ((alternative, 1), (plan, -1)):
        for row in estimated.collectives:
            name = f"{row.kind.replace('_', '-')} on {row.axis}"
            collectives[name] = collectives.get(name, 0.0) + sign * row.time_s
    return _largest_first(parts), _largest_first(collectives)


def _largest_first(parts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(parts.items(), key=lambda part: -abs(part[1])))
