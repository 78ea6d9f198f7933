"""Module boundaries of plans written by hand: layouts alone, as in torch's and HyperParallel's plans.

A port that says where its tensor comes from, or pins its gradient's layout, belongs to a plan that the planner made
and is left to ``executor.shard``. Here a plain tensor is this rank's piece of the layout, a DTensor is redistributed
to it, and the gradient takes the way back that autograd gives it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cost_model.layout import Layout
from planner.errors import PlanTypeError, UnmatchedKeyError
from planner.patterns import resolve_keys
from planner.plan import Port, PortSpec, ShardingPlan
from planner.ports import ports_of, resolve_input_ports, resolve_output_ports

Tree = Any
"""Nested tuples, lists, dicts and dataclasses that pytree knows, with tensors among their leaves."""


def is_plain(port: Port) -> bool:
    """Tell whether the port gives a layout and nothing else."""
    return port.grad is None and port.source is None and port.source_grad is None


def to_layout(tensor: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Return ``tensor`` in ``layout``: a plain one is taken as this rank's piece of it, a DTensor is redistributed."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, layout)
    return DTensor.from_local(tensor, mesh, layout)


def module_fqns(module: nn.Module, *, opaque: Collection[nn.Module] = ()) -> list[str]:
    """Return every name of every submodule, "" for the root first; what is inside an ``opaque`` module has none."""
    named = dict(module.named_modules(remove_duplicate=False))
    hidden = [f"{fqn}." for fqn, submodule in named.items() if submodule in opaque]
    return [fqn for fqn in named if not any(fqn.startswith(prefix) for prefix in hidden)]


def apply_boundaries(
    module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, opaque: Collection[nn.Module] = ()
) -> None:
    """Hook every module that ``input_plan`` or ``output_plan`` gives layouts to. ``check_plan`` must have passed.

    ``opaque`` are the modules that Sharders made: no key was meant for what is inside them.
    """
    names = module_fqns(module, opaque=opaque)
    for submodule, spec in _by_module(module, resolve_input_ports(plan.input_plan, names)).items():
        ports = _plain_ports(spec)
        if ports:
            submodule.register_forward_pre_hook(_input_hook(ports, mesh, parameter_names(submodule)), with_kwargs=True)
    for submodule, spec in _by_module(module, resolve_output_ports(plan.output_plan, names)).items():
        ports = _plain_ports(spec)
        if ports:
            submodule.register_forward_hook(_output_hook(ports, mesh))


def apply_local_outputs(module: nn.Module, plan: ShardingPlan, *, opaque: Collection[nn.Module] = ()) -> None:
    """Hook every module in ``return_local_tensor``: the DTensors that it returns become plain pieces, one per rank.

    Call it after all other hooks on outputs, so that it sees what they leave. Unlike torch's, a piece keeps all its
    dims, also those of size 1: otherwise its shape would depend on the number of ranks. The piece of a partial tensor
    is this rank's addend; give the module an ``output_plan`` to have it summed first.
    """
    names = dict.fromkeys(plan.return_local_tensor, True)
    chosen = resolve_keys(names, module_fqns(module, opaque=opaque), field="return_local_tensor", what="module")
    for submodule in {module.get_submodule(fqn): None for fqn in chosen}:
        submodule.register_forward_hook(_local_output_hook)


def _local_output_hook(module: nn.Module, args: tuple[Any, ...], output: Tree) -> Tree:
    return pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), output)


def _by_module(module: nn.Module, specs: Mapping[str, PortSpec]) -> dict[nn.Module, PortSpec]:
    # A module with two names must not be hooked twice.
    return {module.get_submodule(fqn): spec for fqn, spec in specs.items()}


def _plain_ports(spec: PortSpec) -> dict[str, Port]:
    return {name: port for name, port in ports_of(spec) if is_plain(port)}


def _input_hook(
    ports: Mapping[str, Port], mesh: DeviceMesh, names: list[str]
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "" in ports:
            # A single port is for the first argument, whichever way it is passed.
            first = "0" if args else next(iter(kwargs), "0")
            return _redistributed((args, kwargs), {first: ports[""]}, mesh, names)
        return _redistributed((args, kwargs), ports, mesh, names)

    return hook


def _output_hook(ports: Mapping[str, Port], mesh: DeviceMesh) -> Callable[..., Tree]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tree) -> Tree:
        if "" not in ports:
            return _redistributed_output(output, ports, mesh)
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if len(tensors) != 1:
            raise PlanTypeError(
                f"output_plan gives {type(module).__name__} one layout, but it returned {len(tensors)} tensors.",
                field="output_plan",
                what_to_do="Give a list with a layout or None for each, or a dict by name.",
            )
        only = ports[""].layout
        return pytree.tree_map_only(torch.Tensor, lambda tensor: to_layout(tensor, mesh, only), output)

    return hook


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of ``module.forward`` that may be passed by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, item in inspect.signature(module.forward).parameters.items() if item.kind in kinds]


def path_text(path: tuple[Any, ...]) -> str:
    """Return a pytree path as the plan writes it: keys, indices and attribute names joined by dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _redistributed(
    inputs: tuple[tuple[Any, ...], dict[str, Any]], ports: Mapping[str, Port], mesh: DeviceMesh, names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) with each tensor that a port names in that port's layout, by position or by keyword."""
    met: set[str] = set()

    def change(path: tuple[Any, ...], leaf: Any) -> Any:
        first, *rest = (path_text((key,)) for key in path[1:])
        aliases = [first]
        if path[0] == pytree.SequenceKey(0) and int(first) < len(names):
            aliases.append(names[int(first)])
        elif first in names:
            aliases.append(str(names.index(first)))
        spellings = [".".join((alias, *rest)) for alias in aliases]
        return _changed(leaf, spellings, ports, mesh, met)

    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_with_path(change, inputs)
    return changed


def _redistributed_output(output: Tree, ports: Mapping[str, Port], mesh: DeviceMesh) -> Tree:
    met: set[str] = set()

    def change(path: tuple[Any, ...], leaf: Any) -> Any:
        # A lone tensor is also the first of a list.
        return _changed(leaf, [path_text(path) or "0"], ports, mesh, met)

    changed = pytree.tree_map_with_path(change, output)
    missed = sorted(set(ports) - met)
    if missed:
        raise UnmatchedKeyError(
            f"output_plan names the results {missed}, but the module returned none of those names.",
            field="output_plan",
            key=missed[0],
            what_to_do="Name results by position (0, 1, ...) or by their key.",
        )
    return changed


def _changed(leaf: Any, spellings: list[str], ports: Mapping[str, Port], mesh: DeviceMesh, met: set[str]) -> Any:
    for name in spellings:
        if name not in ports:
            continue
        met.add(name)
        if leaf is None:
            # An optional argument that was not given.
            return None
        if not isinstance(leaf, torch.Tensor):
            raise PlanTypeError(
                f"The plan gives {name!r} a layout, but it is {type(leaf).__name__}, not a tensor.",
                key=name,
                what_to_do="Remove that layout, or write None in its place in a list.",
            )
        return to_layout(leaf, mesh, ports[name].layout)
    return leaf
