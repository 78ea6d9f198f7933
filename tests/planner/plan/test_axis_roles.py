"""The role of an axis, for the layouts that people know by name."""

from __future__ import annotations

from typing import Any

import pytest

from cost_model.layouts.layout import MeshSpec, parse_layout
from planner.plan.axis_roles import Role, axis_uses
from planner.plan.estimate import Pipeline, PipelineStage
from planner.plan.sharding_plan import Job, PlanMesh, Port, ShardingPlan

R, S0, S1, S2 = (parse_layout([text]) for text in ("R", "S(0)", "S(1)", "S(2)"))
MESH = PlanMesh.from_mesh(MeshSpec.parse("x=4"))


def plan_of(
    *, stored: dict[str, str], used: dict[str, str] | None = None, inputs: str = "R", between: str = "R", **fields: Any
) -> ShardingPlan:
    """Return a plan of some weights of blocks, the root's inputs, and the tensors between blocks."""
    return ShardingPlan(
        mesh=MESH,
        plan={f"layers.*.{name}.weight": parse_layout([text]) for name, text in stored.items()},
        compute_plan={f"layers.*.{name}.weight": parse_layout([text]) for name, text in (used or {}).items()},
        input_plan={"input": {"ids": Port(layout=parse_layout([inputs]))}},
        output_plan={"layers.*": Port(layout=parse_layout([between]))},
        **fields,
    )


def role(plan: ShardingPlan) -> Role:
    (only,) = axis_uses(plan)
    return only.role


PLANS: dict[str, tuple[dict[str, Any], Role]] = {
    "replicas": ({"stored": {"q": "R", "up": "R"}, "inputs": "S(0)", "between": "S(0)"}, "dp"),
    "fully sharded": (
        {"stored": {"q": "S(0)", "up": "S(0)"}, "used": {"q": "R", "up": "R"}, "inputs": "S(0)", "between": "S(0)"},
        "fsdp",
    ),
    "fully sharded but for a norm": (
        {"stored": {"q": "S(0)", "norm": "R"}, "used": {"q": "R"}, "inputs": "S(0)", "between": "S(0)"},
        "fsdp",
    ),
    "tensor parallel": ({"stored": {"q": "S(0)", "o": "S(1)", "norm": "R"}}, "tp"),
    "tensor parallel with sequence parallelism": ({"stored": {"q": "S(0)", "o": "S(1)"}, "between": "S(1)"}, "tp"),
    "tensor parallel, with the batch split between blocks": (
        {"stored": {"q": "S(0)", "o": "S(1)"}, "inputs": "S(0)", "between": "S(0)"},
        "tp",
    ),
    "context parallel": ({"stored": {"q": "R"}, "inputs": "S(1)", "between": "S(1)"}, "cp"),
    "context parallel over sharded weights": (
        {"stored": {"q": "S(0)"}, "used": {"q": "R"}, "inputs": "S(1)", "between": "S(1)"},
        "cp",
    ),
    "experts": ({"stored": {"q": "R", "experts.gate_up_proj": "S(0)"}, "inputs": "S(0)"}, "ep"),
    "experts, other weights fully sharded": (
        {
            "stored": {"q": "S(0)", "o": "S(0)", "k": "S(0)", "experts.down_proj": "S(0)"},
            "used": {"q": "R", "o": "R", "k": "R"},
            "inputs": "S(0)",
        },
        "ep",
    ),
    "each expert's matrix is split": ({"stored": {"experts.gate_up_proj": "SS(1,2)"}, "inputs": "S(0)"}, "tp"),
    "a list of experts, each split by rows": ({"stored": {"experts.*.up_proj": "S(0)"}}, "tp"),
    "hybrid: most are gathered": (
        {
            "stored": {"q": "S(0)", "k": "S(0)", "up": "S(0)"},
            "used": {"q": "R", "k": "R"},
            "inputs": "S(0)",
        },
        "fsdp",
    ),
    "hybrid: most are computed in pieces": (
        {"stored": {"q": "S(0)", "k": "S(0)", "up": "S(0)"}, "used": {"q": "R"}, "inputs": "S(0)"},
        "tp",
    ),
    "sharded storage": ({"stored": {"q": "S(0)"}, "used": {"q": "R"}}, "fsdp"),
    "repeated": ({"stored": {"q": "R", "up": "R"}}, "repeat"),
}


@pytest.mark.parametrize("name", PLANS)
def test_role_follows_from_the_layouts(name: str) -> None:
    layouts, expected = PLANS[name]
    assert role(plan_of(**layouts)) == expected


def test_weights_outside_of_blocks_do_not_count_where_there_are_blocks() -> None:
    plan = plan_of(stored={"q": "R"}, inputs="S(0)")
    split_head = ShardingPlan(
        mesh=MESH, plan={**plan.plan, "lm_head.weight": S0, "embed.weight": S1}, input_plan=plan.input_plan
    )
    assert role(split_head) == "dp"
    without_blocks = ShardingPlan(mesh=MESH, plan={"fc1.weight": S0, "fc2.weight": S1}, input_plan=plan.input_plan)
    assert role(without_blocks) == "tp"


def test_heads_of_a_cache_are_no_sequence_in_decode() -> None:
    """In decode dim 1 of the cache is its heads: an axis that splits it alone does not split sequences."""
    inputs = {"input": {"ids": Port(layout=R), "past.0.keys": Port(layout=S1)}}
    layouts = {"layers.*.q.weight": S0}
    for phase, splits in (("decode", False), ("training", True)):
        plan = ShardingPlan(mesh=MESH, plan=layouts, input_plan=inputs, job=Job(phase=phase))  # type: ignore[arg-type]
        assert axis_uses(plan)[0].splits_sequence == splits
        assert axis_uses(plan)[0].role == "tp"


def test_heads_inside_attention_are_context_parallelism_by_swapping() -> None:
    plan = ShardingPlan(
        mesh=MESH,
        plan={"layers.*.q.weight": S0},
        compute_plan={"layers.*.q.weight": R},
        output_plan={"layers.*.q": Port(source=S1, layout=S2)},
    )
    (use,) = axis_uses(plan)
    assert (use.role, use.swaps_heads) == ("cp", True)


def test_stages_are_the_outermost_axis_and_one_rank_is_a_replica() -> None:
    stage = PipelineStage(modules=("layers.*",), micro_batch_s=1.0, peak_memory_bytes=1)
    plan = ShardingPlan(
        mesh=PlanMesh.from_mesh(MeshSpec.parse("pp=2,a=1,b=4")),
        plan={"layers.*.q.weight": parse_layout(["R", "S(0)"])},
        pipeline=Pipeline(schedule="1f1b", layout=("R", "R"), idle_s=0.0, stages=(stage, stage)),
    )
    assert [(use.axis, use.size, use.role) for use in axis_uses(plan)] == [
        ("pp", 2, "pp"),
        ("a", 1, "dp"),
        ("b", 4, "tp"),
    ]
