"""Plans that have a pipeline: when they win, what they say, and where they are refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from support.pipeline_sessions import CONFIG, SLOW, session_of

from api.requests.model_registry import load_model, quiet_libraries
from planner.errors import InfeasibleError, MeshError, PlanError, PlanFormatError
from planner.plan.axis_roles import layout_axis_uses
from planner.plan.patterns import match_keys
from planner.plan.sharding_plan import ShardingPlan
from planner.writing.axis_names import role_names
from planner.writing.reprice import estimate_plan

ODD: dict[str, Any] = {"batch": 18, "ac": "none", "micro_batches": 9}
"""As many micro-batches as are no multiple of any stages: chunks cannot interleave."""


@pytest.fixture(scope="module")
def interleaved() -> ShardingPlan:
    session = session_of("4x1xtoy", blocks=6, executable_only=False, ac="none", micro_batches=8)
    return session.plan(mesh="pp=2,dp=2")


@pytest.fixture(scope="module")
def pipelined() -> ShardingPlan:
    return session_of(SLOW, executable_only=False, **ODD).plan()


def test_the_axes_of_a_stage_are_named_by_role(pipelined: ShardingPlan) -> None:
    assert pipelined.mesh.names == ("pp", *role_names([use.role for use in layout_axis_uses(pipelined)]))
    assert pipelined.estimate is not None
    assert {axis for row in pipelined.estimate.collectives for axis in row.axis.split(",")} <= {*pipelined.mesh.names}
    assert pipelined.solver is not None
    assert [mesh.mesh for mesh in pipelined.solver.meshes if mesh.outcome == "chosen"] == [str(pipelined.mesh)]


def test_on_slow_nodes_a_pipeline_wins(pipelined: ShardingPlan) -> None:
    executable = session_of(SLOW, **ODD).plan()
    assert executable.pipeline is None
    assert executable.estimate is not None
    assert pipelined.pipeline is not None
    assert pipelined.estimate is not None
    assert pipelined.solver is not None
    assert pipelined.estimate.step_time_s < executable.estimate.step_time_s
    assert pipelined.solver.gap is not None
    assert 0 <= pipelined.solver.gap < 0.02
    chosen = [mesh.mesh for mesh in pipelined.solver.meshes if mesh.outcome == "chosen"]
    assert chosen == [str(pipelined.mesh)]


def test_a_mesh_can_say_how_many_stages_there_are(pipelined: ShardingPlan) -> None:
    planned = session_of(SLOW, executable_only=False, **ODD)
    given = planned.plan(mesh=str(pipelined.mesh))
    assert given.mesh == pipelined.mesh
    assert given.estimate is not None
    assert pipelined.estimate is not None
    assert given.solver is not None
    assert given.estimate.step_time_s == pytest.approx(pipelined.estimate.step_time_s, rel=2e-3)
    assert [mesh.mesh for mesh in given.solver.meshes] == [str(pipelined.mesh)]
    deeper = planned.plan(mesh="pp=4,dp=1")
    assert deeper.pipeline is not None
    assert len(deeper.pipeline.stages) == 4
    with pytest.raises(InfeasibleError, match="pp=4,dp=1"):
        planned.plan(mesh="pp=4,dp=1", memory_bytes=1000)


@pytest.mark.parametrize(
    ("mesh", "options", "advice"),
    [
        ("pp=2,dp=2", {"executable_only": True}, "no-executable-only"),
        ("dp=2,pp=2", {}, "outermost"),
        ("pp=4", {}, "outermost"),
        ("pp=1,dp=4", {}, "Choose 2, 4 stages"),
        ("pp=2,dp=2", {"planner": "fully-sharded"}, "Choose the planner ilp"),
    ],
)
def test_a_mesh_whose_stages_cannot_be_is_refused(mesh: str, options: dict[str, Any], advice: str) -> None:
    planner = options.pop("planner", "ilp")
    planned = session_of(SLOW, **({"executable_only": False, "ac": "none", "micro_batches": 8} | options))
    with pytest.raises(MeshError) as refused:
        planned.plan(mesh=mesh, planner=planner)
    assert advice in f"{refused.value} {refused.value.what_to_do}"


def test_stages_take_a_batch_that_divides() -> None:
    with pytest.raises(MeshError, match="divides the samples"):
        session_of(SLOW, executable_only=False, micro_batches=16).plan(mesh="pp=2,dp=2")


def test_a_pipelines_figures_add_up(pipelined: ShardingPlan) -> None:
    pipeline, estimate = pipelined.pipeline, pipelined.estimate
    assert pipeline is not None
    assert estimate is not None
    parts = (estimate.forward_s, estimate.backward_s, estimate.grad_reduce_s, estimate.optimizer_s, pipeline.idle_s)
    assert sum(parts) == pytest.approx(estimate.step_time_s)
    seconds, m = [stage.micro_batch_s for stage in pipeline.stages], pipelined.micro_batches
    assert (m - 1) * max(seconds) + sum(seconds) + estimate.optimizer_s == pytest.approx(estimate.step_time_s)
    assert estimate.peak_memory_bytes == max(stage.peak_memory_bytes for stage in pipeline.stages)
    assert sum(estimate.memory.values()) == estimate.peak_memory_bytes
    assert {row.count for row in estimate.collectives if row.kind == "send_recv"} == {m}


def test_an_interleaved_plan_says_which_chunks_a_rank_has(interleaved: ShardingPlan) -> None:
    pipeline, estimate = interleaved.pipeline, interleaved.estimate
    assert pipeline is not None
    assert estimate is not None
    assert (pipeline.schedule, pipeline.chunks) == ("interleaved", 3)
    blocks = [[f"model.layers.{number}" for number in numbers] for numbers in ((0, 2, 4), (1, 3, 5))]
    first, last = (list(stage.modules) for stage in pipeline.stages)
    assert first == ["model.embed_tokens", *blocks[0]]
    assert last == [*blocks[1], "model.norm", "lm_head"]
    parts = (estimate.forward_s, estimate.backward_s, estimate.grad_reduce_s, estimate.optimizer_s, pipeline.idle_s)
    assert sum(parts) == pytest.approx(estimate.step_time_s)
    seconds, m = [stage.micro_batch_s for stage in pipeline.stages], interleaved.micro_batches
    together_s = m * max(seconds) + min(seconds) / 3
    assert together_s + estimate.optimizer_s == pytest.approx(estimate.step_time_s)
    assert interleaved.solver is not None
    assert interleaved.solver.objective_s == pytest.approx(estimate.step_time_s)
    slowest = max(pipeline.stages, key=lambda stage: stage.micro_batch_s)
    forward = m * (3 if slowest == pipeline.stages[0] else 2)
    sent = {(row.phase, row.count) for row in estimate.collectives if row.kind == "send_recv"}
    assert sent == {("forward", forward), ("backward", 5 * m - forward)}
    assert ShardingPlan.from_dict(interleaved.to_dict()) == interleaved


def test_a_pipelines_plan_names_every_parameter_once(pipelined: ShardingPlan) -> None:
    assert pipelined.pipeline is not None
    names = [name for stage in pipelined.pipeline.stages for name in stage.modules]
    assert names[0] == "model.embed_tokens"
    assert names[-2:] == ["model.norm", "lm_head"]
    with quiet_libraries():
        parameters = [name for name, _ in load_model(CONFIG, seq=32).module.named_parameters()]
    assert sorted(itertools.chain(*match_keys(pipelined.plan, parameters).values())) == sorted(parameters)
    assert len(pipelined.plan) < len(parameters)  # keys speak of several blocks
    assert not [key for key in (*pipelined.input_plan, *pipelined.output_plan) if "pipeline" in key]
    assert {len(layout) for _, _, layout in pipelined.layouts()} == {len(pipelined.mesh.axes) - 1}


def test_a_pipelines_plan_survives_its_file(pipelined: ShardingPlan) -> None:
    assert ShardingPlan.from_dict(pipelined.to_dict()) == pipelined
    assert pipelined.pipeline is not None
    before_chunks = {name: value for name, value in pipelined.to_dict()["pipeline"].items() if name != "chunks"}
    assert ShardingPlan.from_dict(pipelined.to_dict() | {"pipeline": before_chunks}) == pipelined
    with pytest.raises(MeshError, match="3 chunks"):
        dataclasses.replace(pipelined, pipeline=dataclasses.replace(pipelined.pipeline, chunks=3)).validate()
    document = pipelined.to_dict() | {"mesh": {"names": ["dp"], "shape": [4], "device": "cpu"}}
    with pytest.raises(PlanFormatError):
        ShardingPlan.from_dict(document)


def test_a_pipelines_plan_is_refused_where_it_cannot_be_run(pipelined: ShardingPlan) -> None:
    from executor.resolve.resolved_plan import resolve_plan
    from executor.verify import verify

    with quiet_libraries():
        module = load_model(CONFIG, seq=32).module
    with pytest.raises(PlanError, match="executable"):
        estimate_plan(module, pipelined)
    with pytest.raises(PlanError, match="executable"):
        verify(module, pipelined, {})
    with pytest.raises(PlanError, match="executable"):
        resolve_plan(module, None, pipelined)  # type: ignore[arg-type]
