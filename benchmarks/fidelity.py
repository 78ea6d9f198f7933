"""Plans of jobs drawn by a seed, each run on fake processes at its real shapes: do they run as planned?

    python benchmarks/fidelity.py --jobs 200 --seed 0 --output /tmp/fidelity.jsonl

Each job is a preset, a cluster, a mesh (given, or free), a phase, a batch and a sequence length. A job's row is
appended to the output, and jobs that are in it are not planned again. Memory is capped far above any device's, since
the question is whether plans run. Exit code 1: a plan did not run as planned.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.hardware.cluster import ClusterError
from cost_model.layouts.layout import LayoutError
from planner.errors import InfeasibleError, PlannerError, RunError
from planner.progress import RUNNING_ON_FAKE_PROCESSES, ProgressEvent

CLUSTERS = ("1x2", "1x4", "1x8", "2x4", "2x8", "4x8", "8x8")
DEVICE = "h100-sxm-80gb"
MEMORY_GB = 10_000
"""Cap on the bytes per device, above what any of the jobs needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model to draw, and the range of its jobs.

    Attributes:
        weight: how often it is drawn, relative to the others.
        longest: tokens of its longest sequence; None: it takes images.
        decodes: whether its decoding can be planned.
    """

    name: str
    weight: int
    longest: int | None
    decodes: bool = False


PRESETS = (
    Preset(name="gpt2", weight=4, longest=1024, decodes=True),
    Preset(name="bert-large", weight=3, longest=512),
    Preset(name="t5-large", weight=3, longest=2048),
    Preset(name="vit-large", weight=3, longest=None),
    Preset(name="llama-3.1-8b", weight=6, longest=131_072, decodes=True),
    Preset(name="qwen3-8b", weight=4, longest=32_768, decodes=True),
    Preset(name="mistral-7b", weight=3, longest=32_768, decodes=True),
    Preset(name="mixtral-8x7b", weight=4, longest=32_768, decodes=True),
    Preset(name="llama-3.1-70b", weight=2, longest=131_072, decodes=True),
    Preset(name="deepseek-v3", weight=1, longest=16_384),
    Preset(name="llama-3.1-405b", weight=1, longest=131_072),
)
FREE_MESH = ("gpt2", "bert-large", "llama-3.1-8b", "qwen3-8b", "vit-large")
"""Presets whose search over all meshes takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnJob:
    """A job of the benchmark.

    Attributes:
        mesh: mesh as text; None: the planner chooses.
        batch: samples in the global batch.
        micro_batches: micro-batches in a step; None: the planner chooses.
        seq: tokens in a sequence; None: the model takes images.
    """

    model: str
    cluster: str
    mesh: str | None
    phase: str
    batch: int
    micro_batches: int | None
    seq: int | None
    ac: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a job.

    Attributes:
        number: the job's number among those drawn by the seed.
        outcome: the outcome of the verification; "does-not-run", "refused" (no plan for the job), "does-not-fit", or
            "crashed" (an error that is no error of shardplan's own kind).
        kinds: kinds of collectives that ran as planned.
        planning_s: processor seconds of planning, building the model included.
        verifying_s: processor seconds of verifying.
        detail: the error; "" without one.
    """

    number: int
    job: DrawnJob
    mesh: str
    outcome: str
    kinds: int = 0
    planning_s: float = 0.0
    verifying_s: float = 0.0
    detail: str = ""


FAILED = ("does-not-run", "crashed")


def draw(seed: int, number: int) -> DrawnJob:
    """Return job ``number`` of those that ``seed`` draws."""
    rng = random.Random(f"{seed}/{number}")
    preset = rng.choices(PRESETS, weights=[each.weight for each in PRESETS])[0]
    cluster = rng.choice(CLUSTERS)
    nodes, per_node = map(int, cluster.split("x"))
    size = nodes * per_node
    phase = rng.choices(("training", "prefill", "decode"), weights=(8, 1, 1))[0]
    if phase == "decode" and not preset.decodes:
        phase = "prefill"
    mesh = None if preset.name in FREE_MESH and rng.random() < 0.2 else _draw_mesh(rng, size)
    outer = size if mesh is None else int(mesh.partition(",")[0].partition("=")[2])
    batch = outer * rng.randint(1, 4)
    seq = None
    if preset.longest is not None:
        longest = preset.longest
        lengths = [1 << power for power in range(10, 18) if 1 << power <= longest] or [longest]
        seq = rng.choice(lengths)
    micro_batches = rng.choice((1, 1, 2)) if phase == "training" else None
    ac = rng.choice(("none", "none", "selective", "full")) if phase == "training" else None
    return DrawnJob(
        model=preset.name,
        cluster=f"{cluster}x{DEVICE}",
        mesh=mesh,
        phase=phase,
        batch=batch * (micro_batches or 1),
        micro_batches=micro_batches,
        seq=seq,
        ac=ac,
    )


def _draw_mesh(rng: random.Random, size: int) -> str:
    """Return a mesh of one, two or three axes, each above 1."""
    powers = round(math.log2(size))
    axes = rng.randint(1, min(3, powers))
    cuts = sorted(rng.sample(range(1, powers), axes - 1))
    sizes = [1 << (end - start) for start, end in zip([0, *cuts], [*cuts, powers], strict=True)]
    names = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "cp", "tp")}[axes]
    return ",".join(f"{name}={length}" for name, length in zip(names, sizes, strict=True))


def run(number: int, job: DrawnJob) -> Row:
    """Return the result of planning ``job`` and running its plan."""
    from api.requests.plan_request import plan_request
    from api.requests.schemas import PlanRequest

    options = {name: value for name, value in dataclasses.asdict(job).items() if value is not None}
    mesh = job.mesh or "free"
    clock = _Clock()
    try:
        plan = plan_request(
            PlanRequest(memory_gb=MEMORY_GB, **options), allow_local=True, progress=clock.on, time_limit_s=120.0
        )
    except RunError as error:
        return Row(number=number, job=job, mesh=mesh, outcome="does-not-run", detail=str(error))
    except InfeasibleError as error:
        return Row(number=number, job=job, mesh=mesh, outcome="does-not-fit", detail=str(error))
    except (PlannerError, ClusterError, LayoutError) as error:
        return Row(number=number, job=job, mesh=mesh, outcome="refused", detail=str(error))
    except Exception as error:  # noqa: BLE001 - a benchmark of crashes goes on after one
        return Row(number=number, job=job, mesh=mesh, outcome="crashed", detail=f"{type(error).__name__}: {error}")
    clock.stop()
    assert plan.verification is not None
    return Row(
        number=number,
        job=job,
        mesh=str(plan.mesh),
        outcome=plan.verification.outcome,
        kinds=plan.verification.kinds,
        planning_s=clock.planning_s,
        verifying_s=clock.verifying_s,
        detail=plan.verification.reason or "",
    )


class _Clock:
    """Processor seconds of planning and of verifying; other programs that run do not count."""

    def __init__(self) -> None:
        self.planning_s = self.verifying_s = 0.0
        self._verifies, self._last = False, time.process_time()

    def stop(self) -> None:
        """Count the seconds since the last event."""
        now = time.process_time()
        if self._verifies:
            self.verifying_s += now - self._last
        else:
            self.planning_s += now - self._last
        self._last = now

    def on(self, event: ProgressEvent) -> None:
        """Take an event of planning."""
        self.stop()
        self._verifies = event == RUNNING_ON_FAKE_PROCESSES


def read(file: Path) -> Iterator[Row]:
    """Yield the rows in a file of JSON lines; none where there is no file."""
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            yield Row(**{**values, "job": DrawnJob(**values["job"])})


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| # | model | cluster | mesh | phase | batch | seq | outcome | kinds | planning, CPU s | verifying, CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        job = row.job
        cells = (
            row.number, job.model, job.cluster.removesuffix(f"x{DEVICE}"), row.mesh, job.phase, job.batch,
            job.seq or "-", row.outcome, row.kinds, f"{row.planning_s:.1f}", f"{row.verifying_s:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the counts by outcome, and the median and the longest seconds of planning and verifying."""
    ran = [row for row in rows if row.verifying_s]
    figures: dict[str, Any] = {"jobs": len(rows), **Counter(row.outcome for row in rows)}
    for name in ("planning_s", "verifying_s"):
        values = sorted(getattr(row, name) for row in ran)
        if values:
            figures |= {f"median_{name}": values[len(values) // 2], f"longest_{name}": values[-1]}
    return figures


def main() -> int:
    """Run the benchmark; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("/tmp/fidelity.jsonl"))
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the jobs to run; all are planned again")
    parser.add_argument("--json", action="store_true", help="print the rows and the summary as JSON")
    options = parser.parse_args()
    rows = {row.number: row for row in read(options.output)}
    for number in range(options.jobs) if options.only is None else options.only:
        job = draw(options.seed, number)
        if options.only is None and number in rows and rows[number].job == job:
            continue
        row = rows[number] = run(number, job)
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        print(table([row]).splitlines()[-1], row.detail, file=sys.stderr, flush=True)
    chosen = [rows[number] for number in sorted(rows) if number < options.jobs]
    if options.json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in chosen], "summary": summary(chosen)}, indent=2))
    else:
        print(table(chosen), *(f"{name}: {value}" for name, value in summary(chosen).items()), sep="\n")
    return 1 if any(row.outcome in FAILED for row in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
