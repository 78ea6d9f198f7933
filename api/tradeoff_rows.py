"""What a plan costs beside others, on one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from api.models import quiet_libraries
from planner.errors import JobError
from planner.tradeoffs import Objective, best_size, pareto_front, peak_bytes, runner_ups, sizes, step_time_s

if TYPE_CHECKING:
    from api.planning import OpenedRequest
    from planner.plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffRow:
    """A plan among others.

    Attributes:
        cluster: what it is for.
        devices: of the cluster.
        plan: None where none fits, or none was found in time.
        in_time: whether there was time enough to tell.
        is_best: whether it is the one that was asked for.
        price: of a step, in the currency of the price of a device-hour; None without one.
    """

    cluster: str
    devices: int
    plan: ShardingPlan | None
    in_time: bool = True
    is_best: bool = False
    price: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values; what a plan says is null where there is none."""
        plan = self.plan
        found: dict[str, Any] = dict.fromkeys(("mesh", "micro_batches", "ac", "step_time_s", "peak_memory_bytes"))
        found |= dict.fromkeys(("device_s", "gap", "status"))
        if plan is not None and plan.solver is not None:
            found = {
                "mesh": str(plan.mesh),
                "micro_batches": plan.micro_batches,
                "ac": plan.job.ac,
                "step_time_s": step_time_s(plan),
                "peak_memory_bytes": peak_bytes(plan),
                "device_s": step_time_s(plan) * self.devices,
                "gap": plan.solver.gap,
                "status": plan.solver.status,
            }
        head = {"cluster": self.cluster, "devices": self.devices, "fits": plan is not None if self.in_time else None}
        return {**head, **found, "price": self.price, "best": self.is_best}


def _row(plan: ShardingPlan, opened: OpenedRequest, *, is_best: bool) -> TradeoffRow:
    cluster = opened.cluster
    return TradeoffRow(cluster=cluster.name, devices=cluster.size, plan=opened.noted(plan), is_best=is_best)


@quiet_libraries()
def runner_up_rows(opened: OpenedRequest, count: int, time_limit_s: float | None) -> list[TradeoffRow]:
    """Return the best plan and those of the ``count`` meshes that come next."""
    session = opened.session(time_limit_s=time_limit_s)
    best = session.plan()
    others = runner_ups(session, best, count)
    return [_row(plan, opened, is_best=plan is best) for plan in (best, *others)]


@quiet_libraries()
def pareto_rows(opened: OpenedRequest, mesh: str | None, time_limit_s: float | None) -> list[TradeoffRow]:
    """Return the front of step time against memory, the fastest plan first."""
    front = pareto_front(opened.session(time_limit_s=time_limit_s), mesh=mesh)
    return [_row(plan, opened, is_best=plan is front[0]) for plan in front]


@quiet_libraries()
def size_rows(
    opened: OpenedRequest,
    objective: Objective,
    *,
    within_s: float | None,
    price: float | None,
    time_limit_s: float | None,
) -> list[TradeoffRow]:
    """Return the best plan of each size of the cluster, and which is the best for ``objective``.

    Raises:
        JobError: a limit or a price is not above 0.
    """
    for name, value in (("within", within_s), ("price", price)):
        if value is not None and not 0 < value < float("inf"):
            raise JobError(f"--{name} is {value}.", what_to_do="Give a number above 0, or none.", field=name)
    found = sizes(opened.model, cluster=opened.cluster, time_limit_s=time_limit_s, **opened.job)
    best = best_size(found, objective, within_s=within_s)
    return [
        TradeoffRow(
            cluster=size.cluster.name,
            devices=size.cluster.size,
            plan=None if size.plan is None else opened.noted(size.plan),
            in_time=size.in_time,
            is_best=size is best,
            price=None if price is None or size.plan is None else size.device_s / 3600 * price,
        )
        for size in found
    ]
