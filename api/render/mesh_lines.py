"""The mesh of a printed plan: for each axis a sentence on what it does, then micro-batches and checkpointing."""

from __future__ import annotations

from api.render.axis_roles import axis_sentences
from api.render.text import fold
from planner.plan.sharding_plan import ShardingPlan

_LABEL = 14
"""Columns of an axis' name and size."""


def mesh_lines(plan: ShardingPlan) -> list[str]:
    """Return the lines under the heading "Mesh"."""
    axes = [line for axis in axis_sentences(plan) for line in _axis(axis.axis, axis.size, axis.sentence)]
    return ["Mesh", *axes, *fold(_step(plan), "  ")]


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
