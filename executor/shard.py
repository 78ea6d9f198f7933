"""``shard_module``: changes a plain module in place, so that it runs as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from executor.agreement.batches import attach_batch_check
from executor.agreement.before_sharding import Agreed, ShardingAgreement
from executor.agreement.exchange import Exchange
from executor.ops.attention_kernels import use_kernel
from executor.ops.dispatch import OwnOps
from executor.ops.experts import replace_experts
from executor.ops.fused import replace_with_fused_ops
from executor.ops.local_modules import run_local_modules
from executor.ops.opaque import run_opaque
from executor.ops.shared_input_linears import SharedInputLinears
from executor.redistribute import Redistributor
from executor.resolve.checks import check_member, check_source
from executor.resolve.imported_plan import accepts_other_plans
from executor.resolve.module_tree import meta_tree, restored_on_error
from executor.resolve.place_parameters import place_buffers, place_parameters
from executor.resolve.resolved_plan import ResolvedPlan, resolve_plan
from executor.resolve.sharded_as import remember
from executor.resolve.sharder import Sharder, apply_sharders
from executor.resolve.token_order import attach_token_order
from executor.runtime.boundary_hooks import attach_ports
from executor.runtime.buffers import keep_buffers_whole
from executor.runtime.cached_states import attach_states
from executor.runtime.checkpointing import checkpoint_blocks
from executor.runtime.fully_sharded import apply_fsdp_groups
from executor.runtime.grad_reduction import GradientReduction
from executor.runtime.local_outputs import attach_local_outputs
from executor.runtime.optimizer_steps import watch_optimizers
from executor.runtime.parameter_guard import ParameterGuard
from executor.runtime.parameter_views import ComputeDtypeParameters, attach_compute_layouts
from executor.runtime.random_state import RandomState, attach_random_state, drawn_seed
from executor.runtime.root.added_parameters import refuse_plain_parameters
from executor.runtime.root.copies import refuse_copies
from executor.runtime.root.eager_only import keep_eager
from executor.runtime.root.packed_images import attach_packed_images
from executor.runtime.root.root_arguments import attach_root_arguments
from executor.runtime.root.save_pretrained import refuse_save_pretrained
from executor.runtime.root.sharded_root import ShardedRoot, remember_root
from executor.runtime.root.unfrozen_parameters import refuse_unfrozen
from executor.runtime.run_context import PhaseTracker, RunContexts
from executor.runtime.saved_tensor_recompute import CheckpointedRegion
from executor.runtime.shared_redistributions import SharedRedistributions
from executor.runtime.whole_batches import BatchForm, attach_whole_results, encode_whole
from planner.model_rewrites.fuse_projections import fuse_projections
from planner.model_rewrites.mla import concatenate_mla_keys
from planner.model_rewrites.sync_batch_norm import batch_norm_for_sync, norms_in_dtype_of_statistics
from planner.model_rewrites.weights_at_call import read_weights_at_call
from planner.plan.sharding_plan import ShardingPlan

ForwardObserver = Callable[[nn.Module], None]
"""Wraps the forwards of a sharded module's parts, innermost."""

_ON_META = Agreed(values_from_source=False, seed=0)


@accepts_other_plans
def shard_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    *,
    sharders: Mapping[str, Sharder] | None = None,
    src_data_rank: int | None = 0,
    agreement_timeout_s: float = 30.0,
) -> nn.Module:
    """Return ``module``, changed in place to run on ``device_mesh`` as ``plan`` says; training loops need no change.

    Feed each rank its slice of the batch (``local_batch``). Gradients are those of the loss over the global batch. A
    step may have any number of backward passes (``set_accumulation_steps``); ``plan.micro_batches`` are expected. Scale
    the loss of each by one over their number. Run a plan for prefill or decoding under ``torch.no_grad``. If the model
    takes a key-value cache, pass transformers' ``DynamicCache``: its keys and values are DTensors, sharded as attention
    is.

    Before anything is changed, all ranks agree that they have the same plan, module, arguments and versions. In the
    first calls of the module they check that they pass the inputs that the plan needs.

    Args:
        module: a plain module (no parameter is a DTensor yet), on the mesh's device or on meta. If the source rank has
            values, other ranks may have the module on meta.
        device_mesh: the plan's mesh; all of its ranks call this function.
        plan: a plan for this module and this mesh.
        sharders: name of a Sharder in the plan -> the Sharder; None: the plan names none.
        src_data_rank: index along each axis of the rank whose parameters and buffers are used, as in
            ``distribute_tensor``. None: each rank uses its own values, and only the random seed is sent.
        agreement_timeout_s: how long a rank waits for the others to call this function.

    Raises:
        PlanError: plan, module and mesh do not fit together, the plan's attention kernel is not available, or a
            Sharder returned no module.
        RanksError: the ranks differ, one of them has failed its checks or in a Sharder, or has not come in time. If one
            rank raises, all of them do.

    The module has not been changed when one of these errors is raised, except for values of tensors that a Sharder has
    changed in place. After an error of a later collective, which has a note that says so, make the module anew.
    """
    named_sharders = sharders or {}
    agreement = ShardingAgreement(exchange=Exchange.of(device_mesh), timeout_s=agreement_timeout_s)
    check_member(device_mesh)
    resolved = agreement.checked(lambda: _checked(module, device_mesh, plan, named_sharders, src_data_rank))
    agreed = agreement.agree(
        module, device_mesh, plan, sharders=named_sharders, src_data_rank=src_data_rank, seed=drawn_seed()
    )
    if plan.job.fused_projections or resolved.sharders:
        with restored_on_error(module) if resolved.sharders else nullcontext():
            if plan.job.fused_projections:
                fuse_projections(module)
            resolved = resolve_plan(module, device_mesh, plan, named_sharders)
            replacements = agreement.sharders_applied(lambda: apply_sharders(module, resolved.sharders))
    else:
        replacements = frozenset()
    try:
        sharded = _shard(
            module,
            resolved,
            PhaseTracker(),
            src_data_rank=src_data_rank,
            replacements=replacements,
            agreed=agreed,
        )
    except Exception as error:
        error.add_note(
            "shard_module failed while it changed the module, which cannot be used any more: make it anew. If a "
            "collective failed, another rank has probably ended: see the output of all ranks."
        )
        raise
    return remember(sharded, device_mesh, plan)


def _checked(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    sharders: Mapping[str, Sharder],
    src_data_rank: int | None,
) -> ResolvedPlan:
    """Return ``plan`` resolved against ``module`` as it will be sharded, which is not changed; this rank's checks."""
    check_source(device_mesh, src_data_rank)
    planned = fuse_projections(meta_tree(module)) if plan.job.fused_projections else module
    resolved = resolve_plan(planned, device_mesh, plan, sharders)
    use_kernel(plan.job.attention_kernel, device_mesh.device_type)
    return resolved


def shard_on_meta(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    phases: PhaseTracker,
    observer: ForwardObserver | None = None,
) -> nn.Module:
    """Return ``module``, which is on meta, sharded to run there as a plan says; ``phases`` tracks the current phase."""
    if plan.job.fused_projections:
        fuse_projections(module)
    resolved = resolve_plan(module, device_mesh, plan)
    use_kernel(plan.job.attention_kernel, device_mesh.device_type)
    return _shard(module, resolved, phases, src_data_rank=None, on_meta=True, observer=observer)


def _shard(
    module: nn.Module,
    resolved: ResolvedPlan,
    phases: PhaseTracker,
    *,
    src_data_rank: int | None,
    replacements: Collection[nn.Module] = (),
    agreed: Agreed = _ON_META,
    on_meta: bool = False,
    observer: ForwardObserver | None = None,
) -> nn.Module:
    plan, job = resolved.plan, resolved.plan.job
    from_source = agreed.values_from_source
    narrowed = place_parameters(
        resolved,
        src_data_rank=src_data_rank,
        # What is not updated needs no copy in a wider dtype: in inference all parameters, in training the frozen ones.
        dtype=None if job.phase == "training" else resolved.compute_dtype,
        frozen_dtype=resolved.compute_dtype,
        values_from_source=from_source,
    )
    if not on_meta:
        mesh = resolved.device_mesh
        place_buffers(module, mesh, src_data_rank, outside=replacements, values_from_source=from_source)

    redistributor = Redistributor.from_plan(resolved.device_mesh, plan)
    shared = SharedRedistributions(redistributor)
    linear = SharedInputLinears() if job.fused_ops else None
    outside_fsdp = resolved.parameters_outside_fsdp()
    cast_parameters = ComputeDtypeParameters(outside_fsdp, resolved.compute_dtype)
    random = RandomState(resolved.device_mesh, agreed.seed)
    attach_random_state(module, random)
    contexts = RunContexts(
        phases=phases,
        shared=shared,
        own_ops=lambda: OwnOps(redistributor, linear, plan.local_ops, is_planned=plan.solver is not None),
        cast_parameters=cast_parameters.cast,
        device_type=resolved.device_mesh.device_type,
        random=random,
        is_planned=plan.solver is not None,
    )

    in_opaque = {part for fqn in resolved.opaque_modules for part in module.get_submodule(fqn).modules()}
    replace_experts(module, redistributor, opaque=in_opaque)
    run_opaque(module, resolved.opaque_modules, redistributor)
    if job.phase == "decode":
        encode_whole(module, redistributor)
    if job.fused_ops:
        replace_with_fused_ops(module, redistributor, opaque={*replacements, *in_opaque})
    concatenate_mla_keys(module)
    batch_norm_for_sync(module)
    norms_in_dtype_of_statistics(module)
    read_weights_at_call(module)
    attach_token_order(module, resolved.boundaries, redistributor.zigzag)
    form = BatchForm(job.batch // plan.micro_batches if job.batch else None, is_planned=plan.solver is not None)
    inputs_dtype = None if plan.solver is None else resolved.compute_dtype
    root_ports = resolved.boundaries.inputs.get("", {})
    attach_packed_images(module, root_ports, resolved.device_mesh, form)
    attach_root_arguments(module, root_ports, resolved.device_mesh, form, inputs_dtype)
    attach_ports(module, resolved.boundaries, shared, form)
    attach_states(module, resolved.boundaries.inputs, redistributor, form)
    attach_local_outputs(module, resolved.boundaries)
    # Wrappers of forwards, innermost first: a recomputed block redistributes its own parameters again.
    if observer is not None:
        observer(module)
    run_local_modules(module, resolved.local_modules, redistributor)
    keep_buffers_whole(module, redistributor, outside=replacements)
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
    apply_fsdp_groups(module, resolved, shared, reduction, phases, form, on_meta=on_meta)
    attach_whole_results(module, form, redistributor, contexts)
    reduction.attach_root(module)
    watch_optimizers(module, reduction)
    contexts.attach(module, resolved.sharded_parts(module) if plan.solver is None else ())
    attach_batch_check(module, root_ports, resolved.device_mesh, form)
    refuse_save_pretrained(module)
    refuse_unfrozen(module, narrowed)
    if resolved.fsdp_groups:
        refuse_copies(module)
    remember_root(module, ShardedRoot(form=form, redistributor=redistributor, reduction=reduction), contexts)
    refuse_plain_parameters(module)
    if not on_meta:
        keep_eager(module)
    ParameterGuard(
        module,
        reduction,
        "meta" if on_meta else resolved.device_mesh.device_type,
        may_tie=plan.solver is None,
    )
    return module
