"""Checks of a plan against a module, a device mesh and Sharders. They raise before anything is changed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout, divides, format_layout, shard_counts, sharded_dim
from planner.errors import (
    EmptyPathError,
    KeyConflictError,
    PlanLayoutError,
    PlanMismatchError,
    PlanTypeError,
    UnmatchedKeyError,
)
from planner.imported.torch_shard import Sharder as TorchSharder
from planner.model_rewrites.experts.modules import experts_in
from planner.plan.fingerprint import model_fingerprint, torch_fingerprint
from planner.plan.patterns import match_keys
from planner.plan.sharding_plan import PlanMesh, ShardingPlan


def check_mesh(planned: PlanMesh, mesh: DeviceMesh) -> None:
    """Raise ``PlanMismatchError`` if ``mesh`` has other axes than ``planned``; axes of ``mesh`` may have no names."""
    names = mesh.mesh_dim_names
    shape = tuple(mesh.shape)
    if shape == planned.shape and names in (None, planned.names):
        return
    axes = names or tuple(f"axis{index}" for index in range(len(shape)))
    actual = ",".join(f"{name}={size}" for name, size in zip(axes, shape, strict=True))
    raise PlanMismatchError(
        f"The plan is for the mesh {planned}, but the device mesh is {actual}.",
        subject="mesh",
        expected=str(planned),
        found=actual,
        what_to_do=f"Use init_device_mesh(..., {planned.shape}, mesh_dim_names={planned.names}), or plan for {actual}.",
    )


def check_member(mesh: DeviceMesh) -> None:
    """Raise ``PlanMismatchError`` if this process is no rank of ``mesh``."""
    if mesh.get_coordinate() is not None:
        return
    ranks = ", ".join(map(str, mesh.mesh.flatten().tolist()))
    raise PlanMismatchError(
        f"Rank {dist.get_rank()} is not in the device mesh, which has the ranks {ranks}.",
        subject="mesh",
        expected=f"one of the ranks {ranks}",
        found=f"rank {dist.get_rank()}",
        what_to_do="Call this on the ranks of the mesh only, or make a mesh that has all ranks.",
    )


def check_source(mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Raise ``PlanMismatchError`` if an axis of ``mesh`` has no rank at the index ``src_data_rank``."""
    if src_data_rank is None or 0 <= src_data_rank < min(mesh.shape):
        return
    raise PlanMismatchError(
        f"src_data_rank is {src_data_rank}, an index along each axis of the mesh, whose sizes are {tuple(mesh.shape)}.",
        subject="src_data_rank",
        expected=f"0 to {min(mesh.shape) - 1}, or None",
        found=str(src_data_rank),
        what_to_do="Use 0, and read the weights on the first rank of the mesh.",
    )


def check_axis_names(planned: PlanMesh, mesh: DeviceMesh) -> None:
    """Raise ``PlanMismatchError`` if the axes of ``mesh`` have no names, which ``fully_shard`` needs."""
    if mesh.mesh_dim_names is not None:
        return
    raise PlanMismatchError(
        "The plan's fully_shard needs the names of the mesh's axes, but the device mesh has none.",
        subject="mesh",
        expected=str(planned),
        found="axes without names",
        what_to_do=f"Use init_device_mesh(..., mesh_dim_names={planned.names}).",
    )


def check_fingerprint(module: nn.Module, plan: ShardingPlan) -> None:
    """Raise ``PlanMismatchError`` if ``plan`` was made for another model, or with another version of torch."""
    current = {"torch": torch_fingerprint()}
    if "model" in plan.fingerprint:
        current["model"] = model_fingerprint(module)
    for subject, value in current.items():
        expected = plan.fingerprint.get(subject, value)
        if expected != value:
            raise PlanMismatchError(
                f"The plan was made for another {subject}: its fingerprint is {expected}, here it is {value}.",
                subject=subject,
                expected=expected,
                found=value,
                what_to_do=f"Plan again for this {subject}.",
            )


def check_sharders(plan: ShardingPlan, sharders: Mapping[str, TorchSharder]) -> None:
    """Check that ``sharders`` has every Sharder that ``plan`` names, and that none of them gets the root.

    Raises:
        EmptyPathError: the plan gives the root to a Sharder.
        UnmatchedKeyError: the plan names a Sharder that was not passed.
        PlanTypeError: an object in ``sharders`` is no Sharder.
    """
    for key, name in plan.plan.items():
        if not isinstance(name, str):
            continue
        if key == "":
            raise EmptyPathError(
                f"plan gives the root to the Sharder {name!r}, but the path of a Sharder's module must not be empty.",
                field="plan",
                key=key,
                what_to_do="Call the Sharder yourself, or give it a submodule's path.",
            )
        if name not in sharders:
            raise UnmatchedKeyError(
                f"plan gives {key!r} to the Sharder {name!r}, which was not passed.",
                field="plan",
                key=key,
                what_to_do=f"Pass sharders={{{name!r}: ...}}; passed are: {', '.join(sorted(sharders)) or 'none'}.",
            )
        if not isinstance(sharders[name], TorchSharder):
            raise PlanTypeError(
                f"sharders has {type(sharders[name]).__name__} for {name!r}, which is no Sharder.",
                field="sharders",
                key=name,
                what_to_do="Subclass executor.resolve.sharder.Sharder, and pass an instance.",
            )


def check_layouts(
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Mapping[str, Layout]],
    mesh: PlanMesh,
    *,
    may_be_uneven: Container[str] = (),
) -> None:
    """Raise ``PlanLayoutError`` if a layout does not divide its parameter evenly, where that is needed.

    Args:
        parameters: FQN -> parameter.
        layouts: field of the plan -> parameter FQN -> layout.
        mesh: the plan's mesh.
        may_be_uneven: FQNs of the parameters that may be sharded in uneven chunks, as ``torch.chunk`` makes them.
    """
    for field, by_name in layouts.items():
        for fqn, layout in by_name.items():
            parameter = parameters[fqn]
            if not divides(parameter.shape, layout, mesh.shape):
                if fqn in may_be_uneven and chunks(parameter.dim(), layout):
                    continue
                raise PlanLayoutError(
                    f"{field} gives {fqn!r} of shape {tuple(parameter.shape)} the layout "
                    f"({', '.join(format_layout(layout))}) on {mesh}, {_reason(parameter, layout, mesh)}.",
                    field=field,
                    key=fqn,
                    what_to_do="Shard another dim, or choose axis sizes that divide it.",
                )


def chunks(ndim: int, layout: Layout) -> bool:
    """Return whether ``layout`` of a tensor of ``ndim`` dims shards in chunks only, whose sizes may then differ."""
    dims = [sharded_dim(placement) for placement in layout]
    return all(
        dim is None or (dim < ndim and type(placement) is Shard) for dim, placement in zip(dims, layout, strict=True)
    )


def uneven_parameters(module: nn.Module, plan: ShardingPlan) -> frozenset[str]:
    """Return the FQNs of the parameters that ``plan`` may shard in uneven chunks.

    In plans that the planner wrote, these are all with a dim of its ``uneven_lengths``. In others, grouped experts, the
    fused ops and FSDP groups need equal shards.
    """
    if plan.solver is not None:
        named = module.named_parameters(remove_duplicate=False)
        return frozenset(fqn for fqn, parameter in named if set(plan.uneven_lengths) & set(parameter.shape))
    if plan.job.fused_ops:
        return frozenset()
    experts = {part.module for part in experts_in(module)}
    in_groups = {
        f"{fqn}.{name}" if fqn else name
        for key, names in plan.fully_shard.items()
        for fqn in match_keys((key,), dict(module.named_modules(remove_duplicate=False)))[key]
        for name in names
    }
    return frozenset(
        f"{fqn}.{name}" if fqn else name
        for fqn, part in module.named_modules(remove_duplicate=False)
        if part not in experts
        for name in part._parameters
        if (f"{fqn}.{name}" if fqn else name) not in in_groups
    )


def _reason(parameter: nn.Parameter, layout: Layout, mesh: PlanMesh) -> str:
    """Return the reason why ``layout`` does not divide ``parameter`` evenly, as part of a message."""
    missing = [dim for dim in map(sharded_dim, layout) if dim is not None and dim >= parameter.dim()]
    if missing:
        return f"but it has no dim {missing[0]}"
    counts = shard_counts(layout, mesh.shape, parameter.dim())
    dim = next(dim for dim, count in enumerate(counts) if parameter.shape[dim] % count)
    return f"but dim {dim} of size {parameter.shape[dim]} does not divide into {counts[dim]}"


def check_outside_sharders(
    field: str, names: Iterable[str], modules: Mapping[str, nn.Module], sharder_names: Mapping[str, str]
) -> None:
    """Raise ``KeyConflictError`` if one of ``names`` lies inside a module that a Sharder replaces.

    Args:
        field: field of the plan that has the names, for messages.
        names: FQNs of modules or parameters.
        modules: every name of every module -> the module.
        sharder_names: module FQN -> name of its Sharder.
    """
    if not sharder_names:
        return
    replaced = {modules[fqn]: fqn for fqn in sharder_names}
    # A module with several FQNs is replaced under all of them.
    aliases = {fqn: replaced[item] for fqn, item in modules.items() if item in replaced}
    for name in names:
        # Compare whole components: the Sharder of emb has nothing to do with emb2.weight.
        components = name.split(".")
        for length in range(1, len(components)):
            owner = aliases.get(".".join(components[:length]))
            if owner is None:
                continue
            raise KeyConflictError(
                f"{field} names {name!r}, but {owner!r} goes to the Sharder {sharder_names[owner]!r}: "
                "keys should not conflict with the submodule tree that a Sharder is working with.",
                field=field,
                key=name,
                other=owner,
                what_to_do="Keep one of the two; the Sharder lays out what is inside.",
            )
