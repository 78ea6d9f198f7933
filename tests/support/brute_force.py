"""The best assignment of a small problem by enumeration."""

from __future__ import annotations

import itertools

from planner.ilp.problem import InfeasibleAssignmentError, Problem, totals
from planner.ilp.step_cost import peak_bytes, step_time_s


def brute_force(problem: Problem, memory_bytes: float | None) -> tuple[tuple[int, ...], float] | None:
    """Return the fastest assignment within memory and its step time in seconds; None where none fits."""
    best: tuple[tuple[int, ...], float] | None = None
    for assignment in itertools.product(*(range(len(node.charges)) for node in problem.nodes)):
        try:
            total = totals(problem, assignment)
        except InfeasibleAssignmentError:
            continue
        if memory_bytes is not None and peak_bytes(total) > memory_bytes:
            continue
        time_s = step_time_s(total)
        if best is None or time_s < best[1]:
            best = assignment, time_s
    return best
