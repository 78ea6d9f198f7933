"""The picture in the README: step time and memory by role of the chosen plan and of the baselines for one job.

    python benchmarks/draw_baselines.py     # about a minute on two cores; writes docs/images/llama-3.1-8b.png

Needs matplotlib (the ``notebook`` extra).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from api.requests.model_registry import load_model
from planner import PlanningSession
from planner.errors import InfeasibleError, MeshError
from planner.plan.sharding_plan import ShardingPlan
from planner.search.baseline_search import TRAINING

ROLES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "transient",
    "recomputed_block",
    "allocator",
    "context",
)
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def planned(session: PlanningSession, mesh: str | None) -> dict[str, ShardingPlan | InfeasibleError]:
    """Return planner -> its plan, or the report that none fits."""
    plans: dict[str, ShardingPlan | InfeasibleError] = {}
    for name in ("ilp", *TRAINING):
        try:
            plans[name] = session.plan(planner=name, mesh=mesh, tolerance=session.spec.tolerance)
        except InfeasibleError as error:
            plans[name] = error
        except MeshError:  # hybrid sharding needs two nodes
            continue
    return plans


def draw(plans: dict[str, ShardingPlan | InfeasibleError], times: Axes, memory: Axes, capacity_bytes: int) -> None:
    """Draw one bar per planner on both axes: ``times`` in seconds, ``memory`` in GB with lines at cap and capacity."""
    labels = []
    for row, (name, plan) in enumerate(plans.items()):
        if isinstance(plan, InfeasibleError) or plan.estimate is None:
            assert isinstance(plan, InfeasibleError)
            labels.append(name)
            needs = "" if plan.least_bytes is None else f": needs {plan.least_bytes / 1e9:.0f} GB"
            times.text(0, row, f" does not fit{needs}", va="center")
            continue
        labels.append(f"{name}\n{plan.mesh}, micro-batches {plan.micro_batches}, checkpointing {plan.job.ac}")
        bar = times.barh(row, plan.estimate.step_time_s, color="tab:blue")
        times.bar_label(bar, fmt=" %.2f s")
        left = 0.0
        for index, role in enumerate(ROLES):
            width = plan.estimate.memory.get(role, 0) / 1e9
            label = role.replace("_", " ") if row == 0 else None
            memory.barh(row, width, left=left, color=f"C{index}", label=label)
            left += width
    caps = [plan.job.memory_bytes for plan in plans.values() if isinstance(plan, ShardingPlan)]
    cap_bytes = next((cap for cap in caps if cap is not None), capacity_bytes)
    memory.axvline(cap_bytes / 1e9, color="black", linestyle=":", linewidth=1)
    memory.axvline(capacity_bytes / 1e9, color="black", linestyle="--", linewidth=1)
    memory.axvspan(cap_bytes / 1e9, capacity_bytes / 1e9, color="black", alpha=0.08)
    times.set(xlabel="estimated step, s", yticks=range(len(plans)), yticklabels=labels)
    times.margins(x=0.2)
    memory.set(xlabel="peak per device, GB (grey: headroom)", yticks=[])
    for axes in (times, memory):
        axes.set_ylim(len(plans) - 0.5, -0.5)


def _step_s(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def main() -> None:
    """Plan with every planner, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--cluster", default="1x8xh100-sxm-80gb")
    parser.add_argument("--mesh", help="for all planners; each chooses its own where left out")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("-o", "--output", type=Path, help="docs/images/PRESET.png where left out")
    arguments = parser.parse_args()
    source = load_model(arguments.preset, seq=arguments.seq)
    session = PlanningSession(
        source.module, cluster=arguments.cluster, batch=arguments.batch, seq=source.seq, tp_plan=source.tp_plan
    )
    plans = planned(session, arguments.mesh)
    for name, plan in plans.items():
        print(f"{name:16s}", plan if isinstance(plan, InfeasibleError) else f"{_step_s(plan):.3f} s, mesh {plan.mesh}")
    figure, (times, memory) = plt.subplots(1, 2, figsize=(12, 3.0), layout="constrained")
    seq = "" if source.seq is None else f", seq {source.seq}"
    figure.suptitle(f"{arguments.preset} on {arguments.cluster}, batch {arguments.batch}{seq}")
    draw(plans, times, memory, session.cluster.memory_bytes)
    figure.legend(loc="outside lower center", ncols=len(ROLES), fontsize="small")
    output = arguments.output or IMAGES / f"{arguments.preset}.png"
    figure.savefig(output, dpi=110)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
