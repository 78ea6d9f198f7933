"""Async tensor parallelism: the GEMMs that overlap with tensor-parallel communication, in jobs with ``async_tp``.

A collective is cut into as many pieces as there are ranks; one piece is local. An all-gather overlaps with the GEMMs
that read its result. A reduction overlaps with the GEMM whose partial result it sums, except for its last piece. This
is Transformer Engine's userbuffers (``tp_comm_overlap`` in Megatron) and torch's async tensor parallelism. The exposed
seconds are:

    all-gather     max(0, gather - GEMMs)
    reduction      max(reduction / ranks, reduction - GEMM)

`cost_model.configuration.tensor_parallel` has the same rule for configurations. Overlapped communication still occupies
its link and slows the GEMMs (`planner.pricing.overlap`). `RedistributionPricer.overlap_with_gemms` applies the rule.

The rule applies to redistributions that are a single collective on the innermost mesh axis, inside a node. No GEMM then
has both an all-gather and a reduction to overlap with. The seconds of a GEMM are a lower bound: its FLOPs divided over
all devices, at the rate of the fastest tiles. These seconds are proportional to the samples of a micro-batch, so a
lower bound for large micro-batches also holds for small micro-batches. The buffers of the pieces are not counted as
memory. The executor does not run async tensor parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cost_model.kernels.gemm import gemm_rate_flops_per_s
from cost_model.kernels.in_step import in_step
from planner.liveness.multiplicity import Multiplicity
from planner.liveness.structure import EdgeKey, Structure
from planner.pricing.overlap import AdjacentGemms, GemmWork
from planner.pricing.reallgather_variants import is_linear
from planner.pricing.run_spec import Run
from planner.regions.regions import Link, Region, RegionOp

NO_WORK = GemmWork(0.0, 0.0)


class AdjacentGemmFinder:
    """Finds the GEMMs before and after each redistribution of one run.

    The GEMMs of consumers count only if linear layers are the only readers of the tensor. They may read it directly, or
    through modules that pass it on unchanged.
    """

    def __init__(self, structure: Structure, run: Run) -> None:
        rate = gemm_rate_flops_per_s(run.cluster.device, run.job.dtype) * in_step(run.cluster.device).gemm_share
        self._s_per_flop = 1.0 / (rate * run.mesh.size)
        self._structure = structure
        self._links_from: dict[tuple[int, int], list[Link]] = defaultdict(list)
        self._link_to: dict[tuple[int, int], Link] = {}
        self._links_of_edge: dict[EdgeKey, list[Link]] = defaultdict(list)
        class_of = structure.regions.class_of
        for link in structure.regions.links:
            self._links_from[link.producer, link.producer_slot].append(link)
            self._link_to[link.consumer, link.consumer_slot] = link
            key = EdgeKey(
                producer=class_of[link.producer],
                producer_slot=link.producer_slot,
                consumer=class_of[link.consumer],
                consumer_slot=link.consumer_slot,
            )
            self._links_of_edge[key].append(link)

    def redistribution(self, multiplicity: Multiplicity) -> AdjacentGemms:
        """Return the GEMMs around the redistributions of ``multiplicity``, in seconds: the smallest over all tensors.

        All GEMMs that read a tensor count, even if they need it in different layouts: while keys and values wait for an
        all-gather, the GEMM of the queries can run.
        """
        consumers: dict[tuple[int, int], list[GemmWork]] = defaultdict(list)
        for edge in multiplicity.edges:
            for link in self._links_of_edge[self._structure.edges[edge]]:
                flops = self._consumers_flops(link.consumer, link.consumer_slot)
                consumers[link.producer, link.producer_slot].append(flops)
        reading = [NO_WORK if NO_WORK in flops else _sum(flops) for flops in consumers.values()]
        producing = [self._producer_flops(producer, slot) for producer, slot in consumers]
        return AdjacentGemms(self._least_s(reading), self._least_s(producing))

    def recomputed(self, multiplicity: Multiplicity) -> AdjacentGemms | None:
        """Return the GEMMs around the redistributions that a checkpointed block recomputes, in seconds.

        None if the block does not recompute GEMMs.
        """
        key, structure = self._structure.edges[multiplicity.edges[0]], self._structure
        if structure.mode(structure.representative(key.consumer)) != "full":
            return None
        gemms = self.redistribution(multiplicity)
        producer_is_recomputed = structure.mode(structure.representative(key.producer)) == "full"
        return gemms if producer_is_recomputed else gemms._replace(producer=NO_WORK)

    def _least_s(self, flops: list[GemmWork]) -> GemmWork:
        least = GemmWork(min(work.forward for work in flops), min(work.backward for work in flops))
        return least.times(self._s_per_flop)

    def _consumers_flops(self, region_index: int, slot: int) -> GemmWork:
        """Return the FLOPs of the GEMMs that read a slot; `NO_WORK` if any other op reads it as well."""
        region = self._structure.regions.regions[region_index]
        works = [self._linear_flops(region, op) for op in region.ops if slot in op.inputs]
        works += [
            self._consumers_flops(link.consumer, link.consumer_slot) for link in self._links_from[region_index, slot]
        ]
        return _sum(works) if all(work.forward for work in works) else NO_WORK

    def _producer_flops(self, region_index: int, slot: int) -> GemmWork:
        """Return the FLOPs of the GEMM that computes the tensor of a slot; `NO_WORK` if another op computes it."""
        region = self._structure.regions.regions[region_index]
        if region.slots[slot].origin == "entry":
            link = self._link_to.get((region_index, slot))
            return NO_WORK if link is None else self._producer_flops(link.producer, link.producer_slot)
        producers = [op for op in region.ops if slot in op.outputs]
        return self._linear_flops(region, producers[0]) if producers else NO_WORK

    def _linear_flops(self, region: Region, region_op: RegionOp) -> GemmWork:
        """Return the FLOPs of an op that is a linear layer; `NO_WORK` for any other op."""
        if not is_linear(region, region_op, self._structure.profile):
            return NO_WORK
        profile = self._structure.profile.ops[region_op.op.name]
        return GemmWork(profile.flops, profile.backward_flops)


def _sum(works: Sequence[GemmWork]) -> GemmWork:
    return GemmWork(sum(work.forward for work in works), sum(work.backward for work in works))
