"""Costs of collectives, compute and memory on a cluster, in seconds and bytes. They depend on no model graph.

configuration/  a step of given parallel degrees, as Megatron or torchtitan run it
collectives/    collectives on groups of ranks
kernels/        GEMMs, attention, memory-bound ops, the optimizer's step
layouts/        layouts and meshes
hardware/       devices, links, clusters, and measurements of them

`cost_model.redistribute` finds the cheapest path of a redistribution, for prices of its steps that the caller gives
(`planner.pricing.redistribution_costs`). It and ``layouts`` import torch. The names exported here need no torch.
"""

from cost_model.collectives.price import (
    AxisGroup,
    CollectiveKind,
    axes_group,
    axis_group,
    collective_time_s,
    collective_times_s,
    dispatched_collective_time_s,
)
from cost_model.hardware.cluster import ClusterError, ClusterSpec, DeviceSpec, LinkSpec, device_names, find_device
from cost_model.kernels.attention import attention_flops, attention_time_s
from cost_model.kernels.compute import dtype_nbytes, elementwise_time_s, op_time_s
from cost_model.kernels.gemm import gemm_flops, gemm_time_s, grouped_gemm_time_s
from cost_model.kernels.optimizer_memory import (
    optimizer_update_s,
    parameter_state_bytes,
    reserve_by_role,
    reserve_bytes,
)
from cost_model.kernels.optimizers import OPTIMIZERS, OptimizerSpec

__all__ = [
    "OPTIMIZERS",
    "AxisGroup",
    "ClusterError",
    "ClusterSpec",
    "CollectiveKind",
    "DeviceSpec",
    "LinkSpec",
    "OptimizerSpec",
    "attention_flops",
    "attention_time_s",
    "axes_group",
    "axis_group",
    "collective_time_s",
    "collective_times_s",
    "device_names",
    "dispatched_collective_time_s",
    "dtype_nbytes",
    "elementwise_time_s",
    "find_device",
    "gemm_flops",
    "gemm_time_s",
    "grouped_gemm_time_s",
    "op_time_s",
    "optimizer_update_s",
    "parameter_state_bytes",
    "reserve_by_role",
    "reserve_bytes",
]
