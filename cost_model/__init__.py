"""What does it cost? Clusters, collectives, compute and memory; knows no graph.

Layouts and redistribution are in ``cost_model.layout`` and ``cost_model.redistribute``, which import torch; nothing
here does.
"""

from cost_model.attention import attention_flops, attention_time_s
from cost_model.cluster import ClusterError, ClusterSpec, DeviceSpec, LinkSpec, device_names, find_device
from cost_model.collectives import (
    AxisGroup,
    CollectiveKind,
    axes_group,
    axis_group,
    collective_time_s,
    collective_times_s,
    moving_time_s,
)
from cost_model.compute import dtype_nbytes, elementwise_time_s, op_time_s
from cost_model.gemm import gemm_flops, gemm_time_s, grouped_gemm_time_s
from cost_model.memory import (
    OPTIMIZERS,
    OptimizerSpec,
    optimizer_step_time_s,
    optimizer_time_per_parameter_s,
    parameter_state_bytes,
    reserve_bytes,
)

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
    "dtype_nbytes",
    "elementwise_time_s",
    "find_device",
    "gemm_flops",
    "gemm_time_s",
    "grouped_gemm_time_s",
    "moving_time_s",
    "op_time_s",
    "optimizer_step_time_s",
    "optimizer_time_per_parameter_s",
    "parameter_state_bytes",
    "reserve_bytes",
]
