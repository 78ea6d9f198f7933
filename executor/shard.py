"""``shard_module``: a plain module, in place, becomes one that runs as its plan says."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from executor.ops.attention_kernels import use_kernel
from executor.ops.dispatch import OwnOps
from executor.ops.experts import replace_experts
from executor.ops.fused import replace_chains
from executor.ops.joined_linears import JoinedLinears
from executor.redistribute import Redistributor
from executor.resolve.checks import check_plan
from executor.resolve.fsdp_groups import gather_groups, members_of, unfinished_gradients, uses_outside
from executor.resolve.parameter_uses import compute_dtype, parameter_uses, reduce_dtype
from executor.resolve.place_parameters import place_parameters
from executor.resolve.sharder import Sharder, apply_sharders
from executor.resolve.token_order import attach_order
from executor.runtime.boundary_hooks import attach_boundaries
from executor.runtime.checkpointing import checkpoint_blocks
from executor.runtime.fully_sharded import gather_together
from executor.runtime.grad_reduction import GradientReduction
from executor.runtime.local_outputs import apply_local_outputs
from executor.runtime.parameter_views import PresentedParameters, materialize_parameters
from executor.runtime.run_context import PhaseClock, RunContexts
from executor.runtime.saved_tensor_recompute import CheckpointedRegion
from executor.runtime.shared_redistributions import SharedRedistributions
from planner.model_rewrites.mla import concatenate_mla_keys
from planner.plan.sharding_plan import ShardingPlan


def shard_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    *,
    sharders: Mapping[str, Sharder] | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Return ``module``, which from now on runs on ``device_mesh`` as ``plan`` says; a training loop stays as it was.

    Feed each rank its slice of the batch (``local_batch``). Gradients are those of the loss over the
    global batch, and in their parameters' layouts after every ``plan.micro_batches`` backward passes; scale the loss of
    each micro-batch by ``1 / plan.micro_batches``. A plan for prefill or decoding is run under ``torch.no_grad``, with
    transformers' ``DynamicCache`` where there is one: its keys and values are DTensors, in pieces as attention is.

    Args:
        module: plain, on the mesh's device or on meta; changed in place.
        device_mesh: of the ranks that all call this.
        plan: for this module and this mesh.
        sharders: by the names that the plan uses.
        src_data_rank: the rank whose parameter values count; None takes each rank's own, without communication.

    Raises:
        PlanError: plan, module and mesh do not fit together, or the plan's kernel of attention cannot be had; nothing
            has been touched.
    """
    return _shard(module, device_mesh, plan, PhaseClock(), sharders=sharders, src_data_rank=src_data_rank)


def shard_with_clock(module: nn.Module, device_mesh: DeviceMesh, plan: ShardingPlan, clock: PhaseClock) -> nn.Module:
    """Do as ``shard_module`` does to a module on meta, which runs there, and tell ``clock`` of each phase that runs."""
    return _shard(module, device_mesh, plan, clock, sharders=None, src_data_rank=None, without_memory=True)


def _shard(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    clock: PhaseClock,
    *,
    sharders: Mapping[str, Sharder] | None,
    src_data_rank: int | None,
    without_memory: bool = False,
) -> nn.Module:
    check_plan(module, device_mesh, plan, sharders)
    use_kernel(plan.job.attention_kernel, device_mesh.device_type)
    groups = gather_groups(module, plan)
    # Nothing is trained in inference: no wider copy is kept.
    resting = None if plan.job.phase == "training" else compute_dtype(plan)
    place_parameters(module, device_mesh, plan, src_data_rank=src_data_rank, dtype=resting)
    together = members_of(groups)
    uses = uses_outside(groups, parameter_uses(module, plan))
    # Keys are for the module as it was: what a Sharder makes is its own affair.
    opaque = apply_sharders(module, plan, sharders or {})
    redistributor = Redistributor.of_plan(device_mesh, plan)
    shared = SharedRedistributions(redistributor)
    linear = JoinedLinears() if plan.job.fused else None
    presented = PresentedParameters(uses, compute_dtype(plan))
    contexts = RunContexts(
        clock=clock,
        shared=shared,
        own_ops=lambda: OwnOps(redistributor, linear),
        presented_parameters=presented.presented,
        device_type=device_mesh.device_type,
    )
    replace_experts(module, redistributor)
    if plan.job.fused:
        replace_chains(module, redistributor, opaque=opaque)
    concatenate_mla_keys(module)
    attach_order(module, plan, redistributor.order)
    attach_boundaries(module, plan, shared, opaque=opaque)
    apply_local_outputs(module, plan, opaque=opaque)
    # From the inside out: a recomputed block gathers its own parameters again.
    region = CheckpointedRegion()
    materialize_parameters(uses, redistributor, region)
    checkpoint_blocks(module, plan, contexts, presented, region)
    reduction = GradientReduction(
        redistributor, micro_batches=plan.micro_batches, dtype=reduce_dtype(plan), clock=clock
    )
    alone = [parameter for parameter in module.parameters() if parameter not in together]
    reduction.attach(
        [parameter for parameter in alone if isinstance(parameter, DTensor)], unfinished=unfinished_gradients(groups)
    )
    gather_together(module, groups, device_mesh, plan, shared, reduction, clock, without_memory=without_memory)
    contexts.attach(module)
    return module
