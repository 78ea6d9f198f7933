"""The errors that plans are printed with are those that the page on accuracy states."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from cost_model.hardware.cluster import ClusterSpec
from cost_model.layouts.layout import MeshSpec, parse_layout
from planner.plan import stated_errors
from planner.plan.sharding_plan import Job, PlanMesh, ShardingPlan

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("stated", stated_errors.STATED, ids=lambda stated: stated.row)
def test_the_page_and_the_constants_agree(stated: stated_errors.StatedError) -> None:
    rows = [line.split("|") for line in (ROOT / stated_errors.PAGE).read_text().splitlines() if line.startswith("|")]
    (row,) = [cells for cells in rows if cells[1].strip() == stated.row]
    assert re.match(r"\s*(\d+) ", row[2])[1] == str(stated.runs)  # type: ignore[index]
    assert float(re.match(r"\s*([\d.]+) %", row[3])[1]) / 100 == pytest.approx(stated.error)  # type: ignore[index]


def test_a_plan_has_the_error_of_its_kind() -> None:
    mesh = PlanMesh.from_mesh(MeshSpec.parse("dp=8"))
    cluster = ClusterSpec.parse("1x8xh100-sxm-80gb")
    layout = parse_layout(["S(0)"])
    dense = ShardingPlan(mesh=mesh, plan={"model.layers.*.mlp.up_proj.weight": layout})
    experts = dataclasses.replace(dense, plan={"model.layers.*.mlp.experts.gate_up_proj": layout})
    assert stated_errors.stated_error(dense, cluster) is stated_errors.DENSE_PLAN
    assert stated_errors.stated_error(experts, cluster) is stated_errors.EXPERTS
    assert stated_errors.stated_error(dataclasses.replace(dense, job=Job(phase="decode")), cluster) is None
    assert stated_errors.stated_error(dataclasses.replace(dense, job=Job(dtype="fp32")), cluster) is None
    assert stated_errors.stated_error(dense, ClusterSpec.parse("1x8xtoy")) is None
    assert stated_errors.stated_error(dense, None) is None
