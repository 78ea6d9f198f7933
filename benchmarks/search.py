"""Wall time by stage and peak memory of the planner, by layers, devices and mesh axes, and for whole searches.

    python benchmarks/search.py --list
    python benchmarks/search.py --row check-1-given --row check-1-free
    python benchmarks/search.py --group layers --group axes --times 5 --json search.json --plot search.png
    python benchmarks/search.py --group check-8 --json search.json
    python benchmarks/search.py --read search.json --plot search.svg --markdown search.md

Every row runs in a fresh process without a cache of plans. Seconds count from after the imports and after the module is
built. Memory is the process's peak resident set, imports included.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from search_cases import STAGES, Outcome, Row, outcome_of, rows

TIME_LIMIT_S = 600.0


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _cpu_s() -> float:
    """Return the processor seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def measure(row: Row) -> Outcome:
    """Return the outcome of a row, planned in this process."""
    import executor.verify  # noqa: F401  seconds count from after the imports
    from api.requests.model_configs import find_config
    from api.requests.model_registry import load_model, quiet_libraries
    from planner import PlanningSession
    from planner.build import verified_plan
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
            plan = verified_plan(session, mesh=row.mesh, tolerance=session.spec.tolerance)
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
    """Return the outcome of a row, planned in a process of its own."""
    command = [sys.executable, __file__, "--alone", json.dumps(dataclasses.asdict(row))]
    nothing = Outcome(row=row, seconds=0.0, cpu_s=0.0, model_s=0.0, stages={}, peak_mb=0.0, imports_mb=0.0, answer="")
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=time_limit_s, check=False)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(nothing, seconds=time_limit_s, answer=f"stopped after {time_limit_s:.0f} s")
    if done.returncode:
        return dataclasses.replace(nothing, answer=f"failed with exit code {done.returncode}")
    return outcome_of(json.loads(done.stdout.splitlines()[-1]))


def median_run(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the run with the median seconds, with the median of each stage; or a run that failed or was stopped."""
    broken = [item for item in outcomes if item.answer.startswith(("failed", "stopped"))]
    if broken:
        return broken[0]
    median = sorted(outcomes, key=lambda item: item.seconds)[len(outcomes) // 2]
    stages = {name: statistics.median(item.stages[name] for item in outcomes) for name in median.stages}
    return dataclasses.replace(median, stages=stages)


def measure_in_rounds(wanted: Sequence[Row], time_limit_s: float, times: int) -> Iterator[list[Outcome]]:
    """Yield the median outcomes so far, after each run; each of the ``times`` rounds runs all rows once."""
    runs: dict[str, list[Outcome]] = {}
    for row in (row for _ in range(times) for row in wanted):
        outcome = measure_apart(row, time_limit_s)
        print(f"{row.name}: {outcome.seconds:.2f} s, {outcome.answer}", file=sys.stderr, flush=True)
        runs.setdefault(row.name, []).append(outcome)
        yield [median_run(outcomes) for outcomes in runs.values()]


COLUMNS = (
    "row", "model", "cluster", "seconds", "CPU s", "target", *STAGES, "peak MB", "imports MB", "gap", "answer",
)  # fmt: skip
WORDS = ("row", "model", "cluster", "answer")


def cells_of(item: Outcome) -> list[str]:
    """Return the cells of a row, one for each of `COLUMNS`."""
    row = item.row
    depth = "" if row.layers is None else f", {row.layers} layers"
    stages = [f"{item.stages[stage]:.2f}" if stage in item.stages else "-" for stage in STAGES]
    target = "-" if row.target_s is None else f"{row.target_s:.0f}"
    gap = "-" if item.gap is None else f"{100 * item.gap:.2f} %"
    return [
        row.name, row.preset + depth, row.cluster, f"{item.seconds:.2f}", f"{item.cpu_s:.2f}", target, *stages,
        f"{item.peak_mb:.0f}", f"{item.imports_mb:.0f}", gap, item.answer,
    ]  # fmt: skip


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of the outcomes."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in WORDS else "right")
    for item in outcomes:
        table.add_row(*cells_of(item))
    return table


def markdown_of(outcomes: Sequence[Outcome]) -> str:
    """Return the table of the outcomes and the checks below it, in Markdown."""
    lines = ["| " + " | ".join(name.removesuffix("_s") for name in COLUMNS) + " |"]
    lines.append("| " + " | ".join("---" if name in WORDS else "---:" for name in COLUMNS) + " |")
    lines += ["| " + " | ".join(cells_of(item)) + " |" for item in outcomes]
    return "\n".join([*lines, "", *(f"- {line}" for line in checks_of(outcomes))]) + "\n"


def checks_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the checks over all rows as lines: targets missed, solving by layers, plans that more time made worse."""
    late = [item.row.name for item in outcomes if item.row.target_s is not None and item.seconds > item.row.target_s]
    lines = [f"over the target: {', '.join(late) or 'none'}"]
    searches = [item.seconds for item in outcomes if item.row.group == "check-4"]
    if searches:
        lines.append(f"median of {len(searches)} searches of check-4: {statistics.median(searches):.1f} s")
    by_layers = [item for item in outcomes if item.row.group == "layers" and item.stages]
    solving = {item.row.layers or 0: item.stages["solve_s"] for item in by_layers}
    if len(solving) > 1:
        few, many = min(solving.items()), max(solving.items())
        lines.append(f"solving {many[0]} layers takes {many[1] / few[1]:.2f} times as long as {few[0]}")
    limited = [item for item in outcomes if item.row.group == "check-8"]
    limited.sort(key=lambda item: item.row.time_limit_s or math.inf)
    times = [math.inf if item.objective_s is None else item.objective_s for item in limited]
    if len(times) > 1:
        worse = any(later > sooner for sooner, later in itertools.pairwise(times))
        without = any(item.gap is None for item in limited if item.objective_s is not None)
        lines.append(f"more time made a plan worse: {'YES' if worse else 'no'}")
        lines.append(f"a plan without its gap: {'YES' if without else 'no'}")
    return lines


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(rows())
    parser.add_argument("--row", action="append", choices=[row.name for row in known], help="again for more")
    parser.add_argument("--group", action="append", choices=list(dict.fromkeys(row.group for row in known)))
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S, help="of each row")
    parser.add_argument("--times", type=int, default=1, help="rounds, of which medians are taken")
    parser.add_argument("--jobs", type=int, help="processes that search, in place of each row's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    parser.add_argument("--read", type=Path, metavar="FILE", help="read outcomes from there; measure nothing")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--plot", type=Path, metavar="PNG|SVG", help="draw it (needs matplotlib: the notebook extra)")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen(arguments: argparse.Namespace) -> list[Row]:
    """Return the chosen rows; all where none is named."""
    groups, names = arguments.group or [], arguments.row or []
    selected = [row for row in rows() if row.group in groups or row.name in names or not (groups or names)]
    return selected if arguments.jobs is None else [dataclasses.replace(row, jobs=arguments.jobs) for row in selected]


def main() -> int:
    """Measure and print; return 1 where a row failed."""
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
