"""Plans of the integer program against those of the baselines: every dense preset on 8, 64 and 512 devices.

    python benchmarks/baselines.py                                    # everything: half an hour on two cores
    python benchmarks/baselines.py --preset gpt2 --devices 8 --fixed-only
    python benchmarks/baselines.py --preset llama-3.1-8b --devices 64 --mesh dp=8,tp=8 --mesh dp=64

One estimator prices all plans. On a fixed mesh every planner plans on that mesh; with "automatic" each planner chooses
a mesh. Exit code 1 where a baseline's plan is faster than the integer program's by more than the MIP gap, or where only
the baseline's plan fits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from api.requests.model_configs import preset_names
from api.requests.model_registry import ModelSource, load_model
from planner import PlanningSession, ShardingPlan
from planner.errors import BaselineError, InfeasibleError
from planner.run.baselines import NAMES as BASELINES

DEVICE, PER_NODE = "h100-sxm-80gb", 8
DEVICE_COUNTS = (8, 64, 512)
AUTOMATIC = "automatic"
SEQ = {"gpt2": 1024, "bert-large": 512, "t5-large": 512}
"""Tokens of a sequence by preset; `DEFAULT_SEQ` for the others."""
DEFAULT_SEQ = 4096
SAMPLES_PER_DEVICE = {"vit-large": 16}
"""Global batch per device by preset; `DEFAULT_SAMPLES_PER_DEVICE` for the others."""
DEFAULT_SAMPLES_PER_DEVICE = 2

WITH_EXPERTS = frozenset({"deepseek-v3", "mixtral-8x7b"})
"""Presets that are planned only if named: they fit on few clusters, and infeasibility takes long to prove."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster and one mesh; None where each planner chooses its mesh."""

    preset: str
    devices: int
    mesh: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The plan of one planner in one case; without a plan, ``why_not`` is the reason."""

    planner: str
    plan: ShardingPlan | None
    why_not: str
    planning_s: float

    @property
    def step_time_s(self) -> float | None:
        """Seconds of a step; None without a plan."""
        return None if self.plan is None or self.plan.estimate is None else self.plan.estimate.step_time_s


def session_for(source: ModelSource, preset: str, devices: int) -> PlanningSession:
    """Return the session that plans ``preset`` on ``devices`` devices, with one trace for all planners and meshes."""
    return PlanningSession(
        source.module,
        cluster=f"{devices // PER_NODE}x{PER_NODE}x{DEVICE}",
        example_inputs=source.example_inputs,
        batch=SAMPLES_PER_DEVICE.get(preset, DEFAULT_SAMPLES_PER_DEVICE) * devices,
        seq=source.seq,
        tp_plan=source.tp_plan,
    )


def outcome(session: PlanningSession, planner: str, mesh: str | None) -> Outcome:
    """Return the outcome of ``planner`` on ``mesh``."""
    started = time.perf_counter()
    plan, why_not = None, ""
    try:
        plan = session.plan(planner=planner, mesh=mesh)
    except InfeasibleError as error:
        needs = "no even split" if error.least_bytes is None else f"needs {error.least_bytes / 1e9:.2f} GB"
        why_not = f"does not fit: {needs}"
    except BaselineError:
        why_not = "the model has no such plan"
    return Outcome(planner=planner, plan=plan, why_not=why_not, planning_s=time.perf_counter() - started)


def losses(outcomes: Sequence[Outcome], mip_gap: float) -> list[str]:
    """Return the planners that are faster by more than ``mip_gap`` than the integer program, the first outcome."""
    best = outcomes[0].step_time_s
    return [
        other.planner
        for other in outcomes[1:]
        if other.step_time_s is not None and (best is None or best > other.step_time_s * (1 + mip_gap))
    ]


def rows(outcomes: Sequence[Outcome], beaten_by: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the table's cells of one case."""
    best = outcomes[0].step_time_s
    for item in outcomes:
        if item.plan is None or item.plan.estimate is None or item.step_time_s is None:
            yield item.planner, "-", "-", item.why_not, "-", "-", f"{item.planning_s:.1f} s"
            continue
        ratio = "-" if best is None else f"{item.step_time_s / best:.3f}"
        verdict = "FASTER THAN THE ILP'S" if item.planner in beaten_by else "fits"
        run = f"{item.plan.mesh}; micro-batches {item.plan.micro_batches}; checkpointing {item.plan.job.ac}"
        peak = f"{item.plan.estimate.peak_memory_bytes / 1e9:.2f} GB"
        yield item.planner, f"{item.step_time_s * 1e3:.2f} ms", ratio, verdict, peak, run, f"{item.planning_s:.1f} s"


def cases_of(preset: str, devices: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each given mesh, or for one mesh of data and tensor parallelism; then the automatic choice."""
    for mesh in arguments.mesh or [f"dp={devices // PER_NODE},tp={PER_NODE}"]:
        yield Case(preset=preset, devices=devices, mesh=mesh)
    if not arguments.fixed_only:
        yield Case(preset=preset, devices=devices, mesh=None)


def table_of(case: Case, session: PlanningSession, cells: Iterable[tuple[str, ...]]) -> Table:
    """Return the table of one case."""
    seq = "" if session.job.seq is None else f", seq {session.job.seq}"
    title = f"{case.preset}, {case.devices} x {DEVICE}, batch {session.job.batch}{seq}, mesh {case.mesh or AUTOMATIC}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    right = {"step", "to the ILP's", "peak", "planned in"}
    for name in ("planner", "step", "to the ILP's", "verdict", "peak", "plan", "planned in"):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", action="append", choices=preset_names(), help="again for more; all dense ones where left out"
    )
    parser.add_argument("--devices", action="append", type=int, choices=DEVICE_COUNTS, help="likewise")
    parser.add_argument("--mesh", action="append", help="a fixed mesh, again for more; dp=N/8,tp=8 where left out")
    parser.add_argument("--fixed-only", action="store_true", help="leave the automatic choice of the mesh out")
    return parser.parse_args(argv)


def main() -> int:
    """Print a table for every case; return 1 where a baseline is faster than the integer program."""
    arguments = parse_arguments()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=170)
    lost: list[str] = []
    count = 0
    for preset in arguments.preset or [name for name in preset_names() if name not in WITH_EXPERTS]:
        seq = SEQ.get(preset, DEFAULT_SEQ)
        source = load_model(preset, seq=seq)
        for devices in arguments.devices or DEVICE_COUNTS:
            session = session_for(source, preset, devices)
            for case in cases_of(preset, devices, arguments):
                outcomes = [outcome(session, planner, case.mesh) for planner in ("ilp", *BASELINES)]
                beaten_by = losses(outcomes, session.job.mip_gap)
                lost += [f"{preset} on {devices}, {case.mesh or AUTOMATIC}: {name}" for name in beaten_by]
                count += 1
                console.print(table_of(case, session, rows(outcomes, beaten_by)), "", sep="\n")
    print(f"{count} cases; a baseline was faster than the ILP in {len(lost)}")
    for line in lost:
        print(f"  {line}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
