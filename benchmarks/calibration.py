"""Predicted against measured step times of ten plans of small models on this machine's CPU and gloo (check 9).

    python benchmarks/calibration.py [--processes 2] [--steps 5]

First 2, then 4 processes of one thread each measure the machine. Each time a cluster file is fitted, five plans are
made with it, and each plan runs for a few steps. The script prints predicted and measured seconds of a step, the mean
error and Spearman's rank correlation. It takes some minutes, and needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.multiprocessing.spawn import spawn

from cost_model.calibrate import cluster_yaml, fit_cluster
from executor.calibrate.kernels import measure
from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import PlanningSession
from planner.plan.sharding_plan import ShardingPlan

LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan: the sizes of a small Llama, a batch, a planner and a mesh."""

    hidden: int
    layers: int
    batch: int
    seq: int
    planner: str
    mesh: str


CASES = {
    2: (
        Case(hidden=256, layers=2, batch=8, seq=128, planner="data-parallel", mesh="dp=2"),
        Case(hidden=256, layers=4, batch=8, seq=128, planner="tensor-parallel", mesh="tp=2"),
        Case(hidden=512, layers=2, batch=4, seq=128, planner="fully-sharded", mesh="dp=2"),
        Case(hidden=512, layers=4, batch=8, seq=128, planner="ilp", mesh="dp=2"),
        Case(hidden=512, layers=2, batch=16, seq=128, planner="data-parallel", mesh="dp=2"),
    ),
    4: (
        Case(hidden=256, layers=2, batch=8, seq=128, planner="data-parallel", mesh="dp=4"),
        Case(hidden=256, layers=4, batch=16, seq=128, planner="fully-sharded", mesh="dp=4"),
        Case(hidden=512, layers=2, batch=8, seq=128, planner="tensor-parallel", mesh="dp=2,tp=2"),
        Case(hidden=512, layers=4, batch=8, seq=128, planner="ilp", mesh="dp=4"),
        Case(hidden=512, layers=2, batch=16, seq=128, planner="ilp", mesh="dp=2,tp=2"),
    ),
}


def model_of(case: Case) -> torch.nn.Module:
    """Return the case's Llama, with the same weights on every rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=4 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=case.seq,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


def inputs_of(case: Case) -> dict[str, Any]:
    """Return the case's global batch."""
    ids = torch.randint(1024, (case.batch, case.seq), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def on_gloo(run: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """Return rank 0's result of ``run(*arguments)``, JSON data, on gloo processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(run, world_size, folder, arguments), nprocs=world_size)
        return json.loads((Path(folder) / "result").read_text())


def _rank(rank: int, run: Callable[..., Any], world_size: int, folder: str, arguments: Sequence[Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    result = run(*arguments)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def calibrated_yaml() -> str:
    """Return the text of this machine's cluster file, measured by the processes of the group."""
    measured = measure(torch.device("cpu"))
    cluster, residuals = fit_cluster(measured)
    return cluster_yaml(cluster, residuals, measured.notes)


def run_plans(plans: Sequence[tuple[Case, Path]], steps: int) -> list[list[float]]:
    """Return, for each plan, the seconds of each step on the slowest rank, without the first two steps."""
    return [_steps_s(case, ShardingPlan.load(file), steps) for case, file in plans]


def _steps_s(case: Case, plan: ShardingPlan, steps: int) -> list[float]:
    mesh = device_mesh_for(plan, device_type="cpu")
    module = model_of(case)
    shard_module(module, mesh, plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    inputs = local_batch(inputs_of(case), mesh, plan)
    step_times = []
    for _ in range(steps + 2):
        dist.barrier()
        begin = time.perf_counter()
        module(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        step_times.append(float(seconds))
    return step_times[2:]


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (left, right)]
    count = len(left)
    squares = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * float(squares) / (count * (count**2 - 1))


def plan_case(case: Case, cluster: Path) -> ShardingPlan:
    """Return the case's plan on the calibrated cluster."""
    session = PlanningSession(
        model_of(case),
        cluster=str(cluster),
        example_inputs=inputs_of(case),
        dtype="fp32",
        micro_batches=1,
        ac="none",
        optimizer="sgd",
    )
    plan: ShardingPlan = session.plan(planner=case.planner, mesh=case.mesh)
    return plan


def compare(processes: int, folder: Path, steps: int) -> list[tuple[float, float]]:
    """Calibrate, plan and run; print and return (predicted, measured) seconds of a step of each plan."""
    cluster = folder / f"cpu-{processes}.yaml"
    cluster.write_text(on_gloo(calibrated_yaml, processes))
    comments = [line for line in cluster.read_text().splitlines() if line.startswith("#")]
    print(f"{processes} processes", *comments, sep="\n", flush=True)
    plans = [plan_case(case, cluster) for case in CASES[processes]]
    files = [folder / f"plan-{processes}-{index}.json" for index in range(len(plans))]
    for plan, file in zip(plans, files, strict=True):
        plan.save(file)
    pairs = []
    step_times = on_gloo(run_plans, processes, list(zip(CASES[processes], files, strict=True)), steps)
    for case, plan, seconds in zip(CASES[processes], plans, step_times, strict=True):
        assert plan.estimate is not None
        pairs.append((plan.estimate.step_time_s, median(seconds)))
        print(_line(case, plan, seconds), flush=True)
    return pairs


def _line(case: Case, plan: ShardingPlan, seconds: Sequence[float]) -> str:
    estimate = plan.estimate
    assert estimate is not None
    parts = (estimate.compute_s, estimate.exposed_communication_s, estimate.optimizer_s)
    return (
        f"{case.planner:15s} {case.mesh:10s} hidden {case.hidden} layers {case.layers} batch {case.batch:2d}: "
        f"predicted {estimate.step_time_s:.3f} s ({' + '.join(f'{part:.3f}' for part in parts)}), "
        f"measured {median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
        f"{100 * (estimate.step_time_s / median(seconds) - 1):+.0f} %"
    )


def main() -> None:
    """Calibrate, plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each plan")
    parser.add_argument("--processes", type=int, choices=tuple(CASES), help="only the plans on so many processes")
    parser.add_argument("--keep", type=Path, help="folder for the cluster files and plans")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("predicted: compute + exposed communication + optimizer")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        pairs = [
            pair
            for processes in ([arguments.processes] if arguments.processes else CASES)
            for pair in compare(processes, folder, arguments.steps)
        ]
    predicted, measured = zip(*pairs, strict=True)
    error = 100 * mean(abs(p / m - 1) for p, m in pairs)
    print(f"Spearman {spearman(predicted, measured):.3f} (0.9 or more), mean error {error:.1f} % (20 or less)")


if __name__ == "__main__":
    main()
