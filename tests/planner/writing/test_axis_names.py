"""Axes of a chosen mesh are named by what they do; a user's names stay, with a note where they say something else."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from support import families
from support.small_models import TINY_LLAMA

from api.requests.model_registry import load_model, quiet_libraries
from cost_model.layouts.layout import MeshSpec
from executor.verify import verify
from planner import PlanningSession, ShardingPlan, estimate_plan
from planner.plan.axis_roles import axis_uses
from planner.plan.estimate import SolverReport
from planner.writing.axis_names import named_by_role, role_names
from planner.writing.write import write_plan

LAYOUTS = ("plan", "compute_plan", "gradient_plan", "input_plan", "output_plan", "fully_shard", "micro_batches")


@functools.cache
def llama(batch: int = 8, **options: Any) -> PlanningSession:
    """Return a session of a tiny llama on four devices."""
    module, inputs = families.make("llama", batch)
    fixed: dict[str, Any] = {"cluster": "1x4xtoy", "dtype": "fp32", "micro_batches": 1, "ac": "none"}
    return PlanningSession(module, example_inputs=inputs, **{**fixed, **options})


def layouts(plan: ShardingPlan) -> Mapping[str, Any]:
    document = json.loads(plan.to_json())
    return {field: document[field] for field in LAYOUTS}


def named_axes(plan: ShardingPlan) -> set[str]:
    """Return the names of axes that collectives run on."""
    assert plan.estimate is not None
    return {axis for row in plan.estimate.collectives for axis in row.axis.split(",")}


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        (["fsdp"], ("fsdp",)),
        (["dp", "fsdp"], ("dp", "fsdp")),
        (["tp", "tp"], ("tp_outer", "tp")),
        (["fsdp", "tp", "fsdp"], ("fsdp_outer", "tp", "fsdp")),
        (["dp", "dp", "dp"], ("dp_outer2", "dp_outer", "dp")),
    ],
)
def test_no_two_axes_have_one_name(roles: list[Any], names: tuple[str, ...]) -> None:
    assert role_names(roles) == names


@pytest.mark.parametrize("planner", ["ilp", "data-parallel", "fully-sharded"])
def test_the_axes_of_a_chosen_mesh_are_named_by_their_roles(planner: str) -> None:
    plan = llama().plan(planner=planner)
    assert plan.mesh.names == role_names([use.role for use in axis_uses(plan)])
    assert named_axes(plan) <= set(plan.mesh.names)
    assert {"data-parallel": ("dp",), "fully-sharded": ("fsdp",)}.get(planner, plan.mesh.names) == plan.mesh.names
    assert not [note for note in plan.notes if note.startswith("axis ")]
    assert plan.solver is not None
    chosen = [mesh.mesh for mesh in plan.solver.meshes if mesh.outcome == "chosen"]
    assert chosen == ([str(plan.mesh)] if plan.solver.meshes else [])


def test_the_printed_mesh_has_the_same_plan_when_it_is_typed() -> None:
    found = llama().plan()
    typed = llama().plan(mesh=str(found.mesh))
    assert typed.mesh == found.mesh
    assert layouts(typed) == layouts(found)
    assert typed.estimate == found.estimate
    assert not [note for note in typed.notes if note.startswith("axis ")]


def test_a_mesh_keeps_the_names_that_a_user_gave_and_a_note_says_what_it_does() -> None:
    session = llama()
    sharded = session.plan(planner="fully-sharded", mesh="tp=4")
    assert sharded.mesh.names == ("tp",)
    assert named_axes(sharded) == {"tp"}
    (note,) = [note for note in sharded.notes if note.startswith("axis ")]
    assert note.startswith("axis tp does fully sharded data parallelism (FSDP): ")
    tensor = session.plan(planner="tensor-parallel", mesh="dp=4")
    assert any(note.startswith("axis dp does tensor parallelism: ") for note in tensor.notes)


@pytest.mark.parametrize("mesh", ["x=4", "fsdp=4", "dp_shard=4", "data=4"])
def test_names_that_fit_and_names_of_no_role_have_no_note(mesh: str) -> None:
    plan = llama().plan(planner="fully-sharded", mesh=mesh)
    assert str(plan.mesh) == mesh
    assert not [note for note in plan.notes if note.startswith("axis ")]


def test_names_bind_no_layout() -> None:
    plans = [llama().plan(mesh=mesh) for mesh in ("fsdp=2,tp=2", "tp=2,fsdp=2", "x=2,y=2")]
    assert layouts(plans[0]) == layouts(plans[1]) == layouts(plans[2])


def test_with_pins_and_data_axes_the_axes_keep_the_names_that_those_refer_to() -> None:
    pinned = llama(pins=("lm_head.weight=S(1)@tp",)).plan()
    assert pinned.mesh.names == ("dp", "tp")
    data = llama(data_axes=("dp",)).plan()
    assert set(data.mesh.names) <= {"dp", "tp"}


def test_a_comparison_of_meshes_names_their_axes_by_role() -> None:
    plan = llama().plan_if_any(mesh="dp=2,tp=2", keep_names=False)
    assert plan is not None
    assert plan.mesh.names == role_names([use.role for use in axis_uses(plan)])


def test_a_renamed_plan_is_priced_as_before_and_runs() -> None:
    module, inputs = families.make("llama", 8)
    for mesh in ("dp=4", "dp=2,tp=2"):
        plan = llama().plan_if_any(mesh=mesh, keep_names=False)
        assert plan is not None
        assert plan.estimate is not None
        assert estimate_plan(module, plan, example_inputs=inputs).estimate == plan.estimate
        assert verify(module, plan, inputs).equal


def test_zigzag_names_the_axis_of_the_plan() -> None:
    # With projections replicated, heads are not sharded, so sequences are.
    pins = tuple(f"model.layers.*.self_attn.{name}_proj.weight:used=R@tp" for name in "qkvo")
    with quiet_libraries():
        source = load_model({"hf_config": dict(TINY_LLAMA)}, seq=32)
        session = PlanningSession(
            source.module, cluster="1x4xtoy", batch=2, seq=32, dtype="fp32", micro_batches=1, zigzag=True, pins=pins
        )
    mesh = MeshSpec.parse("dp=1,tp=4")
    planner, restrict = session._planner, session._restrict("ilp", session._pins([mesh]))
    candidate = planner.solve(
        planner.run_of(mesh, 1, "none"), restrict(mesh), memory_bytes=session.cluster.memory_bytes
    )
    assert candidate is not None
    named = named_by_role(planner, session._module, candidate)
    plan = write_plan(planner, session._module, named, 1, SolverReport(name="ilp", status="optimal"), [])
    assert plan.zigzag is not None
    assert plan.zigzag.axis == "cp" == plan.mesh.names[1]
    assert any("zigzag order over cp" in note for note in plan.notes)
