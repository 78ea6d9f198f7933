"""Lower bounds on the memory of every plan of a run, in bytes summed over all devices, whatever the layouts are.

The bounds follow from the `Structure` alone. They need neither a mesh nor an integer program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from planner.ilp.quantities import Quantity
from planner.liveness.multiplicity import Multiplicity
from planner.liveness.parameter_classes import ParameterClass
from planner.liveness.structure import Structure
from planner.plan.job import BYTES_PER_ELEMENT, Job
from planner.pricing.optimizer_update import least_state_nbytes
from planner.profile.op_profile import GraphProfile
from planner.regions.regions import Region, RegionGraph, RegionOp, block_of, find_op_inputs
from planner.strategies import context_parallel
from planner.strategies.context_parallel_work import ContextParallelWork


def least_alive_bytes(structure: Structure) -> float:
    """Return a lower bound on the bytes of activations at the peak of the backward, summed over all devices.

    Each tensor of a region counts once, as if no two devices held the same shard. A tensor that one region computes and
    another region saves for backward also counts once, whether it is saved before or after its redistribution.
    """
    profile, most = structure.profile, np.zeros(len(structure.timeline.candidates))
    for index, alive in enumerate(structure.timeline.classes):
        region = structure.representative(index)
        slots = [slot.value for slot in region.slots]
        least = np.array([min(value.nbytes, profile.storage_nbytes.get(value.name, value.nbytes)) for value in slots])
        extras = [_least_extras(region, region_op, profile) for region_op in region.ops]
        most += least @ (alive.saved + alive.recomputed + alive.gradients)
        most += np.array([saved for saved, _ in extras]) @ (alive.saved_extra + alive.recomputed_extra)
        most += np.array([cached for _, cached in extras]) @ alive.cached_extra
    at = {
        candidate.quantity(role): index
        for index, candidate in enumerate(structure.timeline.candidates)
        for role in ("activations", "recomputed_block")
    }
    for _, nbytes, counts, _ in _saved_of_other_regions(structure):
        for name, count in counts.items():
            most[at[name]] += count * nbytes
    return float(most.max(initial=0.0))


def least_saved_bytes(structure: Structure, blocks: Collection[str] | None = None) -> float:
    """Return a lower bound on the bytes that the forward of a micro-batch saves for backward, summed over all devices.

    Tensors count as in `least_alive_bytes`.

    Args:
        structure: the structure of a run.
        blocks: FQNs of blocks: only tensors that these compute count; None: all tensors count.
    """
    profile, total = structure.profile, 0.0

    def counts(region: Region) -> bool:
        return blocks is None or block_of(region.fqn) in blocks

    for index, alive in enumerate(structure.timeline.classes):
        region = structure.representative(index)
        if not counts(region):
            continue
        for slot, count in zip(region.slots, alive.saved_after_forward, strict=True):
            value = slot.value
            total += count * min(value.nbytes, profile.storage_nbytes.get(value.name, value.nbytes))
        for region_op, extra, cached in zip(
            region.ops, alive.saved_extra_after_forward, alive.cached_extra_after_forward, strict=True
        ):
            least_saved, least_cached = _least_extras(region, region_op, profile)
            total += extra * least_saved + cached * least_cached
    total += sum(
        saved * nbytes for producer, nbytes, _, saved in _saved_of_other_regions(structure) if counts(producer)
    )
    return float(total)


def _saved_of_other_regions(structure: Structure) -> Iterator[tuple[Region, float, Mapping[Quantity, float], int]]:
    """Yield each tensor that one region computes and other regions save for backward.

    Each item is (producer, bytes of one copy, peak candidate -> copies alive, copies alive after the forward). The
    tensor is saved in the producer's layout, or once for each edge on which it is redistributed. The numbers of copies
    are lower bounds for both cases.
    """
    copies: dict[int, list[Multiplicity]] = defaultdict(list)
    for multiplicity in structure.saved_copies:
        for edge in multiplicity.edges:
            copies[edge].append(multiplicity)
    copy_ids = set[int]()
    for multiplicity in structure.saved_tensors:
        key = structure.edges[multiplicity.edges[0]]
        value = structure.representative(key.consumer).slots[key.consumer_slot].value
        if value.kind != "activation":
            continue
        alive, saved = multiplicity.lifetime.counts, multiplicity.live_after_forward
        if not multiplicity.in_producer_layout:
            # An edge may save a redistributed copy instead. Each copy is the alternative of one tensor only.
            uncounted_copies = [c for edge in multiplicity.edges for c in copies[edge] if id(c) not in copy_ids]
            if not uncounted_copies:
                continue
            saved_copy = max(
                uncounted_copies,
                key=lambda copied: sum(_smaller_counts(multiplicity.lifetime.counts, copied.lifetime.counts).values()),
            )
            copy_ids.add(id(saved_copy))
            alive, saved = _smaller_counts(alive, saved_copy.lifetime.counts), min(saved, saved_copy.live_after_forward)
        yield structure.representative(key.producer), float(value.nbytes), alive, saved


def _smaller_counts(counts: Mapping[Quantity, float], other_counts: Mapping[Quantity, float]) -> dict[Quantity, float]:
    """Return peak candidate -> the smaller of its two counts, for the candidates in both mappings."""
    return {name: min(count, other_counts[name]) for name, count in counts.items() if name in other_counts}


def _least_extras(region: Region, region_op: RegionOp, profile: GraphProfile) -> tuple[float, float]:
    """Return lower bounds on the bytes that an op saves of tensors that exist only inside it.

    The first counts what autograd saves, the second what selective checkpointing saves. Attention whose sequence may be
    sharded (context parallelism) may save a log-sum-exp for each row, and not the scores.
    """
    op_profile, inputs = profile.ops[region_op.op.name], find_op_inputs(region, region_op)
    extras = op_profile.saved_extra_nbytes, op_profile.cached_extra_nbytes
    if region_op.op.target_name != context_parallel.OP_NAME or not context_parallel.may_split(region_op.op, inputs):
        return extras
    shapes = [value.shape for value in inputs]
    sums = ContextParallelWork.of(region_op.op, shapes, inputs[0].dtype.itemsize, 1).saved_nbytes
    return min(extras[0], sums), min(extras[1], sums)


def least_state_bytes(regions: RegionGraph, job: Job) -> float:
    """Return a lower bound on the bytes of parameters and optimizer states, summed over all devices.

    Gradients do not count, and neither do parameters that no op uses.
    """
    parameters = {
        slot.value.name: slot.value for region in regions.regions for slot in region.slots if slot.origin == "parameter"
    }
    return least_state_nbytes(regions.graph, list(parameters.values()), job)


def least_gradient_bytes(structure: Structure, job: Job) -> float:
    """Return a lower bound on the bytes of gradients that accumulate over micro-batches, summed over all devices."""
    itemsize = min(BYTES_PER_ELEMENT[job.master_dtype or job.dtype], BYTES_PER_ELEMENT[job.reduce_dtype])
    total = 0
    for parameter in structure.parameters:
        value = structure.regions.graph.values[parameter.values[0]]
        if job.training and value.requires_grad and _has_gradient(structure, parameter):
            total += len(parameter.values) * (value.nbytes // value.dtype.itemsize) * itemsize
    return float(total)


def _has_gradient(structure: Structure, parameter: ParameterClass) -> bool:
    """Return whether any op that uses the parameters of the class has a backward."""
    values = structure.regions.graph.values
    return any(
        values[output].requires_grad
        for index, slot in parameter.uses
        for region_op in structure.representative(index).ops
        if slot in region_op.inputs
        for output in region_op.op.outputs
    )
