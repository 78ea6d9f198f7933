"""Seconds of one op on one device by the roofline, with the efficiencies of the device catalogue.

``gemm`` prices GEMMs by shape, and ``attention`` prices attention.
"""

from __future__ import annotations

from cost_model.hardware.devices import DeviceSpec
from cost_model.hardware.reading import ClusterError

DTYPE_NBYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "bool": 1,
}
"""Name of a dtype in jobs and in the catalogue -> bytes of one element; tf32 is fp32 in memory."""

EAGER_HOST_S = 6e-6
"""Host seconds to dispatch one op and launch its kernel from Python with autograd. Assumed, 2026-11: 5 to 10 us on
current servers. ``shardplan calibrate`` measures it."""


def dtype_nbytes(dtype: str) -> int:
    """Return the bytes of one element.

    Raises:
        ClusterError: the name is unknown.
    """
    if dtype not in DTYPE_NBYTES:
        raise ClusterError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_NBYTES)}")
    return DTYPE_NBYTES[dtype]


def matmul_flops_per_s(device: DeviceSpec, dtype: str) -> float:
    """Return the FLOP/s of the best large GEMM: the peak times ``gemm_efficiency``.

    Source: MAMF, the best shape of a search (stas00/ml-engineering @744d01e). Known error: the result is an upper
    bound. Training steps of large models reach 50 to 90 % of it; cuBLAS reaches 90 to 97 % on square matrices from 4096
    on, FlashAttention-3 about 60 % (rows of gemm.csv, 2026-11).

    Raises:
        ClusterError: the device has no rate for the dtype.
    """
    rates = device.peak_flops
    if dtype not in rates:
        raise ClusterError(
            f"{device.name} has no {dtype} matrix rate; it has {', '.join(rates)}. Choose the dtype among these"
        )
    return rates[dtype] * device.gemm_efficiency


def stream_bytes_per_s(device: DeviceSpec) -> float:
    """Return the bytes per second of a streaming kernel: the nominal bandwidth times ``memory_efficiency``."""
    return device.memory_bandwidth_bytes_per_s * device.memory_efficiency


def op_time_s(*, flops: float, nbytes: float, device: DeviceSpec, dtype: str, matmul: bool) -> float:
    """Return the seconds of one op: ``max(flops / rate, nbytes / bandwidth) + launch``; 0.0 for an empty op.

    Source: the roofline of Williams, Waterman and Patterson, CACM 52(4), 2009. Known error: small and oddly shaped
    GEMMs leave processors idle, which the roofline ignores. For these the result is too low by up to a half.

    Args:
        flops: floating-point operations; a multiply-add is two.
        nbytes: bytes read plus bytes written.
        device: the device.
        dtype: dtype of the operands, ``bf16``, ``fp16``, ``tf32``, ``fp32`` or ``fp8``; used for a matmul only.
        matmul: whether the op runs on matrix units; otherwise it runs at the device's fp32 vector rate.
    """
    if flops < 0 or nbytes < 0:
        raise ValueError(f"flops is {flops} and nbytes {nbytes}; give 0 or more")
    if flops == 0 and nbytes == 0:
        return 0.0
    rate = matmul_flops_per_s(device, dtype) if matmul else device.peak_flops["fp32"]
    return max(flops / rate, nbytes / stream_bytes_per_s(device)) + device.kernel_launch_s


def elementwise_time_s(
    *, numel: int, reads: int, writes: int, dtype: str, device: DeviceSpec, ops: int = 1, fused: bool = True
) -> float:
    """Return the seconds of a chain of ``ops`` element-wise ops, limited by memory bandwidth; 0.0 for no elements.

    A fused chain (``torch.compile``, a hand-written kernel) is one kernel, which reads its inputs and writes its
    results once. An unfused one is a kernel for each op: each of the ``ops - 1`` intermediate tensors is written and
    read once. Known error: kernels that reduce over rows (norms, softmax) or write few bytes per row reach 10 to 20 %
    less than the bandwidth of `stream_bytes_per_s`, so they take longer than the result.

    Args:
        numel: elements of one tensor.
        reads, writes: number of tensors of that size that the whole chain reads and writes.
        dtype: of all tensors.
    """
    if min(numel, reads, writes) < 0 or ops < 1:
        raise ValueError(
            f"numel is {numel}, reads {reads} and writes {writes}; give 0 or more, and for ops ({ops}) 1 or more"
        )
    if numel == 0:
        return 0.0
    between = 0 if fused else 2 * (ops - 1)
    nbytes = numel * (reads + writes + between) * dtype_nbytes(dtype)
    return nbytes / stream_bytes_per_s(device) + device.kernel_launch_s * (1 if fused else ops)


def eager_time_s(*, device_s: float, ops: int, host_s: float = EAGER_HOST_S) -> float:
    """Return the seconds of ``ops`` kernels launched one by one: the larger of the device's and the host's seconds.

    This holds if the sequence of ops is long enough for the queue between host and device to fill or to empty.

    Args:
        device_s: the device's seconds for all ops together.
        ops: number of kernels.
        host_s: host seconds per kernel.
    """
    return max(device_s, ops * host_s)
