"""Tables that compare plans, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from api.render.text import duration, new_table, size
from api.render.tradeoff_rows import TradeoffRow
from planner.plan.sharding_plan import ShardingPlan
from planner.tradeoffs import peak_bytes, step_time_s


def show_tradeoffs(rows: Sequence[TradeoffRow], console: Console) -> None:
    """Print a line for each plan; ``*`` marks the best one."""
    clusters = len({row.cluster for row in rows}) > 1
    priced = any(row.price is not None for row in rows)
    per_device = _rate_name(rows)
    inference = any(row.batch is not None for row in rows)
    pieces = ["Batch>", "Mesh"] if inference else ["Mesh", "Micro-batches>", "Checkpointing"]
    columns = ["#>", "", *(["Cluster"] if clusters else []), *pieces, "Step>"]
    columns += ["Peak memory>", f"{per_device}>", "Device time>", *(["Price>"] if priced else []), "Gap>"]
    table = new_table(*columns)
    for number, row in enumerate(rows, 1):
        lead = [str(number), "*" if row.is_best else "", *([row.cluster] if clusters else [])]
        lead += [str(row.batch)] if inference else []
        if row.plan is None:
            table.add_row(*lead, "nothing fits" if row.in_time else "time was up")
            continue
        plan, step_s = row.plan, step_time_s(row.plan)
        cells = [str(plan.mesh), *([] if inference else [str(plan.micro_batches), plan.job.ac or "none"])]
        cells += [duration(step_s), size(peak_bytes(plan)), _rate(row), duration(step_s * row.devices)]
        cells += [f"{row.price:.4g}"] if priced and row.price is not None else []
        table.add_row(*lead, *cells, _gap(plan), style="bold" if row.is_best else None)
    console.print(table)
    if not any(row.is_best for row in rows):
        console.print("None of these is what was asked for.")
    for note in dict.fromkeys(note for row in rows if row.plan is not None for note in row.plan.notes):
        console.print(Text(f"Note: {note}"))


def _rate_name(rows: Sequence[TradeoffRow]) -> str:
    has_tokens = any(row.plan is not None and row.plan.job.seq is not None for row in rows)
    return "Tokens/s per device" if has_tokens else "Samples/s per device"


def _rate(row: TradeoffRow) -> str:
    rate = row.items_per_s or 0.0
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _gap(plan: ShardingPlan) -> str:
    if plan.solver is None or plan.solver.gap is None:
        return ""
    return f"{math.ceil(plan.solver.gap * 1e4) / 1e4:.2%}"
