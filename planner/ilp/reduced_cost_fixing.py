"""A program solved without the choices that its relaxation proves too dear.

A variable that is 0 in the relaxation and 1 in a solution raises that solution's objective by its reduced cost at
least. So the relaxation tells of each what no solution with it can beat; those above a limit are left out, and what is
left is small. A solution below the limit is then the best of the whole program; where there is none, the limit rises.
"""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import numpy.typing as npt

from planner.errors import SolverError
from planner.ilp import backends
from planner.ilp.linear_program import Answer, Floats, Indices, LinearProgram

_NARROW = 0.02
"""The first limit: this far above the relaxation's objective, relative to it."""

_WIDER = 8.0
"""By how much a limit's distance from the relaxation's objective grows where nothing was found below it."""

_NEARLY = 4.0
"""By how much further it may go at once, where that proves the best solution so far."""

_WIDEST = 1.0
"""The relative distance above which nothing is left out any more."""

_FEWEST = 500
"""Programs of fewer variables are solved whole."""

_FEW = 16
"""Relaxations after which branching is left to the solver: it has cuts, and half a second of preparations."""

_MORE = 96
"""The same where memory is capped: what blocks keep comes in few and large pieces, which cuts do little for."""

_NONE = 1e-9
"""Up to which part of the cap memory does not exceed it."""

_SMALLEST = 1e-12
"""What stands for the objective's size where that is 0."""

_WHOLE = 1e-6
"""How far from a whole number the solvers take a variable to be one."""


def solve(
    program: LinearProgram,
    *,
    zero_one: npt.NDArray[np.bool_],
    mip_gap: float,
    cutoff: float = math.inf,
    time_limit_s: float | None = None,
    node_limit: int | None = None,
    solver: str | None = None,
) -> Answer:
    """Return the best solution of ``program`` within a relative gap, or the incumbent at a limit.

    Args:
        program: what to solve.
        zero_one: by variable, whether it is 0 or 1 wherever those that have to be whole numbers are.
        mip_gap: relative gap at which the solver may stop.
        cutoff: the objective from which on a solution is not wanted.
        time_limit_s: for all of it.
        node_limit: number of branch-and-bound nodes after which the incumbent is the answer, on any machine the same;
            None: no limit.
        solver: "highs" or "cbc"; None: HiGHS, or CBC where highspy cannot be imported.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    deadline = None if time_limit_s is None else time.perf_counter() + time_limit_s
    if program.columns < _FEWEST:
        program = bounded(program, cutoff)
        return backends.solve(program, mip_gap=mip_gap, time_limit_s=time_limit_s, solver=solver)
    relaxed = backends.solve_relaxation(program, cutoff=cutoff, time_limit_s=time_limit_s, solver=solver)
    if relaxed.status == "cutoff" or (relaxed.values is not None and relaxed.objective >= cutoff):
        return Answer(status="infeasible")
    if relaxed.values is None or most_fractional(program, relaxed) is None:
        return dataclasses.replace(relaxed, root=relaxed.objective)
    raised = _raised(relaxed, zero_one)
    if node_limit is None:
        answer = _narrowed(program, relaxed, raised, mip_gap, cutoff, deadline, solver)
    else:
        indices = program.possible(relaxed.objective + raised <= cutoff)
        part, root = _part(program, relaxed, indices)
        answer = _whole(program, _branch(part, root, cutoff, mip_gap, deadline, solver, node_limit), indices)
    return dataclasses.replace(answer, root=relaxed.objective)


def _raised(relaxed: Answer, zero_one: npt.NDArray[np.bool_]) -> Floats:
    """Return, by variable, by how much the objective rises at least where that is not 0."""
    assert relaxed.values is not None
    assert relaxed.reduced_costs is not None
    # A reduced cost below 0 belongs to a variable at its upper bound, which is left in.
    return np.where(zero_one & (relaxed.values < _WHOLE), np.maximum(relaxed.reduced_costs, 0.0), 0.0)


def _narrowed(
    program: LinearProgram,
    relaxed: Answer,
    raised: Floats,
    mip_gap: float,
    cutoff: float,
    deadline: float | None,
    solver: str | None,
) -> Answer:
    """Return the answer of a program whose relaxation is not one, from ever more of its variables."""
    scale = max(abs(relaxed.objective), _SMALLEST)
    best, width = Answer(status="infeasible"), _NARROW
    while True:
        width = width if width <= _WIDEST else math.inf
        is_last = relaxed.objective + width * scale >= cutoff
        indices = program.possible(raised <= width * scale)
        best_cutoff = cutoff if best.values is None else min(cutoff, best.objective)
        part = _solve_part(program, relaxed, indices, best_cutoff, mip_gap, deadline, solver)
        if part.values is not None and (best.values is None or part.objective < best.objective):
            best = part
        # What was left out leads to no less than the limit, what was kept to no less than the part's own bound.
        limit = relaxed.objective + width * scale
        bound = max(relaxed.objective, min(part.bound if part.status != "infeasible" else math.inf, limit))
        if part.status == "limit":
            return dataclasses.replace(best, status="limit", bound=bound)
        near = best.values is not None and best.objective - bound <= mip_gap * abs(best.objective)
        if math.isinf(width) or is_last or near or (best.values is not None and best.objective <= limit):
            return best if best.values is None else dataclasses.replace(best, bound=min(bound, best.objective))
        width *= _WIDER
        if best.values is not None:
            enough = (best.objective - relaxed.objective) / scale * (1 + _WHOLE)
            width = enough if enough <= width * _NEARLY else width


def bounded(program: LinearProgram, cutoff: float) -> LinearProgram:
    """Add the constraint that the objective is at most so large. (Relaxations go without: it makes them hard.)"""
    if math.isfinite(cutoff):
        program.constrain_below(program.objective, cutoff)
    return program


def _solve_part(
    program: LinearProgram,
    relaxed: Answer,
    indices: Indices,
    cutoff: float,
    mip_gap: float,
    deadline: float | None,
    solver: str | None,
) -> Answer:
    """Return the answer of a program with the variables ``indices`` alone, as one of the whole: the others are 0.

    Args:
        relaxed: the answer to the whole program's relaxation, in which the others are 0 as well.
    """
    part, root = _part(program, relaxed, indices)
    node_limit, deep = (_FEW, True) if part.cap_row is None else (_MORE, False)
    answer = _branch(part, root, cutoff, mip_gap, deadline, solver, node_limit, deep=deep)
    if answer.status == "limit":
        tighter_cutoff = cutoff if answer.values is None else answer.objective - mip_gap * abs(answer.objective)
        solver_answer = backends.solve(
            bounded(part, tighter_cutoff), mip_gap=mip_gap, time_limit_s=_left_s(deadline), solver=solver
        )
        if solver_answer.values is not None or answer.values is None:
            answer = solver_answer
        elif solver_answer.status == "infeasible":
            answer = dataclasses.replace(answer, status="optimal", bound=tighter_cutoff)
        else:
            answer = dataclasses.replace(answer, bound=max(answer.bound, min(solver_answer.bound, tighter_cutoff)))
    return _whole(program, answer, indices)


def _part(program: LinearProgram, relaxed: Answer, indices: Indices) -> tuple[LinearProgram, Answer]:
    assert relaxed.values is not None
    return program.part(indices), dataclasses.replace(relaxed, values=relaxed.values[indices])


def _whole(program: LinearProgram, answer: Answer, indices: Indices) -> Answer:
    """Return the answer to a part of a program as one to the whole."""
    if answer.values is None:
        return answer
    values = np.zeros(program.columns)
    values[indices] = answer.values
    return dataclasses.replace(answer, values=values)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.perf_counter(), 0.0)


def most_fractional(program: LinearProgram, relaxed: Answer) -> int | None:
    """Return which variable that has to be whole is nearest to 1 without being whole; None where all are whole."""
    assert relaxed.values is not None
    off = np.abs(relaxed.values - np.round(relaxed.values)) > _WHOLE
    off &= program.is_whole()
    return int(np.argmax(np.where(off, relaxed.values, -1.0))) if off.any() else None


def _branch(
    program: LinearProgram,
    root: Answer,
    cutoff: float,
    mip_gap: float,
    deadline: float | None,
    solver: str | None,
    node_limit: int,
    *,
    deep: bool = True,
) -> Answer:
    """Return the best solution by branching from ``root``; the incumbent after ``node_limit`` nodes.

    Args:
        deep: whether a step goes on below the relaxation last solved; otherwise, once there is a solution, where the
            relaxation is lowest.
    """
    open_: list[tuple[float, int, dict[int, float]]] = [(root.objective, 0, {})]
    best, lowest, latest = Answer(status="infeasible"), math.inf, 0
    relaxations = backends.Relaxations(program, root=root.objective, solver=solver)
    for _ in range(node_limit):
        # What a relaxation comes to holds for those below it: most siblings need not be looked at.
        tighter_cutoff = cutoff if best.values is None else best.objective - mip_gap * abs(best.objective)
        lowest = min([lowest, *(bound for bound, _, _ in open_ if bound >= tighter_cutoff)])
        open_ = [node for node in open_ if node[0] < tighter_cutoff]
        if not open_:
            return best if best.values is None else dataclasses.replace(best, bound=min(lowest, best.objective))
        node = open_[-1] if deep or best.values is None else min(open_)
        fixed, relaxed = node[2], root
        if fixed:
            try:
                relaxed = relaxations.at(fixed, cutoff=tighter_cutoff, time_limit_s=_left_s(deadline), afresh=deep)
                if relaxed.excess > _NONE and most_fractional(program, relaxed) is None:
                    # This one does not fit; others that cost more may.
                    relaxed = relaxations.at(
                        fixed, cutoff=tighter_cutoff, time_limit_s=_left_s(deadline), afresh=deep, elastic=False
                    )
            except SolverError:
                break
        if relaxed.status == "limit":
            break
        open_.remove(node)
        if relaxed.status == "cutoff":
            lowest = min(lowest, relaxed.bound)
        if relaxed.values is not None:
            variable = most_fractional(program, relaxed)
            if relaxed.objective >= tighter_cutoff:
                lowest = min(lowest, relaxed.objective)
            elif variable is not None:
                latest -= 2
                below = [(relaxed.objective, latest - int(v), {**fixed, variable: v}) for v in (0.0, 1.0)]
                # What does not fit by now can only end without a solution: the last that is looked at.
                open_ = [*open_, *below] if relaxed.excess <= _NONE else [*below, *open_]
            else:
                best = relaxed
        if not open_:
            return best if best.values is None else dataclasses.replace(best, bound=min(lowest, best.objective))
    left = [lowest, *(bound for bound, _, _ in open_), *([] if best.values is None else [best.objective])]
    bound = max(root.objective, min(left))
    return dataclasses.replace(best, status="limit", bound=bound)
