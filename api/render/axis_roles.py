"""What each mesh axis of a plan does, as text: a sentence, or short names ("FSDP", "TP+SP") with the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.plan.axis_roles import AxisUse, AxisWeights, axis_uses
from planner.plan.sharding_plan import ShardingPlan

_NAMED = 3

REPEATS = "repeats the work of the other ranks: no batch, sequence or weight is split on it"
"""The sentence of an axis whose ranks all do the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """The role of one axis: ``role`` is its short name ("FSDP", "TP+SP"), ``details`` the reasons, one clause each."""

    axis: str
    size: int
    role: str
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSentence:
    """What one axis does, as a sentence without a capital letter and a full stop."""

    axis: str
    size: int
    sentence: str


# --- sentences ----------------------------------------------------------------------------------------------------


def axis_sentences(plan: ShardingPlan) -> tuple[AxisSentence, ...]:
    """Return what each axis of the plan's mesh does, in a sentence each, outermost first."""
    return tuple(AxisSentence(axis=use.axis, size=use.size, sentence=_sentence(plan, use)) for use in axis_uses(plan))


def useful_devices(plan: ShardingPlan) -> int:
    """Return the number of devices that would do a step's work as fast: those of axes that split work."""
    if not plan.input_plan and not plan.output_plan:
        return plan.mesh.size  # a hand-written plan may leave open what is split between modules
    return math.prod(1 if use.repeats_work else use.size for use in axis_uses(plan))


def _sentence(plan: ShardingPlan, use: AxisUse) -> str:
    weights = use.weights.main()
    if use.role == "pp":
        return f"cuts the model into {_stages(plan)} (PP)"
    if use.size == 1:
        return "has one rank: nothing is split on it"
    if use.role == "ep":
        return _experts_sentence(plan, use, weights)
    if use.role == "tp":
        return _tensor_sentence(use, weights)
    if use.role == "cp":
        return _context_sentence(plan, use, weights)
    if use.role == "fsdp":
        return _sharded_sentence(plan, use, weights)
    if use.role == "dp":
        return "splits the batch; every rank has whole weights (DP)"
    return REPEATS if plan.input_plan or plan.output_plan else "splits no weight; the plan has no layouts of tensors"


def _sharded_sentence(plan: ShardingPlan, use: AxisUse, weights: AxisWeights) -> str:
    if not use.splits_batch:
        return "stores weights in pieces, and repeats the work of the other ranks: no batch or sequence is split on it"
    hybrid = f"; computes {_part(weights.pieces, weights)} in pieces (TP)" if weights.pieces else ""
    whole = f"; {_part(weights.whole, weights)} are whole" if len(weights.whole) > len(weights.gathered) else ""
    return f"shards {_states(plan)} and the batch (FSDP){hybrid}{whole}"


def _states(plan: ShardingPlan, weights: str = "weights") -> str:
    """Return what is stored in pieces with ``weights``, listed with commas."""
    return f"{weights}, gradients, optimizer states" if plan.job.training else weights


def _tensor_sentence(use: AxisUse, weights: AxisWeights) -> str:
    most = not weights.gathered and len(weights.pieces) >= len(weights.whole)
    which = "every block's weights" if most else _part(weights.pieces, weights)
    gathered = f"; gathers {_part(weights.gathered, weights)} for compute (FSDP)" if weights.gathered else ""
    between = "the sequence" if use.splits_sequence else "the batch" if use.splits_batch else ""
    if not between:
        return f"splits heads and hidden dims of {which} (TP){gathered}"
    return f"splits heads and hidden dims of {which}, and {between} between blocks (TP + SP){gathered}"


def _context_sentence(plan: ShardingPlan, use: AxisUse, weights: AxisWeights) -> str:
    how = "splits sequences, but heads inside attention" if use.swaps_heads else "splits sequences through attention"
    name = "Ulysses" if use.swaps_heads else "CP"
    if weights.gathered:
        return f"{how}, and shards {_joined(_states(plan))} ({name} + FSDP)"
    return f"{how}; every rank has whole weights ({name})"


def _joined(words: str) -> str:
    """Return words that are listed with commas, with "and" before the last."""
    return " and ".join(words.rsplit(", ", 1))


def _experts_sentence(plan: ShardingPlan, use: AxisUse, weights: AxisWeights) -> str:
    if weights.pieces:
        return "splits the experts, and heads and hidden dims of other weights (EP + TP)"
    if weights.gathered and (use.splits_batch or use.splits_sequence):
        what = "the batch" if use.splits_batch else "sequences"
        return f"splits the experts; shards {_states(plan, 'other weights')} and {what} (EP + FSDP)"
    if use.splits_batch:
        return "splits the experts and the batch; every rank has the other weights whole (EP + DP)"
    if use.splits_sequence:
        return "splits the experts and sequences; every rank has the other weights whole (EP + CP)"
    return "splits the experts (EP); repeats the rest of the work of the other ranks"


def _part(names: tuple[str, ...], weights: AxisWeights) -> str:
    return f"{len(names)} of {weights.count} kinds of weights"


def _stages(plan: ShardingPlan) -> str:
    assert plan.pipeline is not None
    chunks = f", {plan.pipeline.chunks} chunks each" if plan.pipeline.chunks > 1 else ""
    return f"{len(plan.pipeline.stages)} stages, {plan.pipeline.schedule}{chunks}"


# --- short names with reasons -------------------------------------------------------------------------------------


def axis_roles(plan: ShardingPlan) -> tuple[AxisRole, ...]:
    """Return the role of each axis of the plan's mesh, outermost first."""
    return tuple(
        AxisRole(axis=use.axis, size=use.size, role=_short_name(use), details=tuple(_details(plan, use)))
        for use in axis_uses(plan)
    )


def _short_name(use: AxisUse) -> str:
    main = use.weights.main()
    words = ["PP"] if use.role == "pp" else []
    if main.gathered:
        words.append("FSDP" if use.splits_batch or use.splits_sequence else "sharded storage")
    elif use.splits_batch and not main.pieces and main.whole:
        words.append("DP")
    if main.pieces:
        words.append("TP")
    if main.experts:
        words.append("EP")
    if use.splits_sequence or (main.pieces and use.splits_batch and not main.gathered):
        words.append("SP" if main.pieces or use.swaps_heads else "CP")
    return "+".join(words) or "replicated"


def _details(plan: ShardingPlan, use: AxisUse) -> Iterator[str]:
    if use.role == "pp":
        yield _stages(plan)
    if use.splits_batch:
        yield "splits the batch"
    if use.splits_sequence:
        yield "splits sequences" + (", but heads inside attention (Ulysses)" if use.swaps_heads else "")
    yield from _weight_details(use.weights)
    if use.weights.gathered:
        yield from _not_resharded(plan)


def _not_resharded(plan: ShardingPlan) -> Iterator[str]:
    """Yield a clause for the modules not resharded after forward, and one for those unsharded for the whole step."""
    if plan.keep_gathered:
        yield f"{', '.join(plan.keep_gathered)} not resharded between forward and backward"
    if plan.keep_gathered_for_step:
        yield f"{', '.join(plan.keep_gathered_for_step)} not resharded within the step"


def _weight_details(weights: AxisWeights) -> Iterator[str]:
    """Yield one clause for each kind of weights; up to three weights are named, more are counted."""
    kinds = {
        "sharded, all-gathered for use": weights.gathered,
        "sharded in compute": weights.pieces,
        "used by some ranks alone": weights.experts,
        "replicated": weights.whole,
    }
    total = weights.count
    for what, names in kinds.items():
        if len(names) == total and total > 1:
            yield f"all weights {what}"
        elif 0 < len(names) <= _NAMED:
            yield f"{', '.join(names)} {what}"
        elif names:
            yield f"{len(names)} of {total} kinds of weights {what}"
