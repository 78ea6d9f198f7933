"""The integer program: the one file that knows pulp.

    choose      x[v,c] in {0,1}     node v takes choice c                       sum_c x[v,c] = 1
    flows       f[e,p,q] >= 0       edge e shows ports p and q                  sum_q f[e,p,q] = sum_{c shows p}
    x[producer,c]
                                                                                sum_p f[e,p,q] = sum_{c shows q}
                                                                                x[consumer,c]
    units       u >= sum f[e,p,q]   for each edge e with members: an edge shows one pair, so it is paid once
    quantities  Q[name] = constant + sum of the charges of x, f and u
    time        F >= compute + sum of blocking; F >= blocking[l] + prefetch[l] for each link l; B likewise for the
    backward
    memory      memory + Z + W <= cap;  Z >= each transient;  W >= all that is alive at each moment
    minimise    F + B + exposed

With the flow equalities in both directions the relaxation is nearly integral: the branching that is left is small.
`_choices`, `_flows`, `_units`, `_time` and `_memory` build one line each.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pulp

from planner import problem as problems
from planner.errors import SolverError
from planner.problem import Charge, Problem, Solution, peak_bytes, step_time_s, totals


def _in_bytes(name: str) -> bool:
    return name.startswith((problems.MEMORY, problems.TRANSIENT, problems.MOMENT))


@dataclass(slots=True)
class _Program:
    """The program under construction; its scales bring seconds and bytes to about one, which the tolerances are for."""

    problem: Problem
    time_scale: float
    memory_scale: float
    model: pulp.LpProblem
    choice: list[list[pulp.LpVariable]] = field(default_factory=list)
    flow: list[dict[tuple[int, int], pulp.LpVariable]] = field(default_factory=list)
    terms: dict[str, list[tuple[pulp.LpVariable, float]]] = field(default_factory=lambda: defaultdict(list))
    scales: dict[str, float] = field(default_factory=dict)

    def charge(self, variable: pulp.LpVariable, charge: Charge) -> None:
        for name, amount in charge.items():
            if amount:
                self.terms[name].append((variable, amount * self._scale(name)))

    def _scale(self, name: str) -> float:
        if name not in self.scales:
            self.scales[name] = self.memory_scale if _in_bytes(name) else self.time_scale
        return self.scales[name]

    def quantity(self, name: str) -> pulp.LpAffineExpression:
        """Return quantity ``name`` as a linear expression, in the program's scale."""
        constant = self.problem.constant.get(name, 0.0) * self._scale(name)
        return pulp.LpAffineExpression(_summed(self.terms.get(name, [])), constant)


def _summed(terms: list[tuple[pulp.LpVariable, float]]) -> list[tuple[pulp.LpVariable, float]]:
    total: dict[pulp.LpVariable, float] = defaultdict(float)
    for variable, amount in terms:
        total[variable] += amount
    return list(total.items())


def _choices(program: _Program) -> None:
    for v, node in enumerate(program.problem.nodes):
        variables = [program.model.add_variable(f"x_{v}_{c}", cat=pulp.LpBinary) for c in range(len(node.charges))]
        program.choice.append(variables)
        program.model += pulp.lpSum(variables) == 1
        for variable, charge in zip(variables, node.charges, strict=True):
            program.charge(variable, charge)


def _flows(program: _Program) -> None:
    for e, edge in enumerate(program.problem.edges):
        flow = {(p, q): program.model.add_variable(f"f_{e}_{p}_{q}", lowBound=0) for p, q in edge.pairs}
        program.flow.append(flow)
        for pair, variable in flow.items():
            program.charge(variable, edge.pairs[pair])
        for side, ports, node in ((0, edge.producer_ports, edge.producer), (1, edge.consumer_ports, edge.consumer)):
            out: dict[int, list[pulp.LpVariable]] = defaultdict(list)
            for pair, variable in flow.items():
                out[pair[side]].append(variable)
            chosen: dict[int, list[pulp.LpVariable]] = defaultdict(list)
            for variable, port in zip(program.choice[node], ports, strict=True):
                chosen[port].append(variable)
            for port in chosen:
                terms = [(variable, 1.0) for variable in out.get(port, [])] + [
                    (variable, -1.0) for variable in chosen[port]
                ]
                program.model += pulp.LpAffineExpression(terms) == 0


def _units(program: _Program) -> None:
    for u, unit in enumerate(program.problem.units):
        flows: dict[int, list[pulp.LpVariable]] = defaultdict(list)
        for e, p, q in unit.members:
            if (p, q) in program.flow[e]:
                flows[e].append(program.flow[e][p, q])
        if len(flows) == 1:
            for variable in next(iter(flows.values())):
                program.charge(variable, unit.charge)
            continue
        paid = program.model.add_variable(f"u_{u}", lowBound=0)
        program.charge(paid, unit.charge)
        for together in flows.values():
            program.model += pulp.LpAffineExpression([(paid, 1.0), *((v, -1.0) for v in together)]) >= 0


def _time(program: _Program) -> None:
    names = program.problem.quantities()
    links = problems._links(names)
    objective = []
    for compute, blocking, prefetch in (
        (problems.COMPUTE_FORWARD, problems.BLOCKING_FORWARD, problems.PREFETCH_FORWARD),
        (problems.COMPUTE_BACKWARD, problems.BLOCKING_BACKWARD, problems.PREFETCH_BACKWARD),
    ):
        phase = program.model.add_variable(f"T_{compute.rpartition('.')[2]}", lowBound=0)
        objective.append(phase)
        alone = program.quantity(compute)
        for link in links:
            alone = alone + program.quantity(blocking + link)
        program.model += phase >= alone
        for link in links:
            program.model += phase >= program.quantity(blocking + link) + program.quantity(prefetch + link)
    program.model.setObjective(pulp.lpSum(objective) + program.quantity(problems.EXPOSED))


def _memory(program: _Program, memory_bytes: float | None) -> pulp.LpAffineExpression:
    largest = program.model.add_variable("Z", lowBound=0)
    moment = program.model.add_variable("W", lowBound=0)
    peak = largest + moment
    names = program.problem.quantities()
    for name in names:
        if name.startswith(problems.MEMORY):
            peak = peak + program.quantity(name)
        elif name.startswith(problems.TRANSIENT):
            program.model += largest >= program.quantity(name)
    for alive in problems.quantities_by_moment(names).values():
        program.model += moment >= pulp.lpSum(program.quantity(name) for name in alive)
    if memory_bytes is not None:
        program.model += peak <= memory_bytes * program.memory_scale
    return peak


def _solver(mip_gap: float, time_limit_s: float | None, *, mip: bool = True) -> pulp.LpSolver:
    if pulp.HiGHS(msg=False).available():
        # The flows leave presolve little to find, and it takes most of the time (measured: 1.8 s against 0.35 s).
        return pulp.HiGHS(
            mip=mip, msg=False, gapRel=mip_gap, gapAbs=0.0, timeLimit=time_limit_s, threads=1, presolve="off"
        )
    return pulp.PULP_CBC_CMD(mip=mip, msg=False, gapRel=mip_gap, timeLimit=time_limit_s, threads=1)


def _largest(problem: Problem, belongs: Callable[[str], bool]) -> float:
    """Return the largest single amount of any quantity that ``belongs``: a size of the problem, to scale it by."""
    charges = [problem.constant, *(charge for node in problem.nodes for charge in node.charges)]
    charges += [charge for edge in problem.edges for charge in edge.pairs.values()]
    charges += [unit.charge for unit in problem.units]
    return max((amount for charge in charges for name, amount in charge.items() if belongs(name)), default=0.0)


def _typical_time_s(problem: Problem) -> float:
    """Return the largest compute of a choice (communication may be far off it), or any time where nothing computes."""
    compute = _largest(problem, lambda name: name in (problems.COMPUTE_FORWARD, problems.COMPUTE_BACKWARD))
    return compute or _largest(problem, lambda name: not _in_bytes(name)) or 1.0


def _typical_bytes(problem: Problem, memory_bytes: float | None) -> float:
    """Return the cap, or without one the largest amount of memory."""
    return memory_bytes if memory_bytes is not None and memory_bytes > 0 else _largest(problem, _in_bytes) or 1.0


def _build(problem: Problem, memory_bytes: float | None) -> tuple[_Program, pulp.LpAffineExpression]:
    program = _Program(
        problem=problem,
        time_scale=1.0 / _typical_time_s(problem),
        memory_scale=1.0 / _typical_bytes(problem, memory_bytes),
        model=pulp.LpProblem("sharding", pulp.LpMinimize),
    )
    _choices(program)
    _flows(program)
    _units(program)
    _time(program)
    return program, _memory(program, memory_bytes)


def solve(
    problem: Problem,
    *,
    memory_bytes: float | None = None,
    mip_gap: float = 1e-3,
    time_limit_s: float | None = None,
    at_most_s: float | None = None,
) -> Solution | None:
    """Return the best assignment within ``memory_bytes`` and ``at_most_s``, or None where there is none.

    Args:
        problem: what to choose.
        memory_bytes: cap on the peak; None for no cap.
        mip_gap: relative gap at which the solver may stop.
        time_limit_s: after this the best found so far is returned.
        at_most_s: step time from which on an assignment is not wanted; it is quick to see that there is none better.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    started = time.perf_counter()
    program, _ = _build(problem, memory_bytes)
    if at_most_s is not None:
        program.model += program.model.objective <= at_most_s * program.time_scale
    solution = _run(program, mip_gap, time_limit_s, started)
    while solution is not None and memory_bytes is not None:
        if peak_bytes(totals(problem, solution.assignment)) <= memory_bytes:
            break
        # The solver takes a constraint as kept within a tolerance; the cap is to hold to the byte.
        chosen = [row[c] for row, c in zip(program.choice, solution.assignment, strict=True)]
        program.model += pulp.lpSum(chosen) <= len(chosen) - 1
        solution = _run(program, mip_gap, time_limit_s, started)
    return solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What the linear relaxation says without a memory cap.

    Attributes:
        bound_s: no assignment takes less.
        at_least_s: by node and choice, what no assignment with that choice takes less than: the bound and the choice's
            reduced cost.
    """

    bound_s: float
    at_least_s: tuple[tuple[float, ...], ...]


def relax(problem: Problem) -> Relaxation | None:
    """Return the bounds of the linear relaxation, None where it has no solution.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    program, _ = _build(problem, None)
    _solve(program, _solver(0.0, None, mip=False))
    if program.model.status != pulp.LpStatusOptimal:
        return None
    bound_s = pulp.value(program.model.objective) / program.time_scale
    # A reduced cost below 0 belongs to a choice at its upper bound, which costs nothing extra.
    at_least_s = tuple(
        tuple(bound_s + max(variable.dj or 0.0, 0.0) / program.time_scale for variable in row) for row in program.choice
    )
    return Relaxation(bound_s=bound_s, at_least_s=at_least_s)


def least_memory_bound(problem: Problem) -> float | None:
    """Return bytes that no assignment's peak can go below; None where no assignment exists."""
    program, peak = _build(problem, None)
    program.model.setObjective(peak)
    _solve(program, _solver(0.0, None, mip=False))
    if program.model.status != pulp.LpStatusOptimal:
        return None
    return float(pulp.value(program.model.objective)) / program.memory_scale


def least_memory(problem: Problem) -> tuple[tuple[int, ...], float] | None:
    """Return the assignment with the smallest peak, and that peak in bytes; None where no assignment exists."""
    program, peak = _build(problem, None)
    program.model.setObjective(peak)
    solution = _run(program, 1e-4, None, time.perf_counter())
    if solution is None:
        return None
    return solution.assignment, peak_bytes(totals(problem, solution.assignment))


def _solve(program: _Program, solver: pulp.LpSolver) -> int:
    """Return the status after solving.

    Raises:
        SolverError: the solver broke off.
    """
    try:
        return int(program.model.solve(solver))
    except pulp.PulpSolverError as error:
        raise SolverError(
            f"the solver broke off: {error}", what_to_do="Try again with a larger time limit or a larger MIP gap."
        ) from error


def _run(program: _Program, mip_gap: float, time_limit_s: float | None, started: float) -> Solution | None:
    status = _solve(program, _solver(mip_gap, time_limit_s))
    if status == pulp.LpStatusInfeasible:
        return None
    if status not in (pulp.LpStatusOptimal, pulp.LpStatusNotSolved) or any(
        v.value() is None for row in program.choice for v in row
    ):
        if status == pulp.LpStatusUndefined:
            return None
        raise SolverError(
            f"the solver ended as {pulp.LpStatus[status]}", what_to_do="Try again with a larger time limit."
        )
    assignment = tuple(max(range(len(row)), key=lambda c: row[c].value() or 0.0) for row in program.choice)
    objective_s = step_time_s(totals(program.problem, assignment))
    return Solution(
        assignment=assignment,
        objective_s=objective_s,
        bound_s=_bound_s(program, objective_s, mip_gap),
        status="optimal" if status == pulp.LpStatusOptimal else "time-limit",
        time_s=time.perf_counter() - started,
    )


def _bound_s(program: _Program, objective_s: float, mip_gap: float) -> float:
    """Return a time that no assignment can beat: the solver's own bound where it tells, else what its gap allows."""
    inner = getattr(program.model, "solverModel", None)
    info = inner.getInfo() if inner is not None and hasattr(inner, "getInfo") else None
    if info is not None:
        return min(float(info.mip_dual_bound) / program.time_scale, objective_s)
    return objective_s * (1.0 - mip_gap)
