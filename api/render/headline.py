"""The head of a printed plan: what is planned, warnings, step time, MFU, what binds, memory, verification."""

from __future__ import annotations

from collections.abc import Iterator

from api.render.axis_roles import useful_devices
from api.render.run_cost import cluster_of, device_word, run_cost_line
from api.render.text import duration, fold, labelled, percent, significant, size, with_band
from api.requests.run_cost import RunCost
from cost_model import OPTIMIZERS, ClusterSpec
from cost_model.hardware.unlike_devices import NodeGroup
from planner.plan.sharding_plan import Estimate, Job, ShardingPlan
from planner.plan.stated_errors import stated_error

LOUD_NOTES = (
    "forward returns no loss",
    "a pipeline cannot be run",
    "the plan assumes async",
    "shard_module does not run",
    "the devices differ",
    "the whole model runs as one op",
)
"""Beginnings of the notes that say that a plan, or its figures, are not what one would take them for."""

_STREAMING = 0.5
"""Fraction of the kernels' time below which FLOPs at the peak rate explain it, so that memory traffic is named."""


def headline(plan: ShardingPlan) -> list[str]:
    """Return two lines: model and devices; phase, tokens a step, dtype, optimizer."""
    return [*fold(f"{plan.model or 'A model'} on {_devices(plan)}"), *fold(_job(plan.job))]


def assumed(plan: ShardingPlan) -> list[str]:
    """Return lines that say what the job lacked and the planner assumed; none where it lacked nothing."""
    return [line for text in plan.assumed for line in fold(text, "assumed: ")]


def warnings(plan: ShardingPlan) -> list[str]:
    """Return lines that warn of what makes a plan slow or fragile; none where nothing does."""
    return [line for text in warning_texts(plan) for line in fold(text, "Warning: ")]


def figures(plan: ShardingPlan, cost: RunCost | None) -> list[str]:
    """Return a line for each of step time, MFU, memory, verification, and for the price of a run, if it was asked."""
    if plan.estimate is None:
        lines = labelled("step time", "not priced", "`shardplan estimate MODEL PLAN` prices it")
    else:
        lines = [*_step_time(plan, plan.estimate), *labelled("MFU", *utilization_texts(plan, plan.estimate))]
        lines += labelled("memory", *memory_texts(plan, plan.estimate))
    answer, remark = verified_texts(plan)
    lines += labelled("verified", f"{answer}{remark and ': '}{remark}")
    return lines + ([] if cost is None else labelled(*run_cost_line(plan, cost)))


def binding(plan: ShardingPlan, estimate: Estimate) -> tuple[str, float]:
    """Return what binds the step, and its fraction of the step time (above 1 for the host, which is not in it)."""
    step_s = estimate.step_time_s
    if estimate.host_s is not None and estimate.host_s > step_s > 0:
        return "the host", estimate.host_s / step_s
    parts = {
        _kernels(plan, estimate): estimate.compute_s,
        "exposed communication": estimate.exposed_communication_s,
        "the optimizer's memory traffic": estimate.optimizer_s,
        "the pipeline's bubble": 0.0 if plan.pipeline is None else plan.pipeline.idle_s,
    }
    name = max(parts, key=lambda part: parts[part])
    return name, parts[name] / step_s if step_s > 0 else 0.0


def mfu(plan: ShardingPlan) -> float | None:
    """Return the MFU: FLOP/s of the model over the devices' peak of the job's dtype; None where it is not known."""
    estimate, cluster = plan.estimate, cluster_of(plan)
    if estimate is None or cluster is None or not estimate.model_flops or estimate.step_time_s <= 0:
        return None
    return estimate.model_flops / estimate.step_time_s / plan.mesh.size / _peak(cluster, plan.job.dtype)


def _peak(cluster: ClusterSpec, dtype: str) -> float:
    rates = cluster.device.peak_flops
    return rates.get(dtype, rates["fp32"])


def _kernels(plan: ShardingPlan, estimate: Estimate) -> str:
    """Return "compute" or "memory traffic", by how much of the kernels' time the model's FLOPs explain."""
    cluster = cluster_of(plan)
    if cluster is None or not estimate.model_flops or estimate.compute_s <= 0:
        return "compute"
    peak = _peak(cluster, plan.job.dtype) * cluster.device.gemm_efficiency
    least_s = estimate.model_flops / useful_devices(plan) / peak
    return "compute" if least_s >= _STREAMING * estimate.compute_s else "memory traffic"


def _devices(plan: ShardingPlan) -> str:
    cluster = cluster_of(plan)
    if cluster is None:
        return f"{plan.mesh.size} device{'s' if plan.mesh.size > 1 else ''}"
    nodes = f" ({cluster.nodes:,} nodes of {cluster.devices_per_node})" if cluster.nodes > 1 else ""
    groups = cluster.groups or (NodeGroup(nodes=cluster.nodes, device=cluster.device),)
    kinds = (f"{each.nodes * cluster.devices_per_node:,} x {each.device.name.upper()}" for each in groups)
    return f"{' + '.join(kinds)}{nodes}"


def _job(job: Job) -> str:
    kind = {"training": "training" if job.training else "forward only", "decode": "decoding"}.get(job.phase, job.phase)
    parts = [kind]
    if job.batch is not None and job.phase == "decode" and job.seq is not None:
        parts.append(f"{job.batch:,} sequences with {job.seq:,} tokens in the cache")
    elif job.batch is not None:
        parts.append((f"{job.batch:,} x {job.seq:,} tokens" if job.seq else f"{job.batch:,} samples") + " a step")
    parts += [job.dtype, *([OPTIMIZERS[job.optimizer].title] if job.training else [])]
    return ", ".join(parts)


def warning_texts(plan: ShardingPlan) -> Iterator[str]:
    """Yield what makes a plan slow or fragile, a text each."""
    estimate = plan.estimate
    if estimate is not None and estimate.host_s is not None and estimate.host_s > estimate.step_time_s:
        yield (
            f"a step would wait for the host: PyTorch needs about {duration(estimate.host_s)} in eager mode to "
            f"dispatch ops that run for {duration(estimate.step_time_s)} (estimated from their number). "
            "Use CUDA graphs or a larger batch."
        )
    useful, total = useful_devices(plan), plan.mesh.size
    if useful < total:
        axes = f"{useful:,} of {total:,} devices do all the work; the others repeat it."
        otherwise = "mend what makes the model one op" if "" in plan.opaque_modules else "a larger batch"
        yield f"{axes} Use {useful:,} {'device' if useful == 1 else 'devices'}, or {otherwise}."
    if estimate is not None:
        yield from _memory_warnings(plan, estimate)
    if plan.verification is not None and plan.verification.outcome == "not-run":
        yield f"the plan was not verified: {plan.verification.reason or 'it was not run'}"
    yield from (note for note in plan.notes if note.startswith(LOUD_NOTES))


def _memory_warnings(plan: ShardingPlan, estimate: Estimate) -> Iterator[str]:
    cluster = cluster_of(plan)
    peak = estimate.peak_memory_bytes
    if cluster is None:
        return
    if peak > cluster.memory_bytes:
        yield f"the plan does not fit: it needs {size(peak)}, and a device has {size(cluster.memory_bytes)}."
    elif not _keeps_headroom(plan, estimate, cluster):
        free = cluster.memory_bytes - peak
        yield (
            f"no headroom: {size(free)} of {size(cluster.memory_bytes)} stay free "
            f"({percent(free / cluster.memory_bytes)}; {percent(plan.job.headroom)} was asked for). "
            "Fragmentation alone can take that."
        )


def _keeps_headroom(plan: ShardingPlan, estimate: Estimate, cluster: ClusterSpec) -> bool:
    return estimate.peak_memory_bytes <= (1 - plan.job.headroom) * cluster.memory_bytes * (1 + 1e-9)


def _step_time(plan: ShardingPlan, estimate: Estimate) -> list[str]:
    stated = stated_error(plan, cluster_of(plan))
    figure = with_band(estimate.step_time_s, None if stated is None else stated.error)
    return labelled("step time", figure, _rate(plan, estimate))


def _rate(plan: ShardingPlan, estimate: Estimate) -> str:
    if plan.job.batch is None or estimate.step_time_s <= 0:
        return ""
    items, unit = plan.job.items
    rate = items / estimate.step_time_s
    each = f", {significant(rate / plan.mesh.size)} per {device_word(cluster_of(plan))}" if plan.mesh.size > 1 else ""
    return f"{significant(rate)} {unit}/s{each}"


def utilization_texts(plan: ShardingPlan, estimate: Estimate) -> tuple[str, str]:
    """Return the MFU, and what binds the step, as text."""
    share = mfu(plan)
    name, part = binding(plan, estimate)
    amount = f"{significant(part, 2)} x the step" if part > 1 else percent(part)
    bound = f"bound by {name} ({amount})" if estimate.step_time_s > 0 else ""
    return "not counted" if share is None else f"{significant(100 * share)} %", bound


def memory_texts(plan: ShardingPlan, estimate: Estimate) -> tuple[str, str]:
    """Return the peak of the device's memory, and what stays free, as text."""
    cluster, peak, cap = cluster_of(plan), estimate.peak_memory_bytes, plan.job.memory_bytes
    if cluster is None:
        return size(peak) + ("" if cap is None else f" of {size(cap)} allowed"), ""
    capacity = cluster.memory_bytes
    free = max(capacity - peak, 0) / capacity
    remark = f"{percent(free)} free"
    if cap is not None and cap < 0.999 * (1 - plan.job.headroom) * capacity:
        remark += f", {size(cap)} allowed"
    elif plan.job.headroom > 0 and _keeps_headroom(plan, estimate, cluster):
        remark += f", headroom of {percent(plan.job.headroom)} kept"
    return f"{size(peak)} of {size(capacity)}", remark


def verified_texts(plan: ShardingPlan) -> tuple[str, str]:
    """Return whether the plan was run on fake processes ("yes", "no" or "not yet"), and a remark, as text."""
    verification = plan.verification
    if verification is None:
        is_priced_only = plan.pipeline is not None or plan.job.async_tp
        return ("no", "such a plan is priced, not run") if is_priced_only else ("not yet", "`shardplan verify` does")
    if verification.outcome != "as-planned":
        return "no", verification.reason or ""
    kinds = f"{verification.kinds} kind{'' if verification.kinds == 1 else 's'} of collectives"
    return "yes", f"{kinds} run{'s' if verification.kinds == 1 else ''} as planned"
