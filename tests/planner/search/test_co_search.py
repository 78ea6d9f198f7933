"""Searches side by side: the lowest bound goes next, and what one finds the others have to beat."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.pipeline_sessions import SLOW, session_of

from planner.run.run_planner import RunPlanner
from planner.search.co_search import walk_together
from planner.search.mesh_search import MeshSearch
from planner.search.pipeline.search import PipelineSearch
from planner.search.task_pool import Pool


@dataclass
class Bounds:
    """A walk over bounds, each of which its look finds to be as good as it says."""

    name: str
    left: list[float]
    log: list[str]
    best_s: float = math.inf
    limit_s: float = field(default=math.inf)

    @property
    def next_s(self) -> float:
        return self.left[0] if self.left and self.left[0] < self.wanted_s else math.inf

    @property
    def wanted_s(self) -> float:
        return min(self.best_s, self.limit_s)

    def want_less(self, time_s: float) -> None:
        self.limit_s = min(self.limit_s, time_s)

    def pick(self) -> tuple[str, Callable[[Any], float]] | None:
        if self.next_s == math.inf:
            return None
        bound_s = self.left.pop(0)
        return self.name, lambda bench: bound_s * 2

    def done(self, item: str, task: Any, found: float) -> None:
        self.log.append(f"{item} {found / 2:g}")
        self.best_s = min(self.best_s, found)


class Here(Pool):
    """Does tasks one after the other, on nothing."""

    def __init__(self) -> None:
        pass

    def run(self, pick: Any, done: Any) -> None:
        while (picked := pick()) is not None:
            done(*picked, picked[1](None))


def test_the_lowest_bound_goes_next_until_none_is_wanted() -> None:
    log: list[str] = []
    first, second = Bounds("a", [1.0, 3.0, 5.0], log), Bounds("b", [1.5, 1.9, 2.5], log)
    walk_together(Here(), [first, second])
    assert log == ["a 1", "b 1.5", "b 1.9"], "a found 2, which 2.5, 3 and 5 cannot beat"
    assert first.wanted_s == second.wanted_s == 2.0


@pytest.mark.parametrize("cluster", [SLOW, "1x4xtoy"])
def test_both_find_what_each_finds_alone(cluster: Any) -> None:
    """On slow nodes a pipeline is the fastest; within a node it is not."""
    session = session_of(cluster, micro_batches=4, ac="none", executable_only=False)
    plan = session.plan()
    assert plan.estimate is not None
    assert plan.solver is not None
    search: RunPlanner = session._search

    def restrict(mesh: Any) -> None:
        return None

    outer = MeshSearch(search, [4], ["none"], restrict)
    meshes = session._meshes(None, "ilp")
    found = outer.best(meshes)
    piped = PipelineSearch(search, [4], ["none"], restrict).best()
    assert found is not None
    assert found.candidate is not None
    assert piped.plan is not None
    alone = {"mesh": found.candidate.estimate.step_time_s, "pipeline": piped.plan.step_time_s}
    assert plan.estimate.step_time_s == pytest.approx(min(alone.values()), rel=2 * session.job.mip_gap)
    assert ("pp" in plan.mesh.spec.names) == (min(alone, key=lambda which: alone[which]) == "pipeline")
    assert plan.solver.bound_s is not None
    assert plan.solver.bound_s <= min(alone.values())
    assert plan.solver.status == "optimal"
    assert {str(mesh) for mesh in meshes} <= {report.mesh for report in plan.solver.meshes}
