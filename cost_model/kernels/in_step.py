"""What kernels lose inside a step against kernels alone on an idle device: heat, cold caches, NCCL beside them.

The shares are those of ``step_constants.toml``, fitted to whole published runs; what NCCL takes is counted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.step_constants import gemm_share, shipped_constants

NCCL_PROCESSORS = 24
"""Processors that a collective's kernel holds: one for each channel, and NCCL's logs of nodes of eight devices say
"24 coll channels, 24 collnet channels, 16 nvls channels" (seen 2026-11-21). Fitted freely the slow-down came out as
nothing: calibration rows cannot tell it from a lower share of the matrix rate."""

MESSAGE_PROCESSORS = 4
"""The same of messages between nodes, one that comes and one that goes: logs of several nodes say "2 p2p channels per
peer" (NVIDIA/nccl issue 1189, seen 2026-11-24). Inside a node messages take all channels (issue 892)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InStep:
    """How a device computes inside a step.

    Attributes:
        gemm_share: share of a matrix product's rate alone.
        expert_share: the same of products of experts.
        stream_share, fused_stream_share: share of the streaming rate that element-wise kernels reach, one by one and
            fused.
        taken_share: share of compute that is lost while a collective runs beside it.
        message_share: the same of messages between nodes.
    """

    gemm_share: float = 1.0
    expert_share: float = 1.0
    stream_share: float = 1.0
    fused_stream_share: float = 1.0
    taken_share: float = 0.0
    message_share: float = 0.0


AS_ALONE = InStep()
"""A step's kernels are as fast as they were measured, in a step or on a device that is only there for tests."""


@functools.lru_cache(maxsize=256)
def in_step(device: DeviceSpec) -> InStep:
    """Return how ``device`` computes inside a step, by the constants that ship.

    Devices without an architecture (CPUs, ``toy``) and those whose host was measured (``host_op_s``) are as alone:
    nothing was fitted to them.
    """
    if not device.architecture or device.host_op_s:
        return AS_ALONE
    constants = shipped_constants()
    share = gemm_share(constants, device)
    return InStep(
        gemm_share=share,
        expert_share=share * constants.expert_share,
        stream_share=constants.stream_share,
        fused_stream_share=constants.fused_stream_share,
        taken_share=taken_share(device),
        message_share=message_share(device, nodes=2),
    )


def taken_share(device: DeviceSpec) -> float:
    """Return the share of the device's processors that a collective keeps from compute while it runs."""
    return _share_of(NCCL_PROCESSORS, device)


def message_share(device: DeviceSpec, *, nodes: int) -> float:
    """Return the share that messages among ranks on so many nodes keep from compute while they are on their way."""
    return _share_of(MESSAGE_PROCESSORS if nodes > 1 else NCCL_PROCESSORS, device)


def _share_of(processors: int, device: DeviceSpec) -> float:
    return min(1.0, processors / device.processors) if device.processors else 0.0
