"""Seconds of scaled dot-product attention on one device, forward or backward, fused or not.

A fused kernel iterates, for each tile of queries, over the keys that the mask leaves. With ``n`` scores ((query, key)
pairs under the mask, in all heads), ``rows`` queries in all heads, and ``r`` the FLOP/s that the kernel's instructions
can reach,

    seconds = (n (1 + imbalance) + rows * fill_keys) * 4 cost(head_dim) / r        forward; backward with 10 for 4

where ``cost`` is the head dim whose FLOPs take as long as one score: it exceeds the head dim by the cost of
exponentials and of the pipeline. FlashAttention-2 issues Ampere's matrix instructions on all architectures, so its
``r`` is their rate: half of Hopper's peak, a quarter of Blackwell's (FLOPs per processor and clock 2048, 4096, 8192).
So FlashAttention-2's constants hold on every architecture. The seconds are at least those of moving the bytes, and
those of the longest row of tiles on one processor.

Without a fused kernel the scores are written to memory and read again: the seconds are those of the bytes per score and
of two GEMMs (four in backward). FLOPs are FlopCounterMode's: 4 forward and 10 backward per score and dim, without
regard to the mask.

Source of the constants: fitted to published rows, see ``efficiency.toml``. Known error: check 8 of
benchmarks/accuracy.py, mean 5 % on rows that nothing was fitted to (2026-11).
"""

from __future__ import annotations

import functools

from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.compute import dtype_nbytes, matmul_flops_per_s, stream_bytes_per_s
from cost_model.kernels.efficiency import Efficiency, FlashEfficiency, PassEfficiency, shipped_efficiency
from cost_model.kernels.gemm import gemm_time_s

KERNELS = ("flash", "flash2", "flash3", "flash4", "cudnn", "unfused")
"""The kernels by name; ``flash`` is the device's default, see ``default_kernel``."""

_BEST = {
    "sm70": "unfused",
    "sm80": "flash2",
    "sm86": "flash2",
    "sm89": "flash2",
    "sm90": "cudnn",
    "sm100": "flash4",
    "sm103": "flash4",
}
_ON = {
    "flash2": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "gfx90a", "gfx942", "gfx950"),
    "flash3": ("sm90",),
    "cudnn": ("sm90",),
    "flash4": ("sm100", "sm103"),
}
_AMPERE_SHARE = {"sm90": 0.5, "sm100": 0.25, "sm103": 0.25}
_TILE = 128
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


def attention_flops(
    *, batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, head_dim_v: int | None = None, backward: bool
) -> int:
    """Return the FLOPs of a pass as torch's FlopCounterMode counts them: without mask, recomputed scores included.

    A forward has 2 FLOPs per score and dim in each of q k^T (``head_dim``) and p v (``head_dim_v``). A backward has 2
    in each of q k^T again, dq and dk (``head_dim``), dp and dv (``head_dim_v``).
    """
    value_dim = head_dim if head_dim_v is None else head_dim_v
    dims = 3 * head_dim + 2 * value_dim if backward else head_dim + value_dim
    return 2 * batch * heads * seq_q * seq_k * dims


def attended_scores(*, seq_q: float, seq_k: float, causal: bool, window: float | None = None) -> float:
    """Return the number of (query, key) pairs of one head that the mask leaves.

    A causal mask is aligned to the last key. A window leaves each query the nearest ``window`` keys: those before the
    query with a causal mask, otherwise those around it. A pair on the diagonal counts half, as in papers: s^2 / 2.
    """
    most = seq_k if window is None else min(window, seq_k)
    if not causal:
        return float(seq_q * most)
    before = max(0, seq_k - seq_q)
    growing = min(max(most - before, 0), seq_q)
    return before * growing + growing * growing / 2 + (seq_q - growing) * most


def default_kernel(device: DeviceSpec) -> str:
    """Return the device's default kernel: cuDNN's on Hopper, FlashAttention-4 on Blackwell, else FlashAttention-2."""
    if not device.flash_attention:
        return "unfused"
    return _BEST.get(device.architecture, "flash2")


def runs_kernel(kernel: str, device: DeviceSpec) -> bool:
    """Return whether ``device`` can run the fused kernel ``kernel``, a name in ``KERNELS`` other than ``flash``."""
    return device.flash_attention and device.architecture in _ON.get(kernel, ())


def attention_time_s(
    *,
    batch: float,
    heads: float,
    kv_heads: float,
    seq_q: float,
    seq_k: float,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool,
    backward: bool,
    window: float | None = None,
    device: DeviceSpec,
    dtype: str,
    kernel: str = "flash",
    efficiency: Efficiency | None = None,
) -> float:
    """Return the seconds of one pass of attention over ``[batch, heads, seq, head_dim]``; 0.0 for an empty one.

    Args:
        kv_heads: heads of keys and values, for the bytes.
        head_dim, head_dim_v: width of queries and keys, and width of values; None: the same width.
        backward: whether the pass is the backward; otherwise it is the forward.
        window: largest number of keys that a query attends to; None: no limit.
        dtype: dtype of the operands; fp8 is priced as bf16 (no published row).
        kernel: one of ``KERNELS``; the device's default replaces a kernel that the device cannot run.
        efficiency: the constants; None: the shipped ones.

    Raises:
        ClusterError: the device has no rate for the dtype.
        ValueError: the kernel is unknown.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; it is one of {', '.join(KERNELS)}")
    if not (batch and heads and seq_q and seq_k):
        return 0.0
    constants = efficiency or shipped_efficiency()
    value_dim = head_dim if head_dim_v is None else head_dim_v
    dtype = "bf16" if dtype == "fp8" else dtype
    chosen, score_s, fill_keys, imbalance = _score_s(
        device, dtype, kernel, head_dim, value_dim, causal, backward, constants
    )
    bytes_s = _bytes_s(batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, backward, device, dtype)
    if chosen == "unfused":
        scores = batch * heads * seq_q * seq_k
        gemms_s = _gemms_s(batch * heads, seq_q, seq_k, head_dim, value_dim, backward, device, dtype, constants)
        return gemms_s + scores * score_s + bytes_s
    rows = -(-seq_q // _TILE) * _TILE if device.processors else seq_q
    scores_of_head = attended_scores(seq_q=rows, seq_k=seq_k, causal=causal, window=window) * (1 + imbalance)
    all_s = batch * heads * (scores_of_head + rows * fill_keys) * score_s
    most = seq_k if window is None else min(window, seq_k)
    longest_s = min(_TILE, rows) * (most + fill_keys) * score_s * device.processors
    return max(all_s, longest_s, bytes_s) + device.kernel_launch_s


def cached_attention_time_s(
    *,
    batch: float,
    heads: float,
    kv_heads: float,
    tokens: float,
    head_dim: int,
    head_dim_v: int,
    device: DeviceSpec,
    dtype: str,
) -> float:
    """Return the seconds of attention of one new token per sequence over ``tokens`` keys and values in a cache.

    Flash decoding spreads a sequence's keys over all processors and reads each key and value once for all query heads
    that share it. The bytes of the cache limit its speed, or the FLOPs if many heads share one key:

        seconds = max(batch * kv_heads * tokens * (head_dim + head_dim_v) * size / bandwidth, flops / rate) + launch

    Known error: not known, since no measurement was found; the second kernel, which combines the parts, is not counted.
    """
    if not (batch and heads and tokens):
        return 0.0
    nbytes = batch * kv_heads * tokens * (head_dim + head_dim_v) * dtype_nbytes(dtype)
    flops = 2 * batch * heads * tokens * (head_dim + head_dim_v)
    rate = matmul_flops_per_s(device, dtype)
    return max(nbytes / stream_bytes_per_s(device), flops / rate) + device.kernel_launch_s


def causal_imbalance(device: DeviceSpec, kernel: str = "flash") -> float:
    """Return the fraction by which a causal mask inside the kernel prolongs it: the larger of both passes' fractions.

    The result is 0.0 without a fused kernel. It does not apply to a chunk of keys that all precede the queries.
    """
    chosen = _kernel_on(device, kernel)
    if chosen == "unfused" or not device.processors:
        return 0.0
    flash = dict(shipped_efficiency().flash)[chosen]
    return max(flash.forward.imbalance, flash.backward.imbalance)


def _kernel_on(device: DeviceSpec, kernel: str) -> str:
    """Return ``kernel``, or the device's default where the device cannot run it."""
    if kernel == "unfused" or (kernel in _ON and device.architecture in _ON[kernel]):
        return kernel
    return default_kernel(device)


@functools.lru_cache(maxsize=1024)
def _score_s(
    device: DeviceSpec,
    dtype: str,
    kernel: str,
    head_dim: int,
    value_dim: int,
    causal: bool,
    backward: bool,
    constants: Efficiency,
) -> tuple[str, float, float, float]:
    """Return (kernel, seconds of one score on the whole device, fill in keys, imbalance under a causal mask)."""
    chosen = _kernel_on(device, kernel)
    if chosen == "unfused":
        unfused = constants.unfused
        nbytes = unfused.backward_bytes if backward else unfused.forward_bytes
        if causal:
            nbytes += unfused.causal_backward_bytes if backward else unfused.causal_forward_bytes
        return chosen, nbytes * dtype_nbytes(dtype) / 2 / stream_bytes_per_s(device), 0.0, 0.0
    flops = _BACKWARD_FLOPS if backward else _FORWARD_FLOPS
    rate = flash_rate_flops_per_s(device, dtype, chosen)
    if not device.processors:
        return chosen, flops * (head_dim + value_dim) / 2 / rate, 0.0, 0.0
    flash = dict(constants.flash)[chosen]
    one_pass = flash.backward if backward else flash.forward
    cost = (_cost(flash, one_pass, head_dim) + _cost(flash, one_pass, value_dim)) / 2
    fill = one_pass.causal_fill_keys if causal else one_pass.fill_keys
    return chosen, flops * cost / rate, fill, one_pass.imbalance if causal else 0.0


def flash_rate_flops_per_s(device: DeviceSpec, dtype: str, kernel: str) -> float:
    """Return the largest FLOP/s of a fused kernel's instructions: the peak, or the rate of Ampere's instructions.

    On AMD it is the rate of the best GEMM (an assumption, since there is no published row).
    """
    rate = device.peak_flops.get(dtype, device.peak_flops["fp32"])
    if not device.architecture.startswith("sm"):
        return rate * device.gemm_efficiency
    return rate * _AMPERE_SHARE.get(device.architecture, 1.0) if kernel == "flash2" else rate


def _cost(flash: FlashEfficiency, one_pass: PassEfficiency, head_dim: int) -> float:
    """Return the cost of a head dim: linear between the measured head dims, and extrapolated from the last two."""
    dims, costs = flash.head_dims, one_pass.cost
    above = next((i for i, dim in enumerate(dims) if dim >= head_dim), len(dims) - 1)
    if above == 0:
        return costs[0]  # kernels pad a smaller head dim
    slope = (costs[above] - costs[above - 1]) / (dims[above] - dims[above - 1])
    return costs[above] + slope * (head_dim - dims[above])


def _bytes_s(
    batch: float,
    heads: float,
    kv_heads: float,
    seq_q: float,
    seq_k: float,
    head_dim: int,
    value_dim: int,
    backward: bool,
    device: DeviceSpec,
    dtype: str,
) -> float:
    """Return the seconds of reading q, k, v and writing the output; backward also reads o and do, writes dq, dk, dv."""
    queries = heads * seq_q * (head_dim + value_dim)
    keys = kv_heads * seq_k * (head_dim + value_dim)
    elements = batch * (2 * queries + heads * seq_q * value_dim + 2 * keys if backward else queries + keys)
    return elements * dtype_nbytes(dtype) / stream_bytes_per_s(device)


def _gemms_s(
    matrices: float,
    seq_q: float,
    seq_k: float,
    head_dim: int,
    value_dim: int,
    backward: bool,
    device: DeviceSpec,
    dtype: str,
    constants: Efficiency,
) -> float:
    """Return the seconds of the batched GEMMs without a fused kernel: q k^T and p v, or their gradients."""

    def one_gemm_s(m: float, n: float, k: float) -> float:
        return gemm_time_s(m=m, n=n, k=k, batch=matrices, device=device, dtype=dtype, efficiency=constants.gemm)

    scores_s, values_s = one_gemm_s(seq_q, seq_k, head_dim), one_gemm_s(seq_q, value_dim, seq_k)
    if not backward:
        return scores_s + values_s
    return (
        one_gemm_s(seq_q, head_dim, seq_k)
        + one_gemm_s(seq_k, head_dim, seq_q)
        + one_gemm_s(seq_q, seq_k, value_dim)
        + one_gemm_s(seq_k, value_dim, seq_q)
    )
