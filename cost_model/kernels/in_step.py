"""The rates of kernels inside a training step, relative to their stand-alone rates on an idle device.

Kernels are slower because of heat, cold caches, and NCCL's kernels on the same processors. Sources: the shares of
``step_constants.toml``, fitted to published training runs; the processors of NCCL's kernels, from its logs. Known
error: see ``cost_model.configuration.step``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.step_constants import gemm_share, shipped_constants

NCCL_PROCESSORS = 24
"""Processors that a collective's kernel occupies: one per channel. Source: NCCL's logs of nodes of eight devices, "24
coll channels, 24 collnet channels, 16 nvls channels" (seen 2026-11-21). It is not fitted: calibration rows cannot
distinguish it from a lower GEMM rate."""

MESSAGE_PROCESSORS = 4
"""Processors that one received and one sent message between nodes occupy together. Source: logs of several nodes, "2
p2p channels per peer" (NVIDIA/nccl issue 1189, seen 2026-11-24). Inside a node messages use all channels (issue
892)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InStep:
    """The rates of a device's kernels inside a step.

    Attributes:
        gemm_share: fraction of the stand-alone GEMM rate that is reached.
        expert_share: fraction of the stand-alone GEMM rate that the GEMMs of experts reach.
        stream_share, fused_stream_share: fraction of the streaming rate that element-wise kernels reach, unfused and
            fused.
        taken_share: fraction of the compute rate that is lost while a collective overlaps with compute.
        message_share: fraction of the compute rate that is lost while messages between nodes overlap with compute.
    """

    gemm_share: float = 1.0
    expert_share: float = 1.0
    stream_share: float = 1.0
    fused_stream_share: float = 1.0
    taken_share: float = 0.0
    message_share: float = 0.0


STAND_ALONE = InStep()
"""Rates of devices whose kernels are as fast inside a step as stand-alone: measured devices, and devices of tests."""


@functools.lru_cache(maxsize=256)
def in_step(device: DeviceSpec) -> InStep:
    """Return the rates of ``device`` inside a step, by the shipped constants.

    Devices without an architecture (CPUs, ``toy``) and devices whose host was measured (``host_op_s``) have stand-alone
    rates, because no constant was fitted to them.
    """
    if not device.architecture or device.host_op_s:
        return STAND_ALONE
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
    """Return the share of the device's processors that a collective occupies."""
    return _share_of(NCCL_PROCESSORS, device)


def message_share(device: DeviceSpec, *, nodes: int) -> float:
    """Return the share of the device's processors that messages among ranks on ``nodes`` nodes occupy."""
    return _share_of(MESSAGE_PROCESSORS if nodes > 1 else NCCL_PROCESSORS, device)


def _share_of(processors: int, device: DeviceSpec) -> float:
    return min(1.0, processors / device.processors) if device.processors else 0.0
