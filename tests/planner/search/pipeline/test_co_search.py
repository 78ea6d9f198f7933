"""Meshes and pipelines searched together: the faster of what each search finds alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.pipeline_sessions import SLOW, session_of
from support.searches import pipeline_search, spec_of

from cost_model.layouts.layout import MeshSpec
from planner.search.branch_and_bound import Incumbent
from planner.search.mesh_search import MeshSearch


@pytest.mark.parametrize("cluster", [SLOW, "1x4xtoy"])
def test_both_find_what_each_finds_alone(cluster: Any) -> None:
    """On slow nodes a pipeline is the fastest; within a node it is not."""
    session = session_of(cluster, micro_batches=4, ac="none", executable_only=False)
    plan = session.plan()
    assert plan.estimate is not None
    assert plan.solver is not None
    meshes, spec = session._meshes(None, "ilp"), spec_of(session._planner, [4], ["none"])
    flat = MeshSearch(spec, Incumbent(mip_gap=session.job.mip_gap)).best(meshes)
    piped = pipeline_search(spec).best()
    assert flat.plan is not None
    assert piped.plan is not None
    alone = {"mesh": flat.plan.estimate.step_time_s, "pipeline": piped.plan.step_time_s}
    assert plan.estimate.step_time_s == pytest.approx(min(alone.values()), rel=2 * session.job.mip_gap)
    assert ("pp" in plan.mesh.spec.names) == (min(alone, key=lambda which: alone[which]) == "pipeline")
    assert plan.solver.bound_s is not None
    assert plan.solver.bound_s <= min(alone.values())
    assert plan.solver.status == "optimal"
    assert {mesh.shape for mesh in meshes} <= {MeshSpec.parse(report.mesh).shape for report in plan.solver.meshes}
