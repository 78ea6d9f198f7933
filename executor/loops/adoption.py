"""A sharded module is told to take whole batches from a loop; what the loop must not do is refused."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from executor.runtime.root.sharded_root import root_of
from planner.errors import LoopError


def take_whole_batches(module: nn.Module) -> nn.Module:
    """Return the sharded module in ``module``, which takes the same whole batch from every rank from now on.

    Where a result has a loss, the loss is whole and plain, and other tensors stay DTensors: the logits of a global
    batch may be too large for one rank.

    Args:
        module: the result of ``shard_module``, which may be wrapped, by peft for instance.

    Raises:
        PlanMismatchError: ``module`` is not sharded.
        LoopError: the plan's mesh does not have all ranks of the process group.
    """
    sharded, root = root_of(module)
    size = root.redistributor.device_mesh.size()
    if size != dist.get_world_size():
        raise LoopError(
            f"The plan runs on {size} ranks, but the process group has {dist.get_world_size()}.",
            what_to_do="Start as many processes as the plan has devices.",
        )
    root.form.is_whole = root.form.keeps_logits_sharded = True
    return sharded


def refuse_mixed_precision(mixed_precision: str, dtype: str, *, option: str) -> None:
    """Raise an error if a loop is about to cast what the plan casts itself.

    Args:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        dtype: dtype of the plan's job.
        option: how the user turns it off.

    Raises:
        LoopError: ``mixed_precision`` is not "no".
    """
    if mixed_precision != "no":
        raise LoopError(
            f"The loop would run in {mixed_precision} by autocast, but the plan says what is computed in which dtype: "
            f"{dtype}, with its own casts.",
            what_to_do=f"{option}, and plan for dtype={mixed_precision!r} if that is what you want.",
        )
