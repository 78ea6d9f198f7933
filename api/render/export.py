"""What an exported configuration says of a plan, as a table."""

from __future__ import annotations

from rich.console import Console

from api.frameworks.export import TORCH, Exported
from api.render.plan import print_lines
from api.render.text import duration, fold, percent, table
from planner.plan.sharding_plan import ShardingPlan


def show_rows(exported: Exported, plan: ShardingPlan, step_s: float | None, console: Console) -> None:
    """Print the table; ``step_s``: seconds of a step under the configuration, None: not known."""
    print_lines(row_lines(exported, plan, step_s), console)


def row_lines(exported: Exported, plan: ShardingPlan, step_s: float | None) -> list[str]:
    """Return the table as lines of at most 80 columns, and what to do where the plan is not expressed in full."""
    heads = ((f"In {exported.title}", "", ""),)
    lines = table([*heads, *((f"  {row.field}", row.outcome, row.detail) for row in exported.rows)], "<<<", indent="")
    if exported.loses_nothing:
        return [*lines, "", *fold("Nothing of the plan is lost.")]
    lines += ["", *fold(_cost(exported, plan, step_s))]
    if exported.framework != TORCH or exported.has_loss:
        lines += fold(f"`shardplan plan ... --for {exported.framework}` plans within what it can say.")
    return lines


def _cost(exported: Exported, plan: ShardingPlan, step_s: float | None) -> str:
    if exported.framework == TORCH and exported.groups_otherwise:
        return "The script gathers the same weights in fewer collectives: a step takes about as long, or less."
    planned_s = None if plan.estimate is None else plan.estimate.step_time_s
    if step_s is None or planned_s is None:
        return "What that costs is not known: the configuration's layouts are no plan that is priced op by op."
    share = step_s / planned_s - 1
    change = f"{percent(abs(share))} {'more' if share > 0 else 'less'}"
    return f"By our estimate a step takes {duration(step_s)} in place of {duration(planned_s)}: {change}."
