"""What a plan says of the modules that keep what they gather from forward to backward."""

from __future__ import annotations

from collections.abc import Iterable

from planner.errors import PlanKeyError
from planner.patterns import resolve_keys
from planner.plan import ShardingPlan


def kept_modules(plan: ShardingPlan, modules: Iterable[str]) -> frozenset[str]:
    """Return the FQNs of the modules that ``keep_gathered`` names, among ``modules``.

    Raises:
        UnmatchedKeyError: a key that matches nothing.
        PlanKeyError: a module that gathers nothing.
    """
    names = list(modules)
    kept = resolve_keys(dict.fromkeys(plan.keep_gathered, True), names, field="keep_gathered", what="module")
    groups = resolve_keys(plan.fully_shard, names, field="fully_shard", what="module")
    for module in kept:
        if module not in groups:
            raise PlanKeyError(
                f"keep_gathered names {module!r}, for which fully_shard gathers nothing.",
                field="keep_gathered",
                key=module,
                what_to_do="Name modules of fully_shard only.",
            )
    return frozenset(kept)
