"""Both solvers on the same programs: CBC through pulp, which everybody has, and HiGHS, which the tests install."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from support.brute_force import brute_force
from support.random_problems import problems

from planner.errors import SolverError
from planner.ilp import backends, reduced_cost_fixing
from planner.ilp.linear_program import Answer, Expression, LinearProgram
from planner.ilp.problem import Node, Problem
from planner.ilp.relaxation import relax
from planner.ilp.solve import solve

SOLVERS = ("cbc", "highs")


def knapsack(limit: float) -> LinearProgram:
    """Take things worth 3, 5, 4 that weigh 2, 4, 3, up to ``limit``; the objective is 10 less what they are worth."""
    program = LinearProgram()
    things = [program.variable(binary=True) for _ in range(3)]
    program.row(things, [2.0, 4.0, 3.0], upper=limit)
    program.objective = Expression(
        indices=np.asarray(things, np.int32), values=np.asarray([-3.0, -5.0, -4.0]), constant=10.0
    )
    return program


@pytest.mark.parametrize("solver", SOLVERS)
def test_whole_numbers_and_fractions(solver: str) -> None:
    found = backends.solve(knapsack(5.0), mip_gap=0.0, time_limit_s=None, solver=solver)
    assert found.status == "optimal"
    assert found.values is not None
    assert np.allclose(found.values, [1, 0, 1])
    assert found.objective == pytest.approx(3.0)
    assert found.bound <= 3.0 + 1e-6
    relaxed = backends.solve_relaxation(knapsack(6.0), solver=solver)
    assert relaxed.objective == pytest.approx(10 - 3 - 4 - 5 / 4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("cap", "cutoff", "objective"),
    [(9.0, math.inf, -2.0), (6.0, math.inf, 1.75), (6.0, 1.7, None), (-1.0, math.inf, None)],
)
def test_a_cap_on_memory_holds(solver: str, cap: float, cutoff: float, objective: float | None) -> None:
    """One that is kept anyhow, one that binds, one beyond what is wanted, one that nothing keeps."""
    program = knapsack(cap)
    program.cap_row = 0
    found = backends.solve_relaxation(program, cutoff=cutoff, solver=solver)
    if objective is not None:
        assert found.objective == pytest.approx(objective)
        assert found.reduced_costs is not None
        plain = knapsack(cap)
        same = backends.solve_relaxation(plain, solver=solver)
        assert np.allclose(found.reduced_costs, same.reduced_costs)
    elif cap < 0:
        assert found.status == "infeasible"
    else:  # CBC is not told what is wanted, and HiGHS may be there before it looks
        assert found.status == "cutoff" or found.objective == pytest.approx(1.75)


def test_a_time_limit_is_for_both_runs_of_a_capped_relaxation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cap first, and from there within it."""
    program, told = knapsack(6.0), list[float]()
    program.cap_row = 0
    run = backends._highs_run

    def noted(solver: Any, time_limit_s: float | None, **options: Any) -> Answer:
        assert time_limit_s is not None
        told.append(time_limit_s)
        return run(solver, time_limit_s, **options)

    monkeypatch.setattr(backends, "_highs_run", noted)
    backends.solve_relaxation(program, time_limit_s=5.0, solver="highs")
    assert len(told) == 2
    assert told[1] < told[0] == 5.0


@pytest.mark.parametrize("solver", SOLVERS)
def test_reduced_costs_bound_what_a_variable_would_cost(solver: str) -> None:
    """Minimise x + 3 y where x + y >= 1: taking y costs 2 more than the optimum of 1."""
    program = LinearProgram()
    x, y = program.variable(binary=True), program.variable(binary=True)
    program.row([x, y], [1.0, 1.0], lower=1.0)
    program.objective = Expression(indices=np.asarray([x, y], np.int32), values=np.asarray([1.0, 3.0]))
    found = backends.solve_relaxation(program, solver=solver)
    assert found.objective == pytest.approx(1.0)
    assert found.reduced_costs is not None
    assert found.reduced_costs[y] == pytest.approx(2.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_relaxations_one_after_another_are_those_of_programs_of_their_own(solver: str) -> None:
    """What was held the time before is free again."""
    program, things = knapsack(6.0), range(3)
    relaxations = backends.Relaxations(program, solver=solver)
    for held in ({}, {1: 1.0}, {0: 0.0, 2: 1.0}, {1: 1.0, 2: 1.0}, {0: 1.0}, {}):
        found, alone = relaxations.at(held), backends.solve_relaxation(program.fixed(held), solver=solver)
        assert found.status == alone.status
        if alone.values is None:
            continue
        assert found.values is not None
        assert found.objective == alone.objective
        assert found.values.tolist() == alone.values.tolist()
        assert all(found.values[i] == pytest.approx(held.get(i, found.values[i])) for i in things)


def groups_under_a_cap(seed: int) -> tuple[LinearProgram, float]:
    """Return a program that takes one of four things from each of five groups, and the least within the cap."""
    random = np.random.default_rng(seed)
    cost, weight = random.uniform(1, 2, (5, 4)), random.uniform(0, 1, (5, 4))
    program = LinearProgram()
    things = [[program.variable(binary=True) for _ in range(4)] for _ in range(5)]
    for group in things:
        program.row(group, [1.0] * 4, lower=1.0, upper=1.0)
    every = np.asarray(things, np.int32).ravel()
    cap = 0.3 * weight.max(1).sum() + 0.7 * weight.min(1).sum()
    program.row(every, weight.ravel(), upper=float(cap))
    program.cap_row = program.rows - 1
    program.objective = Expression(indices=every, values=cost.ravel())
    taken = [list(zip(range(5), choice, strict=True)) for choice in itertools.product(range(4), repeat=5)]
    return program, min(sum(cost[p] for p in t) for t in taken if sum(weight[p] for p in t) <= cap)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(5))
def test_branching_where_the_relaxation_is_lowest_finds_the_best_within_the_cap(seed: int, solver: str) -> None:
    program, least = groups_under_a_cap(seed)
    root = backends.solve_relaxation(program, solver=solver)
    found = reduced_cost_fixing._branch(program, root, math.inf, 0.0, None, solver, 1000, deep=False)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(least)
    cut = reduced_cost_fixing._branch(program, root, math.inf, 0.0, None, solver, 3, deep=False)
    assert root.objective - 1e-9 <= cut.bound <= least + 1e-9


def test_memory_above_its_cap_is_told_and_never_cheaper() -> None:
    program, least = groups_under_a_cap(0)
    root = backends.solve_relaxation(program).objective
    relaxations = backends.Relaxations(program, root=root)
    whole = relaxations.at({})
    assert whole.objective == pytest.approx(root)
    assert whole.excess == pytest.approx(0.0)
    weights = program.matrix()[2][-20:].reshape(5, 4)
    heaviest = {4 * group + int(thing): 1.0 for group, thing in enumerate(weights.argmax(1))}
    assert backends.solve_relaxation(program.fixed(heaviest)).status == "infeasible"
    over = relaxations.at(heaviest)
    assert over.values is not None
    assert len(over.values) == program.columns
    assert over.excess == pytest.approx(weights.max(1).sum() - program.row_upper[-1])
    assert over.objective > 2 * least


def test_what_is_left_alone_in_a_balance_is_0() -> None:
    """Flows f and g of choices a and b, and h of both flows together: without a, f is 0; without b as well, all are."""
    program = LinearProgram()
    a, b = program.variable(binary=True), program.variable(binary=True)
    f, g, h, free = (program.variable() for _ in range(4))
    program.row([f, a], [1.0, -1.0], lower=0.0, upper=0.0)
    program.row([g, b], [1.0, -1.0], lower=0.0, upper=0.0)
    program.row([f, g, h], [2.0, 1.0, -1.0], lower=0.0, upper=0.0)
    program.row([a, free], [1.0, -1.0], upper=0.0)
    everything = np.ones(program.columns, np.bool_)
    assert program.possible(everything).tolist() == [a, b, f, g, h, free]
    everything[a] = False
    assert program.possible(everything).tolist() == [b, g, h, free]
    everything[b] = False
    assert program.possible(everything).tolist() == [free]


@pytest.mark.parametrize("solver", SOLVERS)
def test_contradiction(solver: str) -> None:
    program = knapsack(5.0)
    program.row([0, 1], [1.0, 1.0], lower=3.0)
    assert backends.solve(program, mip_gap=0.0, time_limit_s=None, solver=solver).status == "infeasible"


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_time_gives_no_plan_rather_than_a_wrong_one(solver: str) -> None:
    """Many near-equal things: no solver proves the best of them in half a second."""
    random = np.random.default_rng(0)
    program = LinearProgram()
    things = [program.variable(binary=True) for _ in range(300)]
    for _ in range(40):
        program.row(things, random.integers(20, 60, 300).astype(float), upper=4000.0)
    worth = random.integers(40, 60, 300).astype(float)
    program.objective = Expression(indices=np.asarray(things, np.int32), values=-worth)
    found = backends.solve(program, mip_gap=0.0, time_limit_s=0.5, solver=solver)
    assert found.status == "limit"
    assert found.bound < 0
    if found.values is not None:
        assert found.bound <= found.objective
        taken = np.round(found.values)
        assert math.isclose(float(-worth @ taken), found.objective, rel_tol=1e-6)


@settings(deadline=None, max_examples=25)
@given(problem=problems())
def test_cbc_finds_the_best_assignment_too(problem: Problem) -> None:
    expected = brute_force(problem, None)
    solution = solve(problem, mip_gap=0.0, solver="cbc")
    assert (solution is None) == (expected is None)
    if solution is not None and expected is not None:
        assert solution.objective_s == pytest.approx(expected[1], rel=1e-6, abs=1e-15)
        relaxed = relax(problem, solver="cbc")
        assert relaxed is not None
        assert relaxed.bound_s <= expected[1] * (1 + 1e-6) + 1e-15


def test_running_out_of_time_is_not_that_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(nodes=(Node(name="n", charges=({},)),), edges=(), shared_charges=())
    monkeypatch.setattr(backends, "solve", lambda *args, **kwargs: Answer(status="limit"))
    with pytest.raises(SolverError, match="larger time limit"):
        solve(problem, time_limit_s=1.0)


@settings(deadline=None, max_examples=10)
@given(problem=problems())
def test_the_solver_does_without_a_relaxation_that_is_not_to_be_had(problem: Problem) -> None:
    def no_answer(*_: object, **__: object) -> Answer:
        raise SolverError("the solver broke off: Unknown")

    expected = brute_force(problem, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduced_cost_fixing, "_FEWEST", 0)
        patch.setattr(backends, "solve_relaxation", no_answer)
        solution = solve(problem, mip_gap=0.0)
    assert (solution is None) == (expected is None)
    if solution is not None and expected is not None:
        assert solution.objective_s == pytest.approx(expected[1], rel=1e-6, abs=1e-15)
