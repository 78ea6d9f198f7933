"""The role of each mesh axis of a plan (dp, fsdp, tp, cp, ep, pp), derived from the plan's layouts.

The names are those of torchtitan, transformers and accelerate:

``dp``      splits the batch; every rank has whole weights (replicas)
``fsdp``    stores weights in pieces and gathers them for compute; splits the batch
``tp``      computes weights in pieces: heads and hidden dims are split, and between blocks often the sequence
``cp``      splits sequences through attention; weights are whole or gathered for compute
``ep``      splits the experts
``pp``      cuts the model into stages
``repeat``  splits nothing: every rank repeats the work of the others

An axis may do several of these things to different weights. Its role is then that of ``ep`` if it splits experts, and
else what it does to most kinds of weights inside the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout, sharded_dim
from planner.plan.patterns import match_keys
from planner.plan.ports import Port, ports_of
from planner.plan.sharding_plan import ShardingPlan

Role = Literal["dp", "fsdp", "tp", "cp", "ep", "pp", "repeat"]

_BATCH_DIM, _SEQUENCE_DIM, _HIDDEN_DIM = 0, 1, 2
_BLOCK = r"(^|\.)(\*|\d+|\{\d+-\d+\})"
_IN_BLOCK = re.compile(_BLOCK + r"(\.|$)")
_BELOW_BLOCK = re.compile(_BLOCK + r"\.(?!input$)")
_EXPERTS = re.compile(r"(^|\.)experts\.(?![*\d{])")
"""A parameter that stacks the matrices of all experts on dim 0; ``experts.0.weight`` is the matrix of one expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWeights:
    """The keys of a plan's weights, without ".weight", by what one axis does to the weights.

    Attributes:
        gathered: stored sharded, replicated in compute.
        pieces: stored sharded, sharded in compute.
        experts: weights of experts that are sharded by expert in compute.
        whole: stored replicated.
    """

    gathered: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of kinds of weights: equal weights of equal blocks share a key."""
        return len(self.gathered) + len(self.pieces) + len(self.experts) + len(self.whole)

    def main(self) -> AxisWeights:
        """Return the weights in blocks, which hold nearly all of a model; all weights where no key names a block."""
        inside = AxisWeights(
            gathered=tuple(filter(_IN_BLOCK.search, self.gathered)),
            pieces=tuple(filter(_IN_BLOCK.search, self.pieces)),
            experts=tuple(filter(_IN_BLOCK.search, self.experts)),
            whole=tuple(filter(_IN_BLOCK.search, self.whole)),
        )
        return inside if inside.count else self


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """What a plan does on one axis of its mesh.

    Attributes:
        axis: name of the axis in the plan.
        size: number of ranks.
        role: the role.
        weights: all weights of the plan, by what the axis does to them; none for ``pp``.
        splits_batch: whether the axis splits the batch.
        splits_sequence: whether it splits sequences, at least between blocks.
        swaps_heads: whether it splits heads inside attention in place of sequences (Ulysses).
    """

    axis: str
    size: int
    role: Role
    weights: AxisWeights = AxisWeights()
    splits_batch: bool = False
    splits_sequence: bool = False
    swaps_heads: bool = False

    @property
    def repeats_work(self) -> bool:
        """Whether all ranks compute the same: the axis splits no batch, no sequence and no weight in compute."""
        computes_alike = self.role == "repeat" or (self.role == "fsdp" and not self.weights.pieces)
        return computes_alike and not self.splits_batch and not self.splits_sequence


def axis_uses(plan: ShardingPlan) -> tuple[AxisUse, ...]:
    """Return what the plan does on each axis of its mesh, outermost first."""
    uses = layout_axis_uses(plan)
    if plan.pipeline is None:
        return uses
    return (AxisUse(axis=plan.mesh.names[0], size=plan.mesh.shape[0], role="pp"), *uses)


def layout_axis_uses(plan: ShardingPlan) -> tuple[AxisUse, ...]:
    """Return what the plan does on each axis that layouts are on: all axes but a pipeline's."""
    return tuple(_use(plan, index, axis, size) for index, (axis, size) in enumerate(plan.layout_mesh.axes))


def _use(plan: ShardingPlan, index: int, axis: str, size: int) -> AxisUse:
    weights = _weights(plan, index)
    inputs = set(_boundary_dims(plan, index, root=True))
    inner = set(_boundary_dims(plan, index, root=False))
    splits_batch = _BATCH_DIM in inputs or (not inputs and _BATCH_DIM in inner)
    # In decode, every sequence has one new token, and dim 1 of the cache is its heads.
    splits_sequence = _SEQUENCE_DIM in inner | inputs and plan.job.phase != "decode"
    role = _role(weights.main(), splits_batch=splits_batch, splits_sequence=splits_sequence) if size > 1 else "dp"
    return AxisUse(
        axis=axis,
        size=size,
        role=role,
        weights=weights,
        splits_batch=splits_batch,
        splits_sequence=splits_sequence,
        swaps_heads=_swaps_heads(plan, index),
    )


def _role(weights: AxisWeights, *, splits_batch: bool, splits_sequence: bool) -> Role:
    """Return the role of an axis of several ranks that treats the main weights so."""
    if weights.experts:
        return "ep"
    if weights.pieces and len(weights.pieces) >= len(weights.gathered):
        return "tp"
    if splits_sequence and not splits_batch:
        return "cp"
    if weights.gathered:
        return "fsdp"
    return "dp" if splits_batch else "repeat"


def weight_layouts(plan: ShardingPlan) -> Iterator[tuple[str, Layout, Layout | None]]:
    """Yield (FQN pattern, stored layout, compute layout) of each parameter entry of ``plan.plan``; skip Sharders.

    The compute layout is None for a tied weight whose compute layouts the plan states under its other names only.
    """
    tied_uses = [key for key in plan.gradient_plan if key in plan.compute_plan]
    computed_as = {key: key for key in plan.plan if key in plan.compute_plan}
    for pattern, keys in match_keys(plan.compute_plan, plan.plan).items():
        for key in keys:
            computed_as.setdefault(key, pattern)
    for key, stored in plan.plan.items():
        if isinstance(stored, str):
            continue
        if key in computed_as:
            yield key, stored, plan.compute_plan[computed_as[key]]
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


def _ports(plan: ShardingPlan) -> Iterator[tuple[bool, Port]]:
    """Yield each port, and whether it is the root's input."""
    for entries in (plan.input_plan, plan.output_plan):
        for key, spec in entries.items():
            for _, port in ports_of(spec):
                yield entries is plan.input_plan and key in ("", "input"), port
