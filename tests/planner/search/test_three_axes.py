"""Meshes of three axes: which are searched, and what the outermost is for."""

from __future__ import annotations

from typing import Any

import pytest
from support import families
from support.searches import pipeline_search, spec_of, unrestricted
from support.small_models import TINY_LLAMA
from torch.distributed.tensor import Replicate, Shard

from api.requests.model_registry import load_model, quiet_libraries
from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError
from planner.formulation.decision import decision_from_assignment
from planner.formulation.estimate import itemise
from planner.ilp.problem import totals
from planner.ilp.random_assignment import random_assignment
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.search.mesh_space import meshes_of
from planner.search.pipeline.stage_planners import PipelineRun, StagePlanners
from planner.search.pipeline.step_time import kinds_of
from planner.session import PlanningSession

THREE = "dp=2,fsdp=2,tp=2"


def session_of(batch: int = 16, cluster: str = "8xtoy", **options: object) -> PlanningSession:
    _, inputs = families.make("mlp", batch)
    module, _ = families.make("mlp", batch)
    return PlanningSession(module, cluster=cluster, example_inputs=inputs, dtype="fp32", micro_batches=1, **options)  # type: ignore[arg-type]


def test_inner_axes_are_a_part_of_a_node_a_node_or_whole_nodes() -> None:
    found = {str(mesh) for mesh in meshes_of(ClusterSpec.parse("3x4xtoy"), axes=3) if len(mesh.shape) == 3}
    # Of twelve devices; an axis of three would end inside a node where it is not around one.
    assert found == {"dp=3,fsdp=2,tp=2"}
    sixteen = [mesh for mesh in meshes_of(ClusterSpec.parse("2x8xtoy"), axes=3) if len(mesh.shape) == 3]
    assert [mesh.shape for mesh in sixteen] == [(4, 2, 2), (2, 4, 2), (2, 2, 4)]
    assert all(mesh.size == 16 for mesh in sixteen)


@pytest.mark.parametrize("axes", [0, 4])
def test_other_numbers_of_axes_are_refused(axes: int) -> None:
    with pytest.raises(JobError, match=f"axes is {axes}"):
        session_of(axes=axes)


def test_the_outermost_axis_is_for_the_batch() -> None:
    plan = session_of().plan(mesh=THREE)
    assert plan.input_plan["input"]["x"].layout[0] == Shard(0)
    computed = {**plan.plan, **plan.compute_plan}
    assert {layout[0] for layout in computed.values()} == {Replicate()}
    assert any("dp splits the batch only" in note for note in plan.notes)


def test_notes_name_the_axes_as_the_plan_does() -> None:
    plan = session_of().plan_if_any(mesh="a=2,b=2,c=2", keep_names=False)
    assert plan is not None
    assert any(f"on the mesh {plan.mesh}, {plan.mesh.names[0]} splits the batch only" in note for note in plan.notes)


def test_an_axis_that_does_not_divide_the_batch_or_is_pinned_is_free() -> None:
    mesh = MeshSpec.parse(THREE)
    assert session_of()._planner.batch_axes(mesh) == (0,)
    assert session_of(batch=15)._planner.batch_axes(mesh) == ()
    assert session_of(pins=["fc1.weight:used=S(0)@dp"])._planner.batch_axes(mesh) == ()
    assert session_of(pins=["fc1.weight=S(0)@dp"])._planner.batch_axes(mesh) == (0,)
    assert session_of()._planner.batch_axes(MeshSpec.parse("dp=2,tp=4,pp=1")) == ()


def test_a_search_over_three_axes_is_no_worse_than_over_two() -> None:
    two, three = (session_of(axes=axes).plan() for axes in (2, 3))
    assert two.estimate is not None
    assert three.estimate is not None
    assert three.solver is not None
    assert THREE in {str(mesh.mesh) for mesh in three.solver.meshes}
    assert three.estimate.step_time_s <= two.estimate.step_time_s * (1 + 1e-3)


PIPELINES: dict[str, Any] = {"executable_only": False, "ac": "none", "micro_batches": 2}


def llama_on(cluster: str, **options: Any) -> PlanningSession:
    with quiet_libraries():
        source = load_model({"hf_config": {**TINY_LLAMA, "num_hidden_layers": 3}}, seq=32)
    options = {"batch": 8, "seq": 32, "dtype": "fp32", **PIPELINES, **options}
    return PlanningSession(source.module, cluster=ClusterSpec.parse(cluster), **options)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_stages_of_three_axes_cost_alike_in_program_and_estimator(index: int) -> None:
    session = llama_on("1x8xtoy")
    whole = RunPlanner(session._planner.model, session.job, ClusterSpec.parse("3x8xtoy"), 8, Clock())
    stages = StagePlanners(whole, {3: ClusterSpec.parse("1x8xtoy")})
    pipeline = PipelineRun(
        mesh=MeshSpec.parse("dp=2,cp=2,tp=2"), blocks_per_stage=(1, 1, 1), micro_batches=2, ac="none"
    )
    kind = next(kind for kind in kinds_of(pipeline.blocks_per_stage) if index in kind.indices)
    search = stages.planner(kind, 3)
    run = stages.run(search, kind, pipeline)
    assert run.batch_axes == (0,)
    split = [layout for layout in stages.layouts(search, run.mesh, 4) if layout[1] == Shard(1)]
    assert {layout[0] for layout in split} == {Shard(0)}
    for layout in split[:2]:
        formulator, _, formulation = search.formulate(run, stages.restriction(search, run, unrestricted, layout))
        assert formulation is not None
        assignment = random_assignment(formulation.problem, 0, lambda node, choice: True)
        assert assignment is not None
        total = totals(formulation.problem, assignment)
        price = itemise(formulator, formulation.structure, decision_from_assignment(formulation, assignment))
        for name in {*total, *price.charge}:
            assert price.charge.get(name, 0.0) == pytest.approx(total.get(name, 0.0), rel=1e-9), name


def test_pipelines_of_three_axes_are_searched_where_they_are_asked_for() -> None:
    session = llama_on("2x8xtoy")
    for axes in (2, 3):
        search = pipeline_search(spec_of(session._planner, [2], ["none"]), axes=axes)
        meshes = {node.pipeline.mesh for node in search.roots()}
        assert max(len(mesh.shape) for mesh in meshes) == axes
    assert all(4 % mesh.shape[0] == 0 for mesh in meshes if len(mesh.shape) == 3)
