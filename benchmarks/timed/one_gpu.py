"""Predicted step time and memory of plans on one GPU, beside what the GPU takes.

    cd benchmarks
    python -m timed.one_gpu plan FOLDER                    # anywhere: FOLDER/NAME.json, a plan of each case
    python -m timed.one_gpu measure FOLDER -o measured.jsonl   # on the GPU: trains each case under its plan
    python -m timed.one_gpu report FOLDER measured.jsonl --markdown

Each case is a model at a real size with random weights, trained by ``shard_module`` under its plan with AdamW
(``fused=True``) on one rank of NCCL. The time is the median of ``STEPS`` steps after ``WARM_UP``, by CUDA events; peaks
are those of the allocator in the same steps. Nothing of the cost model was fitted to these measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from executor import device_mesh_for, local_batch, shard_module
from planner import ShardingPlan, build_plan
from planner.errors import PlannerError
from timed.cases import CASES, Case

WARM_UP, STEPS = 4, 10
CLUSTER = "1x1xh100-sxm-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a case took on the GPU.

    Attributes:
        step_ms: all timed steps, in milliseconds.
        plain_ms: the same of the module without shardplan, all of it in bf16, in a loop of torch's.
        allocated, reserved: peaks of torch's allocator, in bytes.
        outside: bytes in use on the device beyond those that the allocator reserved.
        loss: of the last step.
        error: the traceback, where it did not run.
    """

    name: str
    gpu: str
    torch: str
    step_ms: tuple[float, ...] = ()
    plain_ms: tuple[float, ...] = ()
    allocated: int = 0
    reserved: int = 0
    outside: int = 0
    loss: float = 0.0
    error: str | None = None


def plan_cases(folder: Path, names: Sequence[str]) -> None:
    """Write a plan of each case into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        case, start = CASES[name], time.perf_counter()
        with torch.device("meta"):
            module, inputs = case.make(), case.inputs()
        try:
            plan = build_plan(module, cluster=CLUSTER, example_inputs=inputs, **case.options)
        except PlannerError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        plan.save(folder / f"{name}.json")
        assert plan.estimate is not None
        step_ms, peak_gb = plan.estimate.step_time_s * 1e3, plan.estimate.peak_memory_bytes / 1e9
        taken_s = time.perf_counter() - start
        print(f"{name}: {step_ms:.1f} ms, {peak_gb:.1f} GB, planned in {taken_s:.1f} s", flush=True)


def measure_case(name: str, plan: ShardingPlan) -> Measured:
    """Return what ``plan`` takes on this GPU, and what the module takes without it."""
    about: dict[str, Any] = {"name": name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    try:
        with _freed():
            step_ms, loss = _timed(_sharded_step(CASES[name], plan))
            free, total = torch.cuda.mem_get_info()
            peaks: dict[str, Any] = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "outside": total - free - torch.cuda.memory_reserved(),
            }
    except Exception:  # noqa: BLE001 - a case that does not run is a result
        return Measured(**about, error=traceback.format_exc())
    plain_ms: tuple[float, ...] = ()
    with _freed(), contextlib.suppress(torch.OutOfMemoryError):
        plain_ms, _ = _timed(_plain_step(CASES[name], plan))
    return Measured(**about, **peaks, step_ms=step_ms, plain_ms=plain_ms, loss=loss)


@contextlib.contextmanager
def _freed() -> Iterator[None]:
    """Return a context after which the allocator holds nothing."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _timed(step: Callable[[], torch.Tensor]) -> tuple[tuple[float, ...], float]:
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return tuple(times), float(loss)


def _sharded_step(case: Case, plan: ShardingPlan) -> Callable[[], torch.Tensor]:
    module, inputs = _made(case)
    mesh = device_mesh_for(plan)
    if plan.job.training:
        shard_module(module, mesh, plan)
        return _training_step(module, [local_batch(each, mesh, plan) for each in _micro_batches(inputs, plan)])
    shard_module(module.to(torch.bfloat16).eval(), mesh, plan)
    return _forward(module, local_batch(inputs, mesh, plan))


def _plain_step(case: Case, plan: ShardingPlan) -> Callable[[], torch.Tensor]:
    module, inputs = _made(case)
    typed = pytree.tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, inputs)
    module.to(torch.bfloat16)
    if not plan.job.training:
        return _forward(module.eval(), typed)
    if plan.job.ac == "full":
        getattr(module, "gradient_checkpointing_enable")()  # noqa: B009 - of transformers, not of every module
    return _training_step(module, _micro_batches(typed, plan))


def _made(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return case.make(), case.inputs()


def _micro_batches(inputs: dict[str, Any], plan: ShardingPlan) -> list[dict[str, Any]]:
    def piece(value: Any, index: int) -> Any:
        return value.chunk(plan.micro_batches)[index] if isinstance(value, torch.Tensor) else value

    return [{name: piece(value, index) for name, value in inputs.items()} for index in range(plan.micro_batches)]


def _training_step(module: nn.Module, batches: Sequence[dict[str, Any]]) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        for batch in batches:
            loss: torch.Tensor = module(**batch)["loss"] / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _forward(module: nn.Module, inputs: dict[str, Any]) -> Callable[[], torch.Tensor]:
    @torch.no_grad()
    def step() -> torch.Tensor:
        logits: torch.Tensor = module(**inputs, use_cache=True)["logits"]
        return logits[0, -1, 0].clone()  # a view would keep all logits

    return step


HEADER = (
    *("case", "step, ms", "predicted", "error", "host", "plain torch"),
    *("peak, GB", "predicted", "error", "allocated", "predicted", "error"),
)


def report(folder: Path, rows: Sequence[Measured], *, markdown: bool) -> str:
    """Return a table of what was predicted and measured, with errors as a share of what was measured.

    "host" is the predicted time in which the host dispatches a step, and the larger of it and the step is compared.
    """
    lines: list[tuple[str, ...]] = []
    time_errors, memory_errors = [], []
    for row in rows:
        if row.error is not None:
            lines.append((row.name, row.error.strip().splitlines()[-1][:60], *[""] * (len(HEADER) - 2)))
            continue
        estimate = ShardingPlan.load(folder / f"{row.name}.json").estimate
        assert estimate is not None
        step_ms, host_ms = statistics.median(row.step_ms), (estimate.host_s or 0.0) * 1e3
        predicted_ms = max(estimate.step_time_s * 1e3, host_ms)
        peak, memory = row.reserved + row.outside, dict(estimate.memory)
        allocated = estimate.peak_memory_bytes - memory["context"] - memory["allocator"]
        time_errors.append(predicted_ms / step_ms - 1)
        memory_errors.append(estimate.peak_memory_bytes / peak - 1)
        lines.append(
            (
                *(row.name, f"{step_ms:.1f}", f"{predicted_ms:.1f}", f"{time_errors[-1]:+.0%}", f"{host_ms:.1f}"),
                f"{statistics.median(row.plain_ms):.1f}" if row.plain_ms else "",
                *(f"{peak / 1e9:.1f}", f"{estimate.peak_memory_bytes / 1e9:.1f}", f"{memory_errors[-1]:+.0%}"),
                *(f"{row.allocated / 1e9:.1f}", f"{allocated / 1e9:.1f}", f"{allocated / row.allocated - 1:+.0%}"),
            )
        )
    if markdown:
        table = [HEADER, tuple("---" for _ in HEADER), *lines]
        text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    else:
        widths = [max(len(line[index]) for line in (HEADER, *lines)) for index in range(len(HEADER))]
        text = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in (HEADER, *lines))
    if not time_errors:
        return text
    means = [f"{sum(map(abs, errors)) / len(errors):.1%}" for errors in (time_errors, memory_errors)]
    return f"{text}\n\nmean error of the step {means[0]}, of the peak {means[1]}, {len(time_errors)} cases"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, measure, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "measure", "report"))
    parser.add_argument("folder", type=Path, help="folder of the plans")
    parser.add_argument("measured", type=Path, nargs="?", help="file of the measurements, for report")
    parser.add_argument("-o", "--output", type=Path, help="file to add measurements to")
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case alone; may be repeated")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args(argv)
    names = arguments.only or list(CASES)
    if arguments.what == "plan":
        plan_cases(arguments.folder, names)
        return 0
    if arguments.what == "report":
        rows = [Measured(**json.loads(line)) for line in arguments.measured.read_text().splitlines()]
        print(report(arguments.folder, rows, markdown=arguments.markdown))
        return 0
    if not torch.cuda.is_available():
        parser.error("measure needs a GPU, and torch sees none")
    dist.init_process_group("nccl", init_method="tcp://localhost:29511", rank=0, world_size=1)
    for name in names:
        path = arguments.folder / f"{name}.json"
        if not path.exists():
            continue
        row = measure_case(name, ShardingPlan.load(path))
        with arguments.output.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        steps = (statistics.median(times) if times else 0.0 for times in (row.step_ms, row.plain_ms))
        done = "{:.1f} ms, plain {:.1f} ms".format(*steps)
        print(f"{name}: {row.error.strip().splitlines()[-1] if row.error else done}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
