"""The models and the hand-written plans of drawn training loops: any model under any plan that it has."""

from __future__ import annotations

from collections.abc import Callable

from support.executor_cases import (
    LLAMA_BLOCKS,
    Case,
    data_parallel,
    fully_sharded,
    make_model,
    megatron,
    replicated_on_tp,
    reshard_after_backward,
    reshard_after_step,
    with_fsdp_groups,
)
from support.fsdp_cases import MLP, reduced_on_tp_afterwards
from torch import nn

FAMILIES = ("mlp", "llama", "gpt2", "bert", "t5", "vit", "mixtral", "deepseek")
"""Models of drawn loops. None has a buffer that a forward writes, or dropout: add those here."""


def groups_of(family: str) -> dict[str, tuple[str, ...]]:
    """Return an FSDP group for each block: its matrices."""
    if family == "mlp":
        return MLP
    groups: dict[str, tuple[str, ...]] = {}
    for fqn, module in make_model(family).named_modules():
        if isinstance(module, nn.ModuleList) and not any(fqn.startswith(f"{block}.") for block in groups):
            for index, block in enumerate(module):
                groups[f"{fqn}.{index}"] = tuple(name for name, p in block.named_parameters() if p.ndim == 2)
    return {block: names for block, names in groups.items() if names}


def grouped(family: str, micro_batches: int) -> Case:
    return with_fsdp_groups(replicated_on_tp(family, micro_batches=micro_batches), groups_of(family))


def over_both_axes(family: str, micro_batches: int) -> Case:
    return with_fsdp_groups(data_parallel(family, micro_batches=micro_batches), groups_of(family), 0, 1)


def reduced_afterwards(family: str, micro_batches: int) -> Case:
    groups = with_fsdp_groups(data_parallel(family, micro_batches=micro_batches), groups_of(family))
    return reduced_on_tp_afterwards(groups)


PLANS: dict[str, Callable[[str, int], Case]] = {
    "data parallel": lambda family, n: data_parallel(family, micro_batches=n),
    "sharded, no groups": lambda family, n: fully_sharded(family, micro_batches=n),
    "groups": grouped,
    "groups, until backward": lambda family, n: reshard_after_backward(grouped(family, n)),
    "groups, for the step": lambda family, n: reshard_after_step(grouped(family, n)),
    "groups over both axes": over_both_axes,
    "groups over both axes, for the step": lambda family, n: reshard_after_step(over_both_axes(family, n)),
    "groups, reduced on tp afterwards": reduced_afterwards,
    "groups, for the step, reduced on tp afterwards": lambda family, n: reshard_after_step(
        reduced_afterwards(family, n)
    ),
    "megatron": lambda family, n: megatron(vocabulary=True, fsdp=True, micro_batches=n),
    "megatron, groups for the step, full AC": lambda family, n: reshard_after_step(
        with_fsdp_groups(megatron(micro_batches=n, activation_checkpointing={"model.layers.*": "full"}), LLAMA_BLOCKS)
    ),
}


def plans_of(family: str) -> list[str]:
    """Return the names of the plans that ``family`` has."""
    return [name for name in PLANS if family == "llama" or not name.startswith("megatron")]
