"""Paths between layouts: hand-checked ones, and on every pair of small layouts: valid, even, no dearer than direct."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import Layout, divides, split_factor
from cost_model.redistribute import NoPathError, Redistribution, RedistributionPlanner

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
SHAPE, ITEMSIZE = (8, 8), 4
WHOLE = 8 * 8 * 4


def price(kind: str, axis: int, nbytes: int) -> float:
    """The bandwidth term of a ring on 2 ranks."""
    return {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}[kind] * nbytes / 2


def with_latency(kind: str, axis: int, nbytes: int) -> float:
    return 1e6 + price(kind, axis, nbytes)


def path_between(source: Layout, target: Layout, **options: object) -> Redistribution:
    planner = RedistributionPlanner((2, 2), options.get("price", price))  # type: ignore[arg-type]
    return planner.path(options.get("shape", SHAPE), ITEMSIZE, source, target)  # type: ignore[arg-type]


def steps(path: Redistribution) -> list[tuple[str, int, int]]:
    return [(step.kind, step.axis, step.nbytes) for step in path.steps]


def test_two_partials_are_reduce_scattered_and_all_gathered_where_bytes_dominate() -> None:
    path = path_between((P, P), (R, R))
    assert [kind for kind, _, _ in steps(path)] == ["reduce_scatter", "reduce_scatter", "all_gather", "all_gather"] or [
        kind for kind, _, _ in steps(path)
    ] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert path.time_s < price("all_reduce", 0, WHOLE) * 2


def test_two_partials_are_all_reduced_where_latency_rules() -> None:
    path = path_between((P, P), (R, R), price=with_latency)
    assert sorted(steps(path)) == [("all_reduce", 0, WHOLE), ("all_reduce", 1, WHOLE)]


def test_the_inner_split_is_closed_first() -> None:
    """(S0,S0) -> (R,S0) is not one all-gather on the outer axis: its pieces are not neighbours."""
    path = path_between((S0, S0), (R, S0))
    assert [step.kind for step in path.collectives] != ["all_gather"]
    assert path.steps[0].axis == 1
    assert len(path.steps) >= 2


def test_the_inner_split_is_opened_last() -> None:
    """(R,S0) -> (S0,S0) is no free slice."""
    assert path_between((R, S0), (S0, S0)).time_s > 0
    assert path_between((S0, R), (S0, S0)).time_s == 0
    assert steps(path_between((S0, R), (S0, S0))) == [("slice", 1, 0)]


def test_bytes_of_single_steps() -> None:
    assert steps(path_between((S0, R), (R, R))) == [("all_gather", 0, WHOLE)]
    assert steps(path_between((S0, S1), (R, S1))) == [("all_gather", 0, WHOLE // 2)]
    assert steps(path_between((P, S1), (R, S1))) == [("all_reduce", 0, WHOLE // 2)]
    assert steps(path_between((P, S1), (S0, S1))) == [("reduce_scatter", 0, WHOLE // 2)]
    assert steps(path_between((S0, R), (S1, R))) == [("all_to_all", 0, WHOLE // 2)]
    assert steps(path_between((R, R), (S0, R))) == [("slice", 0, 0)]
    assert path_between((R, R), (R, R)).steps == ()


def test_axes_of_one_rank_take_no_steps() -> None:
    planner = RedistributionPlanner((1, 2), price)
    assert steps(planner.path(SHAPE, ITEMSIZE, (R, S0), (R, R))) == [("all_gather", 1, WHOLE)]


def test_unreachable_targets_are_rejected() -> None:
    with pytest.raises(NoPathError, match=r"no redistribution from \('R', 'R'\) to \('P\(sum\)', 'R'\)"):
        path_between((R, R), (P, R))
    with pytest.raises(NoPathError):
        path_between((R, R), (S0, S0), shape=(6, 8))


LAYOUTS = [(a, b) for a, b in itertools.product((R, P, S0, S1), repeat=2)]


@given(source=st.sampled_from(LAYOUTS), target=st.sampled_from(LAYOUTS), latency_s=st.sampled_from([0.0, 10.0, 1e6]))
def test_every_path_is_a_chain_of_even_single_steps(source: Layout, target: Layout, latency_s: float) -> None:
    planner = RedistributionPlanner((2, 2), lambda *step: latency_s + price(*step))
    lost_sum = any(b.is_partial() and not a.is_partial() for a, b in zip(source, target, strict=True))
    if lost_sum:
        with pytest.raises(NoPathError):
            planner.path(SHAPE, ITEMSIZE, source, target)
        return
    path = planner.path(SHAPE, ITEMSIZE, source, target)
    layout, total = source, 0.0
    for step in path.steps:
        assert step.before == layout
        changed = [axis for axis in range(2) if step.before[axis] != step.after[axis]]
        assert changed == [step.axis]
        dims = {getattr(p[step.axis], "dim", None) for p in (step.before, step.after)} - {None}
        assert all(getattr(inner, "dim", None) not in dims for inner in layout[step.axis + 1 :])
        assert divides(SHAPE, step.after, (2, 2))
        held = WHOLE // split_factor(step.before, (2, 2))
        assert step.nbytes == {"slice": 0, "all_gather": 2 * held}.get(step.kind, held)
        total += 0.0 if step.kind == "slice" else latency_s + price(step.kind, step.axis, step.nbytes)
        layout = step.after
    assert layout == target
    assert path.time_s == pytest.approx(total)
    for middle in LAYOUTS:  # the cheapest path obeys the triangle inequality
        try:
            first = planner.path(SHAPE, ITEMSIZE, source, middle).time_s
            second = planner.path(SHAPE, ITEMSIZE, middle, target).time_s
        except NoPathError:
            continue
        assert path.time_s <= first + second + 1e-9
