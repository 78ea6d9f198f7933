"""Fifteen usual jobs: the chosen plan, the fastest, the baselines, and the plan under the cost model's error.

    cd benchmarks && python launch.py --list
    cd benchmarks && python launch.py --job 8b-1x8 --job gpt2 --json launch.json
    cd benchmarks && python launch.py --read launch.json --markdown results/launch.md --printouts ../docs/usual-jobs.md

Every job runs in a process of its own. ``--json`` keeps the outcomes of jobs that were run before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WITHIN = 0.05
"""Most that a plan may take longer than the best contender under a perturbation (check 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """One job: a preset, a cluster, and the global batch that published recipes use for such models.

    Attributes:
        seq: tokens of a sequence, in decode in the cache; None: the model has no sequences.
    """

    name: str
    preset: str
    cluster: str
    batch: int
    seq: int | None
    phase: str = "training"

    @property
    def command(self) -> str:
        """The command that prints the plan."""
        seq = "" if self.seq is None else f" --seq {self.seq}"
        phase = "" if self.phase == "training" else f" --phase {self.phase}"
        return f"shardplan plan {self.preset} --cluster {self.cluster} --batch {self.batch}{seq}{phase}"


JOBS = (
    LaunchJob(name="8b-1x8", preset="llama-3.1-8b", cluster="1x8xh100-sxm-80gb", batch=64, seq=8192),
    LaunchJob(name="8b-8x8", preset="llama-3.1-8b", cluster="8x8xh100-sxm-80gb", batch=512, seq=8192),
    LaunchJob(name="70b-8x8", preset="llama-3.1-70b", cluster="8x8xh100-sxm-80gb", batch=512, seq=8192),
    LaunchJob(name="70b-32x8", preset="llama-3.1-70b", cluster="32x8xh100-sxm-80gb", batch=512, seq=8192),
    LaunchJob(name="405b-64x8", preset="llama-3.1-405b", cluster="64x8xh100-sxm-80gb", batch=512, seq=8192),
    LaunchJob(name="mixtral-8x8", preset="mixtral-8x7b", cluster="8x8xh100-sxm-80gb", batch=1024, seq=4096),
    LaunchJob(name="qwen3-a100", preset="qwen3-8b", cluster="1x8xa100-sxm-80gb", batch=128, seq=4096),
    LaunchJob(name="qwen3-l40s", preset="qwen3-8b", cluster="1x4xl40s-48gb", batch=64, seq=4096),
    LaunchJob(name="8b-long", preset="llama-3.1-8b", cluster="4x8xh100-sxm-80gb", batch=32, seq=131072),
    LaunchJob(name="gpt2", preset="gpt2", cluster="1x8xh100-sxm-80gb", batch=512, seq=1024),
    LaunchJob(name="bert-large", preset="bert-large", cluster="1x8xh100-sxm-80gb", batch=256, seq=512),
    LaunchJob(name="vit-large", preset="vit-large", cluster="1x8xh100-sxm-80gb", batch=1024, seq=None),
    LaunchJob(name="t5-large", preset="t5-large", cluster="1x8xh100-sxm-80gb", batch=128, seq=512),
    LaunchJob(
        name="70b-decode", preset="llama-3.1-70b", cluster="1x8xh100-sxm-80gb", batch=64, seq=8192, phase="decode"
    ),
    LaunchJob(name="deepseek-32x8", preset="deepseek-v3", cluster="32x8xh100-sxm-80gb", batch=1024, seq=4096),
)


JUDGEMENTS = {
    "8b-1x8": (
        "Launch it: plain FSDP. Selective checkpointing of the first 13 blocks only is what the free memory allows; "
        "`--ac selective` for all of them costs 3 %, and is simpler to set up."
    ),
    "8b-8x8": (
        "Launch it as it is: plain FSDP without checkpointing. The fastest plan found has two axes and is 1 % "
        "faster, which nobody could measure."
    ),
    "70b-8x8": (
        "Launch it: plain FSDP, with full checkpointing of as many blocks as it needs and selective of the others."
        " The fastest plan found is 2 % faster only if all of its communication overlaps as planned."
    ),
    "70b-32x8": (
        "Launch it: plain FSDP. `--ac full` costs 4 %, and leaves 33 % of the memory for what the model leaves out."
    ),
    "405b-64x8": (
        "Launch it: FSDP with tensor parallelism of 2 and sequence parallelism. Published runs have tensor "
        "parallelism of 8 and pipelines; `--no-executable-only` searches those."
    ),
    "mixtral-8x8": (
        "Launch it if the router is known to balance: experts are spread within a node, and imbalance can "
        "cost more than the 4 % that this plan is ahead of FSDP. FSDP is the cautious choice."
    ),
    "qwen3-a100": ("Launch it. With `--planner fsdp` the embedding and the head are gathered like the rest, for 2 %."),
    "qwen3-l40s": (
        "Do not launch it: over PCIe half of the communication is exposed. A fully sharded plan needs 46.5 GB "
        "of 47.7 GB, which misses the headroom; with `--headroom 0.02` it is chosen, and takes 33.5 s."
    ),
    "8b-long": (
        "Launch it: such sequences need context parallelism. I would add `--techniques zigzag`, since ranks "
        "do unequal work under the causal mask."
    ),
    "gpt2": ("Launch it: data parallelism. Half of the memory is free, and a larger micro-batch would gain little."),
    "bert-large": ("Launch it, or DDP, which is simpler to run: 4 % are within the error of the model."),
    "vit-large": ("Launch it, or DDP, for the same reason as BERT."),
    "t5-large": (
        "Compile the model or enlarge the batch first: the host needs twice the time of the kernels. Then launch it."
    ),
    "70b-decode": (
        "Launch it with CUDA graphs, never in eager mode, as the warning says. Tensor parallelism over a node "
        "is what serving engines use."
    ),
    "deepseek-32x8": (
        "Do not launch it: expert parallelism over two nodes leaves a third of the communication exposed. "
        "Search pipelines (`--no-executable-only`) and run such a plan in another framework."
    ),
}
"""Job -> whether an engineer would launch its plan, and what they would change. Judged on 2026-11-25."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The outcome of a job.

    Attributes:
        error: why there is no plan; None: there is one.
        mesh, micro_batches, ac, step_time_s, peak_bytes: the chosen plan.
        gap: relative distance from the lower bound; None: not proven.
        bound_s: lower bound on the step time of every plan.
        fastest_s, fastest_mesh, loses_under: as in `SolverReport`.
        baselines: the fields of each `BaselinePrice`.
        behind: perturbation -> relative distance from the best contender under it.
        axes: mesh axes with more than one rank; ``baseline_axes``: of the fastest baseline; None: none fits.
        layouts: number of different (stored, compute) layouts of parameters.
        cpu_s: processor seconds of tracing, planning and verifying.
        verify_s: seconds of verifying.
        printout: the plan as it is printed.
    """

    name: str
    error: str | None = None
    mesh: str = ""
    micro_batches: int = 1
    ac: str = "none"
    step_time_s: float = math.nan
    peak_bytes: int = 0
    gap: float | None = None
    bound_s: float | None = None
    fastest_s: float | None = None
    fastest_mesh: str | None = None
    loses_under: str | None = None
    baselines: list[dict[str, Any]] = field(default_factory=list)
    behind: dict[str, float] = field(default_factory=dict)
    axes: int = 0
    baseline_axes: int | None = None
    layouts: int = 0
    cpu_s: float = 0.0
    verify_s: float = 0.0
    printout: str = ""

    @property
    def failures(self) -> list[str]:
        """The checks that the plan fails, in words."""
        failures = []
        if self.baseline_axes is not None and self.axes > self.baseline_axes + 1:
            failures.append(f"{self.axes} axes, the best baseline has {self.baseline_axes}")
        best_s = self.step_time_s if self.fastest_s is None else self.fastest_s
        if self.step_time_s > best_s * 1.02:
            failures.append(f"{self.step_time_s / best_s - 1:.1%} slower than the fastest")
        failures += [f"{share:.1%} behind under {name}" for name, share in self.behind.items() if share > WITHIN]
        # The bound is that of plans that checkpoint all blocks alike.
        alike = [price for price in self.baselines if price["ac"] in (None, "none", "selective", "full")]
        times = [price["step_time_s"] for price in alike if price["step_time_s"] is not None]
        if self.bound_s is not None and times and min(times) < self.bound_s * (1 - 1e-9):
            failures.append(f"a baseline of {min(times):.6g} s is below the bound {self.bound_s:.6g} s")
        return failures


def launch(job: LaunchJob) -> Launched:
    """Return the outcome of a job, planned in this process."""
    from api.render.plan import plan_lines
    from api.requests.model_registry import load_model, quiet_libraries
    from planner import PlanningSession
    from planner.build import verified_plan
    from planner.errors import PlannerError
    from planner.plan.job_spec import JobSpec

    with quiet_libraries():
        source = load_model(job.preset, seq=job.seq)
        before = _cpu_s()
        spec = JobSpec(cluster=job.cluster, batch=job.batch, seq=job.seq, phase=job.phase)  # type: ignore[arg-type]
        try:
            session = PlanningSession(source.module, spec=spec, tp_plan=source.tp_plan)
            plan = dataclasses.replace(verified_plan(session, tolerance=spec.tolerance), model=job.preset)
        except PlannerError as error:
            return Launched(name=job.name, error=str(error), cpu_s=_cpu_s() - before)
    assert plan.estimate is not None
    assert plan.solver is not None
    assert session.last_choice is not None
    chosen, among = session.last_choice.contender, session.last_choice.among
    fitting = [price for price in plan.baselines if price.step_time_s is not None]
    best = min(fitting, key=lambda price: price.step_time_s or math.inf, default=None)
    return Launched(
        name=job.name,
        mesh=str(plan.mesh),
        micro_batches=plan.micro_batches,
        ac=plan.job.ac or "none",
        step_time_s=plan.estimate.step_time_s,
        peak_bytes=plan.estimate.peak_memory_bytes,
        gap=plan.solver.gap,
        bound_s=plan.solver.bound_s,
        fastest_s=plan.solver.fastest_s,
        fastest_mesh=plan.solver.fastest_mesh,
        loses_under=plan.solver.loses_under,
        baselines=[dataclasses.asdict(price) for price in plan.baselines],
        behind={
            name: time_s / min(each.perturbed_s[name] for each in among) - 1
            for name, time_s in chosen.perturbed_s.items()
        },
        axes=chosen.axes,
        baseline_axes=None if best is None else _axes(best.mesh),
        layouts=len({(str(layout), str(plan.compute_plan.get(key, layout))) for key, layout in plan.plan.items()}),
        cpu_s=_cpu_s() - before,
        verify_s=plan.timings.get("verify_s", 0.0),
        printout="\n".join(plan_lines(plan, file="plan.json")),
    )


def _axes(mesh: str) -> int:
    return sum(int(axis.partition("=")[2]) > 1 for axis in mesh.split(","))


def _cpu_s() -> float:
    return sum(os.times()[:4])


def launch_apart(job: LaunchJob) -> Launched:
    """Return the outcome of a job, planned in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", job.name], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        return Launched(name=job.name, error=f"failed with exit code {done.returncode}")
    return Launched(**json.loads(done.stdout.splitlines()[-1]))


def rows_of(outcome: Launched) -> list[str]:
    """Return the rows of an outcome in a Markdown table: the plan, then its baselines."""
    if outcome.error is not None:
        return [f"| **{outcome.name}** | {outcome.error.splitlines()[0]} | | | | | |"]
    fastest = "it is the fastest"
    if outcome.fastest_s is not None:
        why = f", and loses under {outcome.loses_under}" if outcome.loses_under else ""
        share = outcome.step_time_s / outcome.fastest_s - 1
        fastest = f"{share:.1%} slower than {outcome.fastest_mesh}{why}"
    behind = ", ".join(f"{share:.1%}" for share in outcome.behind.values()) or "-"
    rows = [
        f"| **{outcome.name}** | {outcome.mesh} | {outcome.micro_batches}, {outcome.ac} | {outcome.step_time_s:.4g} s"
        f" | {outcome.peak_bytes / 1e9:.1f} GB | {fastest}; gap {outcome.gap or 0:.2%}; {outcome.layouts} kinds of "
        f"layout | {behind} |"
    ]
    for price in outcome.baselines:
        step_time_s, peak = price["step_time_s"], price["peak_memory_bytes"]
        verdict = "no such plan" if peak is None else "does not fit"
        if step_time_s is not None:
            verdict = f"{step_time_s / outcome.step_time_s - 1:+.1%}"
        run = "" if price["ac"] is None else f"{price['micro_batches']}, {price['ac']}"
        seconds = "" if step_time_s is None else f"{step_time_s:.4g} s"
        memory = "" if peak is None else f"{peak / 1e9:.1f} GB"
        rows.append(f"| {price['name']} | {price['mesh']} | {run} | {seconds} | {memory} | {verdict} | |")
    return rows


def markdown(outcomes: Sequence[Launched]) -> str:
    """Return the outcomes as a Markdown page."""
    failures = [f"- {each.name}: {text}" for each in outcomes for text in each.failures]
    jobs = {job.name: job for job in JOBS}
    lines = [
        "# launch.py",
        "",
        "`cd benchmarks && python launch.py --json launch.json --markdown results/launch.md`: the plan of usual "
        "jobs, and below each the baselines. Micro-batches and checkpointing are those of the plan. The last column is "
        "how far the plan is from the best contender (the fastest plan and the baselines) with communication 1.3 times "
        "as slow, with a fifth of what overlaps exposed, and with kernels 10 % slower.",
        "",
        "| job or baseline | mesh | micro-batches, checkpointing | step | memory | compared with the plan | behind |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(row for outcome in outcomes for row in rows_of(outcome)),
        "",
        "Jobs:",
        "",
        *(
            f"- {each.name}: {jobs[each.name].preset}, {jobs[each.name].phase}, {jobs[each.name].cluster}, batch "
            f"{jobs[each.name].batch}, sequence {jobs[each.name].seq}; planned in {each.cpu_s:.0f} CPU-seconds, "
            f"{each.verify_s:.1f} s of it verifying."
            for each in outcomes
        ),
        "",
        "Checks that fail:"
        if failures
        else "No check fails: each plan is within 2 % of the fastest, has at most one axis more than the best "
        "baseline, stays within 5 % under each perturbation, and no baseline that checkpoints all blocks alike is "
        "faster than the lower bound.",
        *failures,
        "",
    ]
    return "\n".join(lines)


def printouts(outcomes: Sequence[Launched]) -> str:
    """Return a Markdown page with each plan as it is printed, and a judgement."""
    jobs = {job.name: job for job in JOBS}
    lines = [
        "# Usual jobs",
        "",
        "The plans of fifteen jobs, as they are printed, each with a judgement: would an engineer launch it, and what "
        "would they change? `benchmarks/launch.py` writes this page.",
        "",
    ]
    for outcome in outcomes:
        job = jobs[outcome.name]
        lines += [f"## {job.preset} on {job.cluster}", "", JUDGEMENTS[job.name], "", "```text", f"$ {job.command}"]
        lines += [outcome.error or outcome.printout, "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Run the jobs that the command line names, and print and save their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the jobs")
    parser.add_argument("--job", action="append", choices=[job.name for job in JOBS], help="default: all jobs")
    parser.add_argument("--json", type=Path, help="file for the outcomes; those of other jobs in it are kept")
    parser.add_argument("--read", type=Path, help="read outcomes from this file; run nothing")
    parser.add_argument("--markdown", type=Path, help="file for the page")
    parser.add_argument("--printouts", type=Path, help="file for the page of printed plans")
    parser.add_argument("--alone", choices=[job.name for job in JOBS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    jobs = {job.name: job for job in JOBS}
    if options.list:
        print("\n".join(jobs))
        return
    if options.alone:
        print(json.dumps(dataclasses.asdict(launch(jobs[options.alone]))))
        return
    file = options.read or options.json
    saved = json.loads(file.read_text()) if file is not None and file.exists() else []
    outcomes = {row["name"]: Launched(**row) for row in saved}
    for name in () if options.read else options.job or jobs:
        outcomes[name] = launch_apart(jobs[name])
        print("\n".join([*rows_of(outcomes[name]), *outcomes[name].failures]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([dataclasses.asdict(each) for each in outcomes.values()], indent=1))
    page = markdown([outcomes[name] for name in jobs if name in outcomes])
    if options.markdown is not None:
        options.markdown.write_text(page)
    if options.printouts is not None:
        options.printouts.write_text(printouts([outcomes[name] for name in jobs if name in outcomes]))


if __name__ == "__main__":
    main()
