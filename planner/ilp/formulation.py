"""The integer program, stated.

    choose      x[v,c] in {0,1}     node v takes choice c                       sum_c x[v,c] = 1
    flows       f[e,p,q] >= 0       edge e shows ports p and q                  sum_q f[e,p,q] = sum_{c shows p}
    x[producer,c]
                                                                                sum_p f[e,p,q] = sum_{c shows q}
                                                                                x[consumer,c]
    shared_charges       u >= sum f[e,p,q]   for each edge e with members: an edge shows one pair, so it is paid once
    quantities  Q[name] = constant + sum of the charges of x, f and u
    time        F >= compute + slowdown + sum of blocking; F >= blocking[l] + prefetch[l] for each link l;
                F' >= once[l] + (blocking[l] + prefetch[l] - F) / passes; B and B' likewise for the backward
                (of one pass, F' is left out: F >= once[l] + blocking[l] + prefetch[l])
    memory      memory + Z + W <= cap;  Z >= each transient;  W >= all that is alive at each moment, where what has
                one lifetime is a variable: L >= its bytes
    minimise    F + F' + B + B' + exposed

With the flow equalities in both directions the relaxation is nearly integral: the branching that is left is small.
`_choices`, `_flows`, `_units`, `_time` and `state_memory` build one line each.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.ilp import problem as problems
from planner.ilp.linear_program import Expression, LinearProgram
from planner.ilp.problem import Charge, Problem

_IN_BYTES = (problems.MEMORY, problems.TRANSIENT, problems.MOMENT, problems.LIFETIME)


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
        order = np.lexsort((_small(variable, columns), _small(quantity, len(self.names))))
        keys = (quantity * columns + variable)[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        keys, self._summed = keys[first], np.add.reduceat(amount[order], first) if len(first) else amount
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


def _small(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64] | npt.NDArray[np.uint16]:
    """Return ``numbers``, all below ``count``, in 16 bits where they fit: those are sorted five times as fast."""
    return numbers.astype(np.uint16) if count <= 2**16 else numbers


@dataclass(slots=True)
class Program:
    """The program; its scales bring seconds and bytes to about one, which the tolerances are for.

    Attributes:
        peak: the memory, once that is stated.
        work_rows: quantity of compute -> the row that says that its phase takes as long.
    """

    problem: Problem
    linear: LinearProgram
    quantities: _Quantities
    choice: list[range] = field(default_factory=list)
    flow: list[dict[tuple[int, int], int]] = field(default_factory=list)
    time_scale: float = 1.0
    memory_scale: float = 1.0
    peak: Expression | None = None
    work_rows: dict[str, int] = field(default_factory=dict)

    def zero_one(self) -> npt.NDArray[np.bool_]:
        """Return, by variable, whether it is a choice or a flow: 0 or 1 once every node takes one choice."""
        found = np.zeros(self.linear.columns, np.bool_)
        for row in self.choice:
            found[row.start : row.stop] = True
        for flow in self.flow:
            found[list(flow.values())] = True
        return found


def _choices(program: Program) -> None:
    linear = program.linear
    for node in program.problem.nodes:
        variables = [linear.variable(binary=True) for _ in node.charges]
        program.choice.append(range(variables[0], variables[-1] + 1))
        linear.row(variables, [1.0] * len(variables), lower=1.0, upper=1.0)
        for variable, charge in zip(variables, node.charges, strict=True):
            program.quantities.charge(variable, charge)


def _flows(program: Program) -> None:
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


def _units(program: Program) -> None:
    for shared in program.problem.shared_charges:
        flows: dict[int, list[int]] = defaultdict(list)
        for e, p, q in shared.members:
            variable = program.flow[e].get((p, q))
            if variable is not None:
                flows[e].append(variable)
        if len(flows) == 1:
            for variable in next(iter(flows.values())):
                program.quantities.charge(variable, shared.charge)
            continue
        paid = program.linear.variable()
        program.quantities.charge(paid, shared.charge)
        for together in flows.values():
            program.linear.row([paid, *together], [1.0] + [-1.0] * len(together), lower=0.0)


def _time(program: Program) -> None:
    quantities, linear, scale = program.quantities, program.linear, program.time_scale
    names, links = set(quantities.names), problems._links(quantities.names)
    exposed = quantities.sum([problems.EXPOSED], scale)
    several = problems.passes(quantities.constant) > 1
    phases = []
    for compute, slowdown, blocking, prefetch, once in (problems.FORWARD, problems.BACKWARD):
        phase = linear.variable()
        phases.append(phase)
        linear.constrain_below(
            quantities.sum([compute, slowdown, *(blocking + link for link in links)], scale).less(phase), 0.0
        )
        program.work_rows[compute] = linear.rows - 1
        for link in links:
            carried = [blocking + link, prefetch + link, *([] if several else [once + link])]
            linear.constrain_below(quantities.sum(carried, scale).less(phase), 0.0)
        once_a_step = [(once + link, blocking + link, prefetch + link) for link in links if once + link in names]
        if several and once_a_step:
            phases.append(_exposed_once(program, phase, once_a_step))
    linear.objective = Expression(
        indices=np.append(exposed.indices, np.asarray(phases, np.int32)),
        values=np.append(exposed.values, [1.0] * len(phases)),
        constant=exposed.constant,
    )


def _exposed_once(program: Program, phase: int, carried: Iterable[tuple[str, str, str]]) -> int:
    """Return the variable of what one micro-batch cannot hide of what links carry once a step.

    Args:
        phase: the variable of the phase's seconds.
        carried: by link, what it carries once, and what it carries in every micro-batch: two quantities.
    """
    linear, scale, passes = program.linear, program.time_scale, problems.passes(program.quantities.constant)
    exposed = linear.variable()
    for once, *each in carried:
        row = program.quantities.weighted({once: scale, **dict.fromkeys(each, scale / passes)})
        linear.constrain_below(row.less(phase, 1.0 / passes).less(exposed), 0.0)
    return exposed


def state_memory(program: Program) -> Expression:
    """State the peak of a program that was stated without, and return it."""
    quantities, linear, scale = program.quantities, program.linear, program.memory_scale
    largest, moment = linear.variable(), linear.variable()
    for name in quantities.names:
        if name.startswith(problems.TRANSIENT):
            linear.constrain_below(quantities.sum([name], scale).less(largest), 0.0)
    for alive in _at_moments(program):
        linear.constrain_below(alive.less(moment), 0.0)
    stays = quantities.sum([name for name in quantities.names if name.startswith(problems.MEMORY)], scale)
    program.peak = Expression(
        indices=np.append(stays.indices, np.asarray([largest, moment], np.int32)),
        values=np.append(stays.values, [1.0, 1.0]),
        constant=stays.constant,
    )
    return program.peak


def _at_moments(program: Program) -> list[Expression]:
    """Return what is alive at each moment."""
    quantities, linear, scale = program.quantities, program.linear, program.memory_scale
    direct: dict[str, list[str]] = defaultdict(list)
    lasting: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for name in quantities.names:
        if name.startswith(problems.MOMENT):
            direct[problems.moment_of(name)].append(name)
        elif isinstance(name, problems.Lifetime):
            # In its own largest amounts: a few bytes beside a cap of 80 GB are below what solvers take for 0.
            amount, largest = linear.variable(), quantities.largest([name]) or 1.0
            linear.constrain_below(quantities.sum([name], 1.0 / largest).less(amount), 0.0)
            for at, count in name.counts.items():
                lasting[problems.moment_of(at)][amount] += count * largest * scale
    found = []
    for key in sorted({*direct, *lasting}):
        alive, more = quantities.sum(direct[key], scale), lasting[key]
        found.append(
            Expression(
                indices=np.append(alive.indices, np.fromiter(more, np.int32, len(more))),
                values=np.append(alive.values, np.fromiter(more.values(), np.float64, len(more))),
                constant=alive.constant,
            )
        )
    return found


def cap_peak(program: Program, memory_bytes: float) -> None:
    """Cap the peak, which is stated already."""
    assert program.peak is not None
    program.linear.constrain_below(program.peak, memory_bytes * program.memory_scale)
    program.linear.cap_row = program.linear.rows - 1


def cap_resting(program: Program, memory_bytes: float) -> None:
    """Cap what rests whatever the micro-batches are: parameters, optimizer states, the reserve."""
    quantities = program.quantities
    resting = [name for name in quantities.names if name in problems.RESTING]
    program.linear.constrain_below(quantities.sum(resting, program.memory_scale), memory_bytes * program.memory_scale)


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


def state(problem: Problem, memory_bytes: float | None, *, memory: bool = True) -> Program:
    """Return the program of ``problem``.

    Args:
        memory_bytes: cap on the peak; None for no cap.
        memory: whether the peak is stated at all.
    """
    program = Program(problem=problem, linear=LinearProgram(), quantities=_Quantities(problem.constant))
    _choices(program)
    _flows(program)
    _units(program)
    program.quantities.settle(program.linear.columns)
    program.time_scale = 1.0 / _typical_time_s(program.quantities)
    program.memory_scale = 1.0 / _typical_bytes(program.quantities, memory_bytes)
    _time(program)
    if memory:
        state_memory(program)
        if memory_bytes is not None:
            cap_peak(program, memory_bytes)
    return program
