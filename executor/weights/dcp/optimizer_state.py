"""State of an optimizer in a checkpoint: tensors of a parameter's shape, other values, and options of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from executor.torch_internals.dtensor import like_dtensor, local_of, spec_of
from executor.weights.dcp.opened_state import OpenedState
from executor.weights.dcp.shards import for_dcp
from executor.weights.lazy_tensors import LazyTensor, full_indices, read_into
from executor.weights.local_shards import local_indices
from executor.weights.matching import values_of
from executor.weights.targets import Target
from planner.errors import WeightsError


def _targets_by_parameter(optimizer: Optimizer, targets: list[Target]) -> dict[torch.Tensor, Target]:
    """Return parameter -> target for the parameters of ``optimizer``.

    Raises:
        WeightsError: the optimizer has parameters that the module does not have.
    """
    by_id = {id(target.tensor): target for target in targets}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in parameters if id(parameter) not in by_id]
    if foreign:
        raise WeightsError(
            f"{len(foreign)} of the optimizer's {len(parameters)} parameters are not the module's.",
            what_to_do="Make the optimizer of the sharded module's parameters, after shard_module.",
        )
    return {parameter: by_id[id(parameter)] for parameter in parameters}


def optimizer_contents(
    optimizer: Optimizer, targets: list[Target]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the optimizer's tensors and other values, by name of the parameter and key, and its groups."""
    by_parameter = _targets_by_parameter(optimizer, targets)
    tensors: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, target in by_parameter.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_like(value, parameter, key):
                tensors.setdefault(target.names[0], {})[key] = for_dcp(value)
            elif isinstance(value, DTensor):
                raise WeightsError(
                    f"The optimizer's state {key!r} of {target.names[0]!r} is a DTensor of shape {tuple(value.shape)}, "
                    f"not of the parameter's shape {tuple(parameter.shape)}.",
                    what_to_do="Save with torch.distributed.checkpoint, and resume under the same plan.",
                )
            else:
                values.setdefault(target.names[0], {})[key] = _plain(value)
    groups = [
        {
            "options": {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")},
            "names": [name for p in group["params"] for name in by_parameter[p].unfused_names],
        }
        for group in optimizer.param_groups
    ]
    return tensors, values, groups


def _is_like(value: Any, parameter: torch.Tensor, key: str) -> bool:
    """Return whether ``value`` is a tensor of the parameter's shape and layout; a step counter never is."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and isinstance(value, DTensor) == isinstance(parameter, DTensor)
        and not (key == "step" and value.dim() == 0)
    )


def _plain(value: Any) -> Any:
    """Return ``value``, on the CPU if it is a tensor."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def options_of_groups(optimizer: Optimizer, targets: list[Target], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved options for each group of ``optimizer``, found by the parameters that it has.

    Raises:
        WeightsError: a group whose parameters were in several groups, or in none.
    """
    by_parameter = _targets_by_parameter(optimizer, targets)
    group_of = {name: number for number, group in enumerate(saved) for name in group["names"]}
    options = []
    for number, group in enumerate(optimizer.param_groups):
        names = [name for parameter in group["params"] for name in by_parameter[parameter].unfused_names]
        if not names:
            # A group without parameters, as a Trainer makes for those without weight decay.
            options.append(saved[number]["options"] if number < len(saved) else {})
            continue
        found = {group_of.get(name) for name in names}
        if len(found) != 1 or None in found:
            raise WeightsError(
                f"The parameters of group {number} of the optimizer, {names[0]!r} and {len(names) - 1} more, were in "
                f"{len(found - {None})} groups of the saved optimizer.",
                what_to_do="Make the optimizer with the groups of the run that wrote the state.",
            )
        options.append(saved[next(number for number in found if number is not None)]["options"])
    return options


@torch.no_grad()
def fill_optimizer(optimizer: Optimizer, targets: list[Target], opened: OpenedState) -> None:
    """Put the saved states and options into ``optimizer``."""
    by_parameter = _targets_by_parameter(optimizer, targets)
    values = opened.values()
    for group, options in zip(
        optimizer.param_groups, options_of_groups(optimizer, targets, opened.other["groups"]), strict=True
    ):
        group.update(options)
    tensors_by_key = {key: opened.of_key(key) for key in opened.keys()}  # noqa: SIM118  a method, not a mapping
    for parameter, target in by_parameter.items():
        state: dict[str, Any] = {}
        for key, value in values.get(
            next((n for n in target.names if n in values), target.unfused_names[0]), {}
        ).items():
            state[key] = (
                value.clone().to(_device_of(value, parameter, group)) if isinstance(value, torch.Tensor) else value
            )
        for key, tensors in tensors_by_key.items():
            _, found = values_of(target, tensors)
            if found:
                state[key] = _read_like(parameter, found[0])
        if state:
            optimizer.state[parameter] = state


def _device_of(value: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    """Return the device of a state that is not of its parameter's shape; torch keeps step counters on the CPU."""
    on_parameter = value.dim() > 0 or group.get("fused") or group.get("capturable")
    return parameter.device if on_parameter else torch.device("cpu")


def _read_like(parameter: torch.Tensor, tensor: LazyTensor) -> torch.Tensor:
    """Return ``tensor`` in the layout of ``parameter``."""
    if not isinstance(parameter, DTensor):
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=parameter.device)
        read_into(values, tensor, full_indices(tensor.shape))
        return values
    local = torch.empty_like(local_of(parameter), dtype=tensor.dtype)
    read_into(local, tensor, local_indices(parameter))
    return like_dtensor(local, _spec_in(parameter, tensor.dtype))


def _spec_in(parameter: DTensor, dtype: torch.dtype) -> Any:
    """Return the mesh, layout and shape of ``parameter``, for a tensor of ``dtype``."""
    spec = spec_of(parameter)
    assert spec.tensor_meta is not None
    return dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
