"""The integer program against brute force, on small random problems with every kind of quantity."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ilp import least_memory, least_memory_bound, relax, solve
from planner.problem import (
    COMPUTE_BACKWARD,
    COMPUTE_FORWARD,
    Edge,
    InfeasibleAssignmentError,
    Node,
    Problem,
    Unit,
    brute_force,
    peak_bytes,
    step_time_s,
    totals,
)

TIMES = (
    COMPUTE_FORWARD,
    COMPUTE_BACKWARD,
    "exposed",
    *(
        f"{kind}.{phase}.{link}"
        for kind in ("blocking", "prefetch")
        for phase in ("forward", "backward")
        for link in ("inside-node", "between-nodes")
    ),
)
BYTES = (
    "memory.parameters",
    "memory.activations",
    "transient.0",
    "transient.1",
    "moment.0.activations",
    "moment.0.transient",
    "moment.1.activations",
)


@dataclass(frozen=True)
class Scale:
    """What one unit of time and one of memory are, so that problems come in sizes from toy devices to large ones."""

    time_s: float
    nbytes: float


SCALES = (Scale(1e-7, 1e3), Scale(1e-5, 1e6), Scale(1e-2, 1e9))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A problem of up to 4 nodes of 4 choices, with parallel edges, self-edges, and units shared by several edges."""
    scale = draw(st.sampled_from(SCALES))

    def charge(most: int) -> Mapping[str, float]:
        amounts = draw(st.dictionaries(st.sampled_from(TIMES + BYTES), st.integers(0, 20), max_size=most))
        return {name: n * (scale.time_s if name in TIMES else scale.nbytes) for name, n in amounts.items()}

    nodes = [
        Node(name=f"n{i}", charges=tuple(charge(4) for _ in range(draw(st.integers(1, 4)))))
        for i in range(draw(st.integers(1, 4)))
    ]
    edges = []
    for _ in range(draw(st.integers(0, 5))):
        producer, consumer = (draw(st.integers(0, len(nodes) - 1)) for _ in range(2))
        sides = [[draw(st.integers(0, 2)) for _ in nodes[end].charges] for end in (producer, consumer)]
        possible = sorted(set(itertools.product(*sides)))
        absent = draw(st.sets(st.sampled_from(possible), max_size=len(possible) // 2))
        pairs = {pair: charge(2) for pair in possible if pair not in absent}
        edges.append(
            Edge(
                producer=producer,
                consumer=consumer,
                producer_ports=tuple(sides[0]),
                consumer_ports=tuple(sides[1]),
                pairs=pairs,
            )
        )
    members = [(e, p, q) for e, edge in enumerate(edges) for p, q in edge.pairs]
    units = []
    for _ in range(draw(st.integers(0, 4)) if members else 0):
        chosen = draw(st.lists(st.sampled_from(members), min_size=1, max_size=4, unique=True))
        units.append(Unit(charge=charge(3), members=tuple(chosen)))
    return Problem(nodes=tuple(nodes), edges=tuple(edges), units=tuple(units), constant=charge(2))


def feasible_totals(problem: Problem) -> list[dict[str, float]]:
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
        assert found[1] == pytest.approx(min(peaks), rel=2e-4)
        assert found[1] == peak_bytes(totals(problem, found[0]))


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
        assert found.at_least_s[node][choice] <= time_s * tolerance


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
    at_most_s = data.draw(st.sampled_from(times)) * 1.001
    solution = solve(problem, mip_gap=0.0, at_most_s=at_most_s)
    assert solution is not None
    assert solution.objective_s <= times[0] * (1 + 1e-6)
    if times[0] > 0:
        assert solve(problem, mip_gap=0.0, at_most_s=times[0] * 0.99) is None
