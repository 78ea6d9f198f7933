"""`auto_parallelize`: a module is planned for the ranks that call it, and sharded in place, in one call."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cost_model import ClusterSpec
from cost_model.hardware.reading import ClusterError
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.build import plan_with_defaults, shows_job_options
from planner.defaults.cluster import DefaultCluster, cluster_of_ranks, user_cluster, why_ranks, with_ranks
from planner.defaults.job import report
from planner.defaults.local_devices import LocalDevices, local_devices
from planner.defaults.ranks import is_first_rank, ranks_on
from planner.errors import JobError, MeshError, PlanError, PlannerError
from planner.graph.example_inputs import GivenInputs
from planner.plan.job_spec import JobOptions
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Progress

_PLANNING_LIMIT = timedelta(hours=6)
"""How long the other ranks wait for rank 0, which plans; longer than any search takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What one rank knows of itself."""

    host: str
    product: str


@shows_job_options
def auto_parallelize(
    module: nn.Module,
    example_inputs: GivenInputs = None,
    *,
    tp_plan: Mapping[str, str] | None = None,
    src_data_rank: int | None = 0,
    progress: Progress | None = None,
    **options: Unpack[JobOptions],
) -> nn.Module:
    """Return ``module``, planned for the ranks that call this function, and sharded in place.

    Every rank calls it with the same arguments. Rank 0 plans, the others wait for its plan or its error. Under torchrun
    a process group is started if there is none: nccl where there is a GPU, otherwise gloo. What was assumed is printed
    by rank 0 and written into the plan, `plan_of` the module. Each rank feeds ``local_batch(batch, module)``.

    A cluster that is left out is the user's (`planner.defaults`), with as many nodes and devices as there are ranks, or
    the GPUs of the ranks. Ranks without a GPU are planned as the catalogue's device "cpu", in fp32. ``micro_batches``
    that are left out are 1, so that a step has one backward; None lets the planner choose. ``mesh`` may be a
    `DeviceMesh` of all ranks, on which the module then runs.

    Args:
        module: a plain module, on the ranks' device, on the CPU, or on meta.
        example_inputs: arguments (tuple) or keyword arguments (dict) of one call with the global batch. None: the
            module's Hugging Face config gives them.
        tp_plan: as for `build_plan`.
        src_data_rank: as for `shard_module`.
        progress: called on rank 0 with each event of the search.
        options: the fields of `JobSpec`.

    Raises:
        PlannerError: on every rank, as `build_plan` and `shard_module`. The module has not been changed.
        ClusterError: on every rank; the cluster cannot be read, or the GPU is not in the catalogue.
    """
    _start_process_group()
    given = options.get("mesh")
    device_mesh = given if isinstance(given, DeviceMesh) else None
    if device_mesh is not None and device_mesh.size() != dist.get_world_size():
        raise MeshError(
            f"the DeviceMesh has {device_mesh.size()} ranks, and {dist.get_world_size()} call auto_parallelize.",
            what_to_do="Give a mesh of all ranks, or leave it out.",
        )
    devices = local_devices()
    group = dist.new_group(backend="gloo", timeout=_PLANNING_LIMIT)
    try:
        ranks = _gathered(_Rank(host=socket.gethostname(), product=devices.product), group)
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                plan = _planned(module, example_inputs, tp_plan, progress, options, devices, ranks)
                outcome = [plan.to_dict()]
            except Exception as error:
                dist.broadcast_object_list([_sendable(error)], src=0, group=group)
                raise
        dist.broadcast_object_list(outcome, src=0, group=group)
    finally:
        dist.destroy_process_group(group)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    plan = ShardingPlan.from_dict(outcome[0])
    if device_mesh is None:
        device_mesh = device_mesh_for(plan, device_type=devices.type)
    _move_buffers(module, device_mesh.device_type)
    return shard_module(module, device_mesh, plan, src_data_rank=src_data_rank)


def _start_process_group() -> None:
    """Start the default process group as torchrun's environment says, if there is none.

    Raises:
        PlanError: there is neither a process group nor torchrun's environment.
    """
    if dist.is_initialized():
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise PlanError(
            "there is no process group, and this process was not started by torchrun.",
            what_to_do="Start it with `torchrun --nproc-per-node N SCRIPT`, or call torch.distributed's "
            "init_process_group first.",
        )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    if is_first_rank():
        report([f"started a process group of {dist.get_world_size()} ranks ({backend})"])


def _gathered(rank: _Rank, group: dist.ProcessGroup | None) -> list[_Rank]:
    """Return what every rank knows of itself, in the order of the ranks."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, rank, group=group)
    return ranks


def _planned(
    module: nn.Module,
    example_inputs: GivenInputs,
    tp_plan: Mapping[str, str] | None,
    progress: Progress | None,
    options: JobOptions,
    devices: LocalDevices,
    ranks: list[_Rank],
) -> ShardingPlan:
    """Return the plan of ``module`` for ``ranks``, with what was assumed."""
    options, assumed = options.copy(), []
    if options.get("cluster") is None:
        found = _cluster_of(ranks, devices)
        options["cluster"] = found.cluster
        assumed.append(f"cluster {found.cluster.name}: {found.why}")
    else:
        _check_size(options["cluster"], len(ranks))
    if "micro_batches" not in options:
        options["micro_batches"] = 1
        assumed.append("micro_batches 1: one backward a step")
    if "dtype" not in options and devices.type == "cpu":
        options["dtype"] = "fp32"
        assumed.append("dtype fp32: the ranks have no GPU")
    return plan_with_defaults(
        module, options, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress, assumed=assumed
    )


def _cluster_of(ranks: list[_Rank], devices: LocalDevices) -> DefaultCluster:
    """Return the user's cluster with the nodes of ``ranks``; without one, that of the ranks' devices.

    Raises:
        JobError: nodes have different numbers of ranks, or ranks have different devices.
    """
    nodes = ranks_on([rank.host for rank in ranks])
    products = sorted({rank.product or "no GPU" for rank in ranks})
    if len(products) > 1:
        raise JobError(
            f"the ranks have different devices: {', '.join(products)}.",
            what_to_do="Start them on devices of one kind, or give the cluster.",
            field="cluster",
        )
    user = user_cluster()
    if user is None:
        return DefaultCluster(cluster=cluster_of_ranks(devices.spec, nodes), why=why_ranks(nodes, devices.product))
    return DefaultCluster(cluster=with_ranks(user.cluster, nodes), why=f"{user.why}, for {nodes}")


def _check_size(cluster: Any, size: int) -> None:
    """Check that ``cluster`` has one device for each of ``size`` ranks.

    Raises:
        JobError: it has another number of devices.
    """
    spec = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec.parse(cluster)
    if spec.size != size:
        raise JobError(
            f"the cluster {spec.name} has {spec.size} devices, and {size} ranks were started.",
            what_to_do="Start one rank for each device, or leave the cluster out.",
            field="cluster",
        )


def _sendable(error: Exception) -> Exception:
    """Return what the other ranks raise for an ``error`` of rank 0."""
    if isinstance(error, PlannerError | ClusterError):
        return error
    return PlanError(
        f"rank 0 failed while it planned: {type(error).__name__}: {error}", what_to_do="See rank 0's traceback."
    )


def _move_buffers(module: nn.Module, device_type: str) -> None:
    """Move the buffers of ``module`` to the mesh's device, where its parameters will be; those on meta stay."""
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device.type != device_type:
                setattr(child, name, buffer.to(device_type))
