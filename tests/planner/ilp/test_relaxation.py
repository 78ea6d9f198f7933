"""Relaxations that share a program say what each would by itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_problems import problems

from planner.ilp.problem import Problem
from planner.ilp.quantities import BACKWARD
from planner.ilp.relaxation import Relaxation, Relaxer, least_memory_bound, relax

TOLERANCE = 1e-6


def seconds(relaxation: Relaxation | None) -> float:
    return math.inf if relaxation is None else relaxation.bound_s


@given(problem=problems(), share=st.floats(0.5, 2.0))
def test_one_after_the_other_is_as_each_alone(problem: Problem, share: float) -> None:
    least = least_memory_bound(problem)
    if least is None:
        assert relax(problem) is None
        return
    cap = max(least * share, 1.0)
    relaxer = Relaxer(problem, cap)
    unlimited = relaxer.uncapped()
    assert seconds(unlimited) == pytest.approx(seconds(relax(problem)), rel=TOLERANCE, abs=1e-12)
    assert relaxer.least_peak_bytes() == pytest.approx(least, rel=TOLERANCE, abs=1e-6)
    assert seconds(relaxer.uncapped()) == pytest.approx(seconds(unlimited), rel=TOLERANCE, abs=1e-12)
    within = relaxer.capped()
    assert seconds(within) == pytest.approx(seconds(relax(problem, memory_bytes=cap)), rel=TOLERANCE, abs=1e-12)
    assert seconds(within) >= seconds(unlimited) * (1 - TOLERANCE)


@given(problem=problems(), more_s=st.just(0.0) | st.floats(1e-6, 10.0))
def test_more_work_in_the_backward_is_a_constant_of_the_problem(problem: Problem, more_s: float) -> None:
    constant = {**problem.constant, BACKWARD.compute: problem.constant.get(BACKWARD.compute, 0.0) + more_s}
    expected = relax(dataclasses.replace(problem, constant=constant))
    relaxer = Relaxer(problem)
    before, found = seconds(relaxer.uncapped()), relaxer.uncapped(more_s)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.bound_s == pytest.approx(seconds(expected), rel=TOLERANCE, abs=1e-9)
        assert before - 1e-9 <= found.bound_s <= before + more_s + 1e-9
    assert seconds(relaxer.uncapped()) == pytest.approx(before, rel=TOLERANCE, abs=1e-12), "it was left changed"


@given(problem=problems())
def test_what_is_wanted_is_found_and_what_is_not_is_left_or_bounded(problem: Problem) -> None:
    least = least_memory_bound(problem)
    if least is None:
        return
    cap = least * 1.1 + 1.0
    found = relax(problem, memory_bytes=cap)
    if found is None or found.bound_s < 1e-6:
        return
    assert Relaxer(problem, cap).capped(found.bound_s * 1.01) is not None
    below = Relaxer(problem, cap).capped(found.bound_s * 0.5)
    assert below is None or below.bound_s >= found.bound_s * 0.5
