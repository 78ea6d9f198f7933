"""The whole search against brute force: every mesh, count of micro-batches and checkpointing mode, each by itself."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from support import families

from planner.errors import InfeasibleError
from planner.graph.trace_module import micro_batch_counts
from planner.plan.sharding_plan import ShardingPlan
from planner.search.mesh_space import meshes_of
from planner.session import PlanningSession

BATCH = 8
GAP = 1e-3
ALL_MODES = ("none", "selective", "full")
MODES = {"mlp": ("none",)}
"""Checkpointing of models without repeated blocks."""


class Tried(NamedTuple):
    """One run: sizes of its mesh, number of micro-batches, checkpointing, and the seconds of its best plan."""

    mesh: str
    micro_batches: int
    ac: str
    step_time_s: float


def session_of(family: str, cluster: str, memory_gb: float | None, **run: Any) -> PlanningSession:
    module, inputs = families.make(family, BATCH)
    return PlanningSession(module, cluster=cluster, example_inputs=inputs, dtype="fp32", memory_gb=memory_gb, **run)


def tried(plan: ShardingPlan) -> Tried:
    assert plan.estimate is not None
    ac = next(iter(plan.activation_checkpointing.values()), "none")
    return Tried(" x ".join(map(str, plan.mesh.shape)), plan.micro_batches, ac, plan.estimate.step_time_s)


def binding_gb(family: str, cluster: str, share: float) -> float:
    """Return a cap between the least peak that there is (share 0) and that of the fastest plan (share 1)."""
    free = session_of(family, cluster, None).plan()
    assert free.estimate is not None
    with pytest.raises(InfeasibleError) as report:
        session_of(family, cluster, 1e-9).plan()
    least_bytes = report.value.least_bytes
    assert least_bytes is not None
    assert least_bytes < free.estimate.peak_memory_bytes
    return (least_bytes + share * (free.estimate.peak_memory_bytes - least_bytes)) / 1e9


def every_run(family: str, cluster: str, memory_gb: float | None) -> tuple[list[Tried], int]:
    """Return what each run that fits comes to, and how many do not."""
    fits, refused = [], 0
    for count, ac in itertools.product(micro_batch_counts(BATCH), MODES.get(family, ALL_MODES)):
        session = session_of(family, cluster, memory_gb, micro_batches=count, ac=ac)
        for mesh in meshes_of(session.cluster):
            try:
                fits.append(tried(session.plan(mesh=mesh)))
            except InfeasibleError:
                refused += 1
    return fits, refused


def case(family: str, cluster: str, share: float | None, *, slow: bool = True) -> Any:
    return pytest.param(family, cluster, share, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(
    ("family", "cluster", "share"),
    [
        case("mlp", "1x4xtoy", None, slow=False),
        case("mlp", "1x4xtoy", 0.3, slow=False),
        case("mlp", "2x4xtoy", 0.5),
        case("gpt2", "1x2xtoy", 0.3),
        case("gpt2", "2x2xtoy", 0.6),
        case("llama", "2x2xtoy", None),
        case("llama", "1x4xtoy", 0.4),
        case("bert", "1x2xtoy", 0.3),
        case("vit", "1x4xtoy", 0.5),
        case("t5", "1x2xtoy", 0.5),
    ],
)
def test_the_search_finds_what_brute_force_finds(family: str, cluster: str, share: float | None) -> None:
    """With a cap, the fastest plan that there is without it does not fit."""
    memory_gb = None if share is None else binding_gb(family, cluster, share)
    fits, _ = every_run(family, cluster, memory_gb)
    found, best = tried(session_of(family, cluster, memory_gb).plan()), min(fits, key=lambda run: run.step_time_s)
    # Solved alone or within the search, a run comes to the same but for the solver's gap; so may the best two runs.
    assert found.step_time_s == pytest.approx(best.step_time_s, rel=2 * GAP)
    alike = [run[:3] for run in fits if run.step_time_s <= best.step_time_s * (1 + 2 * GAP)]
    assert found[:3] in alike


def test_both_refuse_what_fits_nowhere() -> None:
    memory_gb = binding_gb("mlp", "1x4xtoy", -0.01)
    fits, refused = every_run("mlp", "1x4xtoy", memory_gb)
    assert not fits
    assert refused
    with pytest.raises(InfeasibleError):
        session_of("mlp", "1x4xtoy", memory_gb).plan()
