"""`chrome_trace`: the predicted step in the Trace Event Format, which Perfetto and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project (complete events "X", counters "C", metadata "M"; microseconds).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from api.view.timeline import Event, Timeline, Track, block_name, step_timeline
from planner.errors import PlanError
from planner.plan.estimate import Breakdown, OpCost
from planner.plan.sharding_plan import ShardingPlan

MOST_EVENTS = 200_000
"""Events above which the ops of the first micro-batch alone are drawn."""

_US = 1e6
_DEVICE, _STAGES = 1, 2
"""Process ids: of the device whose step is shown, and of the stages of a pipeline."""


def chrome_trace(plan: ShardingPlan, *, ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Return the predicted step of ``plan`` as a trace.

    Args:
        ranks: ranks of a pipeline whose stages have a track; empty: all stages have one.

    Raises:
        PlanError: the plan does not say where its seconds are spent, or has no such rank.
    """
    timeline = step_timeline(plan, most_events=MOST_EVENTS)
    if timeline is None or plan.breakdown is None:
        raise PlanError(
            "The plan does not say where the seconds of its step are spent.",
            what_to_do="Plan again: plans of `shardplan plan` and build_plan say so.",
        )
    stages = _stages_of(plan, ranks)
    title = f"{plan.model or 'model'} on {plan.mesh}"
    return {
        "displayTimeUnit": "ms",
        "otherData": {"plan": title, "step_time_s": timeline.step_s, "note": timeline.note},
        "traceEvents": [
            *_names(timeline.tracks, title, stages),
            *_slices(timeline, plan.breakdown, stages, plan.micro_batches),
            *_counters(timeline),
        ],
    }


def _stages_of(plan: ShardingPlan, ranks: Sequence[int]) -> frozenset[str] | None:
    """Return the names of the tracks of the stages that ``ranks`` are in; None: of all stages."""
    if not ranks:
        return None
    wrong = [rank for rank in ranks if not 0 <= rank < plan.mesh.size]
    if wrong:
        raise PlanError(
            f"There is no rank {', '.join(map(str, wrong))}: the plan is for {plan.mesh.size} ranks.",
            what_to_do=f"Give ranks from 0 to {plan.mesh.size - 1}.",
        )
    per_stage = plan.mesh.size // (1 if plan.pipeline is None else len(plan.pipeline.stages))
    return frozenset(f"stage {rank // per_stage}" for rank in ranks)


def _is_shown(track: Track, stages: frozenset[str] | None) -> bool:
    return track.kind != "stage" or stages is None or track.name in stages


def _process(track: Track) -> int:
    return _STAGES if track.kind == "stage" else _DEVICE


def _names(tracks: Sequence[Track], title: str, stages: frozenset[str] | None) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", _DEVICE, 0, {"name": f"one device: {title}"})
    if any(track.kind == "stage" for track in tracks):
        yield _metadata("process_name", _STAGES, 0, {"name": "pipeline stages"})
    for number, track in enumerate(tracks):
        if _is_shown(track, stages):
            name = f"communication on {track.name}" if track.kind == "communication" else track.name
            yield _metadata("thread_name", _process(track), number + 1, {"name": name})
            yield _metadata("thread_sort_index", _process(track), number + 1, {"sort_index": number})


def _metadata(name: str, pid: int, tid: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": dict(arguments)}


def _slices(
    timeline: Timeline, parts: Breakdown, stages: frozenset[str] | None, micro_batches: int
) -> Iterator[dict[str, Any]]:
    ops: dict[int, list[OpCost]] = {}
    for op in parts.ops:
        ops.setdefault(op.section, []).append(op)
    every = sum(len(ops.get(event.section or 0, ())) for event in timeline.events if event.track == 0) <= MOST_EVENTS
    for event in timeline.events:
        track = timeline.tracks[event.track]
        if not _is_shown(track, stages):
            continue
        yield _slice(
            event.label, event.kind, event.start_s, event.duration_s, event, _process(track), _arguments(event)
        )
        in_detail = every or event.micro_batch == 0
        if event.track == 0 and event.section is not None and event.kind in ("forward", "backward") and in_detail:
            yield from _op_slices(event, ops.get(event.section, []), parts, micro_batches)


def _slice(
    name: str, category: str, start_s: float, duration_s: float, event: Event, pid: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_s * _US,
        "dur": duration_s * _US,
        "pid": pid,
        "tid": event.track + 1,
        "args": dict(arguments),
    }


def _arguments(event: Event) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if event.micro_batch is not None:
        arguments["micro_batch"] = event.micro_batch
    if event.collective is not None:
        each = event.collective
        arguments |= {"collective": each.kind, "axis": each.axis, "phase": each.phase, "bytes": each.bytes}
    return arguments


def _op_slices(event: Event, ops: Sequence[OpCost], parts: Breakdown, micro_batches: int) -> Iterator[dict[str, Any]]:
    """Yield the ops inside a slice of kernels; those of several blocks together are drawn as of one."""
    assert event.section is not None
    section = parts.sections[event.section]
    calls = micro_batches * (section.calls if event.block is not None or section.calls == 1 else 1)
    forward = event.kind == "forward"
    seconds = [(op, (op.forward_s if forward else op.backward_s) / calls) for op in ops]
    at_s, end_s = event.start_s, event.start_s + event.duration_s
    for op, duration_s in seconds if forward else reversed(seconds):
        if duration_s <= 0:
            continue
        duration_s = min(duration_s, max(end_s - at_s, 0.0))
        module = block_name(op.module, event.block) or "(root)"
        arguments = {"module": module, "flops_of_the_forward": op.flops, "bytes_of_the_forward": op.nbytes}
        yield _slice(op.op, f"{event.kind} op", at_s, duration_s, event, _DEVICE, arguments)
        at_s += duration_s


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for point in timeline.memory:
        values = {role: max(nbytes, 0) for role, nbytes in point.nbytes.items()}
        yield {"name": "memory (bytes)", "ph": "C", "pid": _DEVICE, "ts": point.at_s * _US, "args": values}
