"""The engine: the lowest bound goes next, and an incumbent prunes all searches that share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from cost_model.layouts.layout import MeshSpec
from planner.progress import IncumbentFound, ProgressEvent
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.search.branch_and_bound import BranchAndBound, Expansion, Incumbent, SearchSpec, run_searches
from planner.search.task_pool import Pool
from planner.search.worker_context import SearchConstraints, WorkerContext

MESH = MeshSpec.parse("dp=2")


@dataclass(frozen=True)
class Node:
    bound_s: float
    shared: str = ""
    mesh: MeshSpec = MESH


class Doubling(BranchAndBound[Node]):
    """A search whose plans take twice the bound of their node; nodes with equal ``shared`` wait for one task."""

    def __init__(
        self, name: str, spec: SearchSpec, incumbent: Incumbent, nodes: Sequence[Node], log: list[str]
    ) -> None:
        super().__init__(spec, incumbent)
        self.name, self.log = name, log
        for node in nodes:
            self.push(node)
        self.has_all_roots = True

    def expand(self, node: Node) -> Expansion[Node] | None:
        def state_task() -> Any:
            self.log.append(f"{self.name} {node.bound_s:g}")
            return lambda context, constraints: 2 * node.bound_s

        return Expansion(node=node, key=node.shared or id(node), state_task=state_task)

    def take_result(self, node: Node, key: Hashable, task: Any, result: float) -> None:
        self.close(2 * node.bound_s)
        self.record(node.mesh).close(2 * node.bound_s)
        if self.incumbent.improve(2 * node.bound_s):
            self.report(lambda state: IncumbentFound(mesh=str(node.mesh), state=state))


class NoPlanner:
    clock = Clock()


def spec_of(events: list[ProgressEvent], deadline: float | None = None) -> SearchSpec:
    context = WorkerContext(cast(RunPlanner, NoPlanner()))
    return SearchSpec(
        context=context,
        micro_batch_counts=(1,),
        modes=("none",),
        constraints=SearchConstraints(memory_bytes=0, restrict=lambda mesh: None),
        pool=Pool(context),
        deadline=deadline,
        progress=events.append,
    )


def searches(
    *bounds: Sequence[float], deadline: float | None = None
) -> tuple[list[Doubling], list[str], list[ProgressEvent]]:
    log, events = list[str](), list[ProgressEvent]()
    spec, incumbent = spec_of(events, deadline), Incumbent(mip_gap=0.0)
    made = [
        Doubling(name, spec, incumbent, list(map(Node, each)), log) for name, each in zip("ab", bounds, strict=False)
    ]
    return made, log, events


def test_the_lowest_bound_goes_next_until_none_is_below_the_cutoff() -> None:
    (first, second), log, events = searches([1.0, 3.0, 5.0], [1.5, 1.9, 2.5])
    run_searches(first.spec.pool, [first, second])
    assert log == ["a 1", "b 1.5", "b 1.9"], "a found 2, which 2.5, 3 and 5 cannot beat"
    assert first.incumbent.cutoff_s == 2.0
    assert first.is_complete
    assert second.is_complete
    assert min(first.bound_s, second.bound_s) == 2.0
    (found,) = events
    assert isinstance(found, IncumbentFound)
    assert (found.state.step_time_s, found.state.bound_s) == (2.0, 1.5)
    assert found.state.gap == pytest.approx(0.25)
    assert found.state.nodes_open == 5


def test_the_bound_of_a_search_without_time_is_that_of_its_open_nodes() -> None:
    (search,), log, _ = searches([3.0, 1.0], deadline=-math.inf)
    run_searches(search.spec.pool, [search])
    assert not log
    assert not search.is_complete
    assert search.bound_s == 1.0
    search.close_open_nodes()
    assert search.mesh_report(MESH).at_least_s == 1.0


def test_nodes_with_the_same_key_wait_for_one_task() -> None:
    (search,), log, _ = searches([])
    for bound_s in (1.0, 1.2):
        search.push(Node(bound_s, shared="stage"))
    picked = search.pick()
    assert picked is not None
    assert search.pick() is None
    assert search.bound_s == 1.0, "nodes that wait are still open"
    key, task = picked
    search.done(key, task, task(search.spec.context, search.spec.constraints))
    assert log == ["a 1"]
    assert search.bound_s == search.incumbent.cutoff_s == 2.0


def test_what_is_pushed_first_is_expanded_first() -> None:
    (search,), log, _ = searches([1.0])
    search.push(Node(1.5), first=True)
    run_searches(search.spec.pool, [search])
    assert log == ["a 1.5", "a 1"]
    assert search.mesh_report(MESH, is_chosen=True).outcome == "chosen"


def test_no_gap_is_told_before_every_root_is_known() -> None:
    (search,), _, _ = searches([1.0])
    search.has_all_roots = False
    search.incumbent.improve(4.0)
    assert search.incumbent.state.bound_s is None
    assert search.incumbent.state.gap is None
    search.has_all_roots = True
    assert search.incumbent.state.gap == pytest.approx(0.75)
    assert dataclasses.replace(search.incumbent, finished_bound_s=0.5).state.bound_s == 0.5
