"""`auto_parallelize`: a module is planned for the ranks of this program and sharded over them, in one call.

all ranks: join the program, say where they run -> first rank: plan -> all ranks: process group, mesh, shard_module
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cost_model import ClusterSpec
from executor.launch.exchange import PlanExchange
from executor.launch.program import Program, join_program, start_group
from executor.resolve.checks import check_member
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.build import build_plan, shows_job_options
from planner.defaults.cluster import cluster_of_program
from planner.defaults.job import config_of, report, with_defaults
from planner.defaults.local_devices import LocalDevices, local_devices
from planner.errors import JobError
from planner.graph.example_inputs import GivenInputs
from planner.plan.former_names import with_current_names
from planner.plan.job_spec import JobOptions
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Progress

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@shows_job_options
def auto_parallelize(
    module: nn.Module,
    example_inputs: GivenInputs = None,
    *,
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[JobOptions],
) -> nn.Module:
    """Return ``module``, changed in place to run on all ranks of this program as the best plan for them says.

    Every rank calls it, under torchrun or with a process group of its own. The process group is initialised if there is
    none: nccl on GPUs, gloo on CPUs. The first rank plans, while the others wait; its plan, or its error, is that of
    all. A plan that is made before there is a process group is verified. `plan_of` and `mesh_of` return the plan and
    the mesh of the module, `local_micro_batches` what a rank feeds to it.

    Left out, the cluster is the one of these ranks: their hosts, their GPUs as the catalogue knows them, and the usual
    links of these. ``SHARDPLAN_CLUSTER`` or the user's cluster file replace devices and links. Without a GPU the
    catalogue's "cpu" stands for each rank. The dtype is that of the module's parameters. Batch and sequence length are
    those of `build_plan`. What was assumed is printed on standard error, and written into the plan.

    Args:
        module: a plain module, on any device or on meta. Rank 0's values are used.
        example_inputs: as for `build_plan`.
        tp_plan: as for `build_plan`.
        progress: called on the first rank with each event of the search.
        options: the fields of `JobSpec`. ``mesh`` may be a `DeviceMesh`, whose ranks then are those of the program.

    Raises:
        PlannerError: there is no plan, or the ranks do not run one program. All ranks raise the same error.
        ClusterError: the ranks have different devices, or devices that the catalogue lacks.
    """
    device_mesh = options.get("mesh")
    ranks = None
    if isinstance(device_mesh, DeviceMesh):
        check_member(device_mesh)
        ranks = device_mesh.mesh.flatten().tolist()
    program, local = join_program(ranks), local_devices()
    exchange = PlanExchange(program)
    places = exchange.gather(json.dumps([socket.gethostname(), dataclasses.asdict(local)]).encode())

    def planned() -> bytes:
        plan = _plan(module, example_inputs, options, places, tp_plan=tp_plan, progress=progress)
        return plan.to_json().encode()

    plan = ShardingPlan.from_dict(json.loads(exchange.from_first(planned)))
    backend = start_group(program, local.type)
    if program.is_first:
        report(_outcome(plan, program, backend))
    if not isinstance(device_mesh, DeviceMesh):
        device_mesh = device_mesh_for(plan, device_type=local.type)
    return shard_module(module, device_mesh, plan)


def _plan(
    module: nn.Module,
    example_inputs: GivenInputs,
    given: Mapping[str, Any],
    places: Sequence[bytes],
    *,
    tp_plan: Mapping[str, str] | None,
    progress: Progress | None,
) -> ShardingPlan:
    """Return the plan for ranks that run at ``places``.

    Raises:
        PlannerError, ClusterError: as `auto_parallelize`.
    """
    options, assumed = with_current_names(given), []
    if options.get("cluster") is None:
        hosts, devices = zip(*(json.loads(place) for place in places), strict=True)
        found = cluster_of_program([LocalDevices(**device) for device in devices], hosts)
        options["cluster"] = found.cluster
        assumed.append(f"cluster {found.cluster.name}: {found.why}")
    _check_size(options["cluster"], len(places))
    dtype = next((_DTYPES.get(p.dtype) for p in module.parameters() if p.is_floating_point()), None)
    if "dtype" not in options and dtype is not None:
        options["dtype"] = dtype
        assumed.append(f"dtype {dtype}: that of the module's parameters")
    full, more = with_defaults(options, config_of(module) if example_inputs is None else None)
    report(f"assumed {line}" for line in (*assumed, *more))
    plan = build_plan(module, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress, **full)
    return dataclasses.replace(plan, assumed=(*assumed, *more))


def _check_size(cluster: Any, ranks: int) -> None:
    """Raise a `JobError` unless ``cluster`` has one device for each of ``ranks``."""
    spec = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec.parse(cluster)
    if spec.size != ranks:
        raise JobError(
            f"the cluster {spec.name} has {spec.size} devices, and this program {ranks} ranks.",
            what_to_do="Leave the cluster out, or start one rank for each device.",
            field="cluster",
        )


def _outcome(plan: ShardingPlan, program: Program, backend: str | None) -> Iterator[str]:
    """Yield lines on the process group that was initialised, the plan, and its verification."""
    if backend is not None:
        yield f"process group initialised: {len(program.ranks)} ranks, {backend}"
    count = plan.micro_batches
    step = "" if plan.estimate is None else f", estimated step {plan.estimate.step_time_s:.3g} s"
    yield f"plan: mesh {plan.mesh}, {count} micro-batch{'es' if count > 1 else ''}{step}"
    if plan.verification is not None and plan.verification.outcome == "not-run":
        yield f"plan not verified: {plan.verification.reason}"
