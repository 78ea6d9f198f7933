"""Solvers of a `LinearProgram`: HiGHS, or CBC through pulp where highspy cannot be imported.

HiGHS takes the arrays of a program as they are. pulp keeps every coefficient in a dictionary and passes rows one by
one, which takes longer than solving a program of this package.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pulp

from planner.errors import SolverError
from planner.ilp.linear_program import Answer, LinearProgram, Status


def solver_name() -> str:
    """Return the solver to use by default: "highs", or "cbc" where highspy cannot be imported."""
    return "highs" if find_spec("highspy") is not None else "cbc"


def solve(program: LinearProgram, *, mip_gap: float, time_limit_s: float | None, solver: str | None = None) -> Answer:
    """Return the best solution within a relative gap, or the incumbent at the time limit.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    if (solver or solver_name()) == "highs":
        return _highs_run(_highs_solver(program, mip_gap, mip=True), time_limit_s, mip=True)
    return _cbc(program, mip_gap, time_limit_s, mip=True)


def solve_relaxation(
    program: LinearProgram, *, cutoff: float = math.inf, time_limit_s: float | None = None, solver: str | None = None
) -> Answer:
    """Return the solution of the linear relaxation, in which no variable has to be integral.

    Args:
        program: the program.
        cutoff: a solution with an objective of at least this counts as none.
        time_limit_s: seconds after which the answer is without a solution; None: no limit.
        solver: "highs" or "cbc"; None: HiGHS, or CBC where highspy cannot be imported.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    if (solver or solver_name()) == "highs":
        return _highs_relaxation(program, cutoff, time_limit_s)
    return _cbc(program, 0.0, time_limit_s, mip=False)


_PER_EXCESS = 100.0
"""Penalty for memory above its cap in `Relaxations`: an excess of one cap costs so many times the root's objective."""


class Relaxations:
    """The relaxations of one program with some variables fixed, solved one after another.

    In HiGHS, memory may exceed its cap at a high penalty (an elastic cap). With a hard cap, the simplex takes long to
    prove that the fixed variables do not fit (measured: 0.3 to 3 s, against 0.03 s for a solution). With the penalty it
    finds a solution with a high objective, as fast as any other.
    """

    def __init__(self, program: LinearProgram, *, root: float = 0.0, solver: str | None = None) -> None:
        """Take the program. ``root``: objective of its relaxation, which scales the penalty; 0: the cap is hard."""
        self._program = program
        self._excess_cost = _PER_EXCESS * abs(root) if program.cap_row is not None else 0.0
        self._is_highs = (solver or solver_name()) == "highs"
        self._highs: Any = None
        self._fixed_variables: list[int] = []
        self._ran = False

    def at(
        self,
        values: Mapping[int, float],
        *,
        cutoff: float = math.inf,
        time_limit_s: float | None = None,
        afresh: bool = True,
        elastic: bool = True,
    ) -> Answer:
        """Return the solution of the relaxation with some variables fixed, as `solve_relaxation` would.

        No solution with these values has a lower objective, even if the returned one exceeds the memory cap.

        Args:
            values: variable -> the value that it is fixed at.
            cutoff: a solution with an objective of at least this counts as none.
            time_limit_s: seconds after which the answer is without a solution; None: no limit.
            afresh: whether a solution below the cutoff is solved again from scratch. Among solutions of equal cost, the
                answer then does not depend on earlier calls.
            elastic: whether memory may exceed its cap.

        Raises:
            SolverError: the solver broke off without an answer.
        """
        program = self._program
        if not self._is_highs:
            return _cbc(program.fixed(values), 0.0, time_limit_s, mip=False)
        if self._highs is None:
            self._highs = _highs_solver(program, 0.0, mip=False)
            if self._excess_cost:
                row, minus = np.asarray([program.cap_row], np.int32), np.asarray([-1.0])
                self._highs.addCol(self._excess_cost, 0.0, math.inf, 1, row, minus)
        for variable in self._fixed_variables:
            self._highs.changeColBounds(variable, program.lower[variable], program.upper[variable])
        for variable, value in values.items():
            self._highs.changeColBounds(variable, value, value)
        self._fixed_variables = list(values)
        if self._excess_cost:
            self._highs.changeColBounds(program.columns, 0.0, math.inf if elastic else 0.0)
        # A warm start from the last solution soon proves that there is no solution below the cutoff. If there is one,
        # it is solved again from scratch: with a warm start, ties would depend on the order of the calls.
        if self._ran:
            near = self._answer(time_limit_s, cutoff)
            if near.values is None or near.objective >= cutoff or not afresh:
                return near
        self._highs.clearSolver()
        self._ran = True
        return self._answer(time_limit_s)

    def _answer(self, time_limit_s: float | None, cutoff: float = math.inf) -> Answer:
        """Return HiGHS's answer; the value of the extra variable, memory above the cap, becomes its ``excess``."""
        answer = _highs_run(self._highs, time_limit_s, mip=False, cutoff=cutoff)
        columns = self._program.columns
        if answer.values is None or not self._excess_cost:
            return answer
        assert answer.reduced_costs is not None
        return dataclasses.replace(
            answer,
            values=answer.values[:columns],
            reduced_costs=answer.reduced_costs[:columns],
            excess=float(answer.values[columns]),
        )


_SECOND_TRIES = (
    ("presolve", "on"),
    ("simplex_dual_edge_weight_strategy", 1),
    ("simplex_strategy", 4),
    ("solver", "ipm"),
)
"""Options of HiGHS that are set one after another while it ends without an answer: presolve (which soon proves that
there is no solution, the simplex late or never), Devex pricing, the primal simplex, the interior point method."""

_SECOND_TRY_S = 2.0
"""Time limit of each of these tries, in seconds."""


def _broke_off(what: object) -> SolverError:
    return SolverError(
        f"the solver broke off: {what}", what_to_do="Try again with a larger time limit or a larger MIP gap."
    )


# --- HiGHS -------------------------------------------------------------------------------------------------------


def _highs_solver(program: LinearProgram, mip_gap: float, *, mip: bool) -> Any:
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    solver.setOptionValue("mip_rel_gap", mip_gap)
    solver.setOptionValue("mip_abs_gap", 0.0)
    solver.setOptionValue("threads", 1)
    # Presolve finds little to remove in flow constraints, and takes most of the time (measured: 1.8 s against 0.35 s).
    solver.setOptionValue("presolve", "off")
    # Row-wise pricing: the same simplex steps, 3 to 5 % faster than where HiGHS chooses the pricing at each step.
    solver.setOptionValue("simplex_price_strategy", 1)
    # A few bytes are 1e-10 of a cap of 80 GB. Taking such coefficients for 0 makes rows that contradict each other.
    solver.setOptionValue("small_matrix_value", 1e-12)
    if solver.passModel(*_highs_model(program, mip)) == highspy.HighsStatus.kError:
        raise _broke_off("HiGHS refused the program")
    return solver


def _highs_relaxation(program: LinearProgram, cutoff: float, time_limit_s: float | None) -> Answer:
    """Return the relaxation's solution. HiGHS solves without the memory cap first, and then with it if it is exceeded.

    The answer is the same in nine tenths of the time (405B on 64 x 8, where the cap binds: 37 ms, against 42 ms with
    the cap from the start). The row of the cap is dense, and enters the basis only in the last steps.
    """
    solver, row = _highs_solver(program, 0.0, mip=False), program.cap_row
    if row is None:
        return _highs_run(solver, time_limit_s, mip=False, cutoff=cutoff)
    solver.changeRowBounds(row, -math.inf, math.inf)
    answer = _highs_run(solver, time_limit_s, mip=False, cutoff=cutoff)
    if answer.values is None or solver.getSolution().row_value[row] <= program.row_upper[row]:
        return answer
    solver.changeRowBounds(row, -math.inf, program.row_upper[row])
    left_s = None if time_limit_s is None else max(time_limit_s - solver.getRunTime(), 0.0)
    return _highs_run(solver, left_s, mip=False, cutoff=cutoff)


def _highs_run(solver: Any, time_limit_s: float | None, *, mip: bool, cutoff: float = math.inf) -> Answer:
    import highspy

    # The dual simplex stops at this objective. For a program without a solution, the steps beyond it take longest.
    solver.setOptionValue("objective_bound", cutoff)
    # HiGHS counts the time of all runs of ``solver`` together.
    limit_s = math.inf if time_limit_s is None else solver.getRunTime() + time_limit_s
    solver.setOptionValue("time_limit", limit_s)
    solver.run()
    usual = {}
    without_answer = [highspy.HighsModelStatus.kUnknown, highspy.HighsModelStatus.kSolveError]
    for option, value in _SECOND_TRIES if not mip else ():
        if solver.getModelStatus() not in without_answer:
            break
        # Now and then rounding ends the dual simplex without an answer, where every solution exceeds the cap by far.
        solver.clearSolver()
        usual[option] = solver.getOptionValue(option)[1]
        solver.setOptionValue(option, value)
        solver.setOptionValue("time_limit", solver.getRunTime() + _SECOND_TRY_S)
        solver.run()
        without_answer = [*without_answer, highspy.HighsModelStatus.kTimeLimit]
    for option, value in usual.items():
        solver.setOptionValue(option, value)
    if len(without_answer) > 2 and solver.getModelStatus() in without_answer:
        raise _broke_off("HiGHS ended without an answer, whatever it was told")
    return _highs_answer(solver, mip)


def _highs_model(program: LinearProgram, mip: bool) -> tuple[Any, ...]:
    """Return the arguments of HiGHS's ``passModel``, as arrays. (Element by element takes as long as solving.)"""
    import highspy

    starts, indices, values = program.matrix()
    whole, any_ = highspy.HighsVarType.kInteger.value, highspy.HighsVarType.kContinuous.value
    return (
        program.columns,
        program.rows,
        len(values),
        highspy.MatrixFormat.kRowwise.value,
        highspy.ObjSense.kMinimize.value,
        program.objective.constant,
        program.cost(),
        *program.bounds(),
        *program.row_bounds(),
        starts,
        indices,
        values,
        np.where(program.is_whole() & mip, whole, any_).astype(np.int32),
    )


def _highs_answer(solver: Any, mip: bool) -> Answer:
    import highspy

    status, info = solver.getModelStatus(), solver.getInfo()
    states = highspy.HighsModelStatus
    if status in (states.kInfeasible, states.kUnboundedOrInfeasible):
        return Answer(status="infeasible")
    if status == states.kObjectiveBound:
        return Answer(status="cutoff", bound=float(solver.getOptionValue("objective_bound")[1]))
    if status not in (states.kOptimal, states.kTimeLimit, states.kModelEmpty):
        raise _broke_off(solver.modelStatusToString(status))
    solved: Status = "limit" if status == states.kTimeLimit else "optimal"
    # A relaxation that was not solved to the end gives no bound.
    feasible = mip and info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status == states.kTimeLimit and not feasible:
        return Answer(status="limit", bound=float(info.mip_dual_bound) if mip else -math.inf)
    solution, objective = solver.getSolution(), float(info.objective_function_value)
    return Answer(
        status=solved,
        values=np.asarray(solution.col_value),
        objective=objective,
        bound=float(info.mip_dual_bound) if mip else objective,
        reduced_costs=None if mip else np.asarray(solution.col_dual),
    )


# --- CBC ---------------------------------------------------------------------------------------------------------


def _cbc(program: LinearProgram, mip_gap: float, time_limit_s: float | None, *, mip: bool) -> Answer:
    model, variables = _pulp_model(program)
    # The CBC binary inside pulp 3, by its path: pulp's own class for it warns that pulp 4 drops it.
    path = pulp.apis.coin_api.pulp_cbc_path
    solver = pulp.COIN_CMD(path=path, mip=mip, msg=False, gapRel=mip_gap, timeLimit=time_limit_s, threads=1)
    try:
        status = model.solve(solver)
    except pulp.PulpSolverError as error:
        raise _broke_off(error) from error
    if status == pulp.LpStatusInfeasible or (status == pulp.LpStatusUndefined and time_limit_s is None):
        return Answer(status="infeasible")
    variable_values = [variable.varValue for variable in variables]
    limited = model.sol_status == pulp.LpSolutionIntegerFeasible
    if status != pulp.LpStatusOptimal or any(value is None for value in variable_values):
        if time_limit_s is not None:
            return Answer(status="limit")
        raise _broke_off(pulp.LpStatus[status])
    values = np.asarray(variable_values, np.float64)
    objective = float(program.cost() @ values) + program.objective.constant
    return Answer(
        status="limit" if limited else "optimal",
        values=values,
        objective=objective,
        # The CBC command reports no bound. Its gap implies one, except where it ran out of time.
        bound=-math.inf if limited else objective - mip_gap * abs(objective),
        reduced_costs=None if mip else np.asarray([variable.dj or 0.0 for variable in variables]),
    )


def _pulp_model(program: LinearProgram) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("sharding", pulp.LpMinimize)
    variables = [
        model.add_variable(
            f"v{index}",
            lowBound=low,
            upBound=None if math.isinf(high) else high,
            cat=pulp.LpInteger if integer else pulp.LpContinuous,
        )
        for index, (low, high, integer) in enumerate(zip(program.lower, program.upper, program.integer, strict=True))
    ]
    objective = program.objective
    terms = [(variables[i], float(v)) for i, v in zip(objective.indices, objective.values, strict=True)]
    model.setObjective(pulp.LpAffineExpression(terms, constant=objective.constant))
    starts, indices, values = program.matrix()
    for row in range(program.rows):
        part = slice(starts[row], starts[row + 1])
        expression = pulp.LpAffineExpression(
            [(variables[i], float(v)) for i, v in zip(indices[part], values[part], strict=True)]
        )
        low, high = program.row_lower[row], program.row_upper[row]
        if low == high:
            model += expression == low
            continue
        if not math.isinf(low):
            model += expression >= low
        if not math.isinf(high):
            model += expression <= high
    return model, variables
