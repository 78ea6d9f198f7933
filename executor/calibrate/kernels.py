"""Measurements of the current cluster: kernels on all ranks at once, and collectives on all groups at once.

Every rank calls ``measure``, and all ranks get the same result. On GPUs the code times events instead of reading the
clock. The code has not been run on GPUs yet.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cost_model.hardware.measurements import AttentionPoint, GemmPoint, Measurements, StreamPoint
from executor.calibrate.collectives import measure_collectives
from executor.calibrate.host import first_touch_s_per_byte, host_op_s
from executor.calibrate.timing import slowest_rank_s, time_s

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_S = 0.1
"""Minimum seconds for which one kernel is measured on a CPU: several time slices of the scheduler."""

_HOST_LEAST_S = 2.0
"""Minimum seconds of the host's measurement. Writes to memory between the ops take most of them, and do not count."""

_ROUNDS = 3
"""Number of times that all kernels are measured in turn: a disturbance affects few measurements of one kernel."""

_Point = TypeVar("_Point", GemmPoint, AttentionPoint, StreamPoint)

_CACHE_BYTES = 2**27
"""Bytes; more than the last-level cache of a CPU or a GPU holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSizes:
    """Sizes of the kernels and collectives that are measured on a device.

    Attributes:
        dtypes: names of the dtypes of GEMMs; attention is measured in the first one.
        gemms: (m, n, k) of each GEMM.
        attention: (batch, heads, seq, head_dim) of each attention op.
        streams: bytes of one tensor of each streaming kernel.
        collectives: bytes of each collective, as ``collective_time_s`` counts them.
        repeats: minimum number of calls of each kernel or collective.
    """

    dtypes: tuple[str, ...]
    gemms: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    streams: tuple[int, ...]
    collectives: tuple[int, ...]
    repeats: int


CPU = MeasuredSizes(
    dtypes=("fp32",),
    gemms=(
        (128, 256, 256),
        (256, 256, 256),
        (256, 512, 512),
        (512, 512, 512),
        (256, 1024, 512),
        (512, 2048, 512),
        (1024, 1024, 1024),
    ),
    attention=((2, 4, 128, 64), (4, 8, 128, 64), (2, 8, 256, 64)),
    streams=(2**20, 2**21, 2**22, 2**23),
    collectives=(2**12, 2**15, 2**18, 2**20, 2**22, 2**24),
    repeats=5,
)
GPU = MeasuredSizes(
    dtypes=("bf16", "tf32"),
    gemms=(
        (1024, 4096, 4096),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (8192, 4096, 4096),
        (8192, 8192, 8192),
        (8192, 28672, 4096),
        (16384, 4096, 14336),
    ),
    attention=((16, 16, 1024, 128), (4, 16, 4096, 128), (2, 32, 8192, 128), (4, 32, 4096, 64)),
    streams=(2**26, 2**28, 2**30),
    collectives=tuple(2**power for power in range(14, 31, 2)),
    repeats=20,
)


def measure(device: torch.device, sizes: MeasuredSizes | None = None) -> Measurements:
    """Return the measurements of this cluster. Every rank of the default process group calls this, with its own device.

    Args:
        device: this rank's device.
        sizes: the sizes to measure; None: ``CPU`` or ``GPU``, by the type of the device.
    """
    sizes = sizes or (CPU if device.type == "cpu" else GPU)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    sweeps, notes = measure_collectives(device, sizes.collectives, ranks_per_node, sizes.repeats)
    is_cpu = device.type == "cpu"
    launch_s = slowest_rank_s(_launch_s(device, sizes.repeats))
    rounds = [_kernels(device, sizes) for _ in range(_ROUNDS)]
    return Measurements(
        device="cpu" if is_cpu else torch.cuda.get_device_name(device),
        kind="cpu" if is_cpu else "rocm" if torch.version.hip else "cuda",
        nodes=dist.get_world_size() // ranks_per_node,
        ranks_per_node=ranks_per_node,
        memory_bytes=_memory_bytes(device, ranks_per_node),
        launch_s=launch_s,
        host_op_s=host_op_s(_HOST_LEAST_S) if is_cpu else 0.0,
        first_touch_s_per_byte=first_touch_s_per_byte(_LEAST_S) if is_cpu else 0.0,
        gemms=_medians([kernels.gemms for kernels in rounds]),
        attention=_medians([kernels.attention for kernels in rounds]),
        streams=_medians([kernels.streams for kernels in rounds]),
        sweeps=sweeps,
        notes=notes,
    )


# --- kernels ----------------------------------------------------------------------------------------------------------


class _Kernels(NamedTuple):
    """Measurements of one round of all kernels."""

    gemms: tuple[GemmPoint, ...]
    attention: tuple[AttentionPoint, ...]
    streams: tuple[StreamPoint, ...]


def _kernels(device: torch.device, sizes: MeasuredSizes) -> _Kernels:
    return _Kernels(
        gemms=tuple(_gemm(device, dtype, shape, sizes.repeats) for dtype in sizes.dtypes for shape in sizes.gemms),
        attention=tuple(
            point for shape in sizes.attention for point in _attention(device, sizes.dtypes[0], shape, sizes.repeats)
        ),
        streams=tuple(point for nbytes in sizes.streams for point in _streams(device, nbytes, sizes.repeats)),
    )


def _medians(rounds: Sequence[Sequence[_Point]]) -> tuple[_Point, ...]:
    """Return each point with the median of its seconds over all rounds."""
    return tuple(replace(same[0], time_s=median(p.time_s for p in same)) for same in zip(*rounds, strict=True))


def _launch_s(device: torch.device, repeats: int) -> float:
    """Return the seconds per op of a sequence of ops on a tiny tensor."""
    ops = 100
    tensor = torch.ones(16, device=device)

    def queue() -> None:
        value = tensor
        for _ in range(ops):
            value = value + tensor

    return time_s(queue, device, repeats, _LEAST_S) / ops


def _gemm(device: torch.device, dtype: str, shape: tuple[int, int, int], repeats: int) -> GemmPoint:
    """Return the mean seconds of a linear layer's three GEMMs: output, gradient of the input, gradient of the weight.

    In a training step the operands of a GEMM are in no cache. So calls cycle through more operands than caches hold.
    """
    m, n, k = shape
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    first = [torch.randn(size, device=device).to(_DTYPES[dtype]) for size in ((m, k), (n, k), (m, n))]
    copies = max(1, _CACHE_BYTES // (4 * (m * k + n * k + m * n)))
    operands = itertools.cycle([first, *([tensor.clone() for tensor in first] for _ in range(copies - 1))])

    def gemms() -> None:
        left, right, gradient = next(operands)
        F.linear(left, right)
        torch.mm(gradient, right)
        torch.mm(gradient.t(), left)

    seconds = slowest_rank_s(time_s(gemms, device, repeats, _LEAST_S)) / 3
    torch.backends.cuda.matmul.allow_tf32 = before
    return GemmPoint(m=m, n=n, k=k, dtype=dtype, time_s=seconds)


def _attention(
    device: torch.device, dtype: str, shape: tuple[int, int, int, int], repeats: int
) -> tuple[AttentionPoint, AttentionPoint]:
    batch, heads, seq, head_dim = shape
    tensors = [torch.randn(shape, device=device).to(_DTYPES[dtype]).requires_grad_() for _ in range(3)]

    def forward() -> torch.Tensor:
        query, key, value = tensors
        # On a CPU the executor makes torch decompose attention, because DTensor has no rule for the CPU's kernel.
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    forward_s = slowest_rank_s(time_s(forward, device, repeats, _LEAST_S))
    both_s = slowest_rank_s(time_s(both, device, repeats, _LEAST_S))
    first = AttentionPoint(
        batch=batch, heads=heads, seq=seq, head_dim=head_dim, backward=False, dtype=dtype, time_s=forward_s
    )
    return first, replace(first, backward=True, time_s=max(both_s - forward_s, 0.1 * both_s))


def _streams(device: torch.device, nbytes: int, repeats: int) -> tuple[StreamPoint, StreamPoint]:
    """Return the seconds of an addition (two tensors read, one written) and of a SiLU (one read, one written).

    These are the two kinds of elementwise ops in a training step. On a CPU the exponential takes as long as moving the
    bytes; on a GPU it takes no additional time. One operand of the addition is in no cache. In a step the same holds:
    one operand was just computed, and the other one was saved in the forward.
    """
    cached = torch.ones(nbytes // 4, device=device)
    uncached = itertools.cycle([cached.clone() for _ in range(max(1, _CACHE_BYTES // nbytes))])
    add_s = slowest_rank_s(time_s(lambda: torch.add(next(uncached), cached), device, repeats, _LEAST_S))
    silu_s = slowest_rank_s(time_s(lambda: F.silu(next(uncached)), device, repeats, _LEAST_S))
    return StreamPoint(nbytes=3 * nbytes, time_s=add_s), StreamPoint(nbytes=2 * nbytes, time_s=silu_s)


def _memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node
    return int(torch.cuda.get_device_properties(device).total_memory)
