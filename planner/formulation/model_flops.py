"""`model_flops`: the FLOPs that a model needs in a step, without recomputation, from which the MFU follows."""

from __future__ import annotations

from planner.graph.op_graph import ATTENTION, Op, OpGraph
from planner.liveness.structure import Structure
from planner.pricing.run_spec import Run
from planner.profile.op_profile import OpProfile
from planner.strategies.context_parallel_work import is_causal

ATTENTION_BACKWARD = 2.0
"""FLOPs of attention's backward per FLOP of its forward, without the scores that a fused kernel computes again."""


def model_flops(structure: Structure, run: Run) -> float:
    """Return the FLOPs of the model in a step of ``run``, of all devices together.

    Matrix multiplications count, a multiply-add as two FLOPs. Recomputation does not count: neither checkpointing's nor
    that of a fused attention kernel. Of causal attention, the scores that are not masked count, as in
    `cost_model.configuration.transformer.TransformerSpec.model_flops`. Of a pipeline stage, the FLOPs are the stage's.
    """
    graph, profiles = structure.regions.graph, structure.profile.ops
    return run.micro_batches * sum(_op_flops(op, profiles[op.name], graph, run.job.training) for op in graph.ops)


def _op_flops(op: Op, profile: OpProfile, graph: OpGraph, training: bool) -> float:
    backward = profile.backward_flops if training else 0.0
    if op.target is not ATTENTION:
        return profile.flops + backward
    backward = min(backward, ATTENTION_BACKWARD * profile.flops)
    queries, keys = (graph.values[name].shape[-2] for name in op.inputs[:2])
    return (profile.flops + backward) * _attended_share(op, profile, queries, keys)


def _attended_share(op: Op, profile: OpProfile, queries: int, keys: int) -> float:
    """Return the fraction of the scores of an attention op that no causal mask hides."""
    tokens = profile.cached_tokens or keys
    return (1.0 + 1.0 / tokens) / 2.0 if is_causal(op) and queries == tokens else 1.0
