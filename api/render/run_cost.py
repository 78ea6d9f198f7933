"""`RunCost`: what a whole training run of a number of tokens takes, in days and at a price per device-hour."""

from __future__ import annotations

import math
from dataclasses import dataclass

from api.render.text import significant
from planner.errors import JobError
from planner.plan.sharding_plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """A training run that is to be priced.

    Attributes:
        tokens: tokens of the whole run.
        price: price of a device for an hour, in any currency; None: only the days are of interest.
    """

    tokens: float
    price: float | None = None

    @classmethod
    def of(cls, tokens: float | None, price: float | None) -> RunCost | None:
        """Return the run that ``--tokens`` and ``--price`` describe; None where neither is given.

        Raises:
            JobError: a number is not above 0, or a price has no tokens.
        """
        for name, value in (("tokens", tokens), ("price", price)):
            if value is not None and not 0 < value < math.inf:
                raise JobError(f"--{name} is {value}.", what_to_do="Give a number above 0.", field=name)
        if tokens is None and price is not None:
            advice = "Add the tokens of the whole run, such as --tokens 1e12."
            raise JobError("--price is for a run of --tokens.", what_to_do=advice, field="price")
        return None if tokens is None else cls(tokens=tokens, price=price)


def run_line(cost: RunCost, tokens_per_s: float, devices: int) -> tuple[str, str, str]:
    """Return (label, days, device-hours and price) of a run on ``devices`` devices that read ``tokens_per_s``."""
    seconds = cost.tokens / tokens_per_s
    hours = seconds / 3600 * devices
    price = "" if cost.price is None else f", {significant(hours * cost.price)} at {cost.price:g} an hour"
    return f"{cost.tokens:.3g} tokens", f"{significant(seconds / 86400)} days", f"{significant(hours)} device-hours{price}"


def run_cost_line(plan: ShardingPlan, cost: RunCost) -> tuple[str, str, str]:
    """Return (label, days, device-hours and price) of a training run with ``plan``.

    Raises:
        JobError: the plan has no price, or no tokens.
    """
    if plan.estimate is None or plan.job.batch is None or plan.estimate.step_time_s <= 0:
        raise JobError("--tokens needs a plan with a step time.", what_to_do="Price the plan: shardplan estimate.")
    items, unit = plan.job.items
    if unit != "tokens":
        raise JobError("--tokens is for models that read tokens.", what_to_do="Leave it out.", field="tokens")
    return run_line(cost, items / plan.estimate.step_time_s, plan.mesh.size)
