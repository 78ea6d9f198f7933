"""What every layout of a parameter would cost, against planning with that layout by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support import families

from planner import build_plan, explain
from planner.errors import MeshError, PlanMismatchError, UnmatchedKeyError
from planner.explanation import difference

CLUSTER = "1x4xtoy"
OPTIONS: dict[str, Any] = {"cluster": CLUSTER, "mesh": "dp=2,tp=2", "micro_batches": 1, "ac": "none"}


@pytest.fixture(scope="module")
def planned() -> object:
    module, inputs = families.make("llama", 8)
    plan = build_plan(module, example_inputs=inputs, tolerance=0.0, **OPTIONS)
    return module, inputs, plan


def test_the_chosen_layout_is_the_plans_and_no_other_is_faster(planned: tuple) -> None:
    module, inputs, plan = planned
    found = explain(module, plan, "model.layers.0.mlp.gate_proj.weight", example_inputs=inputs)
    assert found.plan == plan.estimate
    assert "model.layers.1.mlp.gate_proj.weight" in found.names
    for aspect in ("stored", "computed"):
        rows = [row for row in found.alternatives if row.aspect == aspect]
        assert len(rows) > 3
        (chosen,) = (row for row in rows if row.chosen)
        assert chosen.estimate is not None
        assert chosen.estimate == plan.estimate
        for row in rows:
            if row.estimate is not None and row.fits:
                assert row.estimate.step_time_s >= plan.estimate.step_time_s * (1 - plan.job.mip_gap)
                parts, _ = difference(row.estimate, plan.estimate)
                slower_s = row.estimate.step_time_s - plan.estimate.step_time_s
                assert sum(parts.values()) == pytest.approx(slower_s, abs=0.02 * plan.estimate.step_time_s)
    assert str(found).startswith("model.layers.0.mlp.gate_proj.weight, with")
    assert "Computed as" in str(found)


def check_against_pins(planned: tuple, parameter: str, *, chosen_alone: bool) -> None:
    """Compare the rows of an explanation with what planning anew comes to with their layouts pinned."""
    module, inputs, plan = planned
    found = explain(module, plan, parameter, example_inputs=inputs)
    pattern = re.sub(r"[.][0-9]+[.]", ".*.", parameter)
    chosen = [row for row in found.alternatives if row.chosen]
    assert [row.aspect for row in chosen] == ["stored", "computed"]
    assert all(row.estimate == plan.estimate for row in chosen)
    for row in chosen if chosen_alone else found.alternatives:
        used = ":used" if row.aspect == "computed" else ""
        pins = [f"{pattern}{used}={text}@{axis}" for text, axis in zip(row.layout, plan.mesh.names, strict=True)]
        if row.estimate is None:
            with pytest.raises(MeshError):
                build_plan(module, pins=pins, example_inputs=inputs, **OPTIONS)
            continue
        pinned = build_plan(module, pins=pins, example_inputs=inputs, tolerance=0.0, **OPTIONS)
        assert pinned.estimate.step_time_s == pytest.approx(row.estimate.step_time_s, rel=2 * plan.job.mip_gap), row


def test_the_chosen_rows_are_what_planning_with_them_pinned_comes_to(planned: tuple) -> None:
    check_against_pins(planned, "lm_head.weight", chosen_alone=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameter", ["lm_head.weight", "model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"]
)
def test_every_row_is_what_planning_with_it_pinned_comes_to(planned: tuple, parameter: str) -> None:
    check_against_pins(planned, parameter, chosen_alone=False)


def test_what_does_not_fit_is_priced_all_the_same(planned: tuple) -> None:
    """With little memory, the embedding cannot rest whole on every device; the row says how much it would take."""
    module, inputs, _ = planned
    options = {"example_inputs": inputs, **OPTIONS}
    roomy = build_plan(module, planner="data-parallel", **options)
    tight = build_plan(module, memory_gb=roomy.estimate.peak_memory_bytes * 0.6 / 1e9, **options)
    found = explain(module, tight, "model.embed_tokens.weight", example_inputs=inputs)
    for row in found.alternatives:
        if row.estimate is not None:
            assert row.fits == (row.estimate.peak_memory_bytes <= found.memory_bytes)
    assert any(row.fits for row in found.alternatives)


def test_a_parameter_that_is_not_there_is_named_with_its_neighbours(planned: tuple) -> None:
    module, inputs, plan = planned
    with pytest.raises(UnmatchedKeyError, match=r"model\.embed_tokens\.weight"):
        explain(module, plan, "model.embed_token.weight", example_inputs=inputs)


def test_the_plan_of_another_model_is_refused(planned: tuple) -> None:
    _, _, plan = planned
    other, inputs = families.make("mlp", 8)
    name = next(name for name, _ in other.named_parameters())
    with pytest.raises(PlanMismatchError):
        explain(other, plan, name, example_inputs=inputs)
