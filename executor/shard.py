"""``shard_module``: changes a plain module in place, so that it runs as a plan says."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from executor.ops.attention_kernels import use_kernel
from executor.ops.dispatch import OwnOps
from executor.ops.experts import replace_experts
from executor.ops.fused import replace_with_fused_ops
from executor.ops.shared_input_linears import SharedInputLinears
from executor.redistribute import Redistributor
from executor.resolve.imported_plan import accepts_other_plans
from executor.resolve.place_parameters import place_parameters
from executor.resolve.resolved_plan import ResolvedPlan, resolve_plan
from executor.resolve.sharder import Sharder, apply_sharders
from executor.resolve.sharding_record import recorded
from executor.resolve.token_order import attach_token_order
from executor.runtime.boundary_hooks import attach_ports
from executor.runtime.checkpointing import checkpoint_blocks
from executor.runtime.fully_sharded import apply_fsdp_groups
from executor.runtime.grad_reduction import GradientReduction
from executor.runtime.local_outputs import attach_local_outputs
from executor.runtime.parameter_views import ComputeDtypeParameters, attach_compute_layouts
from executor.runtime.run_context import PhaseTracker, RunContexts
from executor.runtime.saved_tensor_recompute import CheckpointedRegion
from executor.runtime.shared_redistributions import SharedRedistributions
from planner.model_rewrites.fuse_projections import fuse_projections
from planner.model_rewrites.mla import concatenate_mla_keys
from planner.plan.sharding_plan import ShardingPlan


@accepts_other_plans
def shard_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    *,
    sharders: Mapping[str, Sharder] | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Return ``module``, changed in place to run on ``device_mesh`` as ``plan`` says; training loops need no change.

    Feed each rank its slice of the batch (``local_batch``). Gradients are those of the loss over the global batch. They
    are in their parameters' layouts after every ``plan.micro_batches`` backward passes; scale the loss of each
    micro-batch by ``1 / plan.micro_batches``. Run a plan for prefill or decoding under ``torch.no_grad``. If the model
    takes a key-value cache, pass transformers' ``DynamicCache``: its keys and values are DTensors, sharded as attention
    is.

    Args:
        module: a plain module (no parameter is a DTensor yet), on the mesh's device or on meta.
        device_mesh: the plan's mesh; all of its ranks call this function.
        plan: a plan for this module and this mesh.
        sharders: name of a Sharder in the plan -> the Sharder; None: the plan names none.
        src_data_rank: index along each axis of the rank whose parameter values are used, as in ``distribute_tensor``.
            None: each rank uses its own values, without communication.

    Raises:
        PlanError: plan, module and mesh do not fit together, the plan's attention kernel is not available, or a
            Sharder returned no module. The module has not been changed, except by a Sharder, and except that its
            projections are fused if the plan says so.
    """
    if plan.job.fused_projections:
        fuse_projections(module)
    resolved = resolve_plan(module, device_mesh, plan, sharders)
    sharded = _shard(module, resolved, PhaseTracker(), src_data_rank=src_data_rank)
    return recorded(sharded, plan, device_mesh)


def shard_on_meta(module: nn.Module, device_mesh: DeviceMesh, plan: ShardingPlan, phases: PhaseTracker) -> nn.Module:
    """Return ``module``, which is on meta, sharded to run there as a plan says; ``phases`` tracks the current phase."""
    if plan.job.fused_projections:
        fuse_projections(module)
    return _shard(module, resolve_plan(module, device_mesh, plan), phases, src_data_rank=None, on_meta=True)


def _shard(
    module: nn.Module,
    resolved: ResolvedPlan,
    phases: PhaseTracker,
    *,
    src_data_rank: int | None,
    on_meta: bool = False,
) -> nn.Module:
    plan, job = resolved.plan, resolved.plan.job
    use_kernel(job.attention_kernel, resolved.device_mesh.device_type)
    replacements = apply_sharders(module, resolved.sharders)
    # Inference updates no parameter, so it needs no copy in a wider dtype.
    stored_dtype = None if job.phase == "training" else resolved.compute_dtype
    place_parameters(resolved, src_data_rank=src_data_rank, dtype=stored_dtype)

    redistributor = Redistributor.from_plan(resolved.device_mesh, plan)
    shared = SharedRedistributions(redistributor)
    linear = SharedInputLinears() if job.fused_ops else None
    outside_fsdp = resolved.parameters_outside_fsdp()
    cast_parameters = ComputeDtypeParameters(outside_fsdp, resolved.compute_dtype)
    contexts = RunContexts(
        phases=phases,
        shared=shared,
        own_ops=lambda: OwnOps(redistributor, linear),
        cast_parameters=cast_parameters.cast,
        device_type=resolved.device_mesh.device_type,
    )

    replace_experts(module, redistributor)
    if job.fused_ops:
        replace_with_fused_ops(module, redistributor, opaque=replacements)
    concatenate_mla_keys(module)
    attach_token_order(module, resolved.boundaries, redistributor.zigzag)
    attach_ports(module, resolved.boundaries, shared)
    attach_local_outputs(module, resolved.boundaries)
    # Wrappers of forwards, innermost first: a recomputed block redistributes its own parameters again.
    region = CheckpointedRegion()
    attach_compute_layouts(outside_fsdp, redistributor, resolved.reduce_dtype, region)
    checkpoint_blocks(module, resolved.checkpointing, contexts, cast_parameters, region)

    reduction = GradientReduction(
        redistributor, micro_batches=plan.micro_batches, dtype=resolved.reduce_dtype, phases=phases
    )
    in_fsdp = [item for group in resolved.fsdp_groups for item in group.parameters]
    fsdp_parameters = {item.parameter for item in in_fsdp}
    reduction.attach(
        [p for p in module.parameters() if isinstance(p, DTensor) and p not in fsdp_parameters],
        reduce_scattered={item.parameter: item.accumulated for item in in_fsdp if item.accumulated != item.stored},
    )
    apply_fsdp_groups(module, resolved, shared, reduction, phases, on_meta=on_meta)
    contexts.attach(module, resolved.sharded_parts(module) if plan.solver is None else ())
    return module
