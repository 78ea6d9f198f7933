"""`shortened_copy`: a copy of a module on meta with fewer of its equal blocks, which keep their names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from planner.graph.capture import to_meta
from planner.verification.block_runs import BlockRun, position_offsets

Kept = Mapping[str, Sequence[int]]
"""FQN of a list of blocks -> positions of the blocks that are kept, ascending."""


def shortened_copy(module: nn.Module, groups: Mapping[BlockRun, int]) -> nn.Module:
    """Return a copy of ``module`` on meta with fewer blocks; ``module`` is not changed.

    Blocks keep their FQNs, so that the patterns of a plan match them as before. Integers that count positions, and the
    configs that modules refer to (number of layers, kind of each layer), are those of a model with the blocks that are
    kept.

    Args:
        module: a module on any device.
        groups: run of equal blocks -> number of its groups that are kept: its first ones.
    """
    kept = _kept_positions(module, groups)
    lists = {fqn: module.get_submodule(fqn) for fqn in kept}
    names = {fqn: [list(lists[fqn]._modules)[position] for position in kept[fqn]] for fqn in kept}
    only = {lists[fqn]: names[fqn] for fqn in kept}
    shortened = to_meta(module, None, only=only, copies=_shortened_configs(module, kept))
    for fqn in kept:
        offsets = position_offsets(list(lists[fqn].children()))
        for position, name in enumerate(names[fqn]):
            block = shortened.get_submodule(f"{fqn}.{name}" if fqn else name)
            modules = dict(block.named_modules())
            for (path, attribute), offset in offsets.items():
                if path in modules and attribute in modules[path].__dict__:
                    modules[path].__dict__[attribute] = position + offset
    return shortened


def _kept_positions(module: nn.Module, groups: Mapping[BlockRun, int]) -> dict[str, list[int]]:
    dropped: dict[str, set[int]] = {}
    for run, count in groups.items():
        leaving_out = set(run.positions(run.groups)) - set(run.positions(count))
        dropped[run.fqn] = dropped.get(run.fqn, set()) | leaving_out
    return {
        fqn: [position for position, _ in enumerate(module.get_submodule(fqn).children()) if position not in left_out]
        for fqn, left_out in dropped.items()
    }


def _shortened_configs(module: nn.Module, kept: Kept) -> dict[int, Any]:
    """Return ``id`` of each config in ``module`` -> a copy for the blocks that are kept.

    In a config, integers with "layer" in their name that are the length of a list of blocks become the number of blocks
    that are kept, and lists and tuples of that length keep the entries of these blocks. Of several lists of that length
    in the module that has the config, the first counts.
    """
    configs: dict[int, tuple[Any, str]] = {}
    for fqn, submodule in module.named_modules():
        for value in vars(submodule).values():
            _add_configs(value, fqn, configs)
    copies = {identity: copy.copy(config) for identity, (config, _) in configs.items()}
    for identity, (config, owner) in configs.items():
        prefix = f"{owner}." if owner else ""
        by_length = {
            len(list(module.get_submodule(fqn).children())): positions
            for fqn, positions in reversed(list(kept.items()))
            if fqn.startswith(prefix)
        }
        values = vars(copies[identity])
        for name, value in vars(config).items():
            if id(value) in copies:
                values[name] = copies[id(value)]
            elif type(value) is int and "layer" in name and value in by_length:
                values[name] = len(by_length[value])
            elif type(value) in (list, tuple) and len(value) in by_length:
                values[name] = type(value)(value[position] for position in by_length[len(value)])
    return copies


def _add_configs(value: Any, owner: str, configs: dict[int, tuple[Any, str]]) -> None:
    """Add ``value`` to ``configs`` if it is a config (its class has a name that ends in "Config"), and those in it."""
    is_config = type(value).__name__.endswith("Config") and hasattr(value, "__dict__")
    if is_config and id(value) not in configs:
        configs[id(value)] = (value, owner)
        for inner in vars(value).values():
            _add_configs(inner, owner, configs)
