"""The integer program against brute force, on small random problems with every kind of quantity."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force import brute_force
from support.random_problems import problems

from planner.ilp.problem import InfeasibleAssignmentError, Problem, totals
from planner.ilp.quantities import Quantity
from planner.ilp.relaxation import least_memory_bound, relax
from planner.ilp.solve import least_memory, solve
from planner.ilp.step_cost import peak_bytes, step_time_s


def feasible_totals(problem: Problem) -> list[dict[Quantity, float]]:
    found = []
    for assignment in itertools.product(*(range(len(node.charges)) for node in problem.nodes)):
        try:
            found.append(totals(problem, assignment))
        except InfeasibleAssignmentError:
            continue
    return found


@settings(deadline=None, max_examples=100)
@given(problem=problems())
def test_best_time_without_a_cap(problem: Problem) -> None:
    expected = brute_force(problem, None)
    solution = solve(problem, mip_gap=0)
    assert (solution is None) == (expected is None)
    if solution is not None and expected is not None:
        assert solution.objective_s == pytest.approx(expected[1], rel=1e-6, abs=1e-15)
        assert solution.objective_s == step_time_s(totals(problem, solution.assignment))
        assert solution.bound_s <= expected[1] * (1 + 1e-6) + 1e-15
        assert solution.status == "optimal"


@settings(deadline=None, max_examples=100)
@given(problem=problems(), data=st.data())
def test_best_time_under_a_binding_cap(problem: Problem, data: st.DataObject) -> None:
    """The cap is the exact peak of one of the assignments, or one byte less."""
    peaks = sorted({peak_bytes(total) for total in feasible_totals(problem)})
    if not peaks:
        return
    cap = data.draw(st.sampled_from(peaks), label="peak") - data.draw(st.sampled_from([0.0, 1.0]), label="less")
    expected = brute_force(problem, cap)
    solution = solve(problem, memory_bytes=cap, mip_gap=0)
    assert (solution is None) == (expected is None)
    if solution is not None and expected is not None:
        assert peak_bytes(totals(problem, solution.assignment)) <= cap
        assert solution.objective_s == pytest.approx(expected[1], rel=1e-6, abs=1e-15)


@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_least_memory_is_the_smallest_peak(problem: Problem) -> None:
    peaks = [peak_bytes(total) for total in feasible_totals(problem)]
    found = least_memory(problem)
    assert (found is None) == (not peaks)
    if found is not None:
        assert found.nbytes == pytest.approx(min(peaks), rel=2e-4)
        assert found.bound_bytes <= min(peaks) * (1 + 1e-6)
        assert found.assignment is not None
        assert found.nbytes == peak_bytes(totals(problem, found.assignment))


@given(problem=problems())
def test_the_relaxation_bounds_every_assignment_and_every_choice(problem: Problem) -> None:
    found = relax(problem)
    best: dict[tuple[int, int], float] = {}
    for assignment in itertools.product(*(range(len(node.charges)) for node in problem.nodes)):
        try:
            time_s = step_time_s(totals(problem, assignment))
        except InfeasibleAssignmentError:
            continue
        for node, choice in enumerate(assignment):
            best[node, choice] = min(best.get((node, choice), time_s), time_s)
    if not best:
        return
    assert found is not None
    tolerance = 1 + 1e-6
    assert found.bound_s <= min(best.values()) * tolerance
    for (node, choice), time_s in best.items():
        assert found.choice_bounds_s[node][choice] <= time_s * tolerance


@given(problem=problems())
def test_the_bound_on_memory_holds(problem: Problem) -> None:
    peaks = [peak_bytes(total) for total in feasible_totals(problem)]
    bound = least_memory_bound(problem)
    if peaks:
        assert bound is not None
        assert bound <= min(peaks) * (1 + 1e-6)


@given(problem=problems(), data=st.data())
def test_nothing_is_found_that_takes_longer_than_wanted(problem: Problem, data: st.DataObject) -> None:
    times = sorted(step_time_s(total) for total in feasible_totals(problem))
    if not times:
        return
    cutoff_s = data.draw(st.sampled_from(times)) * 1.001
    solution = solve(problem, mip_gap=0.0, cutoff_s=cutoff_s)
    assert solution is not None
    assert solution.objective_s <= times[0] * (1 + 1e-6)
    if times[0] > 0:
        assert solve(problem, mip_gap=0.0, cutoff_s=times[0] * 0.99) is None
