"""A checked configuration as text of 80 columns: legal, fits, how fast, and what would be better."""

from __future__ import annotations

from rich.console import Console

from api.frameworks.changes import Change
from api.frameworks.check import Check
from api.render.configuration import figure_lines, memory_bars
from api.render.plan import print_lines
from api.render.text import duration, fold, labelled, percent, size, table
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.stated_errors import stated_configuration_error


def show_check(check: Check, console: Console) -> None:
    """Print a check."""
    print_lines(check_lines(check), console)


def check_lines(check: Check) -> list[str]:
    """Return a check as lines of at most 80 columns."""
    if check.faults:
        parts = [_headline(check), _faults(check)]
    else:
        parts = [_headline(check), _answers(check), _memory(check), _changes(check), _plans(check)]
    parts.append(_remarks(check))
    return [line for part in parts if part for line in (*part, "")][:-1]


def _headline(check: Check) -> list[str]:
    cluster, launch, framework = check.cluster, check.launch, check.framework
    nodes = f" ({cluster.nodes} nodes of {cluster.devices_per_node})" if cluster.nodes > 1 else ""
    lines = fold(f"{check.model} on {cluster.size:,} x {cluster.device.name.upper()}{nodes}")
    step = f"{launch.phase}, {launch.global_batch:,} x {check.seq:,} tokens a step, {launch.dtype}"
    return lines + fold(f"{step}, launched with {framework.title} {framework.version}")


def _faults(check: Check) -> list[str]:
    count = len(check.faults)
    lines = labelled("legal", f"no: {count} {'faults' if count > 1 else 'fault'}")
    return lines + [line for fault in check.faults for line in fold(fault, "  - ", "    ")]


def _answers(check: Check) -> list[str]:
    lines = labelled("legal", "yes")
    if check.priced is None:
        unknown = f"not known: {check.no_plan or 'serving is priced as a plan, without --quick'}"
        fits = unknown if check.fits is None else "yes" if check.fits else f"no: {check.no_plan}"
        return lines + labelled("fits", fits)
    missing = check.priced.memory.device - check.cluster.memory_bytes
    lines += labelled("fits", "yes" if check.fits else f"no: {size(missing)} are missing on each device")
    most = check.largest_micro_batch
    most_text = "none, all else equal" if most is None else f"{most:,}"
    lines += labelled("micro-batch", f"{check.launch.micro_batch:,}", f"the largest that fits: {most_text}")
    return lines + figure_lines(check.priced)


def _memory(check: Check) -> list[str]:
    return [] if check.priced is None else memory_bars(check.priced)


def _changes(check: Check) -> list[str]:
    """Return the table of the changes that help most, and of the best configuration."""
    if check.priced is None:
        return []
    title = check.framework.title
    if not check.changes and check.best is None:
        if not check.fits:
            return fold(f"No change of {title}'s configuration was found that fits.")
        return fold(f"No change of {title}'s configuration was found that saves 1 % or more.")
    changes = list(check.changes)
    if check.best is not None and all(check.best.launch != change.launch for change in changes):
        changes.append(check.best)
    rows = [("What would help" if check.fits else "What would fit", "step", "memory")]
    rows += [
        (
            f"  {'the best found' if change is check.best else ''}{_gain(check, change)}",
            duration(change.priced.time.total_s),
            size(change.priced.memory.device),
        )
        for change in changes
    ]
    first, *heads = table(rows, "<>>", indent="")
    lines = [first]
    for head, change in zip(heads, changes, strict=True):
        lines += [head, *(line for text in change.texts for line in fold(text, "    ", "      "))]
    return lines


def _gain(check: Check, change: Change) -> str:
    if change.gain is None or check.priced is None:
        return "" if change is check.best else "by this change:"
    experts = check.priced.spec.experts is not None
    stated = stated_configuration_error(check.cluster, check.launch.dtype, has_experts=experts)
    text = f"{', ' if change is check.best else ''}{percent(change.gain)} less"
    return f"{text}, within the model's error" if stated is not None and change.gain < stated.error else text


def _plans(check: Check) -> list[str]:
    """Return the table of the two plans: of the same layouts, and the best of the job."""
    if check.plan is None and check.best_plan is None and not check.no_plan:
        return []
    rows = [("As plans, priced op by op", "", "step", "memory")]
    if check.plan is not None:
        rows.append(("  these layouts", *_plan_cells(check.plan)))
    if check.best_plan is not None:
        rows.append(("  best plan", *_plan_cells(check.best_plan)))
    lines = table(rows, "<<>>", indent="")
    if check.plan is None and check.no_plan:
        lines += fold(f"These layouts: {check.no_plan.rstrip('.')}.", "  ")
    if check.difference:
        lines += fold(f"The two prices of these layouts differ by 10 % or more, {check.difference}.", "  ")
    return lines


def _plan_cells(plan: ShardingPlan) -> tuple[str, str, str]:
    estimate, micro_batches = plan.estimate, plan.micro_batches
    ac = "" if plan.job.ac in (None, "none") else f", {plan.job.ac} AC"
    how = f"{plan.mesh}, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}{ac}"
    if estimate is None:
        return how, "-", "-"
    return how, duration(estimate.step_time_s), size(estimate.peak_memory_bytes)


def _remarks(check: Check) -> list[str]:
    lines = [line for text in check.assumed for line in fold(text, "assumed: ")]
    if check.unpriced:
        lines += fold(f"not priced: {', '.join(check.unpriced)}")
    return lines
