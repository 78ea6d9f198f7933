"""`host_s`: the seconds in which one process dispatches the ops of a step, a lower bound without CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from cost_model.collectives.price import OPS_AROUND_A_COLLECTIVE
from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.compute import EAGER_HOST_S
from planner.graph.op_graph import Op, OpGraph
from planner.liveness.structure import Structure
from planner.plan.estimate import CollectiveEstimate, Estimate
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.profile.op_profile import OpProfile

DTENSOR_OP_S = 25e-6
"""Host seconds to dispatch one op on DTensors, its layouts known already, without its kernel.

24 to 26 us for ``detach`` on a Skylake server with dispatch in C++, 36 to 40 us without (pytorch/pytorch#166371,
October 2025). torch 2.13 has that path in the form of pytorch/pytorch#167051. ``detach`` is among the cheapest ops, so
that an average op takes longer; a newer CPU takes less. ``shardplan calibrate`` measures the time where the device is a
CPU (`DeviceSpec.host_op_s`). Read 2026-11."""

OPTIMIZER_OPS = 10
"""Ops of an optimizer's step over all parameters: AdamW with ``foreach``, torch 2.13, ``_multi_tensor_adamw``."""


def host_s(structure: Structure, run: Run, collectives: Sequence[CollectiveEstimate]) -> float | None:
    """Return the host's seconds to dispatch a step of ``run`` in eager mode; None for a device that is no real one.

    Every op of the forward, of the recomputation and of the backward is dispatched in every micro-batch. Masks,
    positions and other plain tensors are dispatched without DTensor. Python's own time, the data loader and
    synchronization are left out, so a real host takes longer.

    Args:
        structure: the run's graph, profiles and checkpointed blocks.
        run: the run.
        collectives: the collectives of a step; each is issued by a few dispatched ops.
    """
    device = run.cluster.device
    if not device.architecture and not device.host_op_s:
        return None
    op_s = device.host_op_s or DTENSOR_OP_S
    graph, profiles = structure.regions.graph, structure.profile.ops
    seconds = {op.name: _op_forward_s(op, graph, profiles[op.name], op_s) for op in graph.ops}
    micro_batch_s = sum(seconds.values())
    if run.job.training:
        micro_batch_s += sum(op_s * profile.backward_dispatched.ops for profile in profiles.values())
        micro_batch_s += sum(
            seconds[region_op.op.name]
            for region in structure.regions.regions
            if structure.mode(region) is not None
            for region_op in region.ops
        )
    calls = sum(row.count for row in collectives)
    once_s = op_s * (OPS_AROUND_A_COLLECTIVE * calls + (OPTIMIZER_OPS if run.job.training else 0))
    return run.micro_batches * micro_batch_s + once_s


def with_host_time_of_local_modules(
    estimate: Estimate, structure: Structure, plan: ShardingPlan, modules: Sequence[str], device: DeviceSpec
) -> Estimate:
    """Return ``estimate``, which took no module for a local one, with the host's time of the plan's local modules.

    Args:
        structure: the plan's graph and profiles, at any micro-batch.
        plan: the plan; its ops in local modules are dispatched without DTensor.
        modules: FQNs of all modules.
        device: the device that the estimate is for.
    """
    if estimate.host_s is None or not plan.local_modules:
        return estimate
    local = resolve_keys(plan.local_modules, modules, field="local_modules", what="module")
    rerun = resolve_keys(plan.activation_checkpointing, modules, field="activation_checkpointing", what="module")
    graph, op_s = structure.regions.graph, device.host_op_s or DTENSOR_OP_S
    saved_s = max(0.0, op_s - EAGER_HOST_S)
    fqns = [call.fqn for call in graph.calls]
    is_local = [_is_inside(fqn, local) for fqn in fqns]
    runs = [2 if plan.job.training and _is_inside(fqn, rerun) else 1 for fqn in fqns]
    ops = 0.0
    for op in graph.ops:
        if is_local[op.call] and any(graph.values[name].kind != "plain" for name in op.outputs):
            profile = structure.profile.ops[op.name]
            ops += runs[op.call] * (profile.forward_dispatched.ops or len(op.inputs) + len(op.outputs))
            ops += profile.backward_dispatched.ops if plan.job.training else 0
    return replace(estimate, host_s=max(0.0, estimate.host_s - plan.micro_batches * ops * saved_s))


def _is_inside(fqn: str, modules: Collection[str]) -> bool:
    parts = fqn.split(".")
    return any(".".join(parts[:depth]) in modules for depth in range(1, len(parts) + 1))


def _op_forward_s(op: Op, graph: OpGraph, profile: OpProfile, op_s: float) -> float:
    """Return the host's seconds to dispatch the forward of ``op``; a fused kernel is one op, with its conversions."""
    dispatched = profile.forward_dispatched.ops or len(op.inputs) + len(op.outputs)
    is_plain = all(graph.values[name].kind == "plain" for name in op.outputs)
    return dispatched * (min(op_s, EAGER_HOST_S) if is_plain else op_s)
