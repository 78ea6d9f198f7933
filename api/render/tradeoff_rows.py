"""Rows that compare plans: of alternatives, a Pareto front, a sweep over device counts, and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from api.requests.model_registry import quiet_libraries
from planner.errors import JobError
from planner.tradeoffs import (
    Objective,
    alternatives,
    batches,
    best_batch,
    best_size,
    pareto_front,
    peak_bytes,
    step_time_s,
    sweep,
)

if TYPE_CHECKING:
    from api.requests.plan_request import OpenedRequest
    from planner.plan.sharding_plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffRow:
    """One plan in a comparison.

    Attributes:
        cluster: name of the plan's cluster.
        devices: number of the cluster's devices.
        plan: the plan; None where none fits, or where none was found in time.
        in_time: whether the search found a plan, or proved that none fits, within its time limit.
        is_best: whether the plan is the best one by the request's objective.
        price: price of a step, in the currency of the device-hour's price; None without that price or without a plan.
        batch: samples of the global batch, where batches are compared; else None.
    """

    cluster: str
    devices: int
    plan: ShardingPlan | None
    in_time: bool = True
    is_best: bool = False
    price: float | None = None
    batch: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data; without a plan, the figures of the plan are null."""
        plan = self.plan
        figures: dict[str, Any] = dict.fromkeys(("mesh", "micro_batches", "ac", "step_time_s", "peak_memory_bytes"))
        figures |= dict.fromkeys(("device_s", "gap", "status"))
        if plan is not None and plan.solver is not None:
            figures = {
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
        compared = {} if self.batch is None else {"batch": self.batch, "items_per_s_per_device": self.items_per_s}
        return {**head, **compared, **figures, "price": self.price, "best": self.is_best}

    @property
    def items_per_s(self) -> float | None:
        """Tokens (or samples) per second and device; None without a plan."""
        return None if self.plan is None else self.plan.job.items[0] / step_time_s(self.plan) / self.devices


def _row(plan: ShardingPlan, request: OpenedRequest, *, is_best: bool) -> TradeoffRow:
    cluster = request.cluster
    return TradeoffRow(cluster=cluster.name, devices=cluster.size, plan=request.noted(plan), is_best=is_best)


@quiet_libraries()
def alternative_rows(request: OpenedRequest, count: int, time_limit_s: float | None) -> list[TradeoffRow]:
    """Return rows of the best plan and of the best plans on the ``count`` next best meshes."""
    session = request.session(time_limit_s=time_limit_s)
    best = session.plan()
    other_plans = alternatives(session, best, count)
    return [_row(plan, request, is_best=plan is best) for plan in (best, *other_plans)]


@quiet_libraries()
def pareto_rows(request: OpenedRequest, mesh: str | None, time_limit_s: float | None) -> list[TradeoffRow]:
    """Return rows of the Pareto front of step time and peak memory, the fastest plan first."""
    front = pareto_front(request.session(time_limit_s=time_limit_s), mesh=mesh)
    return [_row(plan, request, is_best=plan is front[0]) for plan in front]


@quiet_libraries()
def batch_rows(
    request: OpenedRequest, mesh: str | None, *, most: int, within_s: float | None, time_limit_s: float | None
) -> list[TradeoffRow]:
    """Return a row for each batch, with its fastest plan; the best row has the most tokens per second.

    Args:
        request: the request, for prefill or decode.
        mesh: the mesh of all plans; None: each search chooses.
        most: largest batch in samples.
        within_s: most seconds of the best plan's step; None: no limit.
        time_limit_s: seconds for each search; None: no limit.

    Raises:
        JobError: ``within_s`` is not above 0, the phase is training, or the model brings its own example inputs.
    """
    _check_limits(within=within_s)
    if request.example_inputs is not None:
        advice = "Name a preset or a Hugging Face config."
        raise JobError("batches are compared for models whose config tells their inputs.", what_to_do=advice)
    spec = dataclasses.replace(request.spec, mesh=mesh, micro_batches=None, ac=None, time_limit_s=time_limit_s)
    sizes = batches(request.model, spec=spec, tp_plan=request.tp_plan, most=most, progress=request.progress)
    best = best_batch(sizes, within_s=within_s)
    cluster = request.cluster
    return [
        TradeoffRow(
            cluster=cluster.name,
            devices=cluster.size,
            plan=None if size.plan is None else request.noted(size.plan),
            in_time=size.in_time,
            is_best=size is best,
            batch=size.batch,
        )
        for size in sizes
    ]


def _check_limits(**limits: float | None) -> None:
    for name, value in limits.items():
        if value is not None and not 0 < value < float("inf"):
            raise JobError(f"--{name} is {value}.", what_to_do="Give a number above 0, or none.", field=name)


@quiet_libraries()
def sweep_rows(
    request: OpenedRequest,
    objective: Objective,
    *,
    within_s: float | None,
    price: float | None,
    time_limit_s: float | None,
    counts: Sequence[int] | None = None,
) -> list[TradeoffRow]:
    """Return a row for each number of devices, with its fastest plan; the best row is the best by ``objective``.

    Args:
        request: the request, with the largest cluster.
        objective: what makes a row the best.
        within_s: most seconds of the best plan's step; None: no limit.
        price: price of a device for an hour; None: no prices.
        time_limit_s: seconds for each search; None: no limit.
        counts: numbers of devices; None: 1, 2, 4, ... and the whole cluster.

    Raises:
        JobError: a number of devices is none of the cluster, or ``within_s`` or ``price`` is not above 0.
    """
    _check_limits(within=within_s, price=price)
    sizes = sweep(
        request.model,
        spec=dataclasses.replace(request.spec, time_limit_s=time_limit_s),
        example_inputs=request.example_inputs,
        tp_plan=request.tp_plan,
        progress=request.progress,
        counts=counts,
    )
    best = best_size(sizes, objective, within_s=within_s)
    return [
        TradeoffRow(
            cluster=size.cluster.name,
            devices=size.cluster.size,
            plan=None if size.plan is None else request.noted(size.plan),
            in_time=size.in_time,
            is_best=size is best,
            price=None if price is None or size.plan is None else size.device_s / 3600 * price,
        )
        for size in sizes
    ]
