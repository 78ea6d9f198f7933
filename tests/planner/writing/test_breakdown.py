"""A plan's breakdown adds up to its estimate: seconds, collectives, bytes; over parts, ops and points in time."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import pytest
from support.drawn_plans import KINDS, PIPELINES, drawn_plan
from support.pipeline_sessions import SLOW
from support.small_models import TINY_LLAMA

from api.requests.model_registry import load_model, quiet_libraries
from cost_model import ClusterSpec
from planner import estimate_plan
from planner.plan.estimate import Breakdown, Estimate
from planner.plan.sharding_plan import ShardingPlan


def parts_of(kind: str) -> tuple[ShardingPlan, Estimate, Breakdown]:
    plan = drawn_plan(kind)
    assert plan.estimate is not None
    assert plan.breakdown is not None
    return plan, plan.estimate, plan.breakdown


@pytest.mark.parametrize("kind", KINDS)
def test_sections_add_up_to_the_seconds_of_the_estimate(kind: str) -> None:
    _, estimate, parts = parts_of(kind)
    assert sum(each.forward_s + each.backward_s for each in parts.sections) == pytest.approx(estimate.compute_s)
    waits = sum(each.forward_wait_s + each.backward_wait_s for each in parts.sections)
    assert waits <= estimate.exposed_communication_s * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_sections_have_the_collectives_of_the_estimate(kind: str) -> None:
    _, estimate, parts = parts_of(kind)
    by_axis: dict[tuple[str, str], float] = defaultdict(float)
    for section in parts.sections:
        for each in section.collectives:
            by_axis[each.kind, each.axis] += each.time_s
    expected: dict[tuple[str, str], float] = defaultdict(float)
    for each in estimate.collectives:
        expected[each.kind, each.axis] += each.time_s
    assert by_axis == pytest.approx(dict(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_ops_take_no_longer_than_their_section_and_read_earlier_ops(kind: str) -> None:
    _, _, parts = parts_of(kind)
    for number, section in enumerate(parts.sections):
        ops = [op for op in parts.ops if op.section == number]
        assert sum(op.forward_s for op in ops) == pytest.approx(section.forward_s)
        # What adds gradients up belongs to no op.
        assert sum(op.backward_s for op in ops) <= section.backward_s * (1 + 1e-9)
    for index, op in enumerate(parts.ops):
        assert all(producer < index and parts.ops[producer].section == op.section for producer in op.inputs)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "decode"])
def test_the_fullest_point_is_the_peak(kind: str) -> None:
    _, estimate, parts = parts_of(kind)
    fullest = max(sum(point.live.values()) for point in parts.memory)
    assert sum(parts.held.values()) + fullest == pytest.approx(estimate.peak_memory_bytes, abs=16)
    assert all(0.0 <= point.fraction <= 1.0 for point in parts.memory)


def test_a_step_of_decoding_has_one_amount_of_memory() -> None:
    _, estimate, parts = parts_of("decode")
    most = max((sum(point.live.values()) for point in parts.memory), default=0)
    assert sum(parts.held.values()) + most == pytest.approx(estimate.peak_memory_bytes, abs=16)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PIPELINES])
def test_parameters_have_the_bytes_that_the_optimizer_updates(kind: str) -> None:
    """Every parameter is listed once: its elements, stored in the dtype of the job, add up to the model's."""
    plan, _, parts = parts_of(kind)
    numel = sum(each.count * math.prod(each.shape) for each in parts.parameters)
    stored = sum(each.nbytes for each in parts.parameters)
    assert stored * plan.mesh.size >= 4 * numel
    assert stored <= 4 * numel


def test_blocks_of_two_modes_are_two_sections() -> None:
    _, _, parts = parts_of("some blocks checkpointed")
    blocks = [section for section in parts.sections if "layers" in section.module]
    assert [(each.module, each.calls) for each in blocks] == [("model.layers.{0-1}", 2), ("model.layers.{2-3}", 2)]
    assert blocks[0].backward_s > 1.1 * blocks[1].backward_s


def test_encoder_and_decoder_come_in_their_order() -> None:
    _, _, parts = parts_of("encoder and decoder")
    modules = [section.module for section in parts.sections]
    first = {
        name: next(i for i, module in enumerate(modules) if module.startswith(name)) for name in ("encoder", "decoder")
    }
    assert first["encoder"] < first["decoder"]


def test_a_stage_has_the_names_of_its_own_blocks() -> None:
    _, _, parts = parts_of("1f1b")
    assert [section.module for section in parts.sections if "layers" in section.module] == [
        f"model.layers.{parts.stage}"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_breakdown_survives_the_file(kind: str) -> None:
    plan = drawn_plan(kind)
    assert ShardingPlan.from_dict(plan.to_dict()).breakdown == plan.breakdown


def test_plans_without_a_breakdown_are_read() -> None:
    plan = dataclasses.replace(drawn_plan("fsdp"), breakdown=None)
    data = plan.to_dict()
    del data["breakdown"]
    assert ShardingPlan.from_dict(data) == plan


def test_a_plan_that_is_priced_on_another_cluster_has_its_breakdown() -> None:
    plan, _, parts = parts_of("tensor parallel, checkpointed")
    slower = ClusterSpec.parse(SLOW)
    with quiet_libraries():
        module = load_model({"hf_config": TINY_LLAMA}, seq=32).module
    priced = estimate_plan(module, plan, cluster=slower)
    assert priced.estimate is not None
    assert priced.breakdown is not None
    collectives = [each for section in priced.breakdown.sections for each in section.collectives]
    assert sum(each.time_s for each in collectives) == pytest.approx(priced.estimate.communication_s)
    assert sum(each.time_s for each in collectives) > sum(
        each.time_s for section in parts.sections for each in section.collectives
    )
