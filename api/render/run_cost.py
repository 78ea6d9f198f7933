"""What a whole training run takes, as text: days, device-hours, and the price at a price per device-hour."""

from __future__ import annotations

from api.render.text import significant
from api.requests.run_cost import RunCost
from cost_model import ClusterError, ClusterSpec
from planner.errors import JobError
from planner.plan.sharding_plan import ShardingPlan


def cluster_of(plan: ShardingPlan) -> ClusterSpec | None:
    """Return the cluster that the plan's estimate is for; None: the plan names none, or one that cannot be read."""
    try:
        return ClusterSpec.from_dict(plan.cluster) if plan.cluster else None
    except ClusterError:
        return None


def device_word(cluster: ClusterSpec | None) -> str:
    """Return "GPU", or "device" for what is none."""
    return "GPU" if cluster is not None and cluster.device.kind != "cpu" else "device"


def run_line(cost: RunCost, tokens_per_s: float, cluster: ClusterSpec) -> tuple[str, str, str]:
    """Return (label, days, device-hours and price) of a run on a cluster that reads ``tokens_per_s``."""
    seconds = cost.tokens / tokens_per_s
    hours = seconds / 3600 * cluster.size
    label = f"{cost.tokens:.3g} tokens".replace("e+", "e")
    days, spent = f"{significant(seconds / 86400)} days", f"{significant(hours)} {device_word(cluster)}-hours"
    if cost.price is not None:
        spent += f", {significant(hours * cost.price)} at {cost.price:g} each"
    return label, days, spent


def run_cost_line(plan: ShardingPlan, cost: RunCost) -> tuple[str, str, str]:
    """Return (label, days, device-hours and price) of a training run with ``plan``.

    Raises:
        JobError: the plan has no price, or no tokens.
    """
    cluster = cluster_of(plan)
    if cluster is None or plan.estimate is None or plan.job.batch is None or plan.estimate.step_time_s <= 0:
        raise JobError("--tokens needs a plan with a step time.", what_to_do="Price the plan: shardplan estimate.")
    items, unit = plan.job.items
    if unit != "tokens":
        raise JobError("--tokens is for models that read tokens.", what_to_do="Leave it out.", field="tokens")
    return run_line(cost, items / plan.estimate.step_time_s, cluster)
