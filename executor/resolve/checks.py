"""Everything that can be wrong between a plan, a module and a mesh, found before anything is touched."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import Layout, divides, format_layout, shard_counts, sharded_dim
from executor.resolve.fqns import module_fqns
from executor.resolve.fsdp_groups import gather_groups
from executor.resolve.place_parameters import parameter_layouts, stored_layouts
from executor.resolve.sharder import Sharder, sharder_paths
from executor.resolve.token_order import order_places
from planner.errors import (
    EmptyPathError,
    KeyConflictError,
    PlanLayoutError,
    PlanMismatchError,
    PlanTypeError,
    UnmatchedKeyError,
)
from planner.plan.fingerprint import model_fingerprint, torch_fingerprint
from planner.plan.patterns import resolve_keys
from planner.plan.ports import ports_of, resolve_input_ports, resolve_output_ports
from planner.plan.sharding_plan import PlanMesh, ShardingPlan


def check_plan(
    module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, sharders: Mapping[str, Sharder] | None = None
) -> None:
    """Raise the error that says why ``plan`` cannot be applied to ``module`` on ``mesh``; return where it can.

    Args:
        module: as it was planned: not yet sharded or wrapped.
        mesh: of the ranks that will run it. Its device type may differ: a plan for GPUs can be tried on CPUs.
        plan: machine-made or written by hand.
        sharders: by the names that the plan uses.

    Raises:
        PlanError: the plan has a pipeline, or assumes overlap that is not run.
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
    _check_mesh(plan.mesh, mesh)
    _check_sharders(plan, {} if sharders is None else sharders)
    paths = sharder_paths(module, plan)
    names = module_fqns(module)
    inputs = resolve_input_ports(plan.input_plan, names)
    outputs = resolve_output_ports(plan.output_plan, names)
    locals_ = dict.fromkeys(plan.return_local_tensor, True)
    local = resolve_keys(locals_, names, field="return_local_tensor", what="module")
    modes = resolve_keys(plan.activation_checkpointing, names, field="activation_checkpointing", what="module")
    _check_parameters(module, plan)
    for fqn, dims in order_places(module, plan)[0].items():
        _check_argument_names(module.get_submodule(fqn), fqn, dims, field="even_order")
    groups = gather_groups(module, plan)
    if groups and mesh.mesh_dim_names is None:
        raise _nameless(plan.mesh)
    _check_fingerprint(module, plan)
    stored = {key: value for key, value in plan.plan.items() if not isinstance(value, str)}
    fields: dict[str, Iterable[str]] = {
        "plan": [*_planned_parameters(module, stored, "plan"), *paths],
        "compute_plan": _uses(module, plan.compute_plan, "compute_plan"),
        "gradient_plan": _uses(module, plan.gradient_plan, "gradient_plan"),
        "fully_shard": (member.fqn for group in groups for member in group.members),
        "input_plan": inputs,
        "output_plan": outputs,
        "return_local_tensor": local,
        "activation_checkpointing": modes,
    }
    _check_sharder_trees(module, paths, fields)
    for fqn, spec in inputs.items():
        names_of = [name for name, _ in ports_of(spec)]
        _check_argument_names(module.get_submodule(fqn), fqn, names_of, field="input_plan")


def _check_mesh(planned: PlanMesh, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names
    shape = tuple(mesh.shape)
    if shape == planned.shape and names in (None, planned.names):
        return
    axes = names or tuple(f"axis{index}" for index in range(len(shape)))
    found = ",".join(f"{name}={size}" for name, size in zip(axes, shape, strict=True))
    raise PlanMismatchError(
        f"The plan is for the mesh {planned}, but the device mesh is {found}.",
        subject="mesh",
        expected=str(planned),
        found=found,
        what_to_do=f"Use init_device_mesh(..., {planned.shape}, mesh_dim_names={planned.names}), or plan for {found}.",
    )


def _nameless(planned: PlanMesh) -> PlanMismatchError:
    return PlanMismatchError(
        "The plan's fully_shard needs the names of the mesh's axes, but the device mesh has none.",
        subject="mesh",
        expected=str(planned),
        found="axes without names",
        what_to_do=f"Use init_device_mesh(..., mesh_dim_names={planned.names}).",
    )


def _check_fingerprint(module: nn.Module, plan: ShardingPlan) -> None:
    found = {"torch": torch_fingerprint()}
    if "model" in plan.fingerprint:
        found["model"] = model_fingerprint(module)
    for subject, value in found.items():
        expected = plan.fingerprint.get(subject, value)
        if expected != value:
            raise PlanMismatchError(
                f"The plan was made for another {subject}: its fingerprint is {expected}, here it is {value}.",
                subject=subject,
                expected=expected,
                found=value,
                what_to_do=f"Plan again for this {subject}.",
            )


def _check_sharders(plan: ShardingPlan, sharders: Mapping[str, Sharder]) -> None:
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
        if not isinstance(sharders[name], Sharder):
            raise PlanTypeError(
                f"sharders has {type(sharders[name]).__name__} for {name!r}, which is no Sharder.",
                field="sharders",
                key=name,
                what_to_do="Subclass executor.resolve.sharder.Sharder, and pass an instance.",
            )


def _check_parameters(module: nn.Module, plan: ShardingPlan) -> None:
    names = {parameter: fqn for fqn, parameter in module.named_parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    stored = {names[parameter]: layout for parameter, layout in stored_layouts(module, plan).items()}
    for field, layouts in (
        ("plan", stored),
        ("compute_plan", _uses(module, plan.compute_plan, "compute_plan")),
        ("gradient_plan", _uses(module, plan.gradient_plan, "gradient_plan")),
    ):
        for fqn, layout in layouts.items():
            parameter = parameters[fqn]
            if isinstance(parameter, DTensor):
                raise PlanMismatchError(
                    f"{fqn!r} is a DTensor already.",
                    subject="module",
                    expected="plain parameters",
                    found="DTensor",
                    what_to_do="Apply one plan, once, to a plain module.",
                )
            if not divides(parameter.shape, layout, plan.mesh.shape):
                raise PlanLayoutError(
                    f"{field} gives {fqn!r} of shape {tuple(parameter.shape)} the layout "
                    f"({', '.join(format_layout(layout))}) on {plan.mesh}, {_why_not(parameter, layout, plan)}.",
                    field=field,
                    key=fqn,
                    what_to_do="Shard another dim, or choose axis sizes that divide it.",
                )


def _why_not(parameter: nn.Parameter, layout: Layout, plan: ShardingPlan) -> str:
    beyond = [dim for dim in map(sharded_dim, layout) if dim is not None and dim >= parameter.dim()]
    if beyond:
        return f"but it has no dim {beyond[0]}"
    counts = shard_counts(layout, plan.mesh.shape, parameter.dim())
    dim = next(dim for dim, count in enumerate(counts) if parameter.shape[dim] % count)
    return f"but dim {dim} of size {parameter.shape[dim]} does not divide into {counts[dim]}"


def _uses(module: nn.Module, entries: Mapping[str, Layout], field: str) -> dict[str, Layout]:
    """Return FQN -> layout; a tied parameter is used by each of its names, and may be computed differently by each."""
    names = [fqn for fqn, _ in module.named_parameters(remove_duplicate=False)]
    return resolve_keys(entries, names, field=field, what="parameter")


def _planned_parameters(module: nn.Module, entries: Mapping[str, Layout], field: str) -> Iterator[str]:
    """Yield every name of every parameter that ``entries`` name, so that ties into a Sharder's tree are seen."""
    planned = parameter_layouts(module, entries, field=field)
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in planned:
            yield fqn


def _check_sharder_trees(module: nn.Module, paths: Mapping[str, str], fields: Mapping[str, Iterable[str]]) -> None:
    replaced = {module.get_submodule(fqn): fqn for fqn in paths}
    # A shared module is replaced under all its names.
    aliases = {fqn: replaced[item] for fqn, item in module.named_modules(remove_duplicate=False) if item in replaced}
    for field, names in fields.items():
        for name in names:
            # By component: the Sharder of emb has nothing to do with emb2.weight.
            components = name.split(".")
            for length in range(1, len(components)):
                owner = aliases.get(".".join(components[:length]))
                if owner is None:
                    continue
                raise KeyConflictError(
                    f"{field} names {name!r}, but {owner!r} goes to the Sharder {paths[owner]!r}: "
                    "keys should not conflict with the submodule tree that a Sharder is working with.",
                    field=field,
                    key=name,
                    other=owner,
                    what_to_do="Keep one of the two; what is inside, the Sharder lays out itself.",
                )


def _check_argument_names(module: nn.Module, fqn: str, names: Iterable[str], *, field: str) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(item.kind in (item.VAR_KEYWORD, item.VAR_POSITIONAL) for item in parameters):
        return
    known = [item.name for item in parameters]
    for name in names:
        first = name.partition(".")[0]
        if first in known or first == "" or (first.isdigit() and int(first) < len(known)):
            continue
        raise UnmatchedKeyError(
            f"{field} names the argument {name!r} of {fqn or 'the root'!r}; its forward takes {', '.join(known)}.",
            field=field,
            key=name,
            what_to_do="Name arguments by position (0, 1, ...) or as forward does.",
        )
