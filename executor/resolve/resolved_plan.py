"""``ResolvedPlan``: a plan resolved against one module on one device mesh, once, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from executor.resolve.boundaries import Boundaries, resolve_boundaries
from executor.resolve.checks import (
    check_axis_names,
    check_fingerprint,
    check_layouts,
    check_mesh,
    check_outside_sharders,
    check_sharders,
    uneven_parameters,
)
from executor.resolve.fsdp_groups import FsdpGroup, resolve_fsdp_groups
from executor.resolve.parameter_layouts import ParameterLayouts, named_layouts, resolve_parameters, with_tied_names
from planner.imported.torch_shard import Sharder
from planner.plan.job import CheckpointingMode
from planner.plan.patterns import resolve_keys
from planner.plan.reshard import reshard_modes
from planner.plan.sharding_plan import ShardingPlan

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Name of a dtype in a job -> torch's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlan:
    """A plan with every pattern of FQNs resolved against one module. All checks have passed; nothing has changed.

    Placement of parameters, hooks, FSDP groups, gradient reduction and checkpointing read the resolved plan. None of
    them resolves a key again.

    Attributes:
        plan: the plan as the caller passed it.
        device_mesh: mesh of the ranks that run the plan.
        parameters: FQN -> layouts, for every name of every parameter that becomes a DTensor.
        boundaries: what hooks do to the arguments and results of modules.
        checkpointing: module FQN -> mode of activation checkpointing.
        opaque_modules: FQN of an opaque module -> how it runs on samples, as text.
        local_modules: FQN of a local module -> `planner.model_rewrites.local_module.LocalModule` as text.
        fsdp_groups: groups of parameters that ``fully_shard`` all-gathers together; innermost modules first.
        sharders: module FQN -> the Sharder that replaces the module.
        compute_dtype: dtype of parameters at use.
        reduce_dtype: dtype in which gradients accumulate and are reduced.
    """

    plan: ShardingPlan
    device_mesh: DeviceMesh
    parameters: Mapping[str, ParameterLayouts]
    boundaries: Boundaries
    checkpointing: Mapping[str, CheckpointingMode]
    opaque_modules: Mapping[str, str]
    local_modules: Mapping[str, str]
    fsdp_groups: tuple[FsdpGroup, ...]
    sharders: Mapping[str, Sharder]
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype

    def sharded_parts(self, root: nn.Module) -> tuple[nn.Module, ...]:
        """Return the modules in ``root`` that own a parameter of the plan, or whose tensors the plan lays out."""
        named = {**self.boundaries.inputs, **self.boundaries.outputs}
        owners = {layouts.owner: None for layouts in self.parameters.values()}
        return tuple(owners | {root.get_submodule(fqn): None for fqn in named})

    def parameters_outside_fsdp(self) -> dict[nn.Module, list[ParameterLayouts]]:
        """Return module -> layouts of its own parameters that are in no FSDP group, each attribute once."""
        slots = {slot for group in self.fsdp_groups for parameter in group.parameters for slot in parameter.slots}
        by_owner: dict[nn.Module, list[ParameterLayouts]] = {}
        for layouts in self.parameters.values():
            # A module with several FQNs uses its parameters in the layouts of its first FQN.
            if layouts.slot not in slots:
                slots.add(layouts.slot)
                by_owner.setdefault(layouts.owner, []).append(layouts)
        return by_owner


def resolve_plan(
    module: nn.Module, device_mesh: DeviceMesh, plan: ShardingPlan, sharders: Mapping[str, Sharder] | None = None
) -> ResolvedPlan:
    """Return ``plan`` resolved against ``module``, which is only read.

    Args:
        module: the module as it was planned: not yet sharded or wrapped.
        device_mesh: mesh of the ranks that will run the module. Its device type may differ from the plan's: a plan for
            GPUs can be tried on CPUs.
        plan: a plan made by the planner or written by hand.
        sharders: name of a Sharder in the plan -> the Sharder; None: the plan names none.

    Raises:
        PlanError: the plan has a pipeline, or assumes overlap that the executor does not run.
        PlanTypeError: a value, or a Sharder, of the wrong type.
        PlanMismatchError: the plan is for another mesh, model or torch, or the module is sharded already.
        EmptyPathError: a Sharder for the root.
        UnmatchedKeyError: a key, an argument name or a Sharder's name that does not exist.
        KeyConflictError: two keys that disagree, or a key inside a module that a Sharder replaces.
        PlanLayoutError: a layout with a wrong number of placements, one that does not divide its parameter, or one that
            ``fully_shard`` does not have.
        PlanKeyError: a module or a parameter that ``fully_shard`` cannot take.
    """
    plan.validate()
    plan.check_runs()
    check_mesh(plan.mesh, device_mesh)
    sharders = sharders or {}
    check_sharders(plan, sharders)
    modules = dict(module.named_modules(remove_duplicate=False))
    parameters = dict(module.named_parameters(remove_duplicate=False))

    sharder_names = {key: value for key, value in plan.plan.items() if isinstance(value, str)}
    sharder_names = resolve_keys(sharder_names, modules, field="plan", what="module")
    boundaries = resolve_boundaries(plan, modules)
    checkpointing = resolve_keys(
        plan.activation_checkpointing, modules, field="activation_checkpointing", what="module"
    )
    opaque_modules = resolve_keys(plan.opaque_modules, modules, field="opaque_modules", what="module")
    local_modules = resolve_keys(plan.local_modules, modules, field="local_modules", what="module")
    layouts_by_field = named_layouts(plan, parameters)
    check_layouts(parameters, layouts_by_field, plan.mesh, may_be_uneven=uneven_parameters(module, plan))
    layouts = resolve_parameters(
        module,
        layouts_by_field,
        resolve_keys(plan.read_above, parameters, field="read_above", what="parameter"),
        axes=len(plan.mesh.shape),
        has_root_inputs=any(not port.to_local for port in boundaries.inputs.get("", {}).values()),
        replaced=[modules[fqn] for fqn in sharder_names],
    )
    fsdp_names = resolve_keys(plan.fully_shard, modules, field="fully_shard", what="module")
    fsdp_groups = resolve_fsdp_groups(
        fsdp_names,
        module,
        layouts,
        mesh=plan.mesh,
        checkpointed=checkpointing,
        reshard_after=reshard_modes(plan, modules, fsdp_names),
        is_planned=plan.solver is not None,
    )
    if fsdp_groups:
        check_axis_names(plan.mesh, device_mesh)
    check_fingerprint(module, plan)
    names_by_field: dict[str, Iterable[str]] = {
        "plan": [*with_tied_names(layouts_by_field["plan"], parameters), *sharder_names],
        "compute_plan": layouts_by_field["compute_plan"],
        "gradient_plan": layouts_by_field["gradient_plan"],
        "fully_shard": [parameter.fqn for group in fsdp_groups for parameter in group.parameters],
        "input_plan": boundaries.inputs,
        "output_plan": boundaries.outputs,
        "zigzag": [*boundaries.zigzag_inputs, *boundaries.zigzag_outputs],
        "return_local_tensor": boundaries.local_outputs,
        "activation_checkpointing": checkpointing,
        "opaque_modules": opaque_modules,
        "local_modules": local_modules,
    }
    for field, names in names_by_field.items():
        check_outside_sharders(field, names, modules, sharder_names)
    return ResolvedPlan(
        plan=plan,
        device_mesh=device_mesh,
        parameters=layouts,
        boundaries=boundaries,
        checkpointing=checkpointing,
        opaque_modules=opaque_modules,
        local_modules=local_modules,
        fsdp_groups=fsdp_groups,
        sharders={fqn: sharders[name] for fqn, name in sharder_names.items()},
        compute_dtype=_DTYPES[plan.job.dtype],
        reduce_dtype=_DTYPES[plan.job.reduce_dtype],
    )
