"""Lower bounds on the step time from compute alone, as if it were split perfectly over all devices."""

from __future__ import annotations

from collections.abc import Iterator

from cost_model.layouts.uneven import Rounded
from planner.plan.job import CheckpointingMode
from planner.pricing.op_times import LocalOp, OpTimes
from planner.pricing.run_spec import Run
from planner.regions.block_grouping import Grouping
from planner.run.model_analysis import ModelAnalysis

_FAST_ROWS = 64
"""Rows of whose multiples GEMMs are no slower than of other numbers."""


def least_compute_s(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> float:
    """Return a lower bound in seconds on the step time of ``run``: its compute, perfectly split, no communication."""
    compute_s, recompute_s = _totals(model, times, run, batch)
    return (compute_s + recompute_s) / run.mesh.size * run.passes


def least_recompute_s(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> float:
    """Return a lower bound in seconds on the recomputation of ``run`` in a step, perfectly split."""
    _, recompute_s = _totals(model, times, run, batch)
    return recompute_s / run.mesh.size * run.passes


def _totals(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> tuple[float, float]:
    """Return (forward and backward, recomputation): seconds of one micro-batch on one device. No mesh changes them."""
    key = times, run.job.training, batch, run.grouping
    if key not in model.totals_s:
        each = list(_unsplit_ops(model, times, run, batch))
        compute_s = sum(forward_s + backward_s for _, forward_s, _, backward_s in each)
        model.totals_s[key] = compute_s, sum(recompute_s for _, _, recompute_s, _ in each)
    return model.totals_s[key]


def op_seconds(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> dict[str, float]:
    """Return op -> seconds of one micro-batch on one device: forward, recomputation and backward."""
    return {name: sum(seconds) for name, *seconds in _unsplit_ops(model, times, run, batch)}


def _unsplit_ops(
    model: ModelAnalysis, times: OpTimes, run: Run, batch: int
) -> Iterator[tuple[str, float, float, float]]:
    """Yield (op, forward, recomputation, backward): seconds of one micro-batch on one device.

    A rank that does a fraction of an op's work takes at least that fraction of the seconds, because smaller kernels use
    a device no better. Causal attention is the exception; `OpTimes.least_fraction` lowers its seconds.
    """
    modes = _modes_of_ops(model, batch, run.grouping)
    planned = _planned_ops(model, batch)
    graph, profiles = model.graph_at(batch), model.profile(batch).ops
    for op in graph.ops:
        if op.name not in planned:
            continue
        inputs = [graph.values[name] for name in op.inputs]
        output = graph.values[op.outputs[0]]
        profile = profiles[op.name]
        shapes = [_least_shape(v.shape, graph.rounded) for v in (*inputs, output)]
        whole = times.op_time(LocalOp(op, inputs, output, shapes[:-1], shapes[-1], profile))
        least = times.least_fraction(op, inputs)
        forward_s, backward_s = least * whole.forward_s, least * whole.backward_s
        if not run.job.training:
            yield op.name, forward_s, 0.0, 0.0
            continue
        mode = modes.get(op.name)
        recomputed = mode == "full" or (mode == "selective" and profile.flops == 0)
        yield op.name, forward_s, forward_s if recomputed else 0.0, backward_s


def _least_shape(shape: tuple[int, ...], rounded: Rounded) -> tuple[int, ...]:
    """Return ``shape`` with the lengths that are rounded up rounded down, to rows of which GEMMs run fast.

    The pieces of a vocabulary may have such rows although the whole has not.
    """
    return tuple([rounded[length] // _FAST_ROWS * _FAST_ROWS if length in rounded else length for length in shape])


def _planned_ops(model: ModelAnalysis, batch: int) -> set[str]:
    """Return the names of the ops in regions. Ops on plain values are in no region: every rank runs them unsplit."""
    regions, _ = model.regions_at(batch)
    return {region_op.op.name for region in regions.regions for region_op in region.ops}


def _modes_of_ops(model: ModelAnalysis, batch: int, grouping: Grouping) -> dict[str, CheckpointingMode]:
    """Return op -> checkpointing mode of its block, for ops of checkpointed blocks."""
    regions, blocks = model.regions_at(batch)
    modes = dict(grouping.modes)
    return {
        region_op.op.name: modes[block]
        for region in regions.regions
        if (block := blocks.of_region.get(region.index)) in modes
        for region_op in region.ops
    }
