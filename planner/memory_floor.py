"""Bytes that no plan goes below, whatever it splits: counted from the structure alone, without a mesh or a program."""

from __future__ import annotations

import numpy as np

from cost_model.memory import parameter_state_bytes
from planner.job import Job
from planner.profile import GraphProfile
from planner.regions import Region, RegionOp, find_op_inputs
from planner.strategies import context_parallel
from planner.strategies.context_parallel import ContextWork
from planner.structure import Structure


def least_alive_bytes(structure: Structure) -> float:
    """Return the most activations alive at any moment of the backward, of all devices together.

    The tensors of each region are counted once, as if no device held what another has.
    """
    profile, most = structure.profile, np.zeros(len(structure.timeline.moments))
    for index, alive in enumerate(structure.timeline.classes):
        region = structure.representative(index)
        slots = [slot.value for slot in region.slots]
        made = np.array([min(value.nbytes, profile.storage_nbytes.get(value.name, value.nbytes)) for value in slots])
        extras = [_least_extras(region, region_op, profile) for region_op in region.ops]
        most += made @ (alive.saved + alive.recomputed + alive.gradients)
        most += np.array([saved for saved, _ in extras]) @ (alive.saved_extra + alive.recomputed_extra)
        most += np.array([cached for _, cached in extras]) @ alive.cached_extra
    return float(most.max(initial=0.0))


def least_held_bytes(structure: Structure) -> float:
    """Return the activations that a forward leaves for its backward, of all devices together, counted likewise."""
    profile, total = structure.profile, 0.0
    for index, alive in enumerate(structure.timeline.classes):
        region = structure.representative(index)
        for slot, count in zip(region.slots, alive.held, strict=True):
            value = slot.value
            total += count * min(value.nbytes, profile.storage_nbytes.get(value.name, value.nbytes))
        for region_op, extra, cached in zip(region.ops, alive.held_extra, alive.held_cached, strict=True):
            least_saved, least_cached = _least_extras(region, region_op, profile)
            total += extra * least_saved + cached * least_cached
    return float(total)


def _least_extras(region: Region, region_op: RegionOp, profile: GraphProfile) -> tuple[float, float]:
    """Return the bytes that an op saves, and that selective checkpointing keeps, beside its tensors.

    Where its sequence is split attention saves a sum for each row, and never the scores.
    """
    found, inputs = profile.ops[region_op.op.name], find_op_inputs(region, region_op)
    extras = found.saved_extra_nbytes, found.cached_extra_nbytes
    if region_op.op.target_name != context_parallel.OP_NAME or not context_parallel.may_split(region_op.op, inputs):
        return extras
    shapes = [value.shape for value in inputs]
    sums = ContextWork.of(region_op.op, shapes, inputs[0].dtype.itemsize, 1).saved_nbytes
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
