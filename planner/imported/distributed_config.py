"""``DistributedConfig`` of transformers: sizes of axes and styles, which become a plan without a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import Layout, divides, sharded_dim
from planner.errors import MeshError, PlanError
from planner.imported.tp_plans import plan_from_tp_plan, plan_on_axis
from planner.plan.mesh import PlanMesh
from planner.plan.patterns import match_keys
from planner.plan.sharding_plan import ShardingPlan


class DistributedConfig(Protocol):
    """The fields of transformers' ``DistributedConfig`` that a plan needs."""

    tp_size: int | None
    fsdp_size: int | None
    dp_replicate_size: int | None
    pp_size: int | None
    ep_size: int | None
    fsdp_cpu_offload: bool
    fsdp_mixed_precision: bool


def plan_from_distributed_config(module: nn.Module, config: DistributedConfig, *, device: str = "cuda") -> ShardingPlan:
    """Return the plan that ``config`` says, with the styles that ``module`` carries where it has none of its own.

    The mesh has the axes dp_replicate, fsdp and tp, as far as their sizes are above 1. Each rank gets its slice of the
    batch on the first two.

    Args:
        module: a model of transformers; it is only read.
        config: transformers' ``DistributedConfig``.
        device: device type of the mesh.

    Raises:
        PlanError: pipelines, experts on other ranks than those of tensor parallelism, or offloading.
        PlanTypeError: an unknown style, or none where one is needed.
        MeshError: all sizes are 1.
    """
    _check(config)
    sizes = {"dp_replicate": config.dp_replicate_size, "fsdp": config.fsdp_size, "tp": config.tp_size}
    axes = tuple((name, size) for name, size in sizes.items() if size is not None and size > 1)
    if not axes:
        raise MeshError("All sizes of the DistributedConfig are 1.", what_to_do="Give tp_size or fsdp_size above 1.")
    mesh = PlanMesh(axes=axes, device=device)
    plan = _tensor_parallel_plan(module, mesh, config)
    if config.fsdp_mixed_precision:
        plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, dtype="bf16"))
    return _with_fsdp(module, plan, _merged(module, config, "fsdp_plan")) if "fsdp" in mesh.names else plan


def _check(config: DistributedConfig) -> None:
    problems = []
    if (config.pp_size or 1) > 1:
        problems.append(f"pp_size is {config.pp_size}, but a pipeline cannot be run yet")
    if (config.ep_size or 1) > 1 and config.ep_size != (config.tp_size or 1):
        problems.append(f"ep_size is {config.ep_size} and tp_size {config.tp_size}, but experts go to the ranks of tp")
    if config.fsdp_cpu_offload:
        problems.append("fsdp_cpu_offload is set, but nothing is offloaded")
    if problems:
        raise PlanError(
            f"The DistributedConfig cannot become a plan: {'; '.join(problems)}.",
            what_to_do="Change these fields, or let build_plan plan.",
        )


def _merged(module: nn.Module, config: DistributedConfig, name: str) -> dict[str, str]:
    """Return the styles in the field ``name``: the model's own, overridden by the config's."""
    own: Mapping[str, str] = getattr(module, name, None) or {}
    given = getattr(config, name, None)
    if name == "tp_plan" and given == {}:
        return {}  # as transformers has it: no rule of tensor parallelism
    return {**own, **(given if isinstance(given, Mapping) else {})}


def _tensor_parallel_plan(module: nn.Module, mesh: PlanMesh, config: DistributedConfig) -> ShardingPlan:
    if "tp" not in mesh.names:
        return plan_on_axis(module, mesh, {}, None)
    experts = _merged(module, config, "ep_plan") if (config.ep_size or 1) > 1 else {}
    # Rules of experts win over those for the same modules and what is in them.
    styles = {
        key: style
        for key, style in _merged(module, config, "tp_plan").items()
        if not any(key == expert or key.startswith(f"{expert}.") for expert in experts)
    }
    return plan_from_tp_plan(module, mesh, {**styles, **experts}, axis="tp")


def _with_fsdp(module: nn.Module, plan: ShardingPlan, fsdp_plan: Mapping[str, str]) -> ShardingPlan:
    """Return ``plan`` with FSDP groups: one for each module that ``fsdp_plan`` names, and one for the rest.

    FSDP splits a dim that tensor parallelism does not, in place of the first dim, so that every shard is one piece. A
    parameter without such a dim, like the bias of a column-wise layer, stays out of the groups.
    """
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
    owners: dict[str, None] = {}
    for names in match_keys(fsdp_plan, modules).values():
        owners.update(dict.fromkeys(names))
    stored: dict[str, Layout] = {}
    compute: dict[str, Layout] = {}
    groups: dict[str, list[str]] = {}
    for fqn, parameter in parameters.items():
        layout = plan.plan.get(fqn, (Replicate(),) * len(plan.mesh.axes))
        assert not isinstance(layout, str)
        # The gradient of what a style keeps whole, such as a norm of split heads, is partial on the axis tp.
        is_kept_whole = fqn in plan.plan and all(place == Replicate() for place in layout)
        split = None if is_kept_whole else _split(parameter, layout, plan.mesh)
        if split is None:
            stored[fqn] = layout
            continue
        owner = max((name for name in owners if fqn.startswith(f"{name}.")), key=len, default="")
        groups.setdefault(owner, []).append(fqn[len(owner) + 1 :] if owner else fqn)
        stored[fqn], compute[fqn] = split, layout
    keep = [
        name
        for key, style in fsdp_plan.items()
        if style == "keep_full_weight"
        for name in match_keys((key,), modules)[key]
        if name in groups
    ]
    return dataclasses.replace(
        plan,
        plan=stored,
        compute_plan=compute,
        gradient_plan={fqn: _accumulated(stored[fqn], plan.mesh) for fqn in compute},
        fully_shard={owner: tuple(names) for owner, names in groups.items()},
        keep_gathered=tuple(keep),
    )


def _accumulated(stored: Layout, mesh: PlanMesh) -> Layout:
    """Return the layout in which a gradient accumulates: replicas of the model add theirs once a step."""
    return tuple(Partial() if name == "dp_replicate" else place for name, place in zip(mesh.names, stored, strict=True))


def _split(parameter: nn.Parameter, layout: Layout, mesh: PlanMesh) -> Layout | None:
    """Return ``layout`` with the fsdp axis splitting the first dim that it divides and that no other axis splits."""
    axis = mesh.names.index("fsdp")
    taken = {sharded_dim(place) for place in layout}
    for dim in range(parameter.dim()):
        result = tuple(Shard(dim) if index == axis else place for index, place in enumerate(layout))
        if dim not in taken and divides(parameter.shape, result, mesh.shape):
            return result
    return None
