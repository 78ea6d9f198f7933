"""Module boundaries: ports, token order and local results of the modules that a plan names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from planner.errors import UnmatchedKeyError
from planner.plan.patterns import match_keys, resolve_keys
from planner.plan.ports import Port, ports_of, resolve_input_ports, resolve_output_ports
from planner.plan.sharding_plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """What hooks do to tensors that enter or leave modules. Modules are named by FQN, "" for the root.

    The name of an argument is its position or keyword; "" is the first argument. The name of a result is its position
    or key; "" is the only tensor. Dots lead into nested tuples, lists and dicts.

    Attributes:
        inputs: module -> argument -> port.
        outputs: module -> result -> port.
        zigzag_inputs: module -> argument -> dim along which its tokens are brought into zigzag order.
        zigzag_outputs: module -> result -> dim along which its tokens are brought into zigzag order.
        local_outputs: modules whose results become plain local tensors.
    """

    inputs: Mapping[str, Mapping[str, Port]]
    outputs: Mapping[str, Mapping[str, Port]]
    zigzag_inputs: Mapping[str, Mapping[str, int]]
    zigzag_outputs: Mapping[str, Mapping[str, int]]
    local_outputs: tuple[str, ...]


def resolve_boundaries(plan: ShardingPlan, modules: Mapping[str, nn.Module]) -> Boundaries:
    """Return the boundaries of ``plan``.

    Args:
        plan: a plan that has passed ``validate``.
        modules: every name of every module -> the module.

    Raises:
        PlanKeyError: a key that names no module or argument, two keys that disagree, or a key without ``.input``.
    """
    inputs = resolve_input_ports(plan.input_plan, modules)
    outputs = resolve_output_ports(plan.output_plan, modules)
    zigzag_inputs: Mapping[str, Mapping[str, int]] = {}
    zigzag_outputs: Mapping[str, Mapping[str, int]] = {}
    if plan.zigzag is not None:
        zigzag_inputs = resolve_input_ports(plan.zigzag.inputs, modules, field="zigzag")
        zigzag_outputs = resolve_output_ports(plan.zigzag.outputs, modules, field="zigzag")
    local = {_returning_module(key, modules): True for key in plan.return_local_tensor}
    boundaries = Boundaries(
        inputs={fqn: dict(ports_of(spec)) for fqn, spec in inputs.items()},
        outputs={fqn: dict(ports_of(spec)) for fqn, spec in outputs.items()},
        zigzag_inputs=zigzag_inputs,
        zigzag_outputs=zigzag_outputs,
        local_outputs=tuple(resolve_keys(local, modules, field="return_local_tensor", what="module")),
    )
    for fqn, ports in boundaries.inputs.items():
        _check_argument_names(modules[fqn], fqn, ports, field="input_plan")
    for fqn, dims in boundaries.zigzag_inputs.items():
        _check_argument_names(modules[fqn], fqn, dims, field="zigzag")
    return boundaries


def _returning_module(key: str, modules: Iterable[str]) -> str:
    """Return the key of a module whose results become local tensors; its ".output", which means the same, is dropped.

    A key that matches a module as it is means that module.
    """
    module, _, suffix = key.rpartition(".")
    return module if suffix == "output" and not match_keys((key,), modules)[key] else key


def _check_argument_names(module: nn.Module, fqn: str, names: Iterable[str], *, field: str) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(item.kind in (item.VAR_KEYWORD, item.VAR_POSITIONAL) for item in parameters):
        return
    argument_names = [item.name for item in parameters]
    for name in names:
        first = name.partition(".")[0]
        if first in argument_names or first == "" or (first.isdigit() and int(first) < len(argument_names)):
            continue
        raise UnmatchedKeyError(
            f"{field} names the argument {name!r} of {fqn or 'the root'!r}; "
            f"its forward takes {', '.join(argument_names)}.",
            field=field,
            key=name,
            what_to_do="Name arguments by position (0, 1, ...) or as forward does.",
        )
