"""Sharders: ways to split a module that no table of layouts can say, as in ``torch.distributed._shard.sharder``."""

from __future__ import annotations

import abc
from collections.abc import Mapping

from torch import nn

from planner.errors import PlanTypeError
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan


class Sharder(abc.ABC):
    """Something that replaces a module by a sharded one.

    A plan names a Sharder (``plan={"ebc": "bags"}``), and the caller says which one that is:
    ``shard_module(module, mesh, plan, sharders={"bags": BagSharder(mesh)})``. So a plan file stays data.
    """

    @abc.abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the module that takes the place of ``module``; it may be ``module`` itself, changed."""


def sharder_paths(module: nn.Module, plan: ShardingPlan) -> dict[str, str]:
    """Return module FQN -> name of its Sharder, for every module that the plan gives to one.

    Raises:
        PlanKeyError: a key matches no module, or two keys disagree.
    """
    entries = {key: value for key, value in plan.plan.items() if isinstance(value, str)}
    names = [fqn for fqn, _ in module.named_modules(remove_duplicate=False)]
    return resolve_keys(entries, names, field="plan", what="module")


def apply_sharders(module: nn.Module, plan: ShardingPlan, sharders: Mapping[str, Sharder]) -> frozenset[nn.Module]:
    """Replace, in place, every submodule that the plan gives to a Sharder, and return what took their places.

    ``check_plan`` must have passed, and ``place_parameters`` have run: afterwards keys could match what a Sharder put
    into the tree. A submodule that is registered under several names stays one module under all of them.

    Raises:
        PlanTypeError: a Sharder returned something else than a module; nothing has been replaced.
    """
    originals: dict[nn.Module, str] = {}
    for fqn, name in sharder_paths(module, plan).items():
        originals.setdefault(module.get_submodule(fqn), name)
    replacements: dict[nn.Module, nn.Module] = {}
    for original, name in originals.items():
        replacement = sharders[name].shard(original)
        if not isinstance(replacement, nn.Module):
            raise PlanTypeError(
                f"Sharder {name!r} returned {type(replacement).__name__}, not a module.",
                field="plan",
                key=name,
                what_to_do="Return the sharded nn.Module from Sharder.shard().",
            )
        replacements[original] = replacement
    for parent in list(module.modules()):
        for child_name, child in list(parent._modules.items()):
            if child in replacements:
                parent.register_module(child_name, replacements[child])
    return frozenset(replacements.values())
