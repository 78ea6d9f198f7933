"""`ReshardAfter`: when the parameters of each FSDP group of a plan are resharded."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from planner.errors import KeyConflictError, PlanKeyError
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan


class ReshardAfter(enum.Enum):
    """When the parameters of an FSDP group are resharded: after the forward, the backward, or the last backward.

    The value is the plan's field that names such modules. With ``STEP``, parameters are all-gathered in the first
    micro-batch of a step, and gradients accumulate unreduced until the last micro-batch.
    """

    FORWARD = None
    BACKWARD = "keep_gathered"
    STEP = "keep_gathered_for_step"


def reshard_modes(plan: ShardingPlan, modules: Iterable[str], fsdp_modules: Collection[str]) -> dict[str, ReshardAfter]:
    """Return module FQN -> when it reshards, for the modules that do not reshard after the forward.

    Args:
        plan: the plan, of which only ``keep_gathered`` and ``keep_gathered_for_step`` are read.
        modules: FQNs of all modules.
        fsdp_modules: FQNs of the modules in ``fully_shard``.

    Raises:
        UnmatchedKeyError: a key matches nothing.
        PlanKeyError: a module is not in ``fully_shard``.
        KeyConflictError: a module is in both fields.
    """
    names = list(modules)
    modes: dict[str, ReshardAfter] = {}
    for mode in (ReshardAfter.BACKWARD, ReshardAfter.STEP):
        field = mode.value
        keys = dict.fromkeys(getattr(plan, field), True)
        for module in resolve_keys(keys, names, field=field, what="module"):
            if module not in fsdp_modules:
                raise PlanKeyError(
                    f"{field} names {module!r}, for which fully_shard gathers nothing.",
                    field=field,
                    key=module,
                    what_to_do="Name modules of fully_shard only.",
                )
            if module in modes:
                raise KeyConflictError(
                    f"{modes[module].value} and {field} both name {module!r}.",
                    field=field,
                    key=module,
                    other=module,
                    what_to_do="Name it in one of them.",
                )
            modes[module] = mode
    return modes
