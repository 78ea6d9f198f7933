"""The integer program.

    choose      x[v,c] in {0,1}     node v takes choice c                       sum_c x[v,c] = 1
    flows       f[e,p,q] >= 0       edge e shows ports p and q                  sum_q f[e,p,q] = sum_{c shows p}
    x[producer,c]
                                                                                sum_p f[e,p,q] = sum_{c shows q}
                                                                                x[consumer,c]
    units       u >= sum f[e,p,q]   for each edge e with members: an edge shows one pair, so it is paid once
    quantities  Q[name] = constant + sum of the charges of x, f and u
    time        F >= compute + slowdown + sum of blocking; F >= blocking[l] + prefetch[l] for each link l;
                F' >= once[l] + (blocking[l] + prefetch[l] - F) / passes; B and B' likewise for the backward
                (of one pass, F' is left out: F >= once[l] + blocking[l] + prefetch[l])
    memory      memory + Z + W <= cap;  Z >= each transient;  W >= all that is alive at each moment
    minimise    F + F' + B + B' + exposed

With the flow equalities in both directions the relaxation is nearly integral: the branching that is left is small.
`_choices`, `_flows`, `_units`, `_time` and `_memory` build one line each.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner import problem as problems
from planner import reduction, solvers
from planner.errors import SolverError
from planner.linear_program import Answer, Expression, LinearProgram
from planner.problem import Charge, Problem, Solution, peak_bytes, step_time_s, totals

_IN_BYTES = (problems.MEMORY, problems.TRANSIENT, problems.MOMENT)


class _Quantities:
    """What every variable adds to every quantity, and the sizes of these amounts."""

    def __init__(self, constant: Charge) -> None:
        self.constant = constant
        self._names: list[str] = []
        self._amounts = array("d")
        self._variables: list[int] = []
        self._lengths: list[int] = []

    def charge(self, variable: int, charge: Charge) -> None:
        self._names.extend(charge)
        self._amounts.extend(charge.values())
        self._variables.append(variable)
        self._lengths.append(len(charge))

    def settle(self, columns: int) -> None:
        """Sort what was charged by quantity; nothing is charged after it."""
        self.names = sorted({*self.constant, *self._names})
        number = {name: i for i, name in enumerate(self.names)}
        quantity = np.fromiter(map(number.__getitem__, self._names), np.int64, len(self._names))
        variable = np.repeat(np.asarray(self._variables, np.int64), self._lengths)
        amount = np.array(self._amounts, np.float64)
        largest = np.zeros(len(self.names))
        np.maximum.at(largest, quantity, amount)
        # One entry per quantity and variable, however often it was charged; in order of both.
        keys, place = np.unique(quantity * columns + variable, return_inverse=True)
        self._summed = np.bincount(place, weights=amount, minlength=len(keys))
        self._of = (keys % columns).astype(np.int32) if columns else keys.astype(np.int32)
        starts = np.searchsorted(keys, np.arange(len(self.names) + 1) * columns)
        self._span = {name: slice(starts[i], starts[i + 1]) for i, name in enumerate(self.names)}
        self._columns = columns
        self._largest = {
            name: max(float(size), self.constant.get(name, 0.0)) for name, size in zip(self.names, largest, strict=True)
        }

    def largest(self, names: Iterable[str]) -> float:
        """Return the largest single amount of any of ``names``: a size of the problem, to scale it by."""
        return max((self._largest.get(name, 0.0) for name in names), default=0.0)

    def sum(self, names: Iterable[str], scale: float) -> Expression:
        """Return the sum of quantities as an expression of the variables."""
        return self.weighted(dict.fromkeys(names, scale))

    def weighted(self, scales: Mapping[str, float]) -> Expression:
        """Return the sum of quantities, each times its scale, as an expression of the variables."""
        spans = [(self._span[name], scale) for name, scale in scales.items() if name in self._span]
        indices = np.concatenate([np.empty(0, np.int32), *(self._of[span] for span, _ in spans)])
        values = np.concatenate([np.empty(0), *(self._summed[span] * scale for span, scale in spans)])
        if len(spans) > 1:
            dense = np.bincount(indices, weights=values, minlength=self._columns)
            indices = np.flatnonzero(dense).astype(np.int32)
            values = dense[indices]
        constant = sum(self.constant.get(name, 0.0) * scale for name, scale in scales.items())
        return Expression(indices=indices, values=values, constant=constant)


@dataclass(slots=True)
class _Program:
    """The program under construction; its scales bring seconds and bytes to about one, which the tolerances are for."""

    problem: Problem
    linear: LinearProgram
    quantities: _Quantities
    choice: list[range] = field(default_factory=list)
    flow: list[dict[tuple[int, int], int]] = field(default_factory=list)
    time_scale: float = 1.0
    memory_scale: float = 1.0
    peak: Expression | None = None

    def zero_one(self) -> npt.NDArray[np.bool_]:
        """Return, by variable, whether it is a choice or a flow: 0 or 1 once every node takes one choice."""
        found = np.zeros(self.linear.columns, np.bool_)
        for row in self.choice:
            found[row.start : row.stop] = True
        for flow in self.flow:
            found[list(flow.values())] = True
        return found


def _choices(program: _Program) -> None:
    linear = program.linear
    for node in program.problem.nodes:
        variables = [linear.variable(binary=True) for _ in node.charges]
        program.choice.append(range(variables[0], variables[-1] + 1))
        linear.row(variables, [1.0] * len(variables), lower=1.0, upper=1.0)
        for variable, charge in zip(variables, node.charges, strict=True):
            program.quantities.charge(variable, charge)


def _flows(program: _Program) -> None:
    for edge in program.problem.edges:
        flow = {}
        for pair, charge in edge.pairs.items():
            flow[pair] = program.linear.variable()
            if charge:
                program.quantities.charge(flow[pair], charge)
        program.flow.append(flow)
        for side, ports, node in ((0, edge.producer_ports, edge.producer), (1, edge.consumer_ports, edge.consumer)):
            out: dict[int, list[int]] = defaultdict(list)
            for pair, variable in flow.items():
                out[pair[side]].append(variable)
            chosen: dict[int, list[int]] = defaultdict(list)
            for variable, port in zip(program.choice[node], ports, strict=True):
                chosen[port].append(variable)
            for port, choices in chosen.items():
                shown = out.get(port, [])
                program.linear.row([*shown, *choices], [1.0] * len(shown) + [-1.0] * len(choices), lower=0.0, upper=0.0)


def _units(program: _Program) -> None:
    for unit in program.problem.units:
        flows: dict[int, list[int]] = defaultdict(list)
        for e, p, q in unit.members:
            variable = program.flow[e].get((p, q))
            if variable is not None:
                flows[e].append(variable)
        if len(flows) == 1:
            for variable in next(iter(flows.values())):
                program.quantities.charge(variable, unit.charge)
            continue
        paid = program.linear.variable()
        program.quantities.charge(paid, unit.charge)
        for together in flows.values():
            program.linear.row([paid, *together], [1.0] + [-1.0] * len(together), lower=0.0)


def _time(program: _Program) -> None:
    quantities, linear, scale = program.quantities, program.linear, program.time_scale
    names, links = set(quantities.names), problems._links(quantities.names)
    exposed = quantities.sum([problems.EXPOSED], scale)
    several = problems.passes(quantities.constant) > 1
    phases = []
    for compute, slowdown, blocking, prefetch, once in (problems.FORWARD, problems.BACKWARD):
        phase = linear.variable()
        phases.append(phase)
        linear.at_most(
            quantities.sum([compute, slowdown, *(blocking + link for link in links)], scale).less(phase), 0.0
        )
        for link in links:
            carried = [blocking + link, prefetch + link, *([] if several else [once + link])]
            linear.at_most(quantities.sum(carried, scale).less(phase), 0.0)
        once_a_step = [(once + link, blocking + link, prefetch + link) for link in links if once + link in names]
        if several and once_a_step:
            phases.append(_exposed_once(program, phase, once_a_step))
    linear.objective = Expression(
        indices=np.append(exposed.indices, np.asarray(phases, np.int32)),
        values=np.append(exposed.values, [1.0] * len(phases)),
        constant=exposed.constant,
    )


def _exposed_once(program: _Program, phase: int, carried: Iterable[tuple[str, str, str]]) -> int:
    """Return the variable of what one micro-batch cannot hide of what links carry once a step.

    Args:
        phase: the variable of the phase's seconds.
        carried: by link, what it carries once, and what it carries in every micro-batch: two quantities.
    """
    linear, scale, passes = program.linear, program.time_scale, problems.passes(program.quantities.constant)
    exposed = linear.variable()
    for once, *each in carried:
        row = program.quantities.weighted({once: scale, **dict.fromkeys(each, scale / passes)})
        linear.at_most(row.less(phase, 1.0 / passes).less(exposed), 0.0)
    return exposed


def _memory(program: _Program, memory_bytes: float | None) -> None:
    quantities, linear, scale = program.quantities, program.linear, program.memory_scale
    largest, moment = linear.variable(), linear.variable()
    for name in quantities.names:
        if name.startswith(problems.TRANSIENT):
            linear.at_most(quantities.sum([name], scale).less(largest), 0.0)
    for alive in problems.quantities_by_moment(quantities.names).values():
        linear.at_most(quantities.sum(alive, scale).less(moment), 0.0)
    stays = quantities.sum([name for name in quantities.names if name.startswith(problems.MEMORY)], scale)
    program.peak = Expression(
        indices=np.append(stays.indices, np.asarray([largest, moment], np.int32)),
        values=np.append(stays.values, [1.0, 1.0]),
        constant=stays.constant,
    )
    if memory_bytes is not None:
        linear.at_most(program.peak, memory_bytes * scale)


def _states(program: _Program, memory_bytes: float) -> None:
    """Cap what rests whatever the micro-batches are: parameters, optimizer states, the reserve."""
    quantities = program.quantities
    resting = [name for name in quantities.names if name in problems.RESTING]
    program.linear.at_most(quantities.sum(resting, program.memory_scale), memory_bytes * program.memory_scale)


def _typical_time_s(quantities: _Quantities) -> float:
    """Return the largest compute of a choice (communication may be far off it), or any time where nothing computes."""
    compute = quantities.largest((problems.COMPUTE_FORWARD, problems.COMPUTE_BACKWARD))
    others = (name for name in quantities.names if not name.startswith((*_IN_BYTES, problems.PASSES)))
    return compute or quantities.largest(others) or 1.0


def _typical_bytes(quantities: _Quantities, memory_bytes: float | None) -> float:
    """Return the cap, or without one the largest amount of memory."""
    if memory_bytes is not None and memory_bytes > 0:
        return memory_bytes
    return quantities.largest(name for name in quantities.names if name.startswith(_IN_BYTES)) or 1.0


def _build(problem: Problem, memory_bytes: float | None, *, memory: bool = True) -> _Program:
    program = _Program(problem=problem, linear=LinearProgram(), quantities=_Quantities(problem.constant))
    _choices(program)
    _flows(program)
    _units(program)
    program.quantities.settle(program.linear.columns)
    program.time_scale = 1.0 / _typical_time_s(program.quantities)
    program.memory_scale = 1.0 / _typical_bytes(program.quantities, memory_bytes)
    _time(program)
    if memory:
        _memory(program, memory_bytes)
    return program


def solve(
    problem: Problem,
    *,
    memory_bytes: float | None = None,
    mip_gap: float = 1e-3,
    time_limit_s: float | None = None,
    at_most_s: float | None = None,
    steps: int | None = None,
    solver: str | None = None,
) -> Solution | None:
    """Return the best assignment within ``memory_bytes`` and ``at_most_s``, or None where there is none.

    Args:
        problem: what to choose.
        memory_bytes: cap on the peak; None for no cap.
        mip_gap: relative gap at which the solver may stop.
        time_limit_s: after this the best found so far is returned.
        at_most_s: step time from which on an assignment is not wanted; it is quick to see that there is none better.
        steps: relaxations to branch through, after which the best so far is returned, or None; None: all it takes.
        solver: "highs" or "cbc"; None takes HiGHS where it is installed.

    Raises:
        SolverError: the solver broke off, or ran out of time, without an answer.
    """
    started = time.perf_counter()
    program = _build(problem, memory_bytes, memory=memory_bytes is not None)
    at_most = math.inf if at_most_s is None else at_most_s * program.time_scale
    while True:
        try:
            answer = reduction.solve(
                program.linear,
                zero_one=program.zero_one(),
                mip_gap=mip_gap,
                at_most=at_most,
                time_limit_s=time_limit_s,
                steps=steps,
                solver=solver,
            )
        except SolverError:
            # The relaxation was not to be had. Most often nothing fits; else the solver has to do without it.
            if steps is not None or (memory_bytes is not None and _cannot_fit(problem, memory_bytes)):
                return None
            whole = reduction.bounded(program.linear, at_most)
            answer = solvers.solve(whole, mip_gap=mip_gap, time_limit_s=time_limit_s, solver=solver)
        if answer.values is None and answer.status == "cut-short" and steps is None:
            raise SolverError(
                f"no assignment was found in {time_limit_s} s.", what_to_do="Try again with a larger time limit."
            )
        if answer.values is None:
            return None
        assignment = _assignment(program, answer)
        if memory_bytes is None or peak_bytes(totals(problem, assignment)) <= memory_bytes:
            return _solution(program, answer, assignment, started)
        # The solver takes a constraint as kept within a tolerance; the cap is to hold to the byte.
        chosen = [row[c] for row, c in zip(program.choice, assignment, strict=True)]
        program.linear.row(chosen, [1.0] * len(chosen), upper=len(chosen) - 1.0)


def _assignment(program: _Program, answer: Answer) -> tuple[int, ...]:
    values = answer.values
    assert values is not None
    return tuple(int(np.argmax(values[row.start : row.stop])) for row in program.choice)


def _solution(program: _Program, answer: Answer, assignment: tuple[int, ...], started: float) -> Solution:
    objective_s = step_time_s(totals(program.problem, assignment))
    return Solution(
        assignment=assignment,
        objective_s=objective_s,
        bound_s=min(max(answer.bound, 0.0) / program.time_scale, objective_s),
        status="optimal" if answer.status == "optimal" else "cut-short",
        time_s=time.perf_counter() - started,
        root_s=answer.root / program.time_scale if math.isfinite(answer.root) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What the linear relaxation says.

    Attributes:
        bound_s: no assignment takes less.
        is_whole: whether it is an assignment, which then is the best.
        at_least_s: by node and choice, what no assignment with that choice takes less than: the bound and the choice's
            reduced cost.
    """

    bound_s: float
    is_whole: bool
    at_least_s: tuple[tuple[float, ...], ...]


def relax(
    problem: Problem,
    *,
    memory_bytes: float | None = None,
    resting_bytes: float | None = None,
    solver: str | None = None,
) -> Relaxation | None:
    """Return the bounds of the linear relaxation, None where it has no solution.

    Args:
        memory_bytes: cap on the peak; None for no cap.
        resting_bytes: cap on what is there in every micro-batch alike (`planner.problem.RESTING`); None for no cap.

    Raises:
        SolverError: the solver broke off without an answer.
    """
    if memory_bytes is not None and _cannot_fit(problem, memory_bytes):
        return None  # asked first, since it is hard to see from a program that has no solution
    program = _build(problem, memory_bytes or resting_bytes, memory=memory_bytes is not None)
    if resting_bytes is not None:
        _states(program, resting_bytes)
    answer = solvers.solve_relaxation(program.linear, solver=solver)
    if answer.values is None:
        return None
    assert answer.reduced_costs is not None
    # A reduced cost below 0 belongs to a choice at its upper bound, which costs nothing extra.
    least = (answer.objective + np.maximum(answer.reduced_costs, 0.0)) / program.time_scale
    at_least_s = tuple(tuple(least[row.start : row.stop].tolist()) for row in program.choice)
    is_whole = reduction.most_fractional(program.linear, answer) is None
    return Relaxation(bound_s=answer.objective / program.time_scale, is_whole=is_whole, at_least_s=at_least_s)


def _for_memory(problem: Problem) -> _Program:
    """Return the program that minimises the peak."""
    program = _build(problem, None)
    assert program.peak is not None
    program.linear.objective = program.peak
    return program


def least_memory_bound(problem: Problem) -> float | None:
    """Return bytes that no assignment's peak can go below; None where no assignment exists."""
    program = _for_memory(problem)
    answer = solvers.solve_relaxation(program.linear)
    return None if answer.values is None else answer.objective / program.memory_scale


def _cannot_fit(problem: Problem, memory_bytes: float) -> bool:
    least = least_memory_bound(problem)
    return least is None or least > memory_bytes


def least_memory(problem: Problem) -> tuple[tuple[int, ...], float] | None:
    """Return the assignment with the smallest peak, and that peak in bytes; None where no assignment exists."""
    program = _for_memory(problem)
    answer = reduction.solve(program.linear, zero_one=program.zero_one(), mip_gap=1e-4)
    if answer.values is None:
        return None
    assignment = _assignment(program, answer)
    return assignment, peak_bytes(totals(problem, assignment))
