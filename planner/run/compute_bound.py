"""Lower bounds on seconds of compute: the whole model's, perfectly split, without communication."""

from __future__ import annotations

from collections.abc import Iterator

from planner.plan.job import CheckpointingMode
from planner.pricing.op_times import LocalOp, OpTimes
from planner.pricing.run_spec import Run
from planner.regions.block_grouping import Grouping
from planner.run.model_analysis import ModelAnalysis


def least_compute_s(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> float:
    """Return a time that no plan of ``run`` can beat: all compute, perfectly split, no communication."""
    compute_s, again_s = _totals(model, times, run, batch)
    return (compute_s + again_s) / run.mesh.size * run.passes


def least_recompute_s(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> float:
    """Return what no plan of ``run`` can beat in running blocks again, perfectly split."""
    _, again_s = _totals(model, times, run, batch)
    return again_s / run.mesh.size * run.passes


def _totals(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> tuple[float, float]:
    """Return the seconds of one micro-batch, unsplit, and those of running blocks again. They ask for no mesh."""
    key = times, run.job.training, batch, run.grouping
    if key not in model.totals_s:
        each = list(_whole(model, times, run, batch))
        compute_s = sum(forward_s + backward_s for _, forward_s, _, backward_s in each)
        model.totals_s[key] = compute_s, sum(again_s for _, _, again_s, _ in each)
    return model.totals_s[key]


def op_seconds(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> dict[str, float]:
    """Return op -> seconds of one micro-batch, unsplit, forward and backward."""
    return {name: sum(seconds) for name, *seconds in _whole(model, times, run, batch)}


def _whole(model: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield each op and its seconds unsplit: its forward, that again where a block is run again, and its backward.

    One device's share of the work takes at least its share of the whole's time: pieces fill a device no better.
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
        whole = times.op_time(LocalOp(op, inputs, output, [v.shape for v in inputs], output.shape, profile))
        least = times.least_fraction(op, inputs)
        forward_s, backward_s = least * whole.forward_s, least * whole.backward_s
        if not run.job.training:
            yield op.name, forward_s, 0.0, 0.0
            continue
        mode = modes.get(op.name)
        recomputed = mode == "full" or (mode == "selective" and profile.flops == 0)
        yield op.name, forward_s, forward_s if recomputed else 0.0, backward_s


def _planned_ops(model: ModelAnalysis, batch: int) -> set[str]:
    """Return the ops that regions are made of: all but those on plain values, which every rank runs whole."""
    regions, _ = model._at(batch)
    return {region_op.op.name for region in regions.regions for region_op in region.ops}


def _modes_of_ops(model: ModelAnalysis, batch: int, grouping: Grouping) -> dict[str, CheckpointingMode]:
    """Return op -> how its block is checkpointed, of those whose block is."""
    regions, blocks = model._at(batch)
    modes = dict(grouping.modes)
    return {
        region_op.op.name: modes[block]
        for region in regions.regions
        if (block := blocks.of_region.get(region.index)) in modes
        for region_op in region.ops
    }
