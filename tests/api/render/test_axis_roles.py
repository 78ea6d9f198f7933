"""What an axis is said to do, for the layouts that people know by name."""

from __future__ import annotations

import pytest

from api.render.axis_roles import AxisRole, axis_roles
from cost_model.layouts.layout import MeshSpec, parse_layout
from planner.plan.axis_roles import weight_layouts
from planner.plan.sharding_plan import PlanMesh, Port, ShardingPlan

R, P, S0, S1, S2 = (parse_layout([text]) for text in ("R", "P(sum)", "S(0)", "S(1)", "S(2)"))
ONE_AXIS = PlanMesh.from_mesh(MeshSpec.parse("x=4"))


def only_axis(plan: ShardingPlan) -> AxisRole:
    (only,) = axis_roles(plan)
    return only


def role(*, stored: str, used: str | None = None, inputs: str = "R", activations: str = "R") -> str:
    """Return the role of the only axis of a plan with one weight, the root's inputs and one module's outputs."""
    plan = ShardingPlan(
        mesh=ONE_AXIS,
        plan={"layers.*.weight": parse_layout([stored])},
        compute_plan={} if used is None else {"layers.*.weight": parse_layout([used])},
        input_plan={"input": parse_layout([inputs])},  # type: ignore[dict-item]
        output_plan={"layers.*": parse_layout([activations])},  # type: ignore[dict-item]
    )
    return only_axis(plan).role


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ({"stored": "R", "inputs": "S(0)", "activations": "S(0)"}, "DP"),
        ({"stored": "S(0)", "used": "R", "inputs": "S(0)", "activations": "S(0)"}, "FSDP"),
        ({"stored": "S(0)"}, "TP"),
        ({"stored": "S(1)", "activations": "S(1)"}, "TP+SP"),
        ({"stored": "S(0)", "inputs": "S(0)", "activations": "S(0)"}, "TP+SP"),
        ({"stored": "R", "inputs": "S(1)", "activations": "S(1)"}, "CP"),
        ({"stored": "S(0)", "used": "R", "inputs": "S(1)", "activations": "S(1)"}, "FSDP+CP"),
        ({"stored": "S(0)", "used": "R"}, "sharded storage"),
        ({"stored": "R"}, "replicated"),
    ],
)
def test_role_is_the_fields_word(layouts: dict[str, str], expected: str) -> None:
    assert role(**layouts) == expected


def test_heads_inside_attention_are_ulysses_and_a_split_vocabulary_alone_is_no_tensor_parallelism() -> None:
    plan = ShardingPlan(
        mesh=ONE_AXIS,
        plan={"layers.*.q.weight": S0, "lm_head.weight": S0},
        compute_plan={"layers.*.q.weight": R},
        output_plan={"layers.*.q": Port(source=S1, layout=S2)},
    )
    only = only_axis(plan)
    assert only.role == "FSDP+SP"
    assert "splits sequences, but heads inside attention (Ulysses)" in only.details
    assert "lm_head sharded in compute" in only.details


def test_columns_of_a_table_that_become_sequences_are_no_heads() -> None:
    plan = ShardingPlan(
        mesh=ONE_AXIS,
        plan={"embed.weight": S1, "layers.*.q.weight": S0},
        compute_plan={"layers.*.q.weight": R},
        input_plan={"layers.0.input": Port(source=S2, layout=S1)},
    )
    only = only_axis(plan)
    assert only.role == "FSDP+CP"
    assert "splits sequences" in only.details


def test_tied_weight_is_used_as_under_its_other_name() -> None:
    plan = ShardingPlan(
        mesh=ONE_AXIS,
        plan={"shared.weight": S0, "lm_head.weight": S0},
        compute_plan={"lm_head.weight": R},
        gradient_plan={"shared.weight": P, "lm_head.weight": P},
        input_plan={"input": Port(layout=S0)},
    )
    assert only_axis(plan).role == "FSDP"
    assert {key: used for key, _, used in weight_layouts(plan)} == {"shared.weight": None, "lm_head.weight": R}


@pytest.mark.parametrize(("layout", "expected"), [("S(0)", "DP+EP"), ("SS(1,2)", "TP+SP")])
def test_experts_are_spread_over_an_axis_or_each_is_split(layout: str, expected: str) -> None:
    plan = ShardingPlan(
        mesh=ONE_AXIS,
        plan={
            "layers.*.mlp.experts.gate_up_proj": parse_layout([layout]),
            "layers.*.mlp.gate.weight": R,
        },
        input_plan={"input": S0},  # type: ignore[dict-item]
    )
    assert only_axis(plan).role == expected
