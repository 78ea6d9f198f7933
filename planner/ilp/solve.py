"""The integer program (`planner.ilp.formulation`), solved: the best assignment, and the one with the least memory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from planner.errors import SolverError
from planner.ilp import backends, reduced_cost_fixing
from planner.ilp.formulation import Program, build_program
from planner.ilp.linear_program import Answer
from planner.ilp.problem import Problem, Solution, totals
from planner.ilp.relaxation import least_memory_bound
from planner.ilp.step_cost import peak_bytes, step_time_s

_WHOLE_S = 60.0
"""Seconds for a program whose relaxation has no answer: it may have no solution, and the solver may never prove it."""


def solve(
    problem: Problem,
    *,
    memory_bytes: float | None = None,
    mip_gap: float = 1e-3,
    time_limit_s: float | None = None,
    cutoff_s: float | None = None,
    node_limit: int | None = None,
    solver: str | None = None,
) -> Solution | None:
    """Return the best assignment within ``memory_bytes`` and below ``cutoff_s``; None: there is none.

    Args:
        problem: the problem.
        memory_bytes: cap on the peak; None: no cap.
        mip_gap: relative gap at which the solver may stop.
        time_limit_s: seconds after which the incumbent is returned; None: no limit.
        cutoff_s: step time in seconds; only assignments below it count. If there is none, the proof is quick.
        node_limit: number of relaxations in branch and bound after which the incumbent, or None, is returned. None: no
            limit.
        solver: "highs" or "cbc"; None: HiGHS, or CBC where highspy cannot be imported.

    Raises:
        SolverError: the solver broke off, or ran out of time, without an answer.
    """
    started = time.perf_counter()
    program = build_program(problem, memory_bytes, memory=memory_bytes is not None)
    cutoff = math.inf if cutoff_s is None else cutoff_s * program.time_scale
    while True:
        try:
            answer = reduced_cost_fixing.solve(
                program.linear,
                zero_one=program.zero_one(),
                mip_gap=mip_gap,
                cutoff=cutoff,
                time_limit_s=time_limit_s,
                node_limit=node_limit,
                solver=solver,
            )
        except SolverError:
            # The relaxation has no answer. Most often no assignment fits. Otherwise the whole program is solved.
            if node_limit is not None or (memory_bytes is not None and _cannot_fit(problem, memory_bytes)):
                return None
            whole = reduced_cost_fixing.bounded(program.linear, cutoff)
            limit_s = _WHOLE_S if time_limit_s is None else min(time_limit_s, _WHOLE_S)
            answer = backends.solve(whole, mip_gap=mip_gap, time_limit_s=limit_s, solver=solver)
        if answer.values is None and answer.status == "limit" and node_limit is None:
            raise SolverError(
                f"no assignment was found in {time_limit_s or _WHOLE_S} s.",
                what_to_do="Try again with a larger time limit.",
            )
        if answer.values is None:
            return None
        assignment = _assignment(program, answer)
        if memory_bytes is None or peak_bytes(totals(problem, assignment)) <= memory_bytes:
            return _solution(program, answer, assignment, started)
        # The solver satisfies constraints within a tolerance, but the cap has to hold to the byte. Exclude this
        # assignment and solve again.
        chosen = [row[c] for row, c in zip(program.x, assignment, strict=True)]
        program.linear.row(chosen, [1.0] * len(chosen), upper=len(chosen) - 1.0)


def _assignment(program: Program, answer: Answer) -> tuple[int, ...]:
    values = answer.values
    assert values is not None
    return tuple(int(np.argmax(values[row.start : row.stop])) for row in program.x)


def _solution(program: Program, answer: Answer, assignment: tuple[int, ...], started: float) -> Solution:
    objective_s = step_time_s(totals(program.problem, assignment))
    return Solution(
        assignment=assignment,
        objective_s=objective_s,
        bound_s=min(max(answer.bound, 0.0) / program.time_scale, objective_s),
        status="optimal" if answer.status == "optimal" else "limit",
        time_s=time.perf_counter() - started,
        root_s=answer.root / program.time_scale if math.isfinite(answer.root) else None,
    )


def _cannot_fit(problem: Problem, memory_bytes: float) -> bool:
    try:
        least = least_memory_bound(problem)
    except SolverError:
        return False
    return least is None or least > memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPeak:
    """An assignment with a small peak.

    Attributes:
        assignment: for each node, the index of its choice; None: the time limit came before any was found.
        nbytes: peak of the assignment in bytes; infinite if there is none.
        bound_bytes: lower bound in bytes on the peak of every assignment.
    """

    assignment: tuple[int, ...] | None
    nbytes: float
    bound_bytes: float


def least_memory(problem: Problem, mip_gap: float = 1e-4, *, time_limit_s: float | None = None) -> LeastPeak | None:
    """Return the assignment with the smallest peak; None where no assignment exists.

    Args:
        problem: the problem.
        mip_gap: relative gap: an assignment whose peak is smaller by this fraction may be missed.
        time_limit_s: seconds after which the incumbent is returned; None: no limit.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    program = build_program(problem, None)
    assert program.peak is not None
    program.linear.objective = program.peak
    answer = reduced_cost_fixing.solve(
        program.linear, zero_one=program.zero_one(), mip_gap=mip_gap, time_limit_s=time_limit_s
    )
    bound_bytes = max(answer.bound, 0.0) / program.memory_scale
    if answer.values is None:
        limited = answer.status == "limit"
        return LeastPeak(assignment=None, nbytes=math.inf, bound_bytes=bound_bytes) if limited else None
    assignment = _assignment(program, answer)
    nbytes = peak_bytes(totals(problem, assignment))
    return LeastPeak(assignment=assignment, nbytes=nbytes, bound_bytes=min(bound_bytes, nbytes))
