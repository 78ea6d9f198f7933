"""The mesh of a printed plan: for each axis a sentence on what it does, then micro-batches and checkpointing."""

from __future__ import annotations

from api.render.axis_roles import AxisFacts, axis_facts
from api.render.text import fold
from planner.plan.sharding_plan import ShardingPlan

_LABEL = 14
"""Columns of an axis' name and size."""


def mesh_lines(plan: ShardingPlan) -> list[str]:
    """Return the lines under the heading "Mesh"."""
    lines = ["Mesh"]
    if plan.pipeline is not None:
        pipeline = plan.pipeline
        chunks = f", {pipeline.chunks} chunks each" if pipeline.chunks > 1 else ""
        sentence = f"{len(pipeline.stages)} stages, {pipeline.schedule}{chunks} (pipeline parallelism)"
        lines += _axis(plan.mesh.names[0], plan.mesh.shape[0], sentence)
    for index, (axis, size) in enumerate(plan.layout_mesh.axes):
        facts = axis_facts(plan, index)
        lines += _axis(axis, size, "one rank" if size == 1 else axis_sentence(facts, training=plan.job.training))
    return lines + fold(_step(plan), "  ")


def axis_sentence(facts: AxisFacts, *, training: bool) -> str:
    """Return what an axis does, as text with the name of the technique, such as "splits the batch (DP)"."""
    if facts.repeats_work:
        return "repeats the same work on every rank"
    main = facts.weights.main()
    stored = "weights, gradients, optimizer states" if training else "weights"
    clauses = []
    if main.gathered:
        data = "the batch" if facts.splits_batch else "sequences" if facts.splits_sequence else ""
        name = "FSDP" if data else "sharded storage"
        joint = f"{stored} and {data}" if data else stored.replace(", optimizer", " and optimizer")
        clauses.append(f"shards {joint} ({name})")
    elif facts.splits_batch and main.whole and not main.pieces:
        clauses.append("splits the batch over replicas of the model (DP)")
    if main.pieces:
        clauses.append("splits matrix multiplications (TP)")
    if main.experts:
        clauses.append("spreads the experts (EP)")
    if facts.swaps_heads:
        clauses.append("splits sequences, and heads inside attention (Ulysses)")
    elif facts.splits_sequence and main.pieces:
        clauses.append("sequences in between (SP)")
    elif facts.splits_sequence and not (main.gathered and not facts.splits_batch):
        clauses.append("splits sequences (CP)")
    if facts.splits_batch and main.pieces and not main.gathered:
        clauses.append("splits the batch elsewhere")
    return ", ".join(clauses) or ("replicates the weights" if main.whole else "splits activations")


def _axis(axis: str, size: int, sentence: str) -> list[str]:
    head = f"  {axis} = {size:,}"
    if len(head) <= _LABEL:
        return fold(sentence, f"{head:<{_LABEL}}  ")
    return [*fold(head), *fold(sentence, " " * (_LABEL + 2))]


def _step(plan: ShardingPlan) -> str:
    """Return micro-batches and checkpointing as text."""
    job, parts = plan.job, []
    if job.training and job.phase == "training":
        each = "" if job.batch is None else f" of {job.batch // plan.micro_batches:,} samples"
        one = f"1 micro-batch{each}"
        parts.append(one if plan.micro_batches == 1 else f"{plan.micro_batches:,} micro-batches{each}")
        modes = [f"{mode} activation checkpointing of {key}" for key, mode in plan.activation_checkpointing.items()]
        parts += modes or ["no activation checkpointing"]
    if plan.zigzag is not None:
        parts.append("zigzag token order")
    return ", ".join(parts) or "the batch runs at once"
