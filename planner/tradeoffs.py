"""Comparisons of plans: alternative meshes, Pareto front of time and memory, sweep over device counts, batch sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

from torch import nn

from cost_model import ClusterSpec
from planner.errors import JobError, SolverError
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule, trace_module
from planner.plan.job_spec import JobOptions, JobSpec, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Progress, SweepProgress
from planner.session import PlanningSession

Objective = Literal["step-time", "cost", "fewest-devices"]

_SHARE = 0.8
"""Fraction of a plan's peak memory that the next plan of the Pareto front may use."""


def step_time_s(plan: ShardingPlan) -> float:
    """Return the estimated step time in seconds of a plan that has an estimate."""
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def peak_bytes(plan: ShardingPlan) -> int:
    """Return the estimated peak memory in bytes per device of a plan that has an estimate."""
    assert plan.estimate is not None
    return plan.estimate.peak_memory_bytes


def alternatives(session: PlanningSession, best: ShardingPlan, count: int) -> tuple[ShardingPlan, ...]:
    """Return the fastest plan of each of the ``count`` best other meshes, the fastest first.

    There are fewer plans if fewer meshes have one.

    Args:
        session: session of the job.
        best: the job's fastest plan over several meshes, by the planner "ilp".
        count: number of plans.
    """
    other_meshes = [] if best.solver is None else [m for m in best.solver.meshes if m.outcome != "chosen"]
    plans: list[ShardingPlan] = []
    for least_s, mesh in sorted((m.at_least_s, m.mesh) for m in other_meshes if m.at_least_s is not None):
        if len(plans) >= count and least_s >= step_time_s(plans[count - 1]):
            break
        plan = _in_time(session, mesh, keep_names=False)
        if plan is not None:
            plans = sorted([*plans, plan], key=step_time_s)
    return tuple(plans[:count])


def pareto_front(session: PlanningSession, *, mesh: str | None = None, share: float = _SHARE) -> list[ShardingPlan]:
    """Return the Pareto front of step time and peak memory, the fastest and largest plan first.

    The first plan is the fastest. The last plan has the least peak memory. Each plan between them is the fastest whose
    peak is at most ``share`` of the previous plan's.

    Args:
        session: session of the job.
        mesh: mesh of all plans; None: each plan has the best of all meshes with up to ``axes`` axes.
        share: fraction of a plan's peak that the next plan may use, above 0 and below 1.

    Raises:
        PlannerError: there is no plan. `InfeasibleError`: no plan fits the memory.
    """
    if not 0 < share < 1:
        raise JobError(f"share is {share}.", what_to_do="Give a part of 1, such as 0.8.", field="share")
    plans = [session.plan(mesh=mesh)]
    plans += _smaller(session, plans[0], mesh, share)
    front: list[ShardingPlan] = []
    for plan in reversed(plans):
        if not front or step_time_s(plan) < step_time_s(front[-1]):
            front.append(plan)
    return front[::-1]


def _smaller(session: PlanningSession, plan: ShardingPlan, mesh: str | None, share: float) -> Iterator[ShardingPlan]:
    """Yield the fastest plans under ever smaller memory caps, down to the least peak; end where time runs out."""
    least_bytes = session.least_memory_bytes(mesh=mesh)
    if least_bytes is None or least_bytes >= peak_bytes(plan):
        return
    smaller: ShardingPlan | None = plan
    while smaller is not None and least_bytes < peak_bytes(smaller):
        memory_bytes = max(int(peak_bytes(smaller) * share), least_bytes)
        smaller = _in_time(session, mesh, memory_bytes)
        if smaller is not None:
            yield smaller


def _in_time(
    session: PlanningSession, mesh: str | None, memory_bytes: int | None = None, *, keep_names: bool = True
) -> ShardingPlan | None:
    """Return the fastest plan; None: no plan fits, or the time limit came before any plan was found."""
    try:
        return session.plan_if_any(mesh=mesh, memory_bytes=memory_bytes, keep_names=keep_names)
    except SolverError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """The best plan of a job on one cluster of a sweep.

    Attributes:
        cluster: the cluster.
        plan: the fastest plan; None: no plan fits, or the time limit came before any plan was found.
        in_time: False if the time limit came before any plan was found.
    """

    cluster: ClusterSpec
    plan: ShardingPlan | None
    in_time: bool = True

    @property
    def device_s(self) -> float:
        """Device-seconds of a step: its seconds, summed over all devices."""
        assert self.plan is not None
        return step_time_s(self.plan) * self.cluster.size


def sweep(
    model: nn.Module | TracedModule,
    *,
    spec: JobSpec | None = None,
    example_inputs: GivenInputs = None,
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    counts: Sequence[int] | None = None,
    **options: Unpack[JobOptions],
) -> list[ClusterSize]:
    """Return the best plan on clusters of 1, 2, 4, ... devices of the same nodes, up to the given cluster.

    Args:
        model: as for `build_plan`.
        example_inputs: as for `build_plan`.
        tp_plan: as for `build_plan`.
        progress: as for `build_plan`.
        counts: numbers of devices; None: 1, 2, 4, ... and the whole cluster.
        spec: the job. Its cluster is the largest of the sweep; its mesh is ignored. None: ``options`` give the job.
        options: the fields of `JobSpec`, in place of ``spec``.

    Raises:
        PlannerError: the job cannot be planned at all, or the cluster has no such number of devices.
    """
    spec = spec_of(options) if spec is None else spec
    largest = spec.cluster if isinstance(spec.cluster, ClusterSpec) else ClusterSpec.parse(spec.cluster)
    parts = parts_of(largest) if counts is None else [part_of(largest, count) for count in dict.fromkeys(counts)]
    if not isinstance(model, TracedModule):
        model = trace_module(
            model,
            example_inputs=example_inputs,
            batch=spec.batch,
            seq=spec.seq,
            micro_batches=spec.micro_batches,
            dtype=spec.dtype,
            fused_ops=spec.fused_ops,
            fused_projections=spec.fused_projections,
            opaque_modules=spec.opaque_modules,
        )
    sizes = []
    for part in parts:
        session = PlanningSession(
            model, spec=dataclasses.replace(spec, cluster=part), tp_plan=tp_plan, progress=_for(part.name, progress)
        )
        try:
            sizes.append(ClusterSize(cluster=part, plan=session.plan_if_any(tolerance=spec.tolerance)))
        except SolverError:
            sizes.append(ClusterSize(cluster=part, plan=None, in_time=False))
    return sizes


def _for(subject: str, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda event: progress(SweepProgress(subject=subject, event=event))


def parts_of(cluster: ClusterSpec) -> list[ClusterSpec]:
    """Return clusters of 1, 2, 4, ... devices, up to ``cluster`` itself: parts of one node, then whole nodes."""
    per_node = [2**i for i in range(cluster.devices_per_node.bit_length()) if 2**i < cluster.devices_per_node]
    nodes = [2**i for i in range(cluster.nodes.bit_length()) if 2**i < cluster.nodes]
    return [
        *(_part(cluster, nodes=1, devices_per_node=count) for count in per_node),
        *(dataclasses.replace(cluster, nodes=count) for count in nodes),
        cluster,
    ]


def part_of(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """Return the part of ``cluster`` with ``count`` devices on as few nodes as hold them, the same number on each.

    Raises:
        JobError: the cluster is smaller, or no number of its nodes holds ``count`` devices evenly.
    """
    if not 1 <= count <= cluster.size:
        advice = f"Give numbers from 1 to {cluster.size}, or a larger --cluster."
        raise JobError(f"{count} devices of {cluster.name}.", what_to_do=advice, field="devices")
    for nodes in range(math.ceil(count / cluster.devices_per_node), cluster.nodes + 1):
        if count % nodes == 0:
            return _part(cluster, nodes=nodes, devices_per_node=count // nodes)
    below = max(c for c in range(1, count) if c <= cluster.devices_per_node or c % cluster.devices_per_node == 0)
    raise JobError(
        f"{count} devices do not spread evenly over the nodes of {cluster.name}.",
        what_to_do=f"Give a number that does, such as {below}.",
        field="devices",
    )


def _part(cluster: ClusterSpec, *, nodes: int, devices_per_node: int) -> ClusterSpec:
    """Return ``cluster`` with fewer nodes and devices, and with the network cards and sweeps that they have left."""
    if devices_per_node == cluster.devices_per_node:
        return dataclasses.replace(cluster, nodes=nodes)
    return dataclasses.replace(
        cluster,
        nodes=nodes,
        devices_per_node=devices_per_node,
        cards_per_node=max(1, cluster.cards_per_node * devices_per_node // cluster.devices_per_node),
        sweeps=tuple(sweep for sweep in cluster.sweeps if sweep.ranks_per_node <= devices_per_node),
    )


def best_size(sizes: list[ClusterSize], objective: Objective, *, within_s: float | None = None) -> ClusterSize | None:
    """Return the entry of ``sizes`` that is best for ``objective``; None: no plan has a step time within ``within_s``.

    Args:
        sizes: result of `sweep`.
        objective: "step-time": the least step time. "cost": the fewest device-seconds of a step, which also means the
            most tokens per second and device. "fewest-devices".
        within_s: limit of the step time in seconds; None: no limit.
    """
    fit = [size for size in sizes if size.plan is not None and (within_s is None or step_time_s(size.plan) <= within_s)]
    if not fit:
        return None
    if objective == "step-time":
        return min(fit, key=lambda size: (0.0 if size.plan is None else step_time_s(size.plan), size.cluster.size))
    if objective == "cost":
        return min(fit, key=lambda size: (size.device_s, size.cluster.size))
    return min(fit, key=lambda size: size.cluster.size)


MOST_SEQUENCES = 4096
"""Default of the largest batch that `batches` tries. A small model would fit ever larger batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The fastest plan of an inference phase at one batch size.

    Attributes:
        batch: samples in the batch.
        plan: the fastest plan; None: no plan fits, or the time limit came before any plan was found.
        in_time: False if the time limit came before any plan was found.
    """

    batch: int
    plan: ShardingPlan | None
    in_time: bool = True

    @property
    def items_per_s(self) -> float:
        """Tokens (or samples) per second, summed over all devices."""
        assert self.plan is not None
        return self.plan.job.items[0] / step_time_s(self.plan)


def batches(
    model: nn.Module | TracedModule,
    *,
    spec: JobSpec | None = None,
    tp_plan: Mapping[str, str] | None = None,
    most: int = MOST_SEQUENCES,
    progress: Progress | None = None,
    **options: Unpack[JobOptions],
) -> list[BatchSize]:
    """Return the fastest plan at batches of 1, 2, 4, ... samples, up to the first batch without a plan or to ``most``.

    Args:
        model: as for `build_plan`; traced once.
        tp_plan: as for `build_plan`.
        progress: as for `build_plan`.
        spec: the job, of phase "prefill" or "decode". Its batch is ignored. None: ``options`` give the job.
        most: the largest batch that is tried.
        options: the fields of `JobSpec`, in place of ``spec``; the phase is "decode" by default.

    Raises:
        JobError: the phase is training. There, micro-batches make any batch possible.
        PlannerError: the job cannot be planned at all.
    """
    spec = spec_of({"phase": "decode", **options}) if spec is None else spec
    if spec.phase == "training":
        advice = "Choose prefill or decode; for training, sweep compares numbers of devices."
        raise JobError("batches are compared for inference.", what_to_do=advice, field="phase")
    if not isinstance(model, TracedModule):
        model = trace_module(
            model,
            batch=1,
            phase=spec.phase,
            seq=spec.seq,
            dtype=spec.dtype,
            fused_ops=spec.fused_ops,
            fused_projections=spec.fused_projections,
            opaque_modules=spec.opaque_modules,
        )
    sizes: list[BatchSize] = []
    batch = 1
    while batch <= most and (not sizes or sizes[-1].plan is not None):
        session = PlanningSession(
            model,
            spec=dataclasses.replace(spec, batch=batch),
            tp_plan=tp_plan,
            progress=_for(f"batch {batch}", progress),
        )
        try:
            plan = session.plan_if_any(mesh=spec.mesh, tolerance=spec.tolerance)
            sizes.append(BatchSize(batch=batch, plan=plan))
        except SolverError:
            sizes.append(BatchSize(batch=batch, plan=None, in_time=False))
        batch *= 2
    return sizes


def best_batch(sizes: list[BatchSize], *, within_s: float | None = None) -> BatchSize | None:
    """Return the entry of ``sizes`` with the most tokens per second; None: no plan has a step time within ``within_s``.

    Args:
        sizes: result of `batches`.
        within_s: limit of the step time in seconds; in decode, a step is one token of each sequence. None: no limit.
    """
    fit = [size for size in sizes if size.plan is not None and (within_s is None or step_time_s(size.plan) <= within_s)]
    return max(fit, key=lambda size: (size.items_per_s, -size.batch), default=None)
