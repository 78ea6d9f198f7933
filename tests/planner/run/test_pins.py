"""Pins and axes for data: what is decided beforehand stays so, and what cannot be kept is said."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support import families
from torch.distributed.tensor import Replicate, Shard

from cost_model.layouts.layout import MeshSpec, format_layout
from planner import PlanningSession, build_plan
from planner.errors import JobError, MeshError, UnmatchedKeyError
from planner.plan.patterns import resolve_keys
from planner.run.pins import Pin

OPTIONS: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "micro_batches": 1, "ac": "none"}
MESH = MeshSpec.parse("dp=2,tp=2")
LLAMA, INPUTS = families.make("llama", 8)
NAMES = [name for name, _ in LLAMA.named_parameters()]


def planned(**more: Any) -> Any:
    return build_plan(LLAMA, example_inputs=INPUTS, tolerance=0.0, **{**OPTIONS, **more})


def layouts(plan: Any, field: str) -> dict[str, Any]:
    return resolve_keys(dict(getattr(plan, field)), NAMES, field=field, what="parameter")


@pytest.mark.parametrize(
    ("text", "layout", "kept"),
    [
        ("a=S(0)@tp", (Replicate(), Shard(0)), True),
        ("a=S(0)@tp", (Shard(0), Replicate()), False),
        ("a!=S(0)@tp", (Shard(0), Shard(0)), False),
        ("a!=S(0)@tp", (Shard(0), Shard(1)), True),
        ("a:used = R@dp".replace(" ", ""), (Replicate(), Shard(1)), True),
        ("a=R@elsewhere", (Shard(0), Shard(0)), True),
        ("a=S(0)@elsewhere", (Shard(0), Shard(0)), False),
    ],
)
def test_what_a_pin_allows(text: str, layout: tuple[Any, ...], kept: bool) -> None:
    assert Pin.parse(text).allows(layout, MESH) is kept


@pytest.mark.parametrize(
    "text", ["", "a", "a=S(0)", "a=@tp", "a=X@tp", "a=P(sum)@tp", "=R@tp", "a:kept=R@tp", "a=S(0)@"]
)
def test_what_is_no_pin(text: str) -> None:
    with pytest.raises(JobError) as refused:
        Pin.parse(text)
    assert refused.value.what_to_do


def test_pinned_layouts_are_the_plans() -> None:
    free = planned()
    pins = (
        "model.layers.*.mlp.down_proj.weight=S(0)@dp",
        "lm_head.weight:used=S(1)@tp",
        "model.embed_tokens.weight!=R@dp",
    )
    plan = planned(pins=pins)
    stored, used = layouts(plan, "plan"), layouts(plan, "compute_plan")
    assert all(stored[f"model.layers.{i}.mlp.down_proj.weight"][0] == Shard(0) for i in range(2))
    assert used.get("lm_head.weight", stored["lm_head.weight"])[1] == Shard(1)
    assert stored["model.embed_tokens.weight"][0] != Replicate()
    assert plan.job.pins == pins
    assert plan.estimate.step_time_s >= free.estimate.step_time_s * (1 - free.job.mip_gap)


def test_an_axis_for_data_splits_nothing_else() -> None:
    plan = planned(data_axes=("dp",))
    stored, used = layouts(plan, "plan"), layouts(plan, "compute_plan")
    assert all(used.get(name, layout)[0] == Replicate() for name, layout in stored.items())
    assert plan.job.data_axes == ("dp",)


def test_pins_hold_for_random_plans_and_baselines_too() -> None:
    session = PlanningSession(
        LLAMA, cluster="1x4xtoy", example_inputs=INPUTS, micro_batches=1, ac="none", pins=("lm_head.weight=S(0)@dp",)
    )
    for planner in ("random:1", "random:2", "fully-sharded"):
        plan = session.plan(planner=planner, mesh="dp=2,tp=2")
        assert layouts(plan, "plan")["lm_head.weight"][0] == Shard(0), planner


def test_meshes_without_the_axis_are_left_out() -> None:
    plan = planned(mesh=None, pins=("lm_head.weight=S(0)@tp",))
    assert "tp" in plan.mesh.names
    assert layouts(plan, "plan")["lm_head.weight"][plan.mesh.names.index("tp")] == Shard(0)


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"pins": ("lm_hed.weight=S(0)@tp",)}, UnmatchedKeyError, "lm_head.weight"),
        ({"pins": ("lm_head.weight=S(0)@pp",)}, JobError, "dp, tp"),
        ({"data_axes": ("data",)}, JobError, "dp, tp"),
        ({"pins": ("model.layers.1.mlp.down_proj.weight=S(0)@dp",)}, JobError, r"model\.layers\.0\.mlp"),
        ({"pins": ("lm_head.weight=S(3)@tp",)}, MeshError, r"lm_head\.weight=S\(3\)@tp"),
        (
            {"pins": ("model.norm.weight=S(0)@tp", "model.norm.weight:used=S(0)@dp")},
            MeshError,
            r"norm.weight:used=S\(0\)@dp cannot",
        ),
    ],
)
def test_what_cannot_be_kept_is_said(more: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        planned(**more)


@pytest.mark.parametrize(
    ("pins", "data_axes"),
    [
        (("lm_head.weight=S(0)@tp", "lm_head.weight=S(1)@tp"), ()),
        (("lm_head.weight=S(0)@tp", "lm_head.weight!=S(0)@tp"), ()),
        (("model.layers.*.mlp.up_proj.weight:used=R@tp", "model.layers.*.mlp.*.weight:used=S(0)@tp"), ()),
        (("lm_head.weight:used=S(1)@dp", "dp for data alone"), ("dp",)),
        (("lm_head.weight:used!=R@dp", "dp for data alone"), ("dp",)),
    ],
)
def test_contradictory_pins_are_both_named(pins: tuple[str, ...], data_axes: tuple[str, ...]) -> None:
    """Pins that have nothing to do with it are not."""
    innocent = "model.norm.weight=R@tp"
    given = (innocent, *pins[: 1 if data_axes else 2])
    with pytest.raises(JobError, match="contradict each other") as refused:
        planned(pins=given, data_axes=data_axes)
    assert all(repr(pin) in str(refused.value) for pin in pins)
    assert innocent not in str(refused.value)
    assert refused.value.what_to_do


def test_a_tied_parameter_rests_in_one_layout_under_both_its_names() -> None:
    module, inputs = families.make("gpt2", 8)
    pins = ("lm_head.weight=S(0)@tp", "transformer.wte.weight=S(1)@tp")
    with pytest.raises(JobError, match="contradict each other") as refused:
        build_plan(module, example_inputs=inputs, pins=pins, **OPTIONS)
    assert all(repr(pin) in str(refused.value) for pin in pins)


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param(("lm_head.weight=S(0)@tp", "lm_head.weight=S(0)@dp"), marks=pytest.mark.slow),
        pytest.param(("lm_head.weight=S(0)@tp", "lm_head.weight!=S(1)@tp"), marks=pytest.mark.slow),
        ("lm_head.weight=S(0)@tp", "lm_head.weight:used=R@tp"),
        ("lm_head.weight!=S(0)@tp", "lm_head.weight!=S(1)@tp"),
    ],
)
def test_pins_that_only_look_contradictory_are_kept(pins: tuple[str, ...]) -> None:
    plan = planned(pins=pins)
    stored, used = layouts(plan, "plan"), layouts(plan, "compute_plan")
    for pin in map(Pin.parse, pins):
        found = used.get(pin.pattern, stored[pin.pattern]) if pin.used else stored[pin.pattern]
        assert pin.allows(found, MESH), pin.text


def every_layout(plan: Any) -> dict[str, tuple[str, ...]]:
    """Return the pins that say a plan's layouts, at rest and in computing, and nothing else."""
    stored, used = layouts(plan, "plan"), layouts(plan, "compute_plan")
    return {
        sign: tuple(
            f"{re.sub(r'[.]([0-9]+)[.]', '.*.', name)}{sign}={placement_text}@{axis}"
            for name in NAMES
            for axis, placement_text in zip(MESH.names, format_layout(found(name)), strict=True)
        )
        for sign, found in (("", stored.__getitem__), (":used", lambda name: used.get(name, stored[name])))
    }


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_a_plan_pinned_down_to_the_last_parameter_is_kept_exactly(seed: int) -> None:
    """Another plan's layouts, all of them: the search has only the activations left to choose."""
    free, other = planned(), planned(planner=f"random:{seed}")
    assert layouts(other, "plan") != layouts(free, "plan")
    pins = every_layout(other)
    plan = planned(pins=(*dict.fromkeys(pins[""]), *dict.fromkeys(pins[":used"])))
    assert layouts(plan, "plan") == layouts(other, "plan")
    assert layouts(plan, "compute_plan") == layouts(other, "compute_plan")
    gap = free.job.mip_gap
    assert free.estimate.step_time_s * (1 - gap) <= plan.estimate.step_time_s
    assert plan.estimate.step_time_s <= other.estimate.step_time_s * (1 + gap)
