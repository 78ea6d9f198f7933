"""Tensor parallelism's communication in pieces, beside the matrix products next to it: assumed where a job says so.

Cut into as many pieces as there are ranks, one of them local, an all-gather runs beside the products that read what it
brings, and a reduction beside the product whose partial result it sums, all but its last piece (Transformer Engine's
userbuffers, which Megatron calls ``tp_comm_overlap``; torch's async tensor parallelism). Exposed is

    gather     max(0, gather - products)                reduction     max(reduction / ranks, reduction - product)

as `tensor_parallel` has it for configurations. What is hidden still takes its link, and processors from the
products (`planner.pricing.overlap`). Nothing here runs so. The buffers that the pieces move in are not counted.

It is assumed of redistributions that are one collective, on the innermost axis of the mesh, inside a node: there a
product never has both its gather and its reduction to hide. The seconds of a product are what one device takes at
least: its FLOPs over all devices, at the rate of the best tiles. That is below what any strategy takes, and in
proportion to a micro-batch's samples, so that what bounds large micro-batches bounds small ones as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cost_model.kernels.gemm import gemm_rate_flops_per_s
from cost_model.kernels.in_step import in_step
from planner.liveness.multiplicity import Multiplicity
from planner.liveness.structure import EdgeKey, Structure
from planner.pricing.overlap import Beside, Products
from planner.pricing.regather_variants import is_linear
from planner.pricing.run_spec import Run
from planner.regions.regions import Link, Region, RegionOp

NONE = Products(0.0, 0.0)


class ProductsBeside:
    """Finds the products beside each redistribution of one run.

    A tensor is read by linear layers alone, directly or where a module around them hands it on to them, or it is as if
    by none.
    """

    def __init__(self, structure: Structure, run: Run) -> None:
        rate = gemm_rate_flops_per_s(run.cluster.device, run.job.dtype) * in_step(run.cluster.device).gemm_share
        self._s_per_flop = 1.0 / (rate * run.mesh.size)
        self._structure = structure
        self._leaving: dict[tuple[int, int], list[Link]] = defaultdict(list)
        self._arriving: dict[tuple[int, int], Link] = {}
        self._of_edge: dict[EdgeKey, list[Link]] = defaultdict(list)
        class_of = structure.regions.class_of
        for link in structure.regions.links:
            self._leaving[link.producer, link.producer_slot].append(link)
            self._arriving[link.consumer, link.consumer_slot] = link
            key = EdgeKey(
                producer=class_of[link.producer],
                producer_slot=link.producer_slot,
                consumer=class_of[link.consumer],
                consumer_slot=link.consumer_slot,
            )
            self._of_edge[key].append(link)

    def of(self, multiplicity: Multiplicity) -> Beside:
        """Return the products beside a multiplicity's redistributions: where there are several tensors, the least.

        All that read a tensor are beside its gather, in whichever layout each wants it: that of queries needs no gather
        to be done when keys and values wait for one.
        """
        readers: dict[tuple[int, int], list[Products]] = defaultdict(list)
        for edge in multiplicity.edges:
            for link in self._of_edge[self._structure.edges[edge]]:
                found = self._reading(link.consumer, link.consumer_slot)
                readers[link.producer, link.producer_slot].append(found)
        reading = [NONE if NONE in found else _sum(found) for found in readers.values()]
        making = [self._making(producer, slot) for producer, slot in readers]
        return Beside(self._least_s(reading), self._least_s(making))

    def again(self, multiplicity: Multiplicity) -> Beside | None:
        """Return the products beside what a checkpointed block repeats; None where it does not repeat products."""
        key, structure = self._structure.edges[multiplicity.edges[0]], self._structure
        if structure.mode(structure.representative(key.consumer)) != "full":
            return None
        found = self.of(multiplicity)
        made_again = structure.mode(structure.representative(key.producer)) == "full"
        return found if made_again else found._replace(making=NONE)

    def _least_s(self, products: list[Products]) -> Products:
        least = Products(min(p.forward for p in products), min(p.backward for p in products))
        return least.times(self._s_per_flop)

    def _reading(self, region_index: int, slot: int) -> Products:
        """Return the FLOPs of the products that read a slot; none where anything else reads it as well."""
        region = self._structure.regions.regions[region_index]
        found = [self._product(region, op) for op in region.ops if slot in op.inputs]
        found += [self._reading(link.consumer, link.consumer_slot) for link in self._leaving[region_index, slot]]
        if not all(products.forward for products in found):
            return NONE
        return _sum(found)

    def _making(self, region_index: int, slot: int) -> Products:
        """Return the FLOPs of the product whose result a slot shows."""
        region = self._structure.regions.regions[region_index]
        if region.slots[slot].origin == "entry":
            link = self._arriving.get((region_index, slot))
            return NONE if link is None else self._making(link.producer, link.producer_slot)
        made = [op for op in region.ops if slot in op.outputs]
        return self._product(region, made[0]) if made else NONE

    def _product(self, region: Region, region_op: RegionOp) -> Products:
        """Return the FLOPs of a linear layer: a product of one activation and of parameters."""
        if not is_linear(region, region_op, self._structure.profile):
            return NONE
        profile = self._structure.profile.ops[region_op.op.name]
        return Products(profile.flops, profile.backward_flops)


def _sum(products: Sequence[Products]) -> Products:
    return Products(sum(p.forward for p in products), sum(p.backward for p in products))
