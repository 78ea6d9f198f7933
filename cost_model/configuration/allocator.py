"""Bytes that torch's caching allocator holds beyond the allocated bytes: pools of other streams, holes, split segments.

A block serves only the stream that it was allocated on (c10/cuda/CUDACachingAllocator.cpp), so each stream's own peak
stays reserved, whenever it occurred. fully_shard uses two streams besides the default one (torch's
distributed/fsdp/_fully_shard/_fsdp_collectives.py, 2.13). Parameters are all-gathered on the first and copied to the
default stream. The results of reduce-scatters, of which the gradients are views, are allocated on the second.

Where gradients have no stream of their own, the first step allocates optimizer states between them. Freed gradients
then leave holes.

Known error: split segments are priced as a fixed share of the peak, although they depend on the order of allocations.
They are 2 to 26 % of the peak in the runs that the share was fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cost_model.configuration.parallelism import ParallelSpec
from cost_model.kernels.step_constants import StepConstants


class PhaseBytes(Protocol):
    """Bytes in one phase of a step; see ``memory.MemoryPhase``."""

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
    """Bytes of parameters in the compute dtype on one tensor and pipeline rank, not sharded over the data axis."""

    layer: float
    embedding: float
    head: float

    @property
    def ends(self) -> float:
        """Bytes of the embedding and the head."""
        return self.embedding + self.head


def stream_pool_bytes(parallel: ParallelSpec, phases: Sequence[PhaseBytes], full: FullBytes) -> float:
    """Return the bytes that the pools of other streams add to the allocated peak.

    The pool of the all-gather stream is as large as the two largest all-gathers that follow each other. The pool of the
    reduction stream is as large as the gradients: its blocks stay reserved when the default stream peaks, even if no
    gradient is live then.
    """
    pool = max(_default_stream(parallel, phase) for phase in phases) - max(phase.allocated for phase in phases)
    if _reduces_on_own_stream(parallel):
        pool += max(phase.gradients for phase in phases)
    return max(0.0, pool) + _gather_pool(parallel, full)


def fragmentation_bytes(parallel: ParallelSpec, phases: Sequence[PhaseBytes], constants: StepConstants) -> float:
    """Return the free bytes of the default stream's pool at its peak, in blocks too small for any allocation."""
    peak = max(_default_stream(parallel, phase) for phase in phases)
    gradients = max(phase.gradients for phase in phases)
    with_holes = max(
        _default_stream(parallel, phase) + phase.holes + _gradient_holes(parallel, phase, gradients) for phase in phases
    )
    expandable = parallel.implementation.allocator.expandable_segments
    split = 0.0 if expandable else constants.fragmentation_share * peak
    return with_holes - peak + split


def _gradient_holes(parallel: ParallelSpec, phase: PhaseBytes, gradients: float) -> float:
    """Return the bytes of the blocks that freed gradients leave between the optimizer's states.

    Saved activations are allocated in these blocks; logits do not fit in them.
    """
    if not parallel.implementation.allocator.gradient_holes:
        return 0.0
    return max(0.0, gradients - phase.gradients - phase.activations)


def _gather_pool(parallel: ParallelSpec, full: FullBytes) -> float:
    if not (parallel.implementation.allocator.gather_stream and parallel.fully_sharded):
        return 0.0
    together = parallel.implementation.data_parallel.root_holds_ends
    ends = (full.ends,) if together else (full.embedding, full.head)
    return full.layer + max(full.layer, *ends)


def _default_stream(parallel: ParallelSpec, phase: PhaseBytes) -> float:
    return phase.allocated - (phase.gradients if _reduces_on_own_stream(parallel) else 0.0)


def _reduces_on_own_stream(parallel: ParallelSpec) -> bool:
    return parallel.implementation.allocator.reduce_stream and parallel.fully_sharded
