"""Lower bounds from linear relaxations: of the step time, with and without a memory cap, and of the peak."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.errors import SolverError
from planner.ilp import backends
from planner.ilp.formulation import Program, build_program, memory_cap, peak_memory, static_cap
from planner.ilp.linear_program import Answer
from planner.ilp.problem import Problem
from planner.ilp.quantities import BACKWARD, STATIC, Charge

RELAXATION_S = 20.0
"""Seconds for one relaxation. Nearly all take 0.03 to 3 s. The simplex can take hours to prove that there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """Lower bounds on step time from a linear relaxation, in seconds.

    Attributes:
        bound_s: lower bound on every assignment.
        choice_bounds_s: by node and choice, a lower bound on assignments with that choice: ``bound_s`` plus the reduced
            cost of the choice.
    """

    bound_s: float
    choice_bounds_s: tuple[tuple[float, ...], ...]


class Relaxer:
    """The relaxations of one problem. `capped` has to come last, because it adds the cap to the program.

    All share one program: building a program takes about as long as solving its relaxation.
    """

    def __init__(
        self,
        problem: Problem,
        memory_bytes: float | None = None,
        *,
        static_bytes: float | None = None,
        time_limit_s: float | None = RELAXATION_S,
        solver: str | None = None,
    ) -> None:
        """Build the program of ``problem``.

        Args:
            memory_bytes: cap on the peak in `capped`; None: `capped` is not called.
            static_bytes: cap on static bytes (`planner.ilp.quantities.STATIC`) in all relaxations; None: no such cap.
            time_limit_s: seconds for each relaxation, after which it raises `SolverError`; None: no limit.
            solver: "highs" or "cbc"; None: HiGHS, or CBC where highspy cannot be imported.
        """
        self._solver = solver
        self._time_limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        self._program: Program = build_program(problem, memory_bytes or static_bytes, memory=False)
        if static_bytes is not None:
            static_cap(self._program, static_bytes)

    def uncapped(self, backward_s: float = 0.0) -> Relaxation | None:
        """Return the relaxation without a cap on the peak; None where it is infeasible.

        Args:
            backward_s: seconds of kernels to add to the backward of every assignment.

        Raises:
            SolverError: the solver broke off, or ran out of time, without an answer.
        """
        linear, row = self._program.linear, self._program.compute_rows[BACKWARD]
        limit = linear.row_upper[row]
        linear.row_upper[row] = limit - backward_s * self._program.time_scale
        try:
            answer = self._solve()
        finally:
            linear.row_upper[row] = limit
        return self._relaxation(answer)

    def least_peak_bytes(self) -> float | None:
        """Return a lower bound on the peak of every assignment, in bytes; None: no assignment exists.

        Raises:
            SolverError: the solver broke off, or ran out of time, without an answer.
        """
        linear = self._program.linear
        seconds, peak = linear.objective, self._program.peak or peak_memory(self._program)
        linear.objective = peak
        try:
            answer = self._solve()
        finally:
            linear.objective = seconds
        return None if answer.values is None else answer.objective / self._program.memory_scale

    def capped(self, cutoff_s: float = math.inf) -> Relaxation | None:
        """Return the relaxation within the memory cap; None where it is infeasible or not below ``cutoff_s``.

        Raises:
            SolverError: the solver broke off, or ran out of time, without an answer.
        """
        assert self._memory_bytes is not None
        least = self.least_peak_bytes()  # solved first: a proof that the capped program is infeasible takes long
        if least is None or least > self._memory_bytes:
            return None
        memory_cap(self._program, self._memory_bytes)
        cutoff = cutoff_s * self._program.time_scale
        return self._relaxation(self._solve(cutoff))

    def _solve(self, cutoff: float = math.inf) -> Answer:
        answer = backends.solve_relaxation(
            self._program.linear, cutoff=cutoff, time_limit_s=self._time_limit_s, solver=self._solver
        )
        if answer.status == "limit":
            raise SolverError(f"a relaxation took more than {self._time_limit_s} s.")
        return answer

    def _relaxation(self, answer: Answer) -> Relaxation | None:
        if answer.values is None:
            return None
        assert answer.reduced_costs is not None
        program = self._program
        # A reduced cost below 0 belongs to a choice at its upper bound, which costs nothing extra.
        least = (answer.objective + np.maximum(answer.reduced_costs, 0.0)) / program.time_scale
        return Relaxation(
            bound_s=answer.objective / program.time_scale,
            choice_bounds_s=tuple(tuple(least[row.start : row.stop].tolist()) for row in program.x),
        )


def relax(
    problem: Problem,
    *,
    memory_bytes: float | None = None,
    static_bytes: float | None = None,
    solver: str | None = None,
) -> Relaxation | None:
    """Return the lower bounds of the linear relaxation; None where it is infeasible.

    Args:
        memory_bytes: cap on the peak; None: no cap.
        static_bytes: cap on static bytes (`planner.ilp.quantities.STATIC`); None: no cap.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    relaxer = Relaxer(problem, memory_bytes, static_bytes=static_bytes, solver=solver)
    return relaxer.uncapped() if memory_bytes is None else relaxer.capped()


def least_memory_bound(problem: Problem, *, time_limit_s: float | None = RELAXATION_S) -> float | None:
    """Return a lower bound on the peak of every assignment, in bytes; None: no assignment exists.

    Raises:
        SolverError: the solver broke off, or ran out of time, without an answer.
    """
    return Relaxer(problem, time_limit_s=time_limit_s).least_peak_bytes()


def least_static_bytes(problem: Problem) -> float:
    """Return a lower bound on the static bytes of every assignment: each node takes the choice with the fewest."""

    def static(charge: Charge) -> float:
        return sum(nbytes for quantity, nbytes in charge.items() if quantity in STATIC)

    return static(problem.constant) + sum(min(map(static, node.charges)) for node in problem.nodes)
