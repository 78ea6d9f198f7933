"""Sharders: user code that shards a module where layouts cannot say how, as in ``torch.distributed._shard.sharder``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from planner.errors import PlanTypeError
from planner.imported.torch_shard import Sharder as TorchSharder


class Sharder(TorchSharder):
    """User code that replaces a module with a sharded one.

    A plan refers to a Sharder by name (``plan={"ebc": "bags"}``), so that plan files contain no code. The caller passes
    it: ``shard_module(module, mesh, plan, sharders={"bags": BagSharder(mesh)})``. In a plan that is not saved, the
    Sharder itself may stand for its name, as in torch; torch's own Sharders are accepted in both places.

    A subclass defines ``shard(module)``, which returns the module that takes the place of ``module``; it may be
    ``module`` itself, changed.
    """


def apply_sharders(module: nn.Module, sharders: Mapping[str, TorchSharder]) -> frozenset[nn.Module]:
    """Replace submodules of ``module`` in place, and return the replacements.

    A submodule that is registered under several names is replaced by one module under all of them.

    Args:
        module: the root.
        sharders: FQN of a submodule -> the Sharder that replaces it.

    Raises:
        PlanTypeError: a Sharder returned something other than a module; nothing has been replaced.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for fqn, sharder in sharders.items():
        original = module.get_submodule(fqn)
        if original in replacements:
            continue
        replacement = sharder.shard(original)
        if not isinstance(replacement, nn.Module):
            raise PlanTypeError(
                f"The Sharder {type(sharder).__name__} of {fqn!r} returned {type(replacement).__name__}, not a module.",
                field="plan",
                key=fqn,
                what_to_do="Return the sharded nn.Module from Sharder.shard().",
            )
        replacements[original] = replacement
    for parent in list(module.modules()):
        for child_name, child in list(parent._modules.items()):
            if child in replacements:
                parent.register_module(child_name, replacements[child])
    return frozenset(replacements.values())
