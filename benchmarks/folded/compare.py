"""The cost of folding equal blocks: the folded program against the program in which every block has its own choices.

    cd benchmarks && python -m folded.compare    # six models of 8 layers, without and with a binding memory cap
    cd benchmarks && python -m folded.compare --model gpt2 --layers 4 --without-cap

Three programs of one model on one mesh are solved: folded; unfolded with equal blocks tied to equal choices
(`folded.tied`), whose optimum must equal the folded one; and unfolded without ties ("free"), which may be faster.
Every solution is written as a plan, read back and priced by the estimator. The table also has the plan with
``heterogeneous_blocks``, whose first k blocks may differ from the rest. For this plan and for the folded one, it has a
bound on how much slower they are than any unfolded plan. Exit code 1 where figures differ that must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from baselines import DEFAULT_SEQ, SEQ
from rich.console import Console
from rich.table import Table
from torch import nn

from api.requests.model_configs import find_config
from api.requests.model_registry import load_model, quiet_libraries
from cost_model.layouts.layout import MeshSpec
from folded.tied import TiedProblem
from planner.errors import SolverError
from planner.formulation.decision import Decision, decision_from_assignment, decision_from_plan
from planner.formulation.estimate import estimate
from planner.formulation.formulate import Formulation, Formulator
from planner.graph.trace_module import ModuleNames
from planner.ilp.problem import Assignment, Solution
from planner.ilp.solve import least_memory, solve
from planner.liveness.structure import Structure
from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.pricing.run_spec import Run
from planner.run.model_analysis import ModelAnalysis
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.session import PlanningSession
from planner.writing.fqn_entries import decision_entries
from planner.writing.reprice import estimate_plan

CLUSTER, MESH, BATCH = "1x8xh100-sxm-80gb", "dp=2,tp=4", 8
MODELS = ("llama-3.1-8b", "qwen3-8b", "gpt2", "bert-large", "vit-large", "t5-large")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
COLUMNS = ("model", "cap", "folded", "tied", "free", "heterogeneous", "folded: loss", "heterogeneous: loss", "verdict")
MIP_GAP = 1e-5
TIME_LIMIT_S = 120.0
SAME = 1e-9
"""Largest relative difference of two sums of the same amounts in different orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One formulation of a run: folded, or unfolded, where every block has its own choices."""

    formulator: Formulator
    structure: Structure
    formulation: Formulation


@dataclass(frozen=True, slots=True, kw_only=True)
class BothForms:
    """One run of a model, formulated folded and unfolded."""

    module: nn.Module
    run: Run
    folded: Form
    unfolded: Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one program.

    Attributes:
        solution: None where nothing fits, or where the solver found nothing in time.
        in_time: whether the solver answered.
        priced_s, peak_bytes: step time and peak memory of the written plan, priced from its file.
    """

    program: str
    solution: Solution | None
    in_time: bool = True
    priced_s: float = 0.0
    peak_bytes: int = 0


def both_forms(module: nn.Module, run_on: str, session: PlanningSession) -> BothForms:
    """Return the session's only run on a mesh, formulated folded and unfolded."""
    traced = session._analysis
    unfolded = ModelAnalysis(
        graph=traced.graph,
        traced_batch=traced.traced_batch,
        any_batch=traced.any_batch,
        flash_attention=traced.flash_attention,
        fold=False,
    )
    job = session.job
    assert job.batch is not None
    assert job.micro_batches is not None
    assert job.ac is not None
    run = session._planner.run_of(MeshSpec.parse(run_on), job.micro_batches, job.ac)
    planner = RunPlanner(unfolded, job, session.cluster, job.batch, Clock())
    return BothForms(module=module, run=run, folded=_form(session._planner, run), unfolded=_form(planner, run))


def _form(planner: RunPlanner, run: Run) -> Form:
    formulator, structure, formulation = planner.formulate(run, None)
    assert formulation is not None, "no tensor divides over the mesh"
    return Form(formulator=formulator, structure=structure, formulation=formulation)


def tied(both: BothForms) -> TiedProblem:
    """Return the unfolded problem with equal blocks, and their parameters, tied to equal choices."""
    formulation = both.unfolded.formulation
    options: list[Sequence[Hashable]] = [*formulation.strategies, *formulation.stored]
    options += [range(len(node.charges)) for node in formulation.problem.nodes[len(options) :]]
    return TiedProblem.from_groups(formulation.problem, list(_groups(both)), options)


def _groups(both: BothForms) -> Iterator[list[int]]:
    """Yield the groups of unfolded nodes that are one node of the folded problem."""
    folded, unfolded = both.folded.structure, both.unfolded.structure
    for region_class in folded.regions.classes:
        yield list(dict.fromkeys(unfolded.regions.class_of[member] for member in region_class.members))
    node_of = {
        value: len(unfolded.regions.classes) + index
        for index, parameter in enumerate(unfolded.parameters)
        for value in parameter.values
    }
    for parameter in folded.parameters:
        yield [node_of[value] for value in parameter.values]
    first = len(unfolded.regions.classes) + len(unfolded.parameters) + 1  # after the node of the all-gathers' axes
    for group in folded.fsdp_groups:
        yield [first + index for index, block in enumerate(unfolded.fsdp_groups) if block.kind in group.blocks]


def unfolded_decision(both: BothForms, decision: Decision) -> Decision:
    """Return the folded program's ``decision`` as a decision of the unfolded program."""
    folded, unfolded = both.folded.structure, both.unfolded.structure
    stored = {
        value: choice
        for parameter, choice in zip(folded.parameters, decision.stored, strict=True)
        for value in parameter.values
    }
    return Decision(
        strategies=tuple(decision.strategies[folded.regions.class_of[c.members[0]]] for c in unfolded.regions.classes),
        stored=tuple(stored[parameter.values[0]] for parameter in unfolded.parameters),
        reshard_after={
            block.kind: decision.reshard_after[group.kind]
            for block in unfolded.fsdp_groups
            for group in folded.fsdp_groups
            if group.kind in decision.reshard_after and block.kind in group.blocks
        },
    )


def written_plan(both: BothForms, side: Form, assignment: Assignment) -> ShardingPlan:
    """Return the plan of an assignment, written to JSON and read back."""
    run, entries = (
        both.run,
        decision_entries(
            side.structure, decision_from_assignment(side.formulation, assignment), ModuleNames.from_module(both.module)
        ),
    )
    plan = ShardingPlan(
        mesh=PlanMesh.from_mesh(run.mesh, "cuda"),
        **entries.by_field(),
        micro_batches=run.micro_batches,
        job=run.job,
        cluster=run.cluster.to_dict(),
    )
    return ShardingPlan.from_dict(json.loads(plan.to_json()))


def answers(
    both: BothForms, memory_bytes: float | None, time_limit_s: float = TIME_LIMIT_S, incumbent_s: float = math.inf
) -> Iterator[Answer]:
    """Yield the answers of the three programs: "folded", "tied" and "free".

    Args:
        both: the run in both formulations.
        memory_bytes: memory cap; None: no cap.
        time_limit_s: seconds for each program.
        incumbent_s: step time of a plan whose blocks may differ. This plan and the folded plan are solutions of the
            free program, so the better of the two step times is its cutoff.
    """
    tied_problem = tied(both)
    programs = (
        ("folded", both.folded, both.folded.formulation.problem),
        ("tied", both.unfolded, tied_problem.problem),
        ("free", both.unfolded, both.unfolded.formulation.problem),
    )
    for name, side, problem in programs:
        cutoff_s = incumbent_s * (1 + MIP_GAP) if name == "free" and math.isfinite(incumbent_s) else None
        try:
            solution = solve(
                problem, memory_bytes=memory_bytes, mip_gap=MIP_GAP, time_limit_s=time_limit_s, cutoff_s=cutoff_s
            )
        except SolverError:
            yield Answer(program=name, solution=None, in_time=False)
            continue
        if solution is None:
            yield Answer(program=name, solution=None)
            continue
        if name == "folded":
            incumbent_s = min(incumbent_s, solution.objective_s)
        assignment = tied_problem.untied(solution.assignment) if name == "tied" else solution.assignment
        plan = written_plan(both, side, assignment)
        priced = estimate(
            side.formulator,
            side.structure,
            decision_from_plan(side.structure, side.formulator, plan, ModuleNames.from_module(both.module)),
        )
        yield Answer(program=name, solution=solution, priced_s=priced.step_time_s, peak_bytes=priced.peak_memory_bytes)


def find_faults(answers: Sequence[Answer]) -> list[str]:
    """Return the violated relations between the answers.

    A program that stopped at its time limit is compared by its bound. If one had no answer in time, only the prices of
    the plans are compared with the objectives.
    """
    wrong = []
    for answer in answers:
        s = answer.solution
        if s is not None and abs(answer.priced_s - s.objective_s) > SAME * s.objective_s:
            wrong.append(f"{answer.program}: objective {s.objective_s!r} s, priced {answer.priced_s!r} s")
    if not all(answer.in_time for answer in answers):
        return wrong
    folded, equal, free = (answer.solution for answer in answers)
    if folded is None or equal is None:
        return wrong if folded is equal else [*wrong, "only one of folded and tied fits"]
    tolerance = 1 + 2 * MIP_GAP
    if folded.bound_s > equal.objective_s * tolerance or equal.bound_s > folded.objective_s * tolerance:
        wrong.append(f"folded {folded.objective_s!r} s, tied {equal.objective_s!r} s")
    if free is None or free.bound_s > equal.objective_s * tolerance:
        wrong.append("the free program's bound is above the tied optimum")
    return wrong


def proved(answers: Sequence[Answer]) -> bool:
    """Return whether the folded and the tied program were solved to optimality."""
    return all(answer.solution is not None and answer.solution.status == "optimal" for answer in answers[:2])


def loss(answers: Sequence[Answer], time_s: float | None = None) -> float | None:
    """Return a bound on the relative loss against the free program's optimum; None where a program has no answer.

    Args:
        answers: the answers of the folded, the tied and the free program.
        time_s: step time of the plan that is compared; None: the folded plan's.
    """
    folded, _, free = (answer.solution for answer in answers)
    if folded is None or free is None:
        return None
    return (folded.objective_s if time_s is None else time_s) / free.bound_s - 1.0


def is_repriced(module: nn.Module, plan: ShardingPlan) -> bool:
    """Return whether a plan's estimate is equal to the price of its file."""
    again = estimate_plan(module, ShardingPlan.from_dict(json.loads(plan.to_json()))).estimate
    assert plan.estimate is not None
    assert again is not None
    same_time = abs(again.step_time_s - plan.estimate.step_time_s) <= SAME * plan.estimate.step_time_s
    return same_time and again.peak_memory_bytes == plan.estimate.peak_memory_bytes


def case_of(preset: str, layers: int) -> tuple[BothForms, PlanningSession]:
    """Return a preset's model with ``layers`` layers in both forms on `MESH`, and the session that plans it."""
    config = find_config(preset, allow_local=False)
    assert config is not None
    values = {name: layers if name in DEPTHS else value for name, value in config.values.items()}
    seq = None if preset == "vit-large" else SEQ.get(preset, DEFAULT_SEQ)
    with quiet_libraries():
        source = load_model({"hf_config": values}, seq=seq)
    session = PlanningSession(
        source.module,
        cluster=CLUSTER,
        batch=BATCH,
        seq=seq,
        micro_batches=1,
        ac="none",
        techniques="heterogeneous-blocks",
    )
    return both_forms(source.module, MESH, session), session


def binding_cap(both: BothForms, free_peak_bytes: float) -> float:
    """Return a memory cap halfway between the least possible peak and that of the fastest plan."""
    least = least_memory(both.folded.formulation.problem)
    assert least is not None
    return least.nbytes + 0.5 * (free_peak_bytes - least.nbytes)


def rows(preset: str, arguments: argparse.Namespace) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the cells of each table row of one model, and its faults."""
    both, session = case_of(preset, arguments.layers)
    cap: float | None = None
    for _ in range(1 if arguments.without_cap else 2):
        plan = session.plan(mesh=MESH, memory_bytes=None if cap is None else int(cap))
        assert plan.estimate is not None
        step_s = plan.estimate.step_time_s
        three = list(answers(both, cap, arguments.time_limit_s, step_s))
        cells = [preset, "-" if cap is None else f"{cap / 1e9:.2f} GB", *map(_cell, three)]
        wrong = find_faults(three)
        if not is_repriced(both.module, plan):
            wrong.append("the plan's estimate is not the price of its file")
        cells.append(f"{step_s * 1e3:.4f} ms")
        cells += [_share(loss(three, time_s)) for time_s in (None, step_s)]
        yield [*cells, "; ".join(wrong) or ("equal" if proved(three) else "not proved")], wrong
        cap = binding_cap(both, three[0].peak_bytes)


def _share(part: float | None) -> str:
    return "-" if part is None else f"{part:.2%}"


def _cell(answer: Answer) -> str:
    s = answer.solution
    if s is None:
        return "does not fit" if answer.in_time else "no answer in time"
    within = "" if s.status == "optimal" else f" (>= {s.bound_s * 1e3:.4f})"
    return f"{s.objective_s * 1e3:.4f} ms{within} in {s.time_s:.1f} s"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="again for more; all where left out")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--without-cap", action="store_true", help="leave out the rows with a binding memory cap")
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S, help="of each program")
    return parser.parse_args(argv)


def main() -> int:
    """Print the table; return 1 where there is a fault."""
    arguments = parse_arguments()
    title = f"{arguments.layers} layers, {CLUSTER}, {MESH}, batch {BATCH}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    wrong: list[str] = []
    console = Console(highlight=False, width=190)
    for preset in arguments.model or MODELS:
        for cells, faulty in rows(preset, arguments):
            table.add_row(*cells)
            wrong += faulty
            print("  ".join(cells), file=sys.stderr, flush=True)
    console.print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
