"""The integer program of a `Problem`: every set, variable and constraint, and the objective.

Sets
    v ∈ V             nodes (`Node`), each with choices c ∈ C(v)
    e ∈ E             edges (`Edge`), each from its producer s(e) ∈ V to its consumer d(e) ∈ V
    (p, q) ∈ P(e)     compatible pairs of ports on edge e
    u ∈ U             shared charges (`SharedCharge`), each with members M(u) ⊆ {(e, p, q)}
    φ ∈ {fwd, bwd}    phases of a step
    ℓ ∈ L             links that communication runs on: inside a node, between nodes
    k ∈ K             peak candidates: points of a step at which live bytes can peak
    g ∈ G             lifetimes (`Lifetime`): bytes that are alive at several peak candidates
    r ∈ R             regions whose working memory is charged without peak candidates

Parameters
    s(e, c), d(e, c)  port of choice c of the producer, or of the consumer, on edge e
    a_i(·)            amount that a choice (v, c), a pair (e, p, q) or a shared charge u adds to quantity i
    a_i               amount of quantity i in every step
    κ(g, k)           number of copies of the bytes of lifetime g that are alive at peak candidate k
    n                 number of micro-batches in a step (quantity `PASSES`)
    M                 memory of a device, in bytes

Decision variables
    x[v, c] ∈ {0, 1}  node v takes choice c
    y[e, p, q] ≥ 0    edge e has ports p and q
    z[u] ≥ 0          shared charge u is paid

Quantities (`planner.ilp.quantities`) are linear expressions of these. With i for any of the symbols below,

    i  =  a_i  +  Σ_{v,c} a_i(v, c) x[v, c]  +  Σ_{e,p,q} a_i(e, p, q) y[e, p, q]  +  Σ_u a_i(u) z[u]

    C[φ]        seconds of kernels                          A[k]   live bytes at peak candidate k, of all roles
    S[φ]        slowdown by overlapped communication        Λ[g]   bytes of lifetime g
    B[φ, ℓ]     blocking communication                      W[r]   working memory of region r
    D[φ, ℓ]     prefetched communication                    N      persistent bytes, of all roles
    O[φ, ℓ]     once-a-step communication                   N₀     static bytes: those of N that depend neither on
    X           exposed seconds outside of both phases             micro-batches nor on checkpointing (`STATIC`)

Auxiliary variables, all ≥ 0
    t[φ]        seconds of phase φ                          b[g]   bytes of lifetime g
    h[φ]        seconds by which O[φ, ·] extends phase φ    m      most live bytes at any peak candidate
                                                            w      largest working memory of any region

Objective (`step_time`): seconds of a step

    minimise  t[fwd] + h[fwd] + t[bwd] + h[bwd] + X

Constraints
     1  one_choice         Σ_c x[v, c]  =  1                                                              ∀ v
     2  port_flow          Σ_{q: (p,q) ∈ P(e)} y[e, p, q]  =  Σ_{c: s(e,c) = p} x[s(e), c]                ∀ e, p
                           Σ_{p: (p,q) ∈ P(e)} y[e, p, q]  =  Σ_{c: d(e,c) = q} x[d(e), c]                ∀ e, q
     3  shared_charges     z[u]  ≥  Σ_{(p,q): (e,p,q) ∈ M(u)} y[e, p, q]                                  ∀ u, e
     4  phase_time         t[φ]  ≥  C[φ] + S[φ] + Σ_ℓ B[φ, ℓ]                                             ∀ φ
                           t[φ]  ≥  B[φ, ℓ] + D[φ, ℓ]                          (+ O[φ, ℓ] where n = 1)    ∀ φ, ℓ
     5  once_a_step        h[φ]  ≥  O[φ, ℓ] + (B[φ, ℓ] + D[φ, ℓ] − t[φ]) / n   (where n > 1)              ∀ φ, ℓ
     6  working_memory     w  ≥  W[r]                                                                     ∀ r
     7  lifetime_bytes     b[g]  ≥  Λ[g]                                                                  ∀ g
     8  live_memory        m  ≥  A[k] + Σ_g κ(g, k) b[g]                                                  ∀ k
     9  memory_cap         N + w + m  ≤  M
    10  static_cap         N₀  ≤  M                          (relaxations without a peak: `planner.ilp.relaxation`)

Only x has to be integral. If x is integral, constraints 1 and 2 leave one pair per edge, so that y is 0 or 1. In a
solution, 3 to 8 hold with equality wherever the objective or the cap depends on them. The equalities of 2, at both ends
of an edge, describe a flow along the edge. They make the linear relaxation nearly integral.

In 4, a phase takes as long as its kernels and blocking communication, or as its busiest link. In 5, one micro-batch
takes t[φ] / n, and a link carries (B + D) / n of other communication meanwhile. With one micro-batch, once-a-step
communication counts like prefetched communication.

Rows are scaled (`Program.time_scale`, `Program.memory_scale`), so that the absolute tolerances of solvers fit them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.ilp.charge_matrix import ChargeMatrix
from planner.ilp.linear_program import Expression, LinearProgram
from planner.ilp.problem import Problem
from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD, STATIC, Kind, Lifetime, PhaseQuantities, Quantity
from planner.ilp.step_cost import links_of, passes

_IN_BYTES = frozenset((Kind.PERSISTENT, Kind.TRANSIENT, Kind.LIVE, Kind.LIFETIME))


@dataclass(slots=True)
class Program:
    """The linear program of a problem, with the indices of its variables.

    Attributes:
        charges: the coefficients a_i of all quantities.
        x: for each node, the indices of its choices' variables.
        y: for each edge, pair of ports -> index of its variable.
        time_scale, memory_scale: factors that rows in seconds, and rows in bytes, are multiplied by.
        peak: N + w + m, times ``memory_scale``; None before `peak_memory` is called.
        compute_rows: phase -> index of the row that `phase_time` adds first.
    """

    problem: Problem
    linear: LinearProgram
    charges: ChargeMatrix
    x: list[range] = field(default_factory=list)
    y: list[dict[tuple[int, int], int]] = field(default_factory=list)
    time_scale: float = 1.0
    memory_scale: float = 1.0
    peak: Expression | None = None
    compute_rows: dict[PhaseQuantities, int] = field(default_factory=dict)

    def zero_one(self) -> npt.NDArray[np.bool_]:
        """Return, by variable, whether it is an x or a y. These are 0 or 1 wherever x is integral."""
        is_zero_one = np.zeros(self.linear.columns, np.bool_)
        for choices in self.x:
            is_zero_one[choices.start : choices.stop] = True
        for pairs in self.y:
            is_zero_one[list(pairs.values())] = True
        return is_zero_one


def build_program(problem: Problem, memory_bytes: float | None, *, memory: bool = True) -> Program:
    """Return the program of ``problem``.

    Args:
        memory_bytes: M, in bytes; None: no cap.
        memory: whether constraints 6 to 9 are added.
    """
    program = Program(problem=problem, linear=LinearProgram(), charges=ChargeMatrix(problem.constant))
    one_choice(program)
    port_flow(program)
    shared_charges(program)
    program.charges.compress(program.linear.columns)
    program.time_scale = 1.0 / _typical_time_s(program.charges)
    program.memory_scale = 1.0 / _typical_bytes(program.charges, memory_bytes)
    step_time(program)
    if memory:
        peak_memory(program)
        if memory_bytes is not None:
            memory_cap(program, memory_bytes)
    return program


def one_choice(program: Program) -> None:
    """Add x, and constraint 1: every node takes one choice."""
    linear = program.linear
    for node in program.problem.nodes:
        choices = [linear.variable(binary=True) for _ in node.charges]
        program.x.append(range(choices[0], choices[-1] + 1))
        linear.row(choices, [1.0] * len(choices), lower=1.0, upper=1.0)
        for x, charge in zip(choices, node.charges, strict=True):
            program.charges.charge(x, charge)


def port_flow(program: Program) -> None:
    """Add y, and constraint 2: at both ends of an edge, the pairs with a port add up to the choices with that port."""
    for edge in program.problem.edges:
        y = {}
        for pair, charge in edge.pairs.items():
            y[pair] = program.linear.variable()
            if charge:
                program.charges.charge(y[pair], charge)
        program.y.append(y)
        for side, ports, node in ((0, edge.producer_ports, edge.producer), (1, edge.consumer_ports, edge.consumer)):
            pairs_with: dict[int, list[int]] = defaultdict(list)
            for pair, variable in y.items():
                pairs_with[pair[side]].append(variable)
            choices_with: dict[int, list[int]] = defaultdict(list)
            for x, port in zip(program.x[node], ports, strict=True):
                choices_with[port].append(x)
            for port, choices in choices_with.items():
                pairs = pairs_with.get(port, [])
                values = [1.0] * len(pairs) + [-1.0] * len(choices)
                program.linear.row([*pairs, *choices], values, lower=0.0, upper=0.0)


def shared_charges(program: Program) -> None:
    """Add z, and constraint 3: a shared charge is paid if an edge has one of its members.

    If all members are on one edge, the sum of their y takes the place of z.
    """
    for shared in program.problem.shared_charges:
        by_edge: dict[int, list[int]] = defaultdict(list)
        for e, p, q in shared.members:
            y = program.y[e].get((p, q))
            if y is not None:
                by_edge[e].append(y)
        if len(by_edge) == 1:
            for y in next(iter(by_edge.values())):
                program.charges.charge(y, shared.charge)
            continue
        z = program.linear.variable()
        program.charges.charge(z, shared.charge)
        for members in by_edge.values():
            program.linear.row([z, *members], [1.0] + [-1.0] * len(members), lower=0.0)


def step_time(program: Program) -> None:
    """Add constraints 4 and 5, and the objective: t + h of both phases, and X."""
    seconds = []
    for phase in (FORWARD, BACKWARD):
        t = phase_time(program, phase)
        h = once_a_step(program, phase, t)
        seconds += [t] if h is None else [t, h]
    exposed = program.charges.total([EXPOSED], program.time_scale)
    program.linear.objective = Expression(
        indices=np.append(exposed.indices, np.asarray(seconds, np.int32)),
        values=np.append(exposed.values, [1.0] * len(seconds)),
        constant=exposed.constant,
    )


def phase_time(program: Program, phase: PhaseQuantities) -> int:
    """Add t of a phase, and constraint 4: kernels and blocking communication, or the busiest link. Return t's index."""
    charges, linear, scale = program.charges, program.linear, program.time_scale
    links, with_once = links_of(charges.quantities), passes(charges.constant) <= 1
    t = linear.variable()
    waited_for = [phase.compute, phase.slowdown, *(phase.blocking[link] for link in links)]
    linear.constrain_below(charges.total(waited_for, scale).minus(t), 0.0)
    program.compute_rows[phase] = linear.rows - 1
    for link in links:
        carried = [phase.blocking[link], phase.prefetch[link], *([phase.once[link]] if with_once else [])]
        linear.constrain_below(charges.total(carried, scale).minus(t), 0.0)
    return t


def once_a_step(program: Program, phase: PhaseQuantities, t: int) -> int | None:
    """Add h of a phase, and constraint 5: once-a-step communication extends one micro-batch. Return h's index.

    None where there is one micro-batch, or no once-a-step communication.
    """
    charges, linear, scale, n = program.charges, program.linear, program.time_scale, passes(program.charges.constant)
    charged = set(charges.quantities)
    links = [link for link in links_of(charges.quantities) if phase.once[link] in charged]
    if n <= 1 or not links:
        return None
    h = linear.variable()
    for link in links:
        scales = {phase.once[link]: scale, phase.blocking[link]: scale / n, phase.prefetch[link]: scale / n}
        linear.constrain_below(charges.weighted_total(scales).minus(t, 1.0 / n).minus(h), 0.0)
    return h


def peak_memory(program: Program) -> Expression:
    """Add constraints 6 to 8 to a program without them. Return N + w + m, times ``memory_scale``."""
    charges, linear = program.charges, program.linear
    w, m = linear.variable(), linear.variable()
    working_memory(program, w)
    live_memory(program, m, lifetime_bytes(program))
    persistent = [quantity for quantity in charges.quantities if quantity.kind is Kind.PERSISTENT]
    stays = charges.total(persistent, program.memory_scale)
    program.peak = Expression(
        indices=np.append(stays.indices, np.asarray([w, m], np.int32)),
        values=np.append(stays.values, [1.0, 1.0]),
        constant=stays.constant,
    )
    return program.peak


def working_memory(program: Program, w: int) -> None:
    """Add constraint 6: w is at least the working memory of every region."""
    for quantity in program.charges.quantities:
        if quantity.kind is Kind.TRANSIENT:
            working = program.charges.total([quantity], program.memory_scale)
            program.linear.constrain_below(working.minus(w), 0.0)


def lifetime_bytes(program: Program) -> dict[Lifetime, tuple[int, float]]:
    """Add b, and constraint 7: the bytes of each lifetime. Return lifetime -> (index of b, bytes of one unit of b).

    The unit is the largest amount charged. In units of a cap of 80 GB, a few bytes would be so small a coefficient that
    solvers take it for 0.
    """
    charges, linear = program.charges, program.linear
    b = {}
    for quantity in charges.quantities:
        if isinstance(quantity, Lifetime):
            variable, unit = linear.variable(), charges.largest([quantity]) or 1.0
            linear.constrain_below(charges.total([quantity], 1.0 / unit).minus(variable), 0.0)
            b[quantity] = variable, unit
    return b


def live_memory(program: Program, m: int, b: dict[Lifetime, tuple[int, float]]) -> None:
    """Add constraint 8: m is at least the live bytes of every peak candidate, lifetimes included."""
    direct: dict[str, list[Quantity]] = defaultdict(list)
    for quantity in program.charges.quantities:
        if quantity.candidate is not None:
            direct[quantity.candidate].append(quantity)
    lasting: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for lifetime, (variable, unit) in b.items():
        for live, count in lifetime.counts.items():
            assert live.candidate is not None
            lasting[live.candidate][variable] += count * unit * program.memory_scale
    for candidate in sorted({*direct, *lasting}):
        alive, more = program.charges.total(direct[candidate], program.memory_scale), lasting[candidate]
        row = Expression(
            indices=np.append(alive.indices, np.fromiter(more, np.int32, len(more))),
            values=np.append(alive.values, np.fromiter(more.values(), np.float64, len(more))),
            constant=alive.constant,
        )
        program.linear.constrain_below(row.minus(m), 0.0)


def memory_cap(program: Program, memory_bytes: float) -> None:
    """Add constraint 9: ``program.peak``, from `peak_memory`, is at most M."""
    assert program.peak is not None
    program.linear.constrain_below(program.peak, memory_bytes * program.memory_scale)
    program.linear.cap_row = program.linear.rows - 1


def static_cap(program: Program, memory_bytes: float) -> None:
    """Add constraint 10: parameters, optimizer states and the reserve are at most M."""
    static = [quantity for quantity in program.charges.quantities if quantity in STATIC]
    scale = program.memory_scale
    program.linear.constrain_below(program.charges.total(static, scale), memory_bytes * scale)


def _typical_time_s(charges: ChargeMatrix) -> float:
    """Return the most kernel seconds of any choice; if there are none, the most of any other seconds.

    Communication of a bad choice can be far from typical.
    """
    compute = charges.largest((FORWARD.compute, BACKWARD.compute))
    other_times = (q for q in charges.quantities if q.kind not in _IN_BYTES and q.kind is not Kind.PASSES)
    return compute or charges.largest(other_times) or 1.0


def _typical_bytes(charges: ChargeMatrix, memory_bytes: float | None) -> float:
    """Return the cap; without a cap, the most bytes that any choice adds to a quantity."""
    if memory_bytes is not None and memory_bytes > 0:
        return memory_bytes
    return charges.largest(q for q in charges.quantities if q.kind in _IN_BYTES) or 1.0
