"""Which models can be planned? Small models of many architectures, each traced, planned and verified.

    cd benchmarks && python -m covered.coverage --json results/coverage.jsonl --markdown results/coverage.md \\
        --matrix ../docs/reference/architectures.md

Each case runs in a process of its own, forked from one that has imported everything, within a time limit. Cases that
are in the file already are not run again. Exit code 1: a traceback, or a plan that does not run as planned.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from covered.plain_modules import PLAIN, VISION
from covered.popular import POPULAR, inputs_of
from covered.small_configs import small_model, tp_planned
from torch import nn

import executor.find_local_modules
import executor.verify  # noqa: F401  planning imports both where it verifies a plan
from cost_model.hardware.cluster import ClusterError
from planner.build import verified_plan
from planner.errors import ModelError, PlannerError, RunError
from planner.plan.job_spec import spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.session import PlanningSession

CLUSTER = "2x2xtoy"
MESH = "dp=2,tp=2"
BATCH = 8
RESULTS = ("verified", "baseline", "refused", "differs", "traceback", "too slow", "no eager run")
"""What a case can end in: planned and verified, a plan of which only a baseline's runs, an error of shardplan, a plan
that runs otherwise, any other error, beyond the time limit, and a model that fails without shardplan (not counted)."""

Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of the benchmark; ``make()`` returns it with the arguments of one call."""

    name: str
    group: str
    make: Callable[[], tuple[nn.Module, Inputs]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of a case.

    Attributes:
        result: one of `RESULTS`.
        cause: one line of the error; "" without one.
        planning_s: seconds of `build_plan` on all meshes, verification included.
        ratio: step time of the hand-written plan over that of the ILP's, both on `MESH`; None: there is none, or it
            cannot be priced.
        expert: why there is no such ratio, for models that carry a plan.
    """

    name: str
    group: str
    result: str
    cause: str = ""
    planning_s: float | None = None
    ratio: float | None = None
    expert: str = ""


def cases() -> list[Case]:
    """Return all cases, by group."""

    def of_config(name: str) -> tuple[nn.Module, Inputs]:
        model = small_model(name)
        return model, inputs_of(model, BATCH)

    found = [
        Case(name=name, group=group, make=lambda name=name: of_config(name))
        for group, names in (("tp-plan", tp_planned()), ("popular", POPULAR))
        for name in names
    ]
    plain = (("plain", PLAIN), ("vision", VISION))
    return found + [Case(name=case.name, group=group, make=case.make) for group, many in plain for case in many]


def run(case: Case) -> Row:
    """Return the row of a case, which runs in this process."""
    row = Row(name=case.name, group=case.group, result="no eager run")
    torch.manual_seed(0)
    try:
        model, inputs = case.make()
        model.train()
        _call(model, inputs)
    except Exception as error:  # noqa: BLE001  the model's own fault, whatever it is
        return dataclasses.replace(row, cause=_in_one_line(error))
    try:
        start = time.perf_counter()
        session = _session(model, inputs)
        plans = [verified_plan(session, tolerance=session.spec.tolerance)]
        row = dataclasses.replace(row, planning_s=time.perf_counter() - start)
        plans.append(verified_plan(session, mesh=MESH))
        for plan in plans:
            _check_verified(plan)
    except RunError as error:
        return dataclasses.replace(row, result="differs", cause=_in_one_line(error))
    except (PlannerError, ClusterError) as error:
        return dataclasses.replace(row, result="refused", cause=_in_one_line(error))
    except Exception as error:  # noqa: BLE001  what the benchmark looks for
        return dataclasses.replace(row, result="traceback", cause=_in_one_line(error))
    last_resorts = [plan for plan in plans if plan.solver is not None and plan.solver.name != "ilp"]
    if last_resorts:
        return dataclasses.replace(row, result="baseline", cause=last_resorts[0].notes[-1])
    row = dataclasses.replace(row, result="verified")
    if getattr(getattr(model, "config", None), "base_model_tp_plan", None) is None:
        return row
    try:
        theirs = session.plan(planner="tensor-parallel", mesh=MESH)
        return dataclasses.replace(row, ratio=theirs.estimate.step_time_s / plans[-1].estimate.step_time_s)
    except PlannerError as error:
        return dataclasses.replace(row, expert=_in_one_line(error))


def _session(model: nn.Module, inputs: Inputs) -> PlanningSession:
    """Return the model traced in the default dtype, or in fp32 where the error says so."""
    job = {"cluster": CLUSTER, "batch": BATCH}
    try:
        return PlanningSession(model, spec=spec_of(job), example_inputs=inputs)
    except ModelError as error:
        if "dtype='fp32'" not in error.what_to_do:
            raise
        return PlanningSession(model, spec=spec_of({**job, "dtype": "fp32"}), example_inputs=inputs)


def _call(model: nn.Module, inputs: Inputs) -> None:
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def _check_verified(plan: ShardingPlan) -> None:
    """Raise a `RunError` where ``plan`` was not verified, or runs otherwise."""
    verification = plan.verification
    if verification is None or verification.outcome == "not-run":
        raise RunError(f"the plan was not verified: {verification}")


def _in_one_line(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    if isinstance(error, PlannerError | ClusterError):
        return f"{type(error).__name__}: {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"


def run_apart(case: Case, limit_s: float) -> Row:
    """Return the row of a case, which runs in a process of its own within ``limit_s`` seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        with os.fdopen(write, "w") as result:
            result.write(json.dumps(dataclasses.asdict(run(case))))
        os._exit(0)
    os.close(write)
    row = Row(name=case.name, group=case.group, result="too slow", cause=f"no plan after {limit_s:.0f} s")
    with os.fdopen(read) as result:
        if select.select([result], [], [], limit_s)[0]:
            text = result.read()
            row = Row(**json.loads(text)) if text else dataclasses.replace(row, result="traceback", cause="it crashed")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return row


def rows_of(cases: Sequence[Case], file: Path, limit_s: float) -> Iterator[Row]:
    """Yield the row of each case, from ``file`` where it has it, or else new and appended to it."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = {(row.group, row.name): row for row in (Row(**json.loads(line)) for line in lines)}
    for case in cases:
        if (case.group, case.name) not in known:
            row = known[case.group, case.name] = run_apart(case, limit_s)
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(dataclasses.asdict(row)) + "\n")
            print(f"{row.group:8} {row.name:32} {row.result:12} {row.cause[:150]}", flush=True)
        yield known[case.group, case.name]


def main() -> int:
    """Run the cases, and print and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("coverage.jsonl"), help="rows, one a line; read and extended")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--matrix", type=Path, help="write the page of the documentation to this file")
    parser.add_argument("--group", action="append", help="only this group; may be repeated")
    parser.add_argument("--only", action="append", help="only this case; may be repeated")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for a case")
    args = parser.parse_args()
    chosen = [
        case
        for case in cases()
        if (not args.group or case.group in args.group) and (not args.only or case.name in args.only)
    ]
    torch.set_num_threads(1)
    rows = list(rows_of(chosen, args.json, args.limit_s))
    print(summary(rows))
    if args.markdown:
        args.markdown.write_text(document(rows), encoding="utf-8")
    if args.matrix:
        args.matrix.write_text(support_matrix(rows), encoding="utf-8")
    return int(any(row.result in ("traceback", "differs") for row in rows))


def summary(rows: Sequence[Row]) -> str:
    """Return a table of how many cases of each group ended in what."""
    lines = [f"| group | counted | {' | '.join(RESULTS)} | planning, s, median (longest) | slower than the expert |"]
    lines.append("| --- " * (len(RESULTS) + 4) + "|")
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        counts = Counter(row.result for row in mine)
        counted = len(mine) - counts["no eager run"]
        times = [row.planning_s for row in mine if row.planning_s is not None] or [0.0]
        ratios = [row.ratio for row in mine if row.ratio is not None]
        slower = f"{sum(ratio < 1 - 1e-6 for ratio in ratios)} of {len(ratios)}"
        cells = [group, counted, *(counts[result] for result in RESULTS)]
        cells += [f"{median(times):.1f} ({max(times):.1f})", slower]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def document(rows: Sequence[Row]) -> str:
    """Return the summary as Markdown, for `benchmarks/results`."""
    ran = f"`cd benchmarks && python -m covered.coverage`, last on {date.today()}; two processors, no GPU."
    rest = "Each case: `coverage.jsonl`, and `docs/reference/architectures.md`, which is made of it."
    return "\n".join(["# Which models can be planned?", "", ran, rest, "", summary(rows), ""])


def support_matrix(rows: Sequence[Row]) -> str:
    """Return the page of the documentation on which architectures were planned and verified."""
    lines = [
        "# Architectures",
        "",
        f"A small model of each was traced, planned for {CLUSTER} on the best mesh and on `{MESH}`, and trained",
        "for a step on fake processes. *verified*: both plans ran exactly the collectives that they predict.",
        "*baseline*: only the plan of a baseline does. *refused*: shardplan says why not.",
        "This page is generated from `benchmarks/results/coverage.jsonl`; `benchmarks/README.md` has the command.",
    ]
    in_lists = Counter(case.group for case in cases())
    for group, title in _TITLES.items():
        ran = [row for row in rows if row.group == group and row.result != "no eager run"]
        mine = sorted(ran, key=lambda row: row.name.lower())
        if mine:
            counted = sum(row.result == "verified" for row in mine)
            unseen = in_lists[group] - sum(row.group == group for row in rows)
            more = f" {unseen} more of the list were not run." if unseen else ""
            lines += ["", f"## {title}", "", f"{counted} of {len(mine)} verified.{more}", "", *_table(mine)]
    return "\n".join([*lines, ""])


_TITLES = {
    "tp-plan": "Hugging Face models that carry a tensor-parallel plan",
    "popular": "Other Hugging Face models",
    "plain": "Plain torch modules",
    "vision": "Vision models in plain torch",
}


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| model | result | its own plan's step over ours | planning, s | cause |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
        seconds = f"{row.planning_s:.1f}" if row.planning_s is not None else ""
        cause = (row.cause or row.expert).replace("|", "/").replace("<", "&lt;")
        cause = cause if len(cause) <= _CAUSE else f"{cause[:_CAUSE]} ..."
        lines.append(f"| {row.name} | {row.result} | {ratio} | {seconds} | {cause} |")
    return lines


_CAUSE = 140
"""Characters of a cause that are shown."""


if __name__ == "__main__":
    raise SystemExit(main())
