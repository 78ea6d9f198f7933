"""`launch_of`: a plan as a launch, and what of the plan a launch's degrees do not say."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import get_args

from api.frameworks.expressed import Row
from api.frameworks.launch import Framework, Launch
from cost_model.configuration.parallelism import Checkpointing as CheckpointingName
from cost_model.configuration.parallelism import TrainingDtype
from planner.plan.axis_roles import AxisUse, axis_uses
from planner.plan.job import Checkpointing
from planner.plan.patterns import match_keys
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.techniques import TECHNIQUES

_FIELD_OF_ROLE = {"dp": "replicate", "fsdp": "shard", "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}
_MOST_NAMES = 3
_BLOCK = re.compile(r"(^|\.)(\*|\d+|\{\d+-\d+\})(\.|$)")
"""A part of an FQN pattern that is the number of a block."""

FIELD_NAMES = {
    "replicate": "replicas of the model",
    "shard": "FSDP",
    "zero": "ZeRO stage",
    "tensor": "tensor parallelism",
    "sequence_parallel": "sequence parallelism",
    "pipeline": "pipeline stages",
    "virtual_stages": "model chunks of a pipeline rank",
    "schedule": "pipeline schedule",
    "context": "context parallelism",
    "expert": "expert parallelism",
    "micro_batch": "micro-batch",
    "batch": "global batch",
    "checkpointing": "activation checkpointing",
    "dtype": "dtype",
    "optimizer": "optimizer",
    "reshard_after_forward": "resharding after forward",
}
"""Field of `Launch` -> its name in a table; other fields do not come from a plan."""


def launch_of(plan: ShardingPlan) -> Launch:
    """Return the launch that is nearest to ``plan``.

    Ranks that repeat the work of others count as replicas.
    """
    degrees = dict.fromkeys(_FIELD_OF_ROLE.values(), 1)
    uses = axis_uses(plan)
    for use in uses:
        degrees[_FIELD_OF_ROLE.get(use.role, "replicate")] *= use.size
    has_shards = any(use.role == "fsdp" or (use.role in ("cp", "ep") and use.weights.gathered) for use in uses)
    data = degrees["replicate"] * degrees["shard"] * degrees["expert"]  # experts are spread over ranks of the batch
    if has_shards:
        degrees["shard"] *= degrees["expert"]
    else:
        degrees["replicate"] *= degrees["expert"]
    batch = plan.job.batch or data
    pipeline = plan.pipeline
    return Launch(
        phase=plan.job.phase,
        replicate=degrees["replicate"],
        shard=degrees["shard"],
        tensor=degrees["tensor"],
        context=degrees["context"],
        expert=degrees["expert"],
        pipeline=degrees["pipeline"],
        zero=3 if has_shards else 0,
        sequence_parallel=any(use.role == "tp" and use.splits_sequence for use in uses),
        virtual_stages=1 if pipeline is None else pipeline.chunks,
        schedule="1f1b",
        micro_batch=max(1, batch // (data * plan.micro_batches)),
        batch=batch,
        seq=plan.job.seq,
        checkpointing=_checkpointing(plan),
        dtype=_dtype(plan),
        optimizer=plan.job.optimizer,
        reshard_after_forward=not _keeps_blocks_gathered(plan),
    )


def rows_of(plan: ShardingPlan, framework: Framework, launch: Launch) -> tuple[Row, ...]:
    """Return what of ``plan`` the framework's configuration says, in full, nearly or not at all."""
    uses = axis_uses(plan)
    rows = [*_field_rows(framework, launch), *_axis_rows(uses)]
    rows += [*_group_rows(plan), *_technique_rows(plan), *_other_rows(plan)]
    return tuple(rows)


def _keeps_blocks_gathered(plan: ShardingPlan) -> bool:
    """Return whether the FSDP groups of all blocks stay gathered until backward; of a model without blocks, all groups.

    A group that stays gathered for the whole step does so too.
    """
    groups = [key for key in plan.fully_shard if _BLOCK.search(key)] or list(plan.fully_shard)
    kept = _groups_in(plan, (*plan.keep_gathered, *plan.keep_gathered_for_step))
    return bool(groups) and kept.issuperset(groups)


def _groups_in(plan: ShardingPlan, patterns: Sequence[str]) -> set[str]:
    """Return the FSDP groups that ``patterns`` name; either may stand for several blocks."""
    return {group for groups in match_keys(patterns, plan.fully_shard).values() for group in groups}


def _dtype(plan: ShardingPlan) -> TrainingDtype:
    return next(name for name in get_args(TrainingDtype) if name == plan.job.dtype)


def _checkpointing(plan: ShardingPlan) -> CheckpointingName:
    modes = set(plan.activation_checkpointing.values())
    if not modes and plan.job.ac is not None:
        return next(name for name in get_args(CheckpointingName) if name == Checkpointing.parse(plan.job.ac).mode)
    return "full" if "full" in modes else "selective" if modes else "none"


def _field_rows(framework: Framework, launch: Launch) -> Iterator[Row]:
    """Yield a row for each field that is not what a plain launch has: that the framework can say it, or cannot."""
    plain = Launch()
    for name, title in FIELD_NAMES.items():
        value = getattr(launch, name)
        if value == getattr(plain, name) and name not in ("micro_batch", "batch"):
            continue
        if framework.can_say(launch, name):
            texts = ", ".join(framework.says[name](launch))
            yield Row(field=title, outcome="expressed", detail=texts or f"{value}, which follows from the devices")
        elif name != "checkpointing":  # another mode stands for it, which `export` says
            yield Row(field=title, outcome="lost", detail=f"{value} cannot be said in {framework.title}")


def _axis_rows(uses: Sequence[AxisUse]) -> Iterator[Row]:
    """Yield rows for the weights that an axis treats otherwise than its role says."""
    for use in uses:
        what = f"axis {use.axis}"
        if use.repeats_work and use.size > 1:
            yield Row(field=what, outcome="lost", detail="its ranks repeat work; they become replicas")
        if use.swaps_heads and use.role != "tp":
            yield Row(field=what, outcome="approximated", detail="it splits heads inside attention (Ulysses)")
        others = {"fsdp": use.weights.pieces, "tp": use.weights.gathered, "dp": use.weights.gathered}
        unlike = [*others.get(use.role, ()), *(use.weights.experts if use.role != "ep" else ())]
        if use.role == "tp" and use.splits_batch:
            yield Row(field=what, outcome="approximated", detail="some of its tensors are split by samples")
        if unlike:
            yield Row(field=what, outcome="approximated", detail=f"other layouts than {use.role}'s: {_names(unlike)}")
    shards = [use for use in uses if use.role == "fsdp"]
    if len(shards) > 1:
        names = " and ".join(use.axis for use in shards)
        yield Row(field="FSDP", outcome="approximated", detail=f"{names} become one axis of all their ranks")


def _group_rows(plan: ShardingPlan) -> Iterator[Row]:
    kept, keeps = len(_groups_in(plan, plan.keep_gathered)), _keeps_blocks_gathered(plan)
    if kept and not keeps:
        detail = f"{kept} of {len(plan.fully_shard)} groups stay gathered until backward; now all are freed"
        yield Row(field="FSDP groups", outcome="approximated", detail=detail)
    if plan.keep_gathered_for_step:
        then = "now until backward" if keeps else "now they are freed"
        detail = f"{_names(plan.keep_gathered_for_step)} stay gathered for the whole step; {then}"
        yield Row(field="FSDP groups", outcome="approximated", detail=detail)


def _technique_rows(plan: ShardingPlan) -> Iterator[Row]:
    for gain in plan.techniques:
        if gain.name in TECHNIQUES:
            seconds = "" if gain.gain_s is None else f", {gain.gain_s:.3g} s of a step"
            yield Row(field="technique", outcome="lost", detail=f"{gain.name}{seconds}")


def _other_rows(plan: ShardingPlan) -> Iterator[Row]:
    if plan.pipeline is not None and len({len(stage.modules) for stage in plan.pipeline.stages}) > 1:
        yield Row(field="pipeline stages", outcome="approximated", detail="unequal stages: the framework splits layers")
    sharders = [key for key, layout in plan.plan.items() if isinstance(layout, str)]
    if sharders:
        yield Row(field="Sharders", outcome="lost", detail=_names(sharders))
    if not math.isclose(plan.job.expert_imbalance, 1.0):
        detail = f"expert imbalance {plan.job.expert_imbalance} is an assumption of the price"
        yield Row(field="experts", outcome="expressed", detail=detail)


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
