"""Meshes of three axes: which are searched, and what the outermost is for."""

from __future__ import annotations

import families
import pytest
from torch.distributed.tensor import Replicate, Shard

from cost_model import ClusterSpec
from cost_model.layout import MeshSpec
from planner.candidates import meshes_of
from planner.errors import JobError
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
    with pytest.raises(JobError, match="are not searched"):
        session_of(axes=axes)


def test_the_outermost_axis_is_for_the_batch() -> None:
    plan = session_of().plan(mesh=THREE)
    assert plan.input_plan["input"]["x"].layout[0] == Shard(0)
    computed = {**plan.plan, **plan.compute_plan}
    assert {layout[0] for layout in computed.values()} == {Replicate()}
    assert any("dp was tried for the batch alone" in note for note in plan.notes)


def test_an_axis_that_does_not_divide_the_batch_or_is_pinned_is_free() -> None:
    mesh = MeshSpec.parse(THREE)
    assert session_of()._search.batch_axes(mesh) == (0,)
    assert session_of(batch=15)._search.batch_axes(mesh) == ()
    assert session_of(pins=["fc1.weight:used=S(0)@dp"])._search.batch_axes(mesh) == ()
    assert session_of(pins=["fc1.weight=S(0)@dp"])._search.batch_axes(mesh) == (0,)
    assert session_of()._search.batch_axes(MeshSpec.parse("dp=2,tp=4,pp=1")) == ()


def test_a_search_over_three_axes_is_no_worse_than_over_two() -> None:
    two, three = (session_of(axes=axes).plan() for axes in (2, 3))
    assert two.estimate is not None
    assert three.estimate is not None
    assert three.solver is not None
    assert THREE in {str(mesh.mesh) for mesh in three.solver.meshes}
    assert three.estimate.step_time_s <= two.estimate.step_time_s * (1 + 1e-3)
