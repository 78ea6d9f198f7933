"""`plan_view`: all that the page and the report show of a plan, as JSON values; seconds, bytes, FLOPs are numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from api.render.axis_roles import axis_sentences
from api.render.comparison import NAMES, baseline_verdict, gap_text
from api.render.headline import headline, memory_texts, mfu, utilization_texts, verified_texts, warning_texts
from api.render.plan import MEMORY_NOTES, role_label
from api.render.run_cost import cluster_of, device_word
from api.render.text import duration, percent, significant
from api.view.timeline import Timeline, step_timeline
from cost_model.layouts.layout import Layout, format_layout
from planner.plan.axis_roles import axis_uses, weight_layouts
from planner.plan.estimate import Estimate, MeshReport
from planner.plan.patterns import match_keys
from planner.plan.ports import Port, ports_of
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.stated_errors import stated_error

Json = dict[str, Any]

_OUTCOMES = {
    "chosen": "the plan is on this mesh",
    "fastest": "the fastest plan found; the chosen one is simpler or more robust",
    "slower": "no plan on it that fits is faster",
    "does-not-fit": "no plan on it fits the memory",
    "no-layout": "the model has no layout on it",
    "open": "the search ended before it was decided",
}


def plan_view(plan: ShardingPlan, *, id: str | None = None, request: Json | None = None) -> Json:
    """Return what is shown of ``plan``.

    Args:
        id: id of the job that made it; None: there is no job.
        request: the request that it answers; None: not known.
    """
    cluster, estimate = cluster_of(plan), plan.estimate
    title, *rest = headline(plan)
    timeline = step_timeline(plan)
    return {
        "id": id,
        "title": title,
        "subtitle": " ".join(rest),
        "warnings": list(warning_texts(plan)),
        "assumed": list(plan.assumed),
        "notes": list(plan.notes),
        "headline": [] if estimate is None else list(_tiles(plan, estimate)),
        "model": plan.model,
        "micro_batches": plan.micro_batches,
        "checkpointing": plan.job.ac or "none",
        "cap_bytes": plan.job.memory_bytes,
        "cluster": None
        if cluster is None
        else {
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
            "device": cluster.device.name,
            "memory_bytes": cluster.memory_bytes,
        },
        "axes": [
            {"name": use.axis, "size": use.size, "role": use.role, "does": text.sentence}
            for use, text in zip(axis_uses(plan), axis_sentences(plan), strict=True)
        ],
        "time": None if estimate is None else _time(plan, estimate),
        "memory": None if estimate is None else _memory(plan, estimate, timeline),
        "timeline": None if timeline is None else timeline_view(timeline, plan.micro_batches),
        "layout_axes": list(plan.layout_mesh.names),
        "parameters": list(_parameters(plan)),
        "boundaries": list(_boundaries(plan)),
        **_parts(plan),
        "collectives": [] if estimate is None else [_fields(each) for each in estimate.collectives],
        "meshes": [] if plan.solver is None else [_mesh(each, plan) for each in plan.solver.meshes],
        "baselines": [
            {
                "name": each.name,
                "title": NAMES.get(each.name, each.name),
                "mesh": each.mesh,
                "step_s": each.step_time_s,
                "peak_bytes": each.peak_memory_bytes,
                "micro_batches": each.micro_batches,
                "checkpointing": each.ac,
                "verdict": baseline_verdict(each, plan),
            }
            for each in plan.baselines
        ],
        "pipeline": None if plan.pipeline is None else _pipeline(plan),
        "solver": None
        if plan.solver is None
        else {name: getattr(plan.solver, name) for name in ("status", "bound_s", "gap", "fastest_s", "fastest_mesh")},
        "techniques": [{"name": each.name, "saves_s": each.gain_s} for each in plan.techniques],
        "timings": dict(plan.timings),
        "request": request,
    }


def timeline_view(timeline: Timeline, micro_batches: int) -> Json:
    """Return a timeline as JSON values: labels are listed once, and events refer to them."""
    labels = {label: number for number, label in enumerate(dict.fromkeys(event.label for event in timeline.events))}
    return {
        "step_s": timeline.step_s,
        "micro_batches": micro_batches,
        "note": timeline.note,
        "tracks": [
            {"name": track.name, "kind": track.kind, "axis": track.axis, "seconds": timeline.track_seconds(number)}
            for number, track in enumerate(timeline.tracks)
        ],
        "labels": list(labels),
        "events": [
            [each.track, _rounded(each.start_s), _rounded(each.duration_s), labels[each.label], each.kind]
            for each in timeline.events
        ],
    }


# --- headline, time, memory ------------------------------------------------------------------------------------------


def _tiles(plan: ShardingPlan, estimate: Estimate) -> Iterator[Json]:
    cluster, step_s = cluster_of(plan), estimate.step_time_s
    stated = stated_error(plan, cluster)
    low, high = ((1 - stated.error) * step_s, (1 + stated.error) * step_s) if stated is not None else (None, None)
    band = "" if low is None or high is None else f"{duration(low)} to {duration(high)}"
    yield _tile("Step time", duration(step_s), band, step_s)
    if plan.job.batch is not None and step_s > 0:
        items, unit = plan.job.items
        each = items / step_s / plan.mesh.size
        note = f"per {device_word(cluster)}; {significant(items / step_s)} in all"
        yield _tile("Throughput", f"{significant(each)} {unit}/s", note, each)
    yield _tile("MFU", *utilization_texts(plan, estimate), mfu(plan))
    yield _tile("Memory", *memory_texts(plan, estimate), estimate.peak_memory_bytes)
    if plan.solver is not None and plan.solver.gap is not None and plan.solver.bound_s is not None:
        bound = f"no plan takes less than {duration(plan.solver.bound_s)}"
        yield _tile("Gap", gap_text(plan.solver), bound, plan.solver.gap)
    yield _tile("Verified", *verified_texts(plan), None)


def _tile(label: str, value: str, note: str, number: float | None) -> Json:
    return {"label": label, "value": value, "note": note, "number": number}


def _time(plan: ShardingPlan, estimate: Estimate) -> Json:
    idle_s = 0.0 if plan.pipeline is None else plan.pipeline.idle_s
    exposed_s = estimate.step_time_s - estimate.compute_s - estimate.optimizer_s - idle_s
    parts = {
        "compute": (estimate.compute_s, "kernels of forward and backward"),
        "exposed communication": (max(exposed_s, 0.0), "kernels wait for it, or run slower beside it"),
        "optimizer": (estimate.optimizer_s, ""),
        "bubble": (idle_s, "the stage waits for other stages"),
    }
    phases = {
        "forward": estimate.forward_s,
        "backward": estimate.backward_s,
        "gradient reduction": estimate.grad_reduce_s,
        "optimizer": estimate.optimizer_s,
        "bubble": idle_s,
    }
    shown = estimate.exposed_communication_s
    return {
        "step_s": estimate.step_time_s,
        "parts": [{"name": name, "seconds": s, "note": note} for name, (s, note) in parts.items() if s],
        "communication_s": estimate.communication_s,
        "overlapped_s": max(estimate.communication_s - shown, 0.0),
        "phases": [{"name": name, "seconds": seconds} for name, seconds in phases.items() if seconds],
    }


def _memory(plan: ShardingPlan, estimate: Estimate, timeline: Timeline | None) -> Json:
    cluster = cluster_of(plan)
    roles = sorted(estimate.memory.items(), key=lambda item: -item[1])
    curve = () if timeline is None else timeline.memory
    return {
        "peak_bytes": estimate.peak_memory_bytes,
        "capacity_bytes": None if cluster is None else cluster.memory_bytes,
        "cap_bytes": plan.job.memory_bytes,
        "roles": [
            {"role": role, "label": role_label(role), "bytes": nbytes, "note": MEMORY_NOTES.get(role, "")}
            for role, nbytes in roles
            if nbytes
        ],
        "curve": [{"at_s": _rounded(at.at_s), "label": at.label, "bytes": dict(at.nbytes)} for at in curve],
    }


# --- layouts ---------------------------------------------------------------------------------------------------------


def _parameters(plan: ShardingPlan) -> Iterator[Json]:
    sizes = {} if plan.breakdown is None else {each.name: each for each in plan.breakdown.parameters}
    matching = match_keys(plan.plan, sizes)
    for key, stored, computed in weight_layouts(plan):
        own = [sizes[name] for name in matching[key]] or ([sizes[key]] if key in sizes else [])
        shapes = {each.shape for each in own}
        gradient = plan.gradient_plan.get(key)
        yield {
            "name": key,
            "count": sum(each.count for each in own) or 1,
            "shape": list(next(iter(shapes))) if len(shapes) == 1 else None,
            "stored": _texts(stored),
            "computed": _texts(computed if computed is not None else stored),
            "gradient": None if gradient is None else _texts(gradient),
            "bytes": sum(each.nbytes for each in own) if own else None,
        }


def _boundaries(plan: ShardingPlan) -> Iterator[Json]:
    for entries in (plan.input_plan, plan.output_plan):
        for key, spec in entries.items():
            for path, port in ports_of(spec):
                yield _boundary(key, path, port)


def _boundary(key: str, path: str, port: Port) -> Json:
    return {
        "module": key or "the model",
        "tensor": path,
        "from": None if port.source is None else _texts(port.source),
        "to": _texts(port.layout),
    }


def _texts(layout: Layout) -> list[str]:
    return list(format_layout(layout))


# --- parts, meshes, stages -------------------------------------------------------------------------------------------


def _parts(plan: ShardingPlan) -> Json:
    parts = plan.breakdown
    if parts is None:
        return {"sections": [], "ops": [], "redistributions": []}
    return {
        "sections": [{"module": each.module or "(root)", "calls": each.calls} for each in parts.sections],
        "ops": [
            {**_fields(each), "module": each.module or "(root)", "calls": parts.sections[each.section].calls}
            for each in parts.ops
        ],
        "redistributions": [
            {
                "section": each.section,
                "producer": each.producer,
                "consumer": each.consumer,
                "from": list(each.before),
                "to": list(each.after),
                "seconds": each.time_s,
            }
            for each in parts.redistributions
        ],
    }


def _fields(value: Any) -> Json:
    """Return the fields of a dataclass with slots as JSON values."""
    values = {name: getattr(value, name) for name in value.__slots__}
    return {name: list(item) if isinstance(item, tuple) else item for name, item in values.items()}


def _mesh(report: MeshReport, plan: ShardingPlan) -> Json:
    why = _OUTCOMES[report.outcome]
    best_s = None if plan.estimate is None else plan.estimate.step_time_s
    if report.outcome == "slower" and report.at_least_s is not None and best_s:
        difference = report.at_least_s / best_s - 1
        why = f"takes at least {duration(report.at_least_s)}" + (
            f", {percent(difference)} more" if difference >= 0.0005 else ": no faster than the fastest plan"
        )
    return {
        "mesh": report.mesh,
        "outcome": report.outcome,
        "step_s": report.step_time_s,
        "at_least_s": report.at_least_s,
        "why": why,
    }


def _pipeline(plan: ShardingPlan) -> Json:
    pipeline = plan.pipeline
    assert pipeline is not None
    return {
        "schedule": pipeline.schedule,
        "chunks": pipeline.chunks,
        "idle_s": pipeline.idle_s,
        "stages": [
            {"modules": list(each.modules), "micro_batch_s": each.micro_batch_s, "peak_bytes": each.peak_memory_bytes}
            for each in pipeline.stages
        ],
    }


def _rounded(seconds: float) -> float:
    """Return ``seconds`` to a tenth of a nanosecond, which keeps the JSON short."""
    return round(seconds, 10)
