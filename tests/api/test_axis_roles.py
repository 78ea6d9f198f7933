"""What an axis is said to do, for the layouts that people know by name."""

from __future__ import annotations

import pytest

from api.axis_roles import axis_roles
from cost_model.layout import MeshSpec, parse_layout
from planner.plan import PlanMesh, ShardingPlan


def role(*, stored: str, used: str | None = None, inputs: str = "R", activations: str = "R") -> str:
    """Return the role of the only axis of a plan with one weight, the root's inputs and one module's outputs."""
    plan = ShardingPlan(
        mesh=PlanMesh.of(MeshSpec.parse("x=4")),
        plan={"layers.*.weight": parse_layout([stored])},
        compute_plan={} if used is None else {"layers.*.weight": parse_layout([used])},
        input_plan={"input": parse_layout([inputs])},  # type: ignore[dict-item]
        output_plan={"layers.*": parse_layout([activations])},  # type: ignore[dict-item]
    )
    (only,) = axis_roles(plan)
    return only.role


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ({"stored": "R", "inputs": "S(0)", "activations": "S(0)"}, "DP"),
        ({"stored": "S(0)", "used": "R", "inputs": "S(0)", "activations": "S(0)"}, "FSDP"),
        ({"stored": "S(0)"}, "TP"),
        ({"stored": "S(1)", "activations": "S(1)"}, "TP+SP"),
        ({"stored": "R", "inputs": "S(1)", "activations": "S(1)"}, "CP"),
        ({"stored": "S(0)", "used": "R", "inputs": "S(1)", "activations": "S(1)"}, "FSDP+CP"),
        ({"stored": "S(0)", "used": "R"}, "sharded storage"),
        ({"stored": "R"}, "replicated"),
    ],
)
def test_role_is_the_fields_word(layouts: dict[str, str], expected: str) -> None:
    assert role(**layouts) == expected
