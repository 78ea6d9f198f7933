"""The drawn step: its tracks add up to the estimate, nothing overlaps in a track, and memory peaks at the peak."""

from __future__ import annotations

from collections import defaultdict

import pytest
from support.drawn_plans import VIEWED, drawn_plan

from api.view.timeline import Timeline, block_name, step_timeline
from planner.plan.estimate import Estimate
from planner.plan.sharding_plan import ShardingPlan


def drawn(kind: str, **options: int) -> tuple[ShardingPlan, Estimate, Timeline]:
    plan = drawn_plan(kind)
    timeline = step_timeline(plan, **options)
    assert plan.estimate is not None
    assert timeline is not None
    return plan, plan.estimate, timeline


def seconds_of(timeline: Timeline, kinds: set[str]) -> float:
    return sum(event.duration_s for event in timeline.events if event.track == 0 and event.kind in kinds)


@pytest.mark.parametrize("most_events", [20_000, 0], ids=["blocks", "passes"])
@pytest.mark.parametrize("kind", VIEWED)
def test_lanes_add_up_to_the_estimate(kind: str, most_events: int) -> None:
    plan, estimate, timeline = drawn(kind, most_events=most_events)
    assert timeline.track_seconds(0) == pytest.approx(estimate.step_time_s)
    assert seconds_of(timeline, {"forward", "backward"}) == pytest.approx(estimate.compute_s)
    assert seconds_of(timeline, {"optimizer"}) == pytest.approx(estimate.optimizer_s)
    assert seconds_of(timeline, {"exposed"}) == pytest.approx(estimate.exposed_communication_s, abs=1e-12)
    idle_s = 0.0 if plan.pipeline is None else plan.pipeline.idle_s
    assert seconds_of(timeline, {"idle"}) == pytest.approx(idle_s, abs=1e-12)
    by_axis: dict[str, float] = defaultdict(float)
    for each in estimate.collectives:
        by_axis[each.axis] += each.time_s
    tracks = {
        track.axis: timeline.track_seconds(i) for i, track in enumerate(timeline.tracks) if track.axis is not None
    }
    assert tracks == pytest.approx(dict(by_axis))


@pytest.mark.parametrize("kind", VIEWED)
def test_events_of_a_lane_follow_each_other_within_the_step(kind: str) -> None:
    _, _, timeline = drawn(kind)
    slack = 1e-9 * timeline.step_s
    ends = [0.0] * len(timeline.tracks)
    for event in timeline.events:
        assert event.start_s >= ends[event.track] - slack
        ends[event.track] = event.start_s + event.duration_s
    assert max(ends) <= timeline.step_s + slack


@pytest.mark.parametrize("kind", VIEWED)
def test_the_memory_curve_peaks_at_the_peak(kind: str) -> None:
    _, estimate, timeline = drawn(kind)
    most = max(sum(point.nbytes.values()) for point in timeline.memory)
    assert most == pytest.approx(estimate.peak_memory_bytes, abs=16)
    assert all(0.0 <= point.at_s <= timeline.step_s * (1 + 1e-9) for point in timeline.memory)


def test_stages_wait_for_the_one_before() -> None:
    plan, _, timeline = drawn("1f1b")
    assert plan.pipeline is not None
    assert plan.pipeline.schedule == "1f1b"
    stages = [number for number, track in enumerate(timeline.tracks) if track.kind == "stage"]
    assert len(stages) == len(plan.pipeline.stages)
    first, second = ({event.label: event for event in timeline.events if event.track == track} for track in stages[:2])
    assert first.keys() == second.keys()
    for label, event in first.items():
        before, after = (event, second[label]) if "forward" in label else (second[label], event)
        assert before.start_s + before.duration_s <= after.start_s + 1e-9


def test_many_micro_batches_keep_the_drawing_small() -> None:
    plan, _, whole = drawn("tensor parallel, checkpointed")
    _, _, coarse = drawn("tensor parallel, checkpointed", most_events=10)
    assert len(coarse.events) < len(whole.events)
    assert any("model.layers.*" in event.label for event in coarse.events)
    assert any("model.layers.1" in event.label for event in whole.events)
    assert plan.micro_batches == 2


@pytest.mark.parametrize(
    ("pattern", "block", "name"),
    [
        ("model.layers.*.mlp", 3, "model.layers.3.mlp"),
        ("model.layers.{4-7}.mlp", 3, "model.layers.7.mlp"),
        ("model.layers.{0...24}", 1, "model.layers.{0...24}"),
        ("lm_head", 0, "lm_head"),
        ("model.layers.*", None, "model.layers.*"),
    ],
)
def test_the_name_of_a_block(pattern: str, block: int | None, name: str) -> None:
    assert block_name(pattern, block) == name


def test_a_plan_without_a_breakdown_has_no_timeline(hand_written_plan: ShardingPlan) -> None:
    assert step_timeline(hand_written_plan) is None
