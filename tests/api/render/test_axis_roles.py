"""What an axis is said to do, for the layouts that people know by name."""

from __future__ import annotations

from typing import Any

import pytest

from api.render.axis_roles import REPEATS, AxisRole, axis_roles, axis_sentences
from cost_model.layouts.layout import MeshSpec, parse_layout
from planner.plan.axis_roles import weight_layouts
from planner.plan.sharding_plan import Job, PlanMesh, Port, ShardingPlan

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


def sentence(*, phase: str = "training", **weights: tuple[str, str]) -> str:
    """Return the sentence of an axis; ``weights`` are (stored, compute) layouts, and those of inputs and outputs."""
    inputs, between = weights.pop("around", ("R", "R"))
    plan = ShardingPlan(
        mesh=ONE_AXIS,
        plan={f"layers.*.{name}.weight": parse_layout([stored]) for name, (stored, _) in weights.items()},
        compute_plan={f"layers.*.{name}.weight": parse_layout([used]) for name, (_, used) in weights.items()},
        input_plan={"input": parse_layout([inputs])},  # type: ignore[dict-item]
        output_plan={"layers.*": parse_layout([between])},  # type: ignore[dict-item]
        job=Job(phase=phase),  # type: ignore[arg-type]
    )
    (only,) = axis_sentences(plan)
    assert (only.axis, only.size) == ("x", 4)
    return only.sentence


WHOLE, GATHERED, ROWS, COLUMNS = ("R", "R"), ("S(0)", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)")


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ({"q": WHOLE, "around": ("S(0)", "S(0)")}, "splits the batch; every rank has whole weights (DP)"),
        (
            {"q": GATHERED, "around": ("S(0)", "S(0)")},
            "shards weights, gradients, optimizer states and the batch (FSDP)",
        ),
        ({"q": GATHERED, "around": ("S(0)", "S(0)"), "phase": "prefill"}, "shards weights and the batch (FSDP)"),
        ({"q": ROWS, "o": COLUMNS, "norm": WHOLE}, "splits heads and hidden dims of every block's weights (TP)"),
        (
            {"q": ROWS, "o": COLUMNS, "around": ("R", "S(1)")},
            "splits heads and hidden dims of every block's weights, and the sequence between blocks (TP + SP)",
        ),
        (
            {"q": GATHERED, "k": GATHERED, "up": ROWS, "around": ("S(0)", "S(0)")},
            "shards weights, gradients, optimizer states and the batch (FSDP); computes 1 of 3 kinds of weights in "
            "pieces (TP)",
        ),
        (
            {"q": GATHERED, "up": ROWS, "down": COLUMNS},
            "splits heads and hidden dims of 2 of 3 kinds of weights (TP); gathers 1 of 3 kinds of weights for compute "
            "(FSDP)",
        ),
        (
            {"q": WHOLE, "around": ("S(1)", "S(1)")},
            "splits sequences through attention; every rank has whole weights (CP)",
        ),
        (
            {"q": GATHERED, "around": ("S(1)", "S(1)")},
            "splits sequences through attention, and shards weights, gradients and optimizer states (CP + FSDP)",
        ),
        ({"q": WHOLE, "up": WHOLE}, REPEATS),
        (
            {"q": GATHERED},
            "stores weights in pieces, and repeats the work of the other ranks: no batch or sequence is split on it",
        ),
    ],
)
def test_sentence_says_what_an_axis_does(layouts: dict[str, Any], expected: str) -> None:
    assert sentence(**layouts) == expected


@pytest.mark.parametrize(
    ("router", "inputs", "expected"),
    [
        (WHOLE, "S(0)", "splits the experts and the batch; every rank has the other weights whole (EP + DP)"),
        (
            GATHERED,
            "S(0)",
            "splits the experts; shards other weights, gradients, optimizer states and the batch (EP + FSDP)",
        ),
        (ROWS, "R", "splits the experts, and heads and hidden dims of other weights (EP + TP)"),
        (WHOLE, "R", "splits the experts (EP); repeats the rest of the work of the other ranks"),
    ],
)
def test_sentence_of_experts_says_what_becomes_of_the_rest(router: tuple[str, str], inputs: str, expected: str) -> None:
    plan = ShardingPlan(
        mesh=ONE_AXIS,
        plan={"layers.*.mlp.experts.gate_up_proj": S0, "layers.*.q.weight": parse_layout([router[0]])},
        compute_plan={"layers.*.q.weight": parse_layout([router[1]])},
        input_plan={"input": parse_layout([inputs])},  # type: ignore[dict-item]
    )
    assert [axis.sentence for axis in axis_sentences(plan)] == [expected]
