"""The techniques that a plan uses, of those that its job allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from planner.graph.op_graph import OpGraph
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.techniques import Technique, TechniqueGain
from planner.run.run_results import Candidate
from planner.writing.notes import NOTHING_FUSED, fused_ops_note


def used_techniques(
    allowed: Iterable[Technique], plan: ShardingPlan, graph: OpGraph, candidate: Candidate
) -> tuple[TechniqueGain, ...]:
    """Return those of the ``allowed`` techniques that ``plan`` uses, without gains.

    Args:
        allowed: the techniques of the job.
        plan: the plan of ``candidate``; of a pipeline, the whole plan.
        graph: graph of the model.
        candidate: the decision that the plan states; of a pipeline, the first stage's.
    """
    unused: dict[Technique, bool] = {
        "fused-ops": fused_ops_note(graph) == NOTHING_FUSED,
        "zigzag": plan.zigzag is None,
        "reallgather": not plan.reallgathers,
        "heterogeneous-blocks": not candidate.run.grouping.parts,
    }
    return tuple(TechniqueGain(name=name) for name in allowed if not unused.get(name, False))


def without_gains(techniques: Iterable[TechniqueGain]) -> tuple[TechniqueGain, ...]:
    """Return ``techniques`` without gains, for a plan whose price has changed."""
    return tuple(dataclasses.replace(technique, gain_s=None) for technique in techniques)
