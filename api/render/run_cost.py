"""What a whole training run takes, as text: days, device-hours, and the price at a price per device-hour."""

from __future__ import annotations

from api.render.text import significant
from api.requests.run_cost import RunCost
from planner.errors import JobError
from planner.plan.sharding_plan import ShardingPlan


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
