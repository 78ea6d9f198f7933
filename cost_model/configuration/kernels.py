"""Seconds of the kernels of a training step, as they run inside a step: GEMMs, attention and streams.

Inside a step the device is hot and its caches are cold, so kernels are slower than in a benchmark of one kernel.
``StepConstants`` holds the shares of the stand-alone rate that are reached, by architecture: fitted to published
training runs, see step_constants.toml. Known error: see ``step``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cost_model.configuration.implementation import AttentionKernel
from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.attention import attention_time_s
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.kernels.gemm import gemm_time_s
from cost_model.kernels.step_constants import StepConstants, gemm_share

EARLIER_FLASH = 2.0
"""Ratio of the seconds of FlashAttention-1, and of the memory-efficient kernel, to those of FlashAttention-2. Source:
arXiv 2307.08691, abstract."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """``groups`` GEMMs ``[m, k] @ [k, n]``. Fields are positional for speed: one price creates hundreds of GEMMs."""

    m: float
    n: float
    k: float
    groups: int = 1

    @property
    def flops(self) -> float:
        """FLOPs; a multiply-add is two."""
        return 2.0 * self.m * self.n * self.k * self.groups

    def transposed(self) -> tuple[Gemm, Gemm]:
        """Return the two GEMMs of backward: the gradient of the input and that of the weight."""
        return Gemm(self.m, self.k, self.n, self.groups), Gemm(self.k, self.n, self.m, self.groups)


def gemm_s(gemm: Gemm, *, device: DeviceSpec, dtype: str, constants: StepConstants) -> float:
    """Return the seconds of a GEMM inside a step.

    4 bits are priced as 8 bits, since no kernel was measured. Both are priced as bf16 on devices without fp8.
    """
    eight_bits = dtype in ("fp8", "fp4") and "fp8" in device.peak_flops
    alone = _gemm_alone_s(gemm, device, "fp8" if eight_bits else "bf16" if dtype in ("fp8", "fp4") else dtype)
    return alone / gemm_share(constants, device)


@functools.lru_cache(maxsize=65536)
def _gemm_alone_s(gemm: Gemm, device: DeviceSpec, dtype: str) -> float:
    rows, columns, depth = (max(1, round(size)) for size in (gemm.m, gemm.n, gemm.k))
    return gemm_time_s(m=rows, n=columns, k=depth, batch=gemm.groups, device=device, dtype=dtype)


@functools.lru_cache(maxsize=65536)
def _attention_alone_s(
    device: DeviceSpec, kernel: AttentionKernel, batch: int, heads: int, kv_heads: int, seq: int, head_dim: int,
    value_dim: int, causal: bool, window: int, backward: bool,
) -> float:  # fmt: skip
    earlier = kernel in ("flash1", "efficient")
    seconds = attention_time_s(
        batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq, seq_k=seq, head_dim=head_dim, head_dim_v=value_dim,
        causal=causal, backward=backward, window=window or None, device=device,
        dtype="fp32" if kernel == "dense" else "bf16",
        kernel="flash2" if earlier else "unfused" if kernel == "dense" else kernel,
    )  # fmt: skip
    return seconds * (EARLIER_FLASH if earlier else 1.0)


def attention_s(
    *,
    kernel: AttentionKernel,
    batch: int,
    heads: float,
    kv_heads: float,
    seq: int,
    head_dim: int,
    value_dim: int,
    causal: bool,
    window: int,
    backward: bool,
    device: DeviceSpec,
) -> float:
    """Return the seconds of one layer's attention over whole sequences.

    The stand-alone time holds inside a step, because attention stays below the power limit. Fractions of heads, which
    tensor parallelism may leave, are rounded up.
    """
    whole, whole_kv = max(1, -int(-heads // 1)), max(1, -int(-kv_heads // 1))
    return _attention_alone_s(
        device, kernel, batch, whole, min(whole, whole_kv), seq, head_dim, value_dim, causal, window, backward
    )


def stream_s(nbytes: float, *, fused: bool, device: DeviceSpec, constants: StepConstants) -> float:
    """Return the seconds of memory-bound kernels, fused or not, that read and write ``nbytes``."""
    share = constants.fused_stream_share if fused else constants.stream_share
    return nbytes / (stream_bytes_per_s(device) * share)
