"""Solvers of a `LinearProgram`: CBC through pulp, or HiGHS where highspy is installed.

HiGHS is given the arrays at once. Through pulp, which keeps every coefficient in a dictionary and hands over row by
row, it took longer to hand over a program of this package than to solve it.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pulp

from planner.errors import SolverError
from planner.linear_program import Answer, LinearProgram, Status


def solver_name() -> str:
    """Return which solver is used here."""
    return "highs" if find_spec("highspy") is not None else "cbc"


def solve(program: LinearProgram, *, mip_gap: float, time_limit_s: float | None, solver: str | None = None) -> Answer:
    """Return the best solution within a relative gap, or the best found in the time.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    if (solver or solver_name()) == "highs":
        return _highs(program, mip_gap, time_limit_s, mip=True)
    return _cbc(program, mip_gap, time_limit_s, mip=True)


def solve_relaxation(program: LinearProgram, *, time_limit_s: float | None = None, solver: str | None = None) -> Answer:
    """Return the solution of the program in which no variable has to be a whole number.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    if (solver or solver_name()) == "highs":
        return _highs(program, 0.0, time_limit_s, mip=False)
    return _cbc(program, 0.0, time_limit_s, mip=False)


_SECOND_TRIES = (("simplex_dual_edge_weight_strategy", 1), ("simplex_strategy", 4), ("solver", "ipm"))
"""What HiGHS is told where it ends without an answer: Devex pricing, the primal simplex, the interior point method."""

_SECOND_TRY_S = 2.0
"""Seconds for each of these."""


def _broke_off(what: object) -> SolverError:
    return SolverError(
        f"the solver broke off: {what}", what_to_do="Try again with a larger time limit or a larger MIP gap."
    )


# --- HiGHS -------------------------------------------------------------------------------------------------------


def _highs(program: LinearProgram, mip_gap: float, time_limit_s: float | None, *, mip: bool) -> Answer:
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    solver.setOptionValue("mip_rel_gap", mip_gap)
    solver.setOptionValue("mip_abs_gap", 0.0)
    solver.setOptionValue("threads", 1)
    # The flows leave presolve little to find, and it takes most of the time (measured: 1.8 s against 0.35 s).
    solver.setOptionValue("presolve", "off")
    # A few bytes beside a cap of 80 GB are 1e-10 of it; taking them for 0 makes rows that contradict each other.
    solver.setOptionValue("small_matrix_value", 1e-12)
    if time_limit_s is not None:
        solver.setOptionValue("time_limit", float(time_limit_s))
    if solver.passModel(_highs_model(program, mip)) == highspy.HighsStatus.kError:
        raise _broke_off("HiGHS refused the program")
    solver.run()
    without_answer = [highspy.HighsModelStatus.kUnknown, highspy.HighsModelStatus.kSolveError]
    for option, value in _SECOND_TRIES if not mip else ():
        if solver.getModelStatus() not in without_answer:
            break
        # The dual simplex now and then ends so, by rounding, where nothing fits by far.
        solver.clearSolver()
        solver.setOptionValue(option, value)
        solver.setOptionValue("time_limit", _SECOND_TRY_S)
        solver.run()
        without_answer = [*without_answer, highspy.HighsModelStatus.kTimeLimit]
    if len(without_answer) > 2 and solver.getModelStatus() in without_answer:
        raise _broke_off("HiGHS ended without an answer, whatever it was told")
    return _highs_answer(solver, mip)


def _highs_model(program: LinearProgram, mip: bool) -> Any:
    import highspy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.columns, program.rows
    model.col_cost_ = program.cost()
    model.offset_ = program.objective.constant
    model.col_lower_, model.col_upper_ = np.asarray(program.lower), np.asarray(program.upper)
    model.row_lower_, model.row_upper_ = np.asarray(program.row_lower), np.asarray(program.row_upper)
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = program.columns, program.rows
    matrix.start_, matrix.index_, matrix.value_ = program.matrix()
    if mip:
        whole, any_ = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [whole if integer else any_ for integer in program.integer]
    return model


def _highs_answer(solver: Any, mip: bool) -> Answer:
    import highspy

    status, info = solver.getModelStatus(), solver.getInfo()
    states = highspy.HighsModelStatus
    if status in (states.kInfeasible, states.kUnboundedOrInfeasible):
        return Answer(status="infeasible")
    if status not in (states.kOptimal, states.kTimeLimit, states.kModelEmpty):
        raise _broke_off(solver.modelStatusToString(status))
    solved: Status = "cut-short" if status == states.kTimeLimit else "optimal"
    # A relaxation that was not solved to its end bounds nothing.
    feasible = mip and info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status == states.kTimeLimit and not feasible:
        return Answer(status="cut-short", bound=float(info.mip_dual_bound) if mip else -math.inf)
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
    # The CBC that pulp 3 brings along, by its path: pulp's own class for it warns of its end in pulp 4.
    path = pulp.apis.coin_api.pulp_cbc_path
    solver = pulp.COIN_CMD(path=path, mip=mip, msg=False, gapRel=mip_gap, timeLimit=time_limit_s, threads=1)
    try:
        status = model.solve(solver)
    except pulp.PulpSolverError as error:
        raise _broke_off(error) from error
    if status == pulp.LpStatusInfeasible or (status == pulp.LpStatusUndefined and time_limit_s is None):
        return Answer(status="infeasible")
    found = [variable.varValue for variable in variables]
    limited = model.sol_status == pulp.LpSolutionIntegerFeasible
    if status != pulp.LpStatusOptimal or any(value is None for value in found):
        if time_limit_s is not None:
            return Answer(status="cut-short")
        raise _broke_off(pulp.LpStatus[status])
    values = np.asarray(found, np.float64)
    objective = float(program.cost() @ values) + program.objective.constant
    return Answer(
        status="cut-short" if limited else "optimal",
        values=values,
        objective=objective,
        # CBC's command tells no bound: what its gap allows, and nothing where it ran out of time.
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
