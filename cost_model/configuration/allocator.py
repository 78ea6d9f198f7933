"""Bytes that torch's caching allocator holds beyond what is allocated: pools of other streams, holes, split segments.

A block serves only the stream that it was allocated on (c10/cuda/CUDACachingAllocator.cpp), so that each stream's own
peak is held for good, whenever it was. fully_shard has two beside the default one (torch's
distributed/fsdp/_fully_shard/_fsdp_collectives.py, 2.13): parameters are gathered on one and copied out into the
default stream's, and the results of reduce-scatters, of which the gradients are views, are allocated on the other.

Where gradients have no stream of their own, optimizer states are allocated between them in the first step.

Known error: segments that are split for good are taken as one share of the peak, while they depend on the order of
sizes: 2 to 26 % in the runs that the share was fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cost_model.configuration.parallelism import ParallelSpec
from cost_model.kernels.step_constants import StepConstants


class MomentBytes(Protocol):
    """Bytes at one moment of a step, as ``step_memory.Moment`` has them."""

    @property
    def allocated(self) -> float: ...
    @property
    def gradients(self) -> float: ...
    @property
    def activations(self) -> float: ...
    @property
    def holes(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class FullBytes:
    """Bytes of parameters in the compute dtype on one tensor and pipeline rank, not split over the data axis."""

    layer: float
    embedding: float
    head: float

    @property
    def ends(self) -> float:
        """Embedding and head together."""
        return self.embedding + self.head


def stream_pools(parallel: ParallelSpec, timeline: Sequence[MomentBytes], full: FullBytes) -> float:
    """Return the bytes that the pools of other streams add to the allocated peak.

    Of gathers the largest two that follow each other; of reductions the gradients, which are there still when the
    default stream has its own peak and no gradient is alive.
    """
    kept = max(_default_stream(parallel, moment) for moment in timeline) - max(moment.allocated for moment in timeline)
    if _reduces_apart(parallel):
        kept += max(moment.gradients for moment in timeline)
    return max(0.0, kept) + _gather_pool(parallel, full)


def fragments(parallel: ParallelSpec, timeline: Sequence[MomentBytes], constants: StepConstants) -> float:
    """Return the bytes of the default stream's pool that are free and that nothing at its peak fits in."""
    peak = max(_default_stream(parallel, moment) for moment in timeline)
    gradients = max(moment.gradients for moment in timeline)
    with_holes = max(
        _default_stream(parallel, moment) + moment.holes + _gradient_holes(parallel, moment, gradients)
        for moment in timeline
    )
    split = 0.0 if parallel.implementation.expandable_segments else constants.fragmentation_share * peak
    return with_holes - peak + split


def _gradient_holes(parallel: ParallelSpec, moment: MomentBytes, gradients: float) -> float:
    """Return the bytes of blocks that gradients left between the optimizer's states and that nothing fills.

    Blocks of kept activations fit in them, the logits' do not.
    """
    if not parallel.implementation.gradient_holes:
        return 0.0
    return max(0.0, gradients - moment.gradients - moment.activations)


def _gather_pool(parallel: ParallelSpec, full: FullBytes) -> float:
    if not parallel.implementation.gather_stream or not _sharded(parallel):
        return 0.0
    ends = (full.ends,) if parallel.implementation.root_holds_ends else (full.embedding, full.head)
    return full.layer + max(full.layer, *ends)


def _default_stream(parallel: ParallelSpec, moment: MomentBytes) -> float:
    return moment.allocated - (moment.gradients if _reduces_apart(parallel) else 0.0)


def _reduces_apart(parallel: ParallelSpec) -> bool:
    return parallel.implementation.reduce_stream and _sharded(parallel)


def _sharded(parallel: ParallelSpec) -> bool:
    return parallel.zero == 3 and parallel.shard * parallel.context > 1
