"""Seconds by stage and peak memory of the planner itself: against layers, devices, axes, and where issue 4 asks.

    python benchmarks/search.py --list
    python benchmarks/search.py --row check-1-given --row check-1-free
    python benchmarks/search.py --group layers --group axes --times 5 --json search.json --plot search.png
    python benchmarks/search.py --group check-8 --json search.json
    python benchmarks/search.py --read search.json --plot search.svg --markdown search.md

Every row runs in a fresh process, without any cache of plans. Seconds count from after the imports and after the
module is built; memory is the process's peak resident set, imports included. A row past its time limit says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GPU, PER_NODE = "h100-sxm-80gb", 8
LAYERS, DEVICES = (2, 8, 32, 80, 126), (1, 8, 64, 512, 4096, 16384)
STAGES = ("trace_s", "costs_s", "solve_s", "check_s", "write_s")
LIMITS_S = (1.0, 5.0, 30.0)
WITH_EXPERTS = ("mixtral-8x7b", "deepseek-v3")
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request to the planner.

    Attributes:
        group: "layers", "devices", "axes" or "check-N", a check of issue 4.
        layers: in place of the preset's; None leaves them.
        mesh, micro_batches, ac: given, or None to have them found.
        pipelines: whether pipelines are searched as well.
        asked_s: what the issue asks for, None where it does not.
        time_limit_s: of the search, which then gives the best plan so far; None: it ends by itself.
        jobs: processes that search; memory is then that of the first, and CPU seconds are those of the first.
    """

    name: str
    group: str
    preset: str
    devices: int
    batch: int
    seq: int = 8192
    layers: int | None = None
    mesh: str | None = None
    micro_batches: int | None = None
    ac: str | None = None
    pipelines: bool = False
    asked_s: float | None = None
    time_limit_s: float | None = None
    jobs: int = 1

    @property
    def cluster(self) -> str:
        """The cluster, whole nodes where there is more than one."""
        nodes, inside = max(self.devices // PER_NODE, 1), min(self.devices, PER_NODE)
        return f"{nodes}x{inside}x{GPU}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a row.

    Attributes:
        seconds: from the module to the plan, or to the refusal.
        cpu_s: of processor time meanwhile; less than ``seconds`` where others had the processor.
        stages: seconds by stage, as the plan has them; empty without a plan.
        peak_mb: peak resident set of the process; ``imports_mb`` of it before planning.
        answer: the plan in a few words, or why there is none.
        objective_s: seconds per step of the plan; None without one.
        gap: how far from the best it may be, relative to it.
    """

    row: Row
    seconds: float
    cpu_s: float
    model_s: float
    stages: Mapping[str, float]
    peak_mb: float
    imports_mb: float
    answer: str
    objective_s: float | None = None
    gap: float | None = None


def rows() -> Iterator[Row]:
    """Yield every row."""
    for layers in LAYERS:
        yield Row(
            name=f"layers-{layers}", group="layers", preset="llama-3.1-405b", layers=layers, devices=512, batch=128,
            mesh="dp=64,tp=8", micro_batches=1, ac="full", asked_s=5.0 if layers == 126 else None,
        )  # fmt: skip
    for devices in DEVICES:
        yield Row(name=f"devices-{devices}", group="devices", preset="llama-3.1-8b", devices=devices, batch=2 * devices)
    for mesh in ("dp=64", "dp=8,tp=8"):
        axes = mesh.count("=")
        yield Row(
            name=f"axes-{axes}", group="axes", preset="llama-3.1-8b", devices=64, batch=128, mesh=mesh,
            micro_batches=1, ac="full",
        )  # fmt: skip
    given = Row(
        name="check-1-given", group="check-1", preset="llama-3.1-8b", devices=256, batch=64, mesh="dp=32,tp=8",
        micro_batches=1, ac="full", asked_s=3.0,
    )  # fmt: skip
    yield given
    yield dataclasses.replace(given, name="check-1-free", micro_batches=None, ac=None)
    for pipelines in (False, True):
        name = "check-3-pipelines" if pipelines else "check-3"
        yield Row(
            name=name, group="check-3", preset="llama-3.1-405b", devices=16384, batch=2048, pipelines=pipelines,
            asked_s=60.0,
        )  # fmt: skip
    for preset, sizes in (
        ("llama-3.1-8b", (1, 8, 64, 512)),
        ("llama-3.1-70b", (64, 512)),
        ("llama-3.1-405b", (512, 1024, 2048, 4096, 8192, 16384)),
        ("mixtral-8x7b", (64,)),
        ("deepseek-v3", (256,)),
    ):
        for devices in sizes:
            yield Row(
                name=f"check-4-{preset.removeprefix('llama-3.1-')}-{devices}", group="check-4", preset=preset,
                devices=devices, batch=max(128, devices), seq=4096 if preset in WITH_EXPERTS else 8192,
                pipelines=True, asked_s=30.0, jobs=2,
            )  # fmt: skip
    for limit_s in (*LIMITS_S, None):
        yield Row(
            name=f"check-8-{'none' if limit_s is None else f'{limit_s:g}'}", group="check-8", preset="llama-3.1-405b",
            devices=16384, batch=2048, time_limit_s=limit_s,
        )  # fmt: skip


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _cpu_s() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def measure(row: Row) -> Outcome:
    """Return what comes of a row, planned in this process."""
    from api.requests.model_configs import find_config
    from api.requests.model_registry import load_model, quiet_libraries
    from planner import PlanningSession
    from planner.errors import InfeasibleError, SolverError

    config = find_config(row.preset, allow_local=False)
    assert config is not None
    values = {**config.values, **({} if row.layers is None else {"num_hidden_layers": row.layers})}
    started = time.perf_counter()
    with quiet_libraries():
        source = load_model({"hf_config": values}, seq=row.seq)
    model_s, imports_mb = time.perf_counter() - started, _peak_mb()
    started, cpu_started, stages = time.perf_counter(), _cpu_s(), {}
    objective_s = gap = None
    try:
        with quiet_libraries():
            session = PlanningSession(
                source.module, cluster=row.cluster, batch=row.batch, seq=row.seq, micro_batches=row.micro_batches,
                ac=row.ac, executable_only=not row.pipelines, time_limit_s=row.time_limit_s, jobs=row.jobs,
            )  # fmt: skip
            plan = session.plan(mesh=row.mesh)
        assert plan.estimate is not None
        assert plan.solver is not None
        stages, objective_s, gap = dict(plan.timings), plan.estimate.step_time_s, plan.solver.gap
        answer = f"{plan.mesh}; {plan.micro_batches} micro-batches; {plan.job.ac}; {plan.estimate.step_time_s:.3f} s"
    except InfeasibleError as error:
        needs = "no even split" if error.least_bytes is None else f"least {error.least_bytes / 1e9:.1f} GB"
        answer = f"does not fit: {needs}"
    except SolverError as error:
        answer = f"no plan: {error}"
    return Outcome(
        row=row, seconds=time.perf_counter() - started, cpu_s=_cpu_s() - cpu_started, model_s=model_s,
        stages=stages, peak_mb=_peak_mb(),
        imports_mb=imports_mb, answer=answer, objective_s=objective_s, gap=gap,
    )  # fmt: skip


def measure_apart(row: Row, time_limit_s: float) -> Outcome:
    """Return what comes of a row in a process of its own."""
    command = [sys.executable, __file__, "--alone", json.dumps(dataclasses.asdict(row))]
    nothing = Outcome(row=row, seconds=0.0, cpu_s=0.0, model_s=0.0, stages={}, peak_mb=0.0, imports_mb=0.0, answer="")
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=time_limit_s, check=False)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(nothing, seconds=time_limit_s, answer=f"stopped after {time_limit_s:.0f} s")
    if done.returncode:
        return dataclasses.replace(nothing, answer=f"failed with exit code {done.returncode}")
    return outcome_of(json.loads(done.stdout.splitlines()[-1]))


def usual_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the run of one row that took the median of the seconds, with medians of the stages; or one that broke."""
    broken = [item for item in outcomes if item.answer.startswith(("failed", "stopped"))]
    if broken:
        return broken[0]
    usual = sorted(outcomes, key=lambda item: item.seconds)[len(outcomes) // 2]
    stages = {name: statistics.median(item.stages[name] for item in outcomes) for name in usual.stages}
    return dataclasses.replace(usual, stages=stages)


def measure_in_rounds(wanted: Sequence[Row], time_limit_s: float, times: int) -> Iterator[list[Outcome]]:
    """Yield what comes of the rows, the usual of so many ``times``, after each run: slow minutes fall on all rows."""
    runs: dict[str, list[Outcome]] = {}
    for row in (row for _ in range(times) for row in wanted):
        found = measure_apart(row, time_limit_s)
        print(f"{row.name}: {found.seconds:.2f} s, {found.answer}", file=sys.stderr, flush=True)
        runs.setdefault(row.name, []).append(found)
        yield [usual_of(of_row) for of_row in runs.values()]


def outcome_of(document: Mapping[str, Any]) -> Outcome:
    """Return an outcome from what `dataclasses.asdict` made of it."""
    return Outcome(**{**document, "row": Row(**document["row"])})


COLUMNS = (
    "row", "model", "cluster", "seconds", "CPU s", "asked", *STAGES, "peak MB", "imports MB", "gap", "answer",
)  # fmt: skip
WORDS = ("row", "model", "cluster", "answer")


def cells_of(item: Outcome) -> list[str]:
    """Return what is said of a row, one cell for each of `COLUMNS`."""
    row = item.row
    depth = "" if row.layers is None else f", {row.layers} layers"
    stages = [f"{item.stages[stage]:.2f}" if stage in item.stages else "-" for stage in STAGES]
    asked = "-" if row.asked_s is None else f"{row.asked_s:.0f}"
    gap = "-" if item.gap is None else f"{100 * item.gap:.2f} %"
    return [
        row.name, row.preset + depth, row.cluster, f"{item.seconds:.2f}", f"{item.cpu_s:.2f}", asked, *stages,
        f"{item.peak_mb:.0f}", f"{item.imports_mb:.0f}", gap, item.answer,
    ]  # fmt: skip


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of what was measured."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in WORDS else "right")
    for item in outcomes:
        table.add_row(*cells_of(item))
    return table


def markdown_of(outcomes: Sequence[Outcome]) -> str:
    """Return the same table as docs write it, and what is checked below it."""
    lines = ["| " + " | ".join(name.removesuffix("_s") for name in COLUMNS) + " |"]
    lines.append("| " + " | ".join("---" if name in WORDS else "---:" for name in COLUMNS) + " |")
    lines += ["| " + " | ".join(cells_of(item)) + " |" for item in outcomes]
    return "\n".join([*lines, "", *(f"- {line}" for line in checks_of(outcomes))]) + "\n"


def checks_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what the rows say together: late ones, solving by layers, and plans that more time made worse."""
    late = [item.row.name for item in outcomes if item.row.asked_s is not None and item.seconds > item.row.asked_s]
    found = [f"later than asked for: {', '.join(late) or 'none'}"]
    searches = [item.seconds for item in outcomes if item.row.group == "check-4"]
    if searches:
        found.append(f"median of {len(searches)} searches of check-4: {statistics.median(searches):.1f} s")
    by_layers = [item for item in outcomes if item.row.group == "layers" and item.stages]
    solving = {item.row.layers or 0: item.stages["solve_s"] for item in by_layers}
    if len(solving) > 1:
        few, many = min(solving.items()), max(solving.items())
        found.append(f"solving {many[0]} layers takes {many[1] / few[1]:.2f} times as long as {few[0]}")
    limited = [item for item in outcomes if item.row.group == "check-8"]
    limited.sort(key=lambda item: item.row.time_limit_s or math.inf)
    times = [math.inf if item.objective_s is None else item.objective_s for item in limited]
    if len(times) > 1:
        worse = any(later > sooner for sooner, later in itertools.pairwise(times))
        without = any(item.gap is None for item in limited if item.objective_s is not None)
        found.append(f"more time made a plan worse: {'YES' if worse else 'no'}")
        found.append(f"a plan without its gap: {'YES' if without else 'no'}")
    return found


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(rows())
    parser.add_argument("--row", action="append", choices=[row.name for row in known], help="again for more")
    parser.add_argument("--group", action="append", choices=list(dict.fromkeys(row.group for row in known)))
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S, help="of each row")
    parser.add_argument("--times", type=int, default=1, help="run each row so often, and take the medians")
    parser.add_argument("--jobs", type=int, help="processes that search, in place of what each row says")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take what was measured from there; measure nothing")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as docs have it")
    parser.add_argument("--plot", type=Path, metavar="PNG|SVG", help="draw it (needs matplotlib, the notebook extra)")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen(arguments: argparse.Namespace) -> list[Row]:
    """Return the rows that are asked for; all where none is named."""
    groups, names = arguments.group or [], arguments.row or []
    wanted = [row for row in rows() if row.group in groups or row.name in names or not (groups or names)]
    return wanted if arguments.jobs is None else [dataclasses.replace(row, jobs=arguments.jobs) for row in wanted]


def main() -> int:
    """Measure and print; 1 where a row failed."""
    arguments = parse_arguments()
    if arguments.alone:
        print(json.dumps(dataclasses.asdict(measure(Row(**json.loads(arguments.alone))))))
        return 0
    if arguments.list:
        print("\n".join(f"{row.name:24} {row.preset} on {row.cluster}" for row in rows()))
        return 0
    if arguments.read:
        outcomes = [outcome_of(item) for item in json.loads(arguments.read.read_text())]
    else:
        outcomes = []
        for outcomes in measure_in_rounds(chosen(arguments), arguments.time_limit_s, arguments.times):
            if arguments.json:
                arguments.json.write_text(json.dumps([dataclasses.asdict(item) for item in outcomes], indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown_of(outcomes))
    if arguments.plot:
        from draw_search import draw

        draw(outcomes, arguments.plot)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=220)).print(table_of(outcomes))
    print("\n".join(checks_of(outcomes)))
    return 1 if any(item.answer.startswith("failed") for item in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
