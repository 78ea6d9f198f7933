"""What a plan says of how long modules keep what they gather together."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from planner.errors import KeyConflictError, PlanKeyError
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan


class ReshardAfter(enum.Enum):
    """How long a module keeps what it gathered: until its forward is over, its backward, or that of the last one.

    The value is the plan's field that names such modules. Kept for a step, parameters are gathered in the first
    micro-batch, and gradients add up unreduced until the last.
    """

    FORWARD = None
    BACKWARD = "keep_gathered"
    STEP = "keep_gathered_for_step"


def reshard_modes(plan: ShardingPlan, modules: Iterable[str]) -> dict[str, ReshardAfter]:
    """Return how long the modules keep what they gather that the plan says it of, by FQN, among ``modules``.

    Raises:
        UnmatchedKeyError: a key that matches nothing.
        PlanKeyError: a module that gathers nothing.
        KeyConflictError: a module of both fields.
    """
    names = list(modules)
    groups = resolve_keys(plan.fully_shard, names, field="fully_shard", what="module")
    found: dict[str, ReshardAfter] = {}
    for keeping in (ReshardAfter.BACKWARD, ReshardAfter.STEP):
        field = keeping.value
        keys = dict.fromkeys(getattr(plan, field), True)
        for module in resolve_keys(keys, names, field=field, what="module"):
            if module not in groups:
                raise PlanKeyError(
                    f"{field} names {module!r}, for which fully_shard gathers nothing.",
                    field=field,
                    key=module,
                    what_to_do="Name modules of fully_shard only.",
                )
            if module in found:
                raise KeyConflictError(
                    f"{found[module].value} and {field} both name {module!r}.",
                    field=field,
                    key=module,
                    other=module,
                    what_to_do="Name it in one of them.",
                )
            found[module] = keeping
    return found
