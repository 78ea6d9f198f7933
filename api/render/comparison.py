"""What a plan is compared with: the plans that people write by hand, the fastest plan, and the lower bound."""

from __future__ import annotations

import math

from api.render.run_cost import cluster_of
from api.render.text import duration, fold, percent, significant, size, table
from planner.plan.estimate import BaselinePrice, Estimate, Perturbation, SolverReport
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.stated_errors import stated_error

NAMES = {"ddp": "DDP", "fsdp": "FSDP", "hsdp": "HSDP", "fsdp-tp": "FSDP x TP", "tp": "TP"}
"""Name of a baseline in a plan -> its name in text."""

_ASSUMED: dict[Perturbation, str] = {
    "slow-communication": "with communication 1.3 times as slow",
    "exposed-communication": "with a fifth of the overlapped communication exposed",
    "slow-kernels": "with kernels 10 % slower",
}
_EQUAL = 5e-4
"""Relative difference below which two step times are printed as equal."""


def comparison_lines(plan: ShardingPlan) -> list[str]:
    """Return the table "Compared with" as lines; none where no baseline was priced."""
    if not plan.baselines or plan.estimate is None:
        return []
    estimate = plan.estimate
    same = next((price for price in plan.baselines if _is_same(price, plan, estimate)), None)
    name = "  this plan" if same is None else f"  this plan ({_name(same)})"
    rows = [("Compared with", "", "step", "memory", "")]
    rows.append((name, str(plan.mesh), duration(estimate.step_time_s), size(estimate.peak_memory_bytes), ""))
    rows += [_row(price, plan, estimate.step_time_s) for price in plan.baselines if price is not same]
    return table(rows, "<<>><", indent="")


def _is_same(price: BaselinePrice, plan: ShardingPlan, estimate: Estimate) -> bool:
    """Return whether a baseline is the plan itself: its mesh, seconds and bytes are the plan's."""
    figures = (price.mesh, price.step_time_s, price.peak_memory_bytes)
    return figures == (str(plan.mesh), estimate.step_time_s, estimate.peak_memory_bytes)


def _name(price: BaselinePrice) -> str:
    return NAMES.get(price.name, price.name)


def _row(price: BaselinePrice, plan: ShardingPlan, step_s: float) -> tuple[str, str, str, str, str]:
    memory = "-" if price.peak_memory_bytes is None else size(price.peak_memory_bytes)
    time = "-" if price.step_time_s is None else duration(price.step_time_s)
    return f"  {_name(price)}", price.mesh, time, memory, _verdict(price, plan, step_s)


def baseline_verdict(price: BaselinePrice, plan: ShardingPlan) -> str:
    """Return how a baseline compares with a plan: that it is the plan itself, slower by so much, or does not fit."""
    if plan.estimate is None:
        return ""
    if _is_same(price, plan, plan.estimate):
        return "this plan"
    return _verdict(price, plan, plan.estimate.step_time_s)


def _verdict(price: BaselinePrice, plan: ShardingPlan, step_s: float) -> str:
    if price.step_time_s is not None:
        return _difference(price.step_time_s, plan, step_s)
    if price.peak_memory_bytes is None:
        return "the model has no such plan here"
    return f"does not fit, needs {size(price.peak_memory_bytes)}"


def _difference(other_s: float, plan: ShardingPlan, step_s: float) -> str:
    """Return how much slower or faster a plan of ``other_s`` seconds is, and whether the model can tell."""
    relative = other_s / step_s - 1 if step_s > 0 else 0.0
    if abs(relative) < _EQUAL:
        return "as fast"
    share = significant(100 * abs(relative), 1 if abs(relative) < 0.095 else 2)
    text = f"{share} % {'slower' if relative > 0 else 'faster'}"
    stated = stated_error(plan, cluster_of(plan))
    within = stated is not None and abs(relative) <= stated.error
    return f"{text}: within the model's error" if within else text


def optimality_lines(plan: ShardingPlan) -> list[str]:
    """Return sentences on how far the plan can be from the best; none for a plan that no planner wrote."""
    if plan.solver is None:
        return []
    step_s = plan.solver.objective_s if plan.estimate is None else plan.estimate.step_time_s
    return fold(" ".join(filter(None, (_bound(plan.solver, step_s), _fastest(plan.solver)))))


def _bound(solver: SolverReport, step_s: float | None) -> str:
    if solver.status == "given":
        return f"Not optimised: the planner {solver.name} drew it."
    if solver.bound_s is None or not step_s:
        return "No bound was proven: nothing says how far the plan is from the best."
    space = "the search space" if solver.name in ("ilp", "HiGHS") else f"the planner {solver.name}"
    if solver.gap is None:
        return (
            f"Faster than every plan of {space} that checkpoints all blocks alike: they take at least "
            f"{duration(solver.bound_s)}. No bound was proven for others."
        )
    gap = max(step_s - solver.bound_s, 0.0) / step_s
    within = f"{math.ceil(round(1000 * gap, 3)) / 10:.1f} %"
    bound = f"no plan of {space} takes less than {duration(solver.bound_s)}."
    if solver.status == "time-limit":
        return f"Time was up: the plan is at most {within} from the best, as {bound}"
    return f"Optimal{'' if within == '0.0 %' else f' within {within}'}: {bound}"


def _fastest(solver: SolverReport) -> str:
    if solver.fastest_s is None:
        return ""
    where = "" if solver.fastest_mesh is None else f" on {solver.fastest_mesh}"
    found = f"The fastest found takes {duration(solver.fastest_s)}{where};"
    if solver.loses_under is None:
        return f"{found} this one is simpler."
    return f"{found} {_ASSUMED[solver.loses_under]} it is slower than this one."


def gap_text(solver: SolverReport) -> str:
    """Return the gap as percent, rounded up; "" where no bound was proven."""
    return "" if solver.gap is None else percent(math.ceil(round(solver.gap * 1e4, 6)) / 1e4)
