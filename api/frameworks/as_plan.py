"""A launch as a plan: the baseline whose layouts it has, planned and priced op by op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from api.frameworks.launch import Launch
from api.requests.price_configuration import PricedConfiguration
from api.requests.schemas import PlanRequest
from planner.plan.estimate import Estimate
from planner.plan.sharding_plan import ShardingPlan
from planner.run.baselines import KEEP_GATHERED

LARGE_DIFFERENCE = 0.1
"""Relative difference between the two prices of a launch from which its cause is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAPlan:
    """Why no plan has a launch's layouts."""

    reason: str


def request_of(
    launch: Launch, model: str | Mapping[str, Any], cluster: str | Mapping[str, Any], seq: int, memory_gb: float | None
) -> PlanRequest | NotAPlan:
    """Return the request of the plan with the layouts of ``launch``.

    Args:
        launch: a legal launch.
        model: as in a `PlanRequest`.
        cluster: as in a `PlanRequest`.
        seq: tokens of a sequence.
        memory_gb: cap on the memory of a device.
    """
    reason = _why_not(launch)
    if reason:
        return NotAPlan(reason=reason)
    planner, mesh = baseline_of(launch)
    training = launch.phase == "training"
    return PlanRequest(
        model=model,
        cluster=cluster,
        batch=launch.global_batch,
        seq=seq,
        mesh=mesh,
        phase=launch.phase,
        planner=_joined(planner, launch) if launch.zero == 3 else planner,
        micro_batches=launch.global_batch // (launch.data * launch.micro_batch) if training else None,
        ac=launch.checkpointing if training else None,
        dtype=launch.dtype,
        optimizer=launch.optimizer,
        memory_gb=memory_gb,
        tolerance=0.0,
    )


def _joined(baseline: str, launch: Launch) -> str:
    """Return the planner of a baseline all of whose FSDP groups reshard at one time, as those of the launch do."""
    return f"{baseline}+{baseline if launch.reshard_after_forward else KEEP_GATHERED}"


def baseline_of(launch: Launch) -> tuple[str, str]:
    """Return (baseline, mesh) whose layouts a launch without pipeline, context and expert parallelism has."""
    if launch.tensor > 1:
        name = "fsdp-tp" if launch.zero == 3 else "tp"
        data = ("fsdp" if launch.zero == 3 else "dp", launch.data)
        axes = [data, ("tp", launch.tensor)]
    elif launch.zero == 3 and launch.replicate > 1:
        name, axes = "hsdp", [("dp", launch.replicate), ("fsdp", launch.shard)]
    else:
        name, axes = ("fsdp", [("fsdp", launch.data)]) if launch.zero == 3 else ("ddp", [("dp", launch.data)])
    used = [axis for axis in axes if axis[1] > 1] or axes[:1]
    return name, ",".join(f"{axis}={size}" for axis, size in used)


def _why_not(launch: Launch) -> str:
    if launch.pipeline > 1:
        return "a pipeline is priced by its degrees only"
    if launch.context > 1 or launch.expert > 1:
        kind = "context" if launch.context > 1 else "expert"
        return f"{kind} parallelism beside other axes is priced by its degrees only"
    if launch.zero in (1, 2):
        return f"ZeRO-{launch.zero} is priced by its degrees only"
    if launch.replicate > 1 and launch.zero == 3 and launch.tensor > 1:
        return "a mesh of replicas, shards and tensor parallelism is priced by its degrees only"
    if launch.dtype not in ("bf16", "fp16", "fp32"):
        return f"{launch.dtype} is priced by its degrees only"
    if launch.checkpointing == "attention":
        return "recomputing attention alone is priced by its degrees only"
    if launch.offload:
        return "offloading is not planned"
    return ""


def difference(plan: ShardingPlan, priced: PricedConfiguration) -> str:
    """Return why the two prices of a launch differ by `LARGE_DIFFERENCE` or more: the part that does; "" otherwise."""
    estimate = plan.estimate
    if estimate is None:
        return ""
    by_plan, by_degrees = estimate.step_time_s, priced.time.total_s
    if abs(by_plan - by_degrees) < LARGE_DIFFERENCE * by_degrees:
        return ""
    parts = _parts(estimate, priced)
    name = max(parts, key=lambda part: abs(parts[part][0] - parts[part][1]))
    ours, theirs = parts[name]
    cause = f"mostly {name}: {ours:.3g} s as a plan, {theirs:.3g} s by degrees"
    if name == "kernels" and priced.parallel.implementation.kernels.fused_ops:
        return f"{cause}, where kernels are fused"
    return cause


def _parts(estimate: Estimate, priced: PricedConfiguration) -> dict[str, tuple[float, float]]:
    """Return part of the step -> its seconds (as a plan, by degrees)."""
    time = priced.time
    exposed = time.tensor_s + time.context_s + time.expert_s + time.data_s + time.pipeline_send_s + time.slowdown_s
    return {
        "kernels": (estimate.compute_s, time.compute_s + time.loss_s),
        "exposed communication": (estimate.exposed_communication_s, exposed),
        "the optimizer": (estimate.optimizer_s, time.optimizer_s),
    }
