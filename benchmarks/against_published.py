"""Published training runs of preset models against the plans of the same jobs.

    cd benchmarks && python against_published.py --truth ../../shared/truth [--model llama-3.1-8b] [--devices 64]
    cd benchmarks && python against_published.py --truth ../../shared/truth --pipelines --own-mesh
    cd benchmarks && python against_published.py --truth ../../shared/truth --same

For each run the table has the measurement, the price of its configuration by `shardplan estimate`, and the plan for the
same model, cluster, batch, sequence, reduction dtype of gradients, and attention kernel (FlashAttention-3 where the run
had it on a GPU that runs it); with ``--pipelines`` pipelines too. The two prices come from two models of a step
(results/accuracy.md). Plans are in bf16. So a configuration that ran in 8 bits or less is priced in bf16, and its
measurement is not shown. A configuration that does not fit in bf16, by its own estimate, is left out. The exit code is
1 where a configuration is priced faster than the plan, or no plan fits.

``--own-mesh`` also plans each run's own configuration: its mesh, micro-batches and checkpointing are given, the rest is
chosen. The plan of the free search may not be slower than this plan by more than the MIP gap.

The techniques of the frameworks are options: ``--fused-ops`` (torch.compile, Transformer Engine, Megatron),
``--async-tp``, ``--reallgather``, ``--zigzag`` and ``--fused-projections`` (Megatron, NeMo).

``--same`` prices each run's own configuration as a plan, where a plan can express it: fully sharded on one axis, with
the run's micro-batches and checkpointing, and with fused ops where its framework fused or compiled them. torchtitan's
selective checkpointing recomputes every other GEMM and ours none, so such runs are priced halfway between our selective
and full checkpointing. The errors compare the plans' prices with the measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published.frameworks.assumptions import assumptions_of
from published.frameworks.configuration import UnknownConfigurationError, configuration_of, precision_class
from published.pricing.runs import price_row
from published.rows.machines import cluster_of
from published.rows.models import model_of
from published.rows.priced_row import number, read
from rich.console import Console
from rich.table import Table
from torch import nn

from api.requests.model_configs import FUSED_PROJECTIONS
from api.requests.model_registry import load_model, quiet_libraries
from cost_model import ClusterSpec
from cost_model.configuration.memory import step_memory
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.kernels.attention import runs_kernel
from planner import PlanningSession, ShardingPlan
from planner.errors import PlannerError
from planner.plan.job import Job
from planner.plan.techniques import AttentionKernel

PRESETS = {
    "Llama3-8B": "llama-3.1-8b",
    "Llama3.1-8B": "llama-3.1-8b",
    "Llama3-70B": "llama-3.1-70b",
    "Llama3.1-70B": "llama-3.1-70b",
    "Llama3.1-405B": "llama-3.1-405b",
    "Qwen3-8B": "qwen3-8b",
    "DeepSeek-V3": "deepseek-v3",
    "Mixtral-8x7B": "mixtral-8x7b",
}
"""Model's name in the file -> preset. Llama 3 has the dimensions of Llama 3.1."""

SAME_COLUMNS = ("row", "model", "device", "devices", "framework", "checkpointing", "measured", "as a plan", "error")
COLUMNS = ("row", "model", "devices", "batch x seq", "configuration", "measured", "its price", "plan", "its price", "")
OWN_MESH_COLUMNS = (*COLUMNS, "as a plan", "")
OTHER_BITS = "its configuration does not fit in bf16"


JobKey = tuple[str, ClusterSpec, int, int, str, str | None]
"""Preset, cluster, batch, sequence, reduction dtype of gradients, attention kernel (None for torch's default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One row: its job, its configuration, and seconds of a step; ``measured_s`` is None for runs not in 16 bits."""

    row_id: str
    preset: str
    cluster: ClusterSpec
    batch: int
    seq: int
    configuration: str
    measured_s: float | None
    priced_s: float
    framework: str
    parallel: ParallelSpec

    @property
    def reduce_dtype(self) -> str:
        """The dtype that the run reduced its gradients in."""
        return "bf16" if self.parallel.implementation.data_parallel.reduce_nbytes == 2 else "fp32"

    @property
    def attention_kernel(self) -> AttentionKernel | None:
        """The run's attention kernel, where it is not torch's default; else None."""
        named = self.parallel.implementation.kernels.attention
        return "flash3" if named == "flash3" and runs_kernel(named, self.cluster.device) else None

    @property
    def job(self) -> JobKey:
        """The key of the run's job: runs with equal keys have one plan."""
        return self.preset, self.cluster, self.batch, self.seq, self.reduce_dtype, self.attention_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of a job, or the reason why there is none, and the seconds of planning."""

    plan: ShardingPlan | str
    seconds: float


def runs_of(folder: Path) -> tuple[list[PublishedRun], Counter[str]]:
    """Return the runs of presets, and the number of rows left out by reason."""
    found, left_out = [], Counter[str]()
    for row in read(folder, "training_runs.csv"):
        if row["model"] not in PRESETS:
            continue
        try:
            found.append(_run_of(row))
        except UnknownConfigurationError as error:
            left_out[str(error)] += 1
    return found, left_out


def _run_of(row: Mapping[str, str]) -> PublishedRun:
    in_16_bits = precision_class(row["precision"]) == "16-bit"
    asked = row if in_16_bits else {**row, "precision": "bf16"}
    assumed, priced = assumptions_of(asked), price_row("training_runs.csv", asked)
    if assumed is None or priced.predicted is None:
        raise UnknownConfigurationError(priced.left_out or "framework unknown")
    parallel, cluster = configuration_of(asked, assumed), cluster_of(asked)
    if not in_16_bits:
        memory = step_memory(model_of(asked, old_dropout=assumed.dropout), parallel, cluster)
        if memory.reserved > cluster.device.memory_bytes:
            raise UnknownConfigurationError(OTHER_BITS)
    return PublishedRun(
        row_id=row["row_id"],
        preset=PRESETS[row["model"]],
        cluster=cluster,
        batch=parallel.global_batch,
        seq=parallel.seq,
        configuration=_degrees(row),
        measured_s=priced.measured if in_16_bits else None,
        priced_s=priced.predicted,
        framework=row["framework"],
        parallel=parallel,
    )


def _degrees(row: Mapping[str, str]) -> str:
    degrees = [
        f"{name}={value:.0f}" for name in ("fsdp", "tp", "pp", "cp", "ep") if (value := number(row, name) or 1) > 1
    ]
    return " ".join([*degrees, row["act_ckpt"].split(" ")[0]]).strip() or "one device"


def session_of(run: PublishedRun, module: nn.Module, **options: Any) -> PlanningSession:
    """Return the session that plans a run's job; ``options`` are further arguments of `PlanningSession`."""
    return PlanningSession(
        module,
        cluster=run.cluster,
        batch=run.batch,
        seq=run.seq,
        reduce_dtype=run.reduce_dtype,
        attention_kernel=run.attention_kernel,
        **options,
    )


def plan_of(run: PublishedRun, options: Mapping[str, Any]) -> Planned:
    """Return the plan of a run's job; ``options`` as in `session_of`."""
    plan: ShardingPlan | str
    with quiet_libraries():
        source = load_model(run.preset, batch=run.batch, seq=run.seq)
        started = time.perf_counter()
        try:
            plan = session_of(run, source.module, **options).plan()
        except PlannerError as error:
            plan = str(error).splitlines()[0]
    return Planned(plan=plan, seconds=time.perf_counter() - started)


def own_mesh(parallel: ParallelSpec) -> str:
    """Return the mesh of a configuration, outermost axis first, without axes of size 1."""
    sizes = {"pp": parallel.pipeline, "dp": parallel.data, "cp": parallel.context, "tp": parallel.tensor}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def own_mesh_seconds(run: PublishedRun, options: Mapping[str, Any]) -> float | str:
    """Return the seconds of the best plan with a run's own mesh, micro-batches and checkpointing, or why none fits."""
    parallel = run.parallel
    with quiet_libraries():
        source = load_model(run.preset, batch=run.batch, seq=run.seq)
        try:
            session = session_of(
                run,
                source.module,
                micro_batches=parallel.micro_batches,
                ac="selective" if parallel.checkpointing == "attention" else parallel.checkpointing,
                **{**options, "executable_only": options["executable_only"] and parallel.pipeline == 1},
            )
            estimate = session.plan(mesh=own_mesh(parallel)).estimate
        except PlannerError as error:
            return str(error).splitlines()[0][:40]
    assert estimate is not None
    step_time_s: float = estimate.step_time_s
    return step_time_s


def same_as_a_plan(run: PublishedRun) -> float | None:
    """Return the seconds of a step of the run's own configuration as a plan; None where no plan expresses it."""
    parallel = run.parallel
    split = parallel.zero != 3 or parallel.replicate > 1 or parallel.shard != run.cluster.size
    if split or parallel.checkpointing == "attention" or parallel.implementation.state.optimizer_on_host:
        return None
    # torchtitan's selective checkpointing recomputes every other GEMM, ours none, and full checkpointing all GEMMs.
    modes = ("selective", "full") if parallel.checkpointing == "selective" else (parallel.checkpointing,)
    step_times = []
    with quiet_libraries():
        source = load_model(run.preset, batch=run.batch, seq=run.seq)
        for mode in modes:
            fused = parallel.implementation.kernels.fused_ops
            session = session_of(run, source.module, micro_batches=parallel.micro_batches, ac=mode, fused_ops=fused)
            # Memory is no limit here: accuracy.py compares it row by row.
            estimate = session.plan(planner="fully-sharded", memory_bytes=2**50).estimate
            assert estimate is not None
            step_times.append(estimate.step_time_s)
    return statistics.fmean(step_times)


def show_same(runs: Sequence[PublishedRun]) -> int:
    """Print each run's own configuration priced as a plan; return 0."""
    table, errors = Table(*SAME_COLUMNS), []
    for run in runs:
        seconds = None if run.measured_s is None else same_as_a_plan(run)
        if seconds is None or run.measured_s is None:
            continue
        errors.append(seconds / run.measured_s - 1)
        cells = (run.row_id, run.preset, run.cluster.device.name, str(run.cluster.size), run.framework)
        numbers = (f"{run.measured_s:.3f}", f"{seconds:.3f}", f"{errors[-1]:+.0%}")
        table.add_row(*cells, run.parallel.checkpointing, *numbers)
    Console(width=150).print(table)
    if errors:
        mean, median = statistics.fmean(map(abs, errors)), statistics.median(map(abs, errors))
        print(f"{len(errors)} runs: mean error {mean:.1%}, median {median:.1%}, signed {statistics.fmean(errors):+.1%}")
    return 0


def main() -> int:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument("--model", choices=sorted(set(PRESETS.values())), help="only runs of this preset")
    parser.add_argument("--devices", type=int, help="only runs on so many devices")
    parser.add_argument("--pipelines", action="store_true", help="search pipelines as well")
    parser.add_argument("--fused-ops", action="store_true", help="plan with fused ops, as most of the runs had them")
    parser.add_argument("--async-tp", action="store_true", help="plan with async tensor parallelism; needs --pipelines")
    parser.add_argument("--reallgather", action="store_true", help="plan with re-all-gathered inputs in backward")
    parser.add_argument("--zigzag", action="store_true", help="plan with zigzag token order")
    parser.add_argument("--fused-projections", action="store_true", help="plan models with fused projections")
    parser.add_argument("--axes", type=int, default=2, help="most axes of a mesh, or of a stage's mesh")
    parser.add_argument("--own-mesh", action="store_true", help="plan each run's own mesh and micro-batches")
    parser.add_argument("--same", action="store_true", help="price the runs' own configurations as plans")
    arguments = parser.parse_args()
    if not (arguments.truth / "training_runs.csv").exists():
        parser.error(f"--truth: there is no {arguments.truth / 'training_runs.csv'}")
    runs, left_out = runs_of(arguments.truth)
    for reason, count in left_out.most_common():
        print(f"left out {count:3}  {reason}", file=sys.stderr)
    selected = [
        run for run in runs if arguments.model in (None, run.preset) and arguments.devices in (None, run.cluster.size)
    ]
    selected.sort(key=lambda run: (run.preset, run.cluster.size, run.row_id))
    if arguments.same:
        return show_same(selected)
    if arguments.fused_projections:
        selected = [dataclasses.replace(run, preset=run.preset + FUSED_PROJECTIONS) for run in selected]
    options = {
        "executable_only": not arguments.pipelines,
        "fused_ops": arguments.fused_ops,
        "async_tp": arguments.async_tp,
        "reallgather": arguments.reallgather,
        "zigzag": arguments.zigzag,
        "axes": arguments.axes,
    }
    return show_planned(selected, options, own=arguments.own_mesh)


def show_planned(runs: Sequence[PublishedRun], options: Mapping[str, Any], *, own: bool) -> int:
    """Print each run with the plan of its job; return 1 where a run is priced faster, or no plan fits."""
    table, worse, missed = Table(*(OWN_MESH_COLUMNS if own else COLUMNS)), 0, 0
    plans: dict[JobKey, Planned] = {}
    meshes: dict[tuple[object, ...], float | str] = {}
    for number_of, run in enumerate(runs, 1):
        if run.job not in plans:
            print(f"{number_of}/{len(runs)}: {run.preset} on {run.cluster.name}", file=sys.stderr, flush=True)
            plans[run.job] = plan_of(run, options)
        plan = plans[run.job].plan
        cells = [run.row_id, run.preset, str(run.cluster.size), f"{run.batch} x {run.seq}", run.configuration]
        cells += ["-" if run.measured_s is None else f"{run.measured_s:.3f}", f"{run.priced_s:.3f}"]
        seconds = math.inf
        if isinstance(plan, str) or plan.estimate is None:
            worse += 1
            cells += ["none", "", str(plan)[:60]]
        else:
            seconds = plan.estimate.step_time_s
            worse += seconds > run.priced_s
            what = f"{plan.mesh.spec} x{plan.micro_batches} {plan.job.ac}"
            cells += [what, f"{seconds:.3f}", _ratio(run.priced_s, seconds)]
        if own:
            key = (*run.job, own_mesh(run.parallel), run.parallel.micro_batches, run.parallel.checkpointing)
            if key not in meshes:
                meshes[key] = own_mesh_seconds(run, options)
            own_s = meshes[key]
            missed += isinstance(own_s, float) and own_s < seconds * (1.0 - Job().mip_gap)
            cells += [own_s, ""] if isinstance(own_s, str) else [f"{own_s:.3f}", _ratio(own_s, seconds)]
        table.add_row(*cells)
        print("  ".join(cells), file=sys.stderr, flush=True)
    Console(width=200 if own else 170).print(table)
    print(f"{len(runs)} runs, {len(plans)} plans; a configuration is priced faster, or nothing fits, in {worse}")
    if own:
        print(f"a run's own mesh, micro-batches and checkpointing make a faster plan in {missed}")
    if plans:
        planning_s = [planned.seconds for planned in plans.values()]
        print(f"seconds of planning: median {statistics.median(planning_s):.1f}, most {max(planning_s):.1f}")
    return 1 if worse or missed else 0


def _ratio(other_s: float, seconds: float) -> str:
    return f"{other_s / seconds:.2f}" + (" SLOWER" if seconds > other_s else "")


if __name__ == "__main__":
    sys.exit(main())
