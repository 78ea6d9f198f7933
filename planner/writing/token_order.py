"""The zigzag token order of a plan: written from a decision, and checked in an existing plan."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from planner.errors import PlanMismatchError
from planner.formulation.decision import Decision
from planner.graph.trace_module import ModuleNames
from planner.liveness.structure import Structure
from planner.plan.ports import input_key, output_key
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.token_order import ZigzagOrder
from planner.pricing.run_spec import Run
from planner.strategies.context_parallel_order import zigzag_axis
from planner.strategies.token_reordering import Reordering
from planner.writing.fqn_entries import fold_names


def zigzag_order(
    reordering: Reordering | str | None, structure: Structure, decision: Decision, run: Run, names: ModuleNames
) -> ZigzagOrder | None:
    """Return the zigzag order that tokens have under ``decision``; None: tokens stay in their own order."""
    axis = zigzag_axis(structure.regions, decision.strategies, run.mesh.shape)
    if axis is None or not isinstance(reordering, Reordering):
        return None
    inputs, outputs = defaultdict[str, dict[str, int]](dict), defaultdict[str, dict[str, int]](dict)
    for place, dim in reordering.boundaries.items():
        (inputs if place.direction == "input" else outputs)[place.fqn][place.path] = dim
    return ZigzagOrder(
        axis=run.mesh.names[axis],
        length=reordering.length,
        inputs={input_key(fqn): dims for fqn, dims in fold_names(inputs, names.modules).items()},
        outputs={output_key(fqn): dims for fqn, dims in fold_names(outputs, names.modules).items()},
    )


def check_token_order(plan: ShardingPlan, order: ZigzagOrder | None, reordering: Reordering | str | None) -> None:
    """Check that a plan states ``order``, the token order that its layouts require.

    Raises:
        PlanMismatchError: it states another order.
    """
    if plan.zigzag == order:
        return
    raise PlanMismatchError(
        f"the plan's zigzag is not what its layouts ask for: {_difference(plan.zigzag, order, reordering)}.",
        subject="zigzag",
        expected=str(plan.zigzag),
        found=str(order),
        what_to_do="Split all attention along the sequence on zigzag's axis, or leave it out; or plan again.",
    )


def _difference(plan_order: ZigzagOrder | None, order: ZigzagOrder | None, reordering: Reordering | str | None) -> str:
    if isinstance(reordering, str):
        return f"sequences stay in their own order, as {reordering}"
    if plan_order is None or order is None:
        return "it has none, and attention is split" if plan_order is None else "it has one, and no attention is split"
    names = [
        field.name
        for field in dataclasses.fields(order)
        if getattr(plan_order, field.name) != getattr(order, field.name)
    ]
    return f"{', '.join(names)} of it would be {', '.join(str(getattr(order, name)) for name in names)}"


def token_order_notes(reordering: Reordering | str | None, order: ZigzagOrder | None) -> list[str]:
    """Return the notes on the token order of a plan."""
    if isinstance(reordering, str):
        return [f"sequences stay in their own order: {reordering}."]
    if reordering is None or order is None:
        return []
    results = f": {', '.join(reordering.results)} too" if reordering.results else ""
    return [f"sequences are in zigzag order over {order.axis}{results}; executor.natural_order undoes it."]
