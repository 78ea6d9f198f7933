"""Bytes that no plan goes below, whatever it splits: counted from the structure alone, without a mesh or a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from cost_model.kernels.optimizer_memory import parameter_state_bytes
from planner.ilp.quantities import Quantity
from planner.liveness.multiplicity import Multiplicity
from planner.liveness.parameter_classes import ParameterClass
from planner.liveness.structure import Structure
from planner.plan.job import BYTES_PER_ELEMENT, Job
from planner.profile.op_profile import GraphProfile
from planner.regions.regions import Region, RegionOp, block_of, find_op_inputs
from planner.strategies import context_parallel
from planner.strategies.context_parallel_work import ContextParallelWork


def least_alive_bytes(structure: Structure) -> float:
    """Return the most activations alive at any candidate of the backward, of all devices together.

    The tensors of each region are counted once, as if no device held what another has, and so is what regions keep of
    each other's: as it was made or, where it was redistributed on the way, as it came.
    """
    profile, most = structure.profile, np.zeros(len(structure.timeline.candidates))
    for index, alive in enumerate(structure.timeline.classes):
        region = structure.representative(index)
        slots = [slot.value for slot in region.slots]
        made = np.array([min(value.nbytes, profile.storage_nbytes.get(value.name, value.nbytes)) for value in slots])
        extras = [_least_extras(region, region_op, profile) for region_op in region.ops]
        most += made @ (alive.saved + alive.recomputed + alive.gradients)
        most += np.array([saved for saved, _ in extras]) @ (alive.saved_extra + alive.recomputed_extra)
        most += np.array([cached for _, cached in extras]) @ alive.cached_extra
    at = {
        candidate.quantity(role): index
        for index, candidate in enumerate(structure.timeline.candidates)
        for role in ("activations", "recomputed_block")
    }
    for _, nbytes, counts, _ in _kept_of_others(structure):
        for name, count in counts.items():
            most[at[name]] += count * nbytes
    return float(most.max(initial=0.0))


def least_held_bytes(structure: Structure, blocks: Collection[str] | None = None) -> float:
    """Return the activations that a forward leaves for its backward, of all devices together, counted likewise.

    Args:
        blocks: only what is made in these counts; None: all.
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
    total += sum(held * nbytes for maker, nbytes, _, held in _kept_of_others(structure) if counts(maker))
    return float(total)


def _kept_of_others(structure: Structure) -> Iterator[tuple[Region, float, Mapping[Quantity, float], int]]:
    """Yield what regions save of tensors that another makes: that one, bytes, candidate's quantity -> how many, and
    how many after the forward.

    Each is there as its maker has it, or for every edge on which it is redistributed as it comes out there.
    """
    copies: dict[int, list[Multiplicity]] = defaultdict(list)
    for multiplicity in structure.saved_copies:
        for edge in multiplicity.edges:
            copies[edge].append(multiplicity)
    counted = set[int]()
    for multiplicity in structure.saved_tensors:
        key = structure.edges[multiplicity.edges[0]]
        value = structure.representative(key.consumer).slots[key.consumer_slot].value
        if value.kind != "activation":
            continue
        alive, held = multiplicity.lifetime.counts, multiplicity.live_after_forward
        if not multiplicity.in_producer_layout:
            # Of the multiplicities that an edge may count in place of this one, one, and none of them twice.
            others = [c for edge in multiplicity.edges for c in copies[edge] if id(c) not in counted]
            if not others:
                continue
            other = max(
                others, key=lambda copied: sum(_less(multiplicity.lifetime.counts, copied.lifetime.counts).values())
            )
            counted.add(id(other))
            alive, held = _less(alive, other.lifetime.counts), min(held, other.live_after_forward)
        yield structure.representative(key.producer), float(value.nbytes), alive, held


def _less(some: Mapping[Quantity, float], others: Mapping[Quantity, float]) -> dict[Quantity, float]:
    """Return the smaller count of each name that both have."""
    return {name: min(count, others[name]) for name, count in some.items() if name in others}


def _least_extras(region: Region, region_op: RegionOp, profile: GraphProfile) -> tuple[float, float]:
    """Return the bytes that an op saves, and that selective checkpointing keeps, beside its tensors.

    Where its sequence is split attention saves a sum for each row, and never the scores.
    """
    found, inputs = profile.ops[region_op.op.name], find_op_inputs(region, region_op)
    extras = found.saved_extra_nbytes, found.cached_extra_nbytes
    if region_op.op.target_name != context_parallel.OP_NAME or not context_parallel.may_split(region_op.op, inputs):
        return extras
    shapes = [value.shape for value in inputs]
    sums = ContextParallelWork.of(region_op.op, shapes, inputs[0].dtype.itemsize, 1).saved_nbytes
    return min(extras[0], sums), min(extras[1], sums)


def least_state_bytes(structure: Structure, job: Job) -> float:
    """Return the bytes of parameters and optimizer states, of all devices together; gradients are not counted.

    A parameter that nothing uses is in no plan, and is not counted either.
    """
    stored_dtype = job.master_dtype or job.dtype
    total = 0
    for name in (name for parameter in structure.parameters for name in parameter.values):
        value = structure.regions.graph.values[name]
        state = parameter_state_bytes(
            value.nbytes // value.dtype.itemsize,
            optimizer=job.optimizer,
            dtype=stored_dtype,
            master_dtype=stored_dtype,
            gradient_dtype=stored_dtype,
            training=job.training and value.requires_grad,
        )
        total += state["parameters"] + state["optimizer_state"]
    return float(total)


def least_sums_bytes(structure: Structure, job: Job) -> float:
    """Return the bytes of gradients that add up over more than one micro-batch, of all devices together."""
    itemsize = min(BYTES_PER_ELEMENT[job.master_dtype or job.dtype], BYTES_PER_ELEMENT[job.reduce_dtype])
    total = 0
    for parameter in structure.parameters:
        value = structure.regions.graph.values[parameter.values[0]]
        if job.training and value.requires_grad and _has_gradient(structure, parameter):
            total += len(parameter.values) * (value.nbytes // value.dtype.itemsize) * itemsize
    return float(total)


def _has_gradient(structure: Structure, parameter: ParameterClass) -> bool:
    """Tell whether any op that uses the parameters passes gradients back."""
    values = structure.regions.graph.values
    return any(
        values[output].requires_grad
        for index, slot in parameter.uses
        for region_op in structure.representative(index).ops
        if slot in region_op.inputs
        for output in region_op.op.outputs
    )
