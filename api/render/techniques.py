"""The techniques of a plan, and what each gives, as lines of text."""

from __future__ import annotations

from planner.plan.sharding_plan import ShardingPlan
from planner.plan.techniques import TechniqueGain


def technique_lines(plan: ShardingPlan) -> list[str]:
    """Return a heading and a line for each technique of ``plan``; no lines where it has none."""
    if not plan.techniques:
        return []
    width = max(len(technique.name) for technique in plan.techniques)
    step_s = None if plan.estimate is None else plan.estimate.step_time_s
    return ["Techniques", *(f"  {item.name:<{width}}  {_gain(item, step_s)}" for item in plan.techniques)]


def _gain(technique: TechniqueGain, step_s: float | None) -> str:
    if technique.gain_s is None:
        return "gain not measured"
    share = "" if not step_s else f" ({technique.gain_s / step_s:.1%})"
    return f"without it a step takes {_seconds(technique.gain_s)}{share} longer"


def _seconds(seconds: float) -> str:
    """Return ``seconds`` with three significant digits, in s, ms or µs."""
    for unit, length_s in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
