"""The role of each mesh axis in a plan (FSDP, TP, SP, DP, ...), derived from the plan's layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout, sharded_dim
from planner.plan.patterns import match_keys
from planner.plan.ports import Port, ports_of
from planner.plan.sharding_plan import ShardingPlan

_BATCH_DIM, _SEQUENCE_DIM, _HIDDEN_DIM = 0, 1, 2
_ROOT_INPUT = ("", "input")
_IN_BLOCK = re.compile(r"(^|\.)(\*|\d+|\{\d+-\d+\})(\.|$)")
_BELOW_BLOCK = re.compile(r"(^|\.)(\*|\d+|\{\d+-\d+\})\.(?!input$)")
_EXPERTS = re.compile(r"(^|\.)experts\.")
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """The role of one axis: ``role`` is its short name ("FSDP", "TP+SP"), ``details`` the reasons, one clause each."""

    axis: str
    size: int
    role: str
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWeights:
    """The keys of a plan's weights, without ".weight", by what one axis does to the weights.

    Attributes:
        gathered: stored sharded, replicated in compute.
        pieces: stored sharded, sharded in compute.
        experts: weights of experts that are sharded by expert in compute.
        whole: stored replicated.
    """

    gathered: tuple[str, ...]
    pieces: tuple[str, ...]
    experts: tuple[str, ...]
    whole: tuple[str, ...]

    def main(self) -> AxisWeights:
        """Return the weights in blocks, which hold nearly all of a model; all weights where no key names a block."""
        inside = AxisWeights(
            gathered=tuple(filter(_IN_BLOCK.search, self.gathered)),
            pieces=tuple(filter(_IN_BLOCK.search, self.pieces)),
            experts=tuple(filter(_IN_BLOCK.search, self.experts)),
            whole=tuple(filter(_IN_BLOCK.search, self.whole)),
        )
        return inside if inside.gathered or inside.pieces or inside.experts or inside.whole else self


def axis_roles(plan: ShardingPlan) -> tuple[AxisRole, ...]:
    """Return the role of each axis of the plan's mesh, outermost first."""
    roles = [_role(plan, index, axis, size) for index, (axis, size) in enumerate(plan.layout_mesh.axes)]
    if plan.pipeline is not None:
        stages = len(plan.pipeline.stages)
        chunks = f", {plan.pipeline.chunks} chunks each" if plan.pipeline.chunks > 1 else ""
        detail = f"{stages} stages, {plan.pipeline.schedule}{chunks}"
        roles.insert(0, AxisRole(axis=plan.mesh.names[0], size=stages, role="PP", details=(detail,)))
    return tuple(roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFacts:
    """What one axis splits, in a plan.

    Attributes:
        splits_batch, splits_sequence: whether inputs and activations are split by samples, by tokens.
        swaps_heads: whether attention has heads in place of tokens split (Ulysses).
        weights: the plan's weights by what the axis does to them.
        repeats_work: whether all ranks of the axis compute the same: neither a tensor at a boundary of the model's
            blocks nor a weight in compute is split on it.
    """

    splits_batch: bool
    splits_sequence: bool
    swaps_heads: bool
    weights: AxisWeights
    repeats_work: bool


def axis_facts(plan: ShardingPlan, index: int) -> AxisFacts:
    """Return what axis ``index`` of the layouts' mesh splits."""
    weights = _weights(plan, index)
    inputs = set(_boundary_dims(plan, index, root=True))
    inner = set(_boundary_dims(plan, index, root=False))
    main, has_ports = weights.main(), bool(plan.input_plan or plan.output_plan)
    is_split = inputs or main.pieces or main.experts or set(_block_dims(plan, index))
    return AxisFacts(
        splits_batch=_BATCH_DIM in inputs or (not inputs and _BATCH_DIM in inner),
        splits_sequence=_SEQUENCE_DIM in inner | inputs,
        swaps_heads=_swaps_heads(plan, index),
        weights=weights,
        repeats_work=has_ports and not is_split,
    )


def useful_devices(plan: ShardingPlan) -> int:
    """Return the number of devices that would do a step's work as fast: those of axes that split work."""
    axes = enumerate(plan.layout_mesh.shape)
    useful = math.prod(size for index, size in axes if size == 1 or not axis_facts(plan, index).repeats_work)
    return useful * (1 if plan.pipeline is None else len(plan.pipeline.stages))


def _role(plan: ShardingPlan, index: int, axis: str, size: int) -> AxisRole:
    facts = axis_facts(plan, index)
    main = facts.weights.main()
    words = []
    if main.gathered:
        words.append("FSDP" if facts.splits_batch or facts.splits_sequence else "sharded storage")
    elif facts.splits_batch and not main.pieces and main.whole:
        words.append("DP")
    if main.pieces:
        words.append("TP")
    if main.experts:
        words.append("EP")
    if facts.splits_sequence or (main.pieces and facts.splits_batch and not main.gathered):
        words.append("SP" if main.pieces or facts.swaps_heads else "CP")

    details = []
    if facts.splits_batch:
        details.append("splits the batch")
    if facts.splits_sequence:
        details.append("splits sequences" + (", but heads inside attention (Ulysses)" if facts.swaps_heads else ""))
    details += _weight_details(facts.weights)
    if facts.weights.gathered:
        details += _not_resharded(plan)
    return AxisRole(axis=axis, size=size, role="+".join(words) or "replicated", details=tuple(details))


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
    total = sum(map(len, kinds.values()))
    for what, names in kinds.items():
        if len(names) == total and total > 1:
            yield f"all weights {what}"
        elif 0 < len(names) <= _NAMED:
            yield f"{', '.join(names)} {what}"
        elif names:
            yield f"{len(names)} of {total} kinds of weights {what}"


def weight_layouts(plan: ShardingPlan) -> Iterator[tuple[str, Layout, Layout | None]]:
    """Yield (FQN pattern, stored layout, compute layout) of each parameter entry of ``plan.plan``; skip Sharders.

    The compute layout is None for a tied weight whose compute layouts the plan states under its other names only.
    """
    tied_uses = [key for key in plan.gradient_plan if key in plan.compute_plan]
    for key, stored in plan.plan.items():
        if isinstance(stored, str):
            continue
        wider = [pattern for pattern, names in match_keys(plan.compute_plan, [key]).items() if names or pattern == key]
        if wider:
            yield key, stored, plan.compute_plan[wider[0]]
        else:
            # A gradient that every micro-batch reduces to the stored layout is no sign of a tied weight.
            waits = plan.gradient_plan.get(key, stored) != stored
            yield key, stored, None if waits and tied_uses else stored


def _weights(plan: ShardingPlan, index: int) -> AxisWeights:
    """Return the plan's weights by their stored and compute placements on axis ``index``."""
    gathered: list[str] = []
    pieces: list[str] = []
    experts: list[str] = []
    whole: list[str] = []
    for key, stored, used in weight_layouts(plan):
        if used is None:
            continue
        if sharded_dim(stored[index]) is None:
            kind = whole
        elif sharded_dim(used[index]) is None:
            kind = gathered
        elif _EXPERTS.search(key) and used[index] == Shard(0):
            kind = experts
        else:
            kind = pieces
        kind.append(key.removesuffix(".weight"))
    return AxisWeights(gathered=tuple(gathered), pieces=tuple(pieces), experts=tuple(experts), whole=tuple(whole))


def _swaps_heads(plan: ShardingPlan, index: int) -> bool:
    """Return whether axis ``index`` redistributes a tensor in a block from the sequence dim to the heads, or back.

    Inputs of whole blocks do not count: the first block may read embeddings from a table that is sharded by columns.
    """
    swap = {_SEQUENCE_DIM, _HIDDEN_DIM}
    return any(
        port.source is not None and {sharded_dim(port.source[index]), sharded_dim(port.layout[index])} == swap
        for entries in (plan.input_plan, plan.output_plan)
        for key, spec in entries.items()
        for _, port in ports_of(spec)
        if _BELOW_BLOCK.search(key)
    )


def _boundary_dims(plan: ShardingPlan, index: int, *, root: bool) -> Iterator[int]:
    """Yield the dims on which axis ``index`` shards boundary tensors: the root's inputs (``root``), or all others."""
    for is_root, port in _ports(plan):
        if is_root == root:
            for layout in (port.layout, port.source):
                dim = None if layout is None else sharded_dim(layout[index])
                if dim is not None:
                    yield dim


def _block_dims(plan: ShardingPlan, index: int) -> Iterator[int]:
    """Yield the dims on which axis ``index`` shards tensors at boundaries in blocks; at all where there is no block."""
    specs = [(key, spec) for entries in (plan.input_plan, plan.output_plan) for key, spec in entries.items()]
    inside = [spec for key, spec in specs if _IN_BLOCK.search(key)]
    for spec in inside or [spec for _, spec in specs]:
        for _, port in ports_of(spec):
            for layout in (port.layout, port.source):
                dim = None if layout is None else sharded_dim(layout[index])
                if dim is not None:
                    yield dim


def _ports(plan: ShardingPlan) -> Iterator[tuple[bool, Port]]:
    """Yield each port, and whether it is the root's input."""
    for entries in (plan.input_plan, plan.output_plan):
        for key, spec in entries.items():
            for _, port in ports_of(spec):
                yield entries is plan.input_plan and key in _ROOT_INPUT, port
