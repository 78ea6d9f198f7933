"""What it costs to plan within a framework: each dense preset on 8 and 64 H100s, for each set of baselines.

    python -m covered.frameworks [--presets gpt2,llama-3.1-8b] [--clusters 1x8xh100-sxm-80gb] [--output FILE.md]

A plan made ``--for`` a framework is exported, and has to lose nothing. The table has the step time of the best plan of
the search, how much longer a step takes within what the frameworks can say, and what a torch script approximates.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.frameworks.export import TORCH, export_plan, plan_within, planners_of
from api.frameworks.expressed import Row as ExportRow
from api.frameworks.registry import NAMES
from api.requests.model_registry import load_model, quiet_libraries
from planner.build import build_plan
from planner.errors import InfeasibleError, PlannerError
from planner.plan.sharding_plan import ShardingPlan

PRESETS = (
    *("gpt2", "bert-large", "t5-large", "vit-large", "mistral-7b", "qwen3-8b"),
    *("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"),
)
CLUSTERS = ("1x8xh100-sxm-80gb", "8x8xh100-sxm-80gb")
SEQ = {"gpt2": 1024, "bert-large": 512, "t5-large": 512, "vit-large": None}
SAMPLES_PER_DEVICE = 4
FRAMEWORKS = tuple(name for name in NAMES if name != "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One preset on one cluster.

    Attributes:
        best_s: seconds of a step under the best plan; None: none fits.
        within: planners of a set of frameworks -> (baseline, mesh, seconds of a step); None: none of them fits.
        losses: what an export of such a plan does not express; of a torch script, what it loses. It should be empty.
        approximated: what a torch script approximates.
        seconds: time of planning all.
    """

    preset: str
    cluster: str
    best_s: float | None
    within: dict[str, tuple[str, str, float] | None]
    losses: tuple[str, ...]
    approximated: tuple[str, ...]
    seconds: float


def sets() -> dict[str, list[str]]:
    """Return planners, joined, or `TORCH` -> the frameworks that can say them."""
    found: dict[str, list[str]] = {}
    for name in FRAMEWORKS:
        found.setdefault(TORCH if name == TORCH else "+".join(planners_of(name)), []).append(name)
    return found


def row_of(preset: str, cluster: str) -> Row:
    """Plan a preset on a cluster."""
    started = time.perf_counter()
    nodes, per_node = (int(part) for part in cluster.split("x")[:2])
    batch, seq = SAMPLES_PER_DEVICE * nodes * per_node, SEQ.get(preset, 4096)
    source = load_model(preset, batch=batch, seq=seq)
    within: dict[str, tuple[str, str, float] | None] = {}
    losses: list[str] = []
    approximated: list[str] = []

    def plan(planner: str) -> ShardingPlan:
        with quiet_libraries():
            found = build_plan(
                source.module,
                example_inputs=source.example_inputs,
                tp_plan=source.tp_plan,
                cluster=cluster,
                batch=batch,
                seq=source.seq,
                planner=planner,
            )
        return dataclasses.replace(found, model=preset)

    best = _or_none(lambda: plan("ilp"))
    for planners, names in sets().items():
        found = _or_none(lambda name=names[0]: plan_within(name, plan))
        if found is None or found.estimate is None or found.solver is None:
            within[planners] = None
            continue
        within[planners] = found.solver.name, str(found.mesh), found.estimate.step_time_s
        for name in names:
            for row, text in _not_expressed(found, name):
                is_near = name == TORCH and row is not None and row.outcome == "approximated"
                (approximated if is_near else losses).append(text)
    return Row(
        preset=preset,
        cluster=cluster,
        best_s=None if best is None or best.estimate is None else best.estimate.step_time_s,
        within=within,
        losses=tuple(losses),
        approximated=tuple(approximated),
        seconds=time.perf_counter() - started,
    )


def _or_none(plan: Callable[[], ShardingPlan]) -> ShardingPlan | None:
    try:
        return plan()
    except InfeasibleError:
        return None


def _not_expressed(plan: ShardingPlan, name: str) -> Iterator[tuple[ExportRow | None, str]]:
    """Yield what an export does not express, as a row and as text; a row of None: there is no export."""
    try:
        rows = export_plan(plan, name).rows
    except PlannerError as error:
        yield None, f"{name}: {error}"
        return
    for row in rows:
        if row.outcome != "expressed":
            yield row, f"{name}: {row.field} {row.outcome}: {row.detail}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    heads = [", ".join(names) for names in sets().values()]
    lines = ["| preset | devices | best plan | " + " | ".join(heads) + " | lost | approximated |"]
    lines.append("| --- | --- | --- | " + " | ".join("---" for _ in heads) + " | --- | --- |")
    for row in rows:
        nodes, per_node = (int(part) for part in row.cluster.split("x")[:2])
        best = "does not fit" if row.best_s is None else f"{row.best_s:.3g} s"
        cells = [_cell(row.best_s, found) for found in row.within.values()]
        lost, near = ("; ".join(texts) or "nothing" for texts in (row.losses, row.approximated))
        lines.append(f"| {row.preset} | {nodes * per_node} | {best} | {' | '.join(cells)} | {lost} | {near} |")
    return "\n".join(lines) + "\n"


def _cell(best_s: float | None, found: tuple[str, str, float] | None) -> str:
    if found is None:
        return "does not fit"
    _, mesh, step_s = found
    more = "" if best_s is None else f" ({100 * (step_s / best_s - 1):+.1f} %)"
    return f"{step_s:.3g} s{more} on {mesh}"


def main() -> None:
    """Plan, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for preset in options.presets.split(","):
        for cluster in options.clusters.split(","):
            rows.append(row_of(preset, cluster))
            print(table(rows[-1:]).splitlines()[-1], f"{rows[-1].seconds:.0f} s", flush=True)
    if options.output is not None:
        options.output.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
