"""Reduced-cost fixing: a program is solved without the variables that its relaxation proves too expensive.

A variable that is 0 in the relaxation and 1 in a solution raises the objective by at least its reduced cost. The
relaxation's objective plus the reduced cost is therefore a lower bound on every solution with that variable. Variables
whose bound is above a limit are left out, so that the remaining program is small. A solution below the limit is optimal
in the whole program. If there is none, the limit rises.
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
"""Distance of the first limit from the relaxation's objective, relative to that objective."""

_WIDER = 8.0
"""Factor by which the distance grows if no solution below the limit was found."""

_NEARLY = 4.0
"""The distance may grow by up to this factor more, if the limit is then high enough to prove the incumbent optimal."""

_WIDEST = 1.0
"""Relative distance above which no variable is left out."""

_FEWEST = 500
"""Programs with fewer variables are solved whole."""

_FEW = 16
"""Relaxations of our own branching before the solver takes over. It has cuts, but takes half a second to prepare."""

_MORE = 96
"""The same with a memory cap. Cuts do little there, because blocks save activations in few, large pieces."""

_NONE = 1e-9
"""Excess over the memory cap, as a fraction of the cap, that counts as none."""

ROOT_S = 20.0
"""Seconds for the relaxation of the whole program; nearly all take 0.03 to 3 s. It ends without an answer then."""

_SMALLEST = 1e-12
"""Size of the objective, for relative distances, where the objective is 0."""

_WHOLE = 1e-6
"""Distance from an integer within which solvers take a variable as integral."""


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
        program: the program.
        zero_one: by variable, whether it is 0 or 1 wherever the integer variables are integral.
        mip_gap: relative gap at which the solver may stop.
        cutoff: only solutions with a lower objective count.
        time_limit_s: seconds for the whole call; None: no limit.
        node_limit: number of branch-and-bound nodes after which the incumbent is the answer. Unlike a time limit, it
            gives the same answer on any machine. None: no limit.
        solver: "highs" or "cbc"; None: HiGHS, or CBC where highspy cannot be imported.

    Raises:
        SolverError: the solver broke off without an answer, or the relaxation of the whole program took `ROOT_S`.
    """
    deadline = None if time_limit_s is None else time.perf_counter() + time_limit_s
    if program.columns < _FEWEST:
        program = bounded(program, cutoff)
        return backends.solve(program, mip_gap=mip_gap, time_limit_s=time_limit_s, solver=solver)
    limit_s = ROOT_S if time_limit_s is None else min(time_limit_s, ROOT_S)
    relaxed = backends.solve_relaxation(program, cutoff=cutoff, time_limit_s=limit_s, solver=solver)
    if relaxed.status == "limit" and limit_s == ROOT_S:
        raise SolverError(f"the relaxation took more than {ROOT_S} s.")
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
    """Return, by variable, the least rise of the objective if the variable is not 0."""
    assert relaxed.values is not None
    assert relaxed.reduced_costs is not None
    # A reduced cost below 0 belongs to a variable at its upper bound, which is never left out.
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
    """Return the answer of a program with a fractional relaxation, solved with more and more of its variables."""
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
        # A solution with a variable that was left out costs at least the limit, any other at least the part's bound.
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
    """Return ``program`` with the added constraint that the objective is at most ``cutoff``.

    Relaxations are solved without it, because it makes them hard.
    """
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
    """Return the best solution of ``program`` in which only the variables ``indices`` can be above 0.

    Args:
        relaxed: answer of the whole program's relaxation, in which all other variables are 0 as well.
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
    """Return ``answer``, of the part of ``program`` with the variables ``indices``, as an answer of ``program``."""
    if answer.values is None:
        return answer
    values = np.zeros(program.columns)
    values[indices] = answer.values
    return dataclasses.replace(answer, values=values)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.perf_counter(), 0.0)


def most_fractional(program: LinearProgram, relaxed: Answer) -> int | None:
    """Return the fractional integer variable nearest to 1; None: all integer variables are integral."""
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
    """Return the best solution by branch and bound from ``root``; the incumbent after ``node_limit`` nodes.

    Args:
        root: answer of the relaxation of ``program``.
        deep: True: the newest node is expanded next (depth first). False: once there is an incumbent, the node with the
            lowest bound is.
    """
    open_: list[tuple[float, int, dict[int, float]]] = [(root.objective, 0, {})]
    best, lowest, latest = Answer(status="infeasible"), math.inf, 0
    relaxations = backends.Relaxations(program, root=root.objective, solver=solver)
    for _ in range(node_limit):
        # The objective of a relaxation bounds the nodes below it. Most siblings are pruned by it.
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
                    # This integral solution exceeds the memory cap. A more expensive one may fit.
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
                # Nodes below a relaxation that exceeds the cap seldom have a solution: they are expanded last.
                open_ = [*open_, *below] if relaxed.excess <= _NONE else [*below, *open_]
            else:
                best = relaxed
        if not open_:
            return best if best.values is None else dataclasses.replace(best, bound=min(lowest, best.objective))
    left = [lowest, *(bound for bound, _, _ in open_), *([] if best.values is None else [best.objective])]
    bound = max(root.objective, min(left))
    return dataclasses.replace(best, status="limit", bound=bound)
