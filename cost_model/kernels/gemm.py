"""Seconds of a GEMM on one device by its shape: tiles, waves of tiles, split depth, bytes.

A device with ``p`` processors (SMs) computes ``[m, n] = [m, k] @ [k, n]`` in tiles of ``t_m x t_n``. All processors
compute one wave of ``p`` tiles at a time. With ``w = batch ceil(m/t_m) ceil(n/t_n) / p``

    seconds = waves(w) * 2 t_m t_n k / (rate / p * tile_rate),   waves(w) = a ceil(w) + (1 - a) max(w, 1)

where ``a`` is ``GemmEfficiency.wave_rounding``. Where tiles leave processors idle, the depth ``k`` may be split into
``s`` parts: there are ``s`` times the tiles, with depth ``k / s`` each, and the partial sums are written and read once.
The result is the minimum over tiles and splits, but at least the seconds of the bytes. Each term grows with m, n, k and
batch, and so does their minimum.

Source: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization); constants fitted to
published rows, see ``efficiency.toml``. Known error: check 8 of benchmarks/accuracy.py, mean 5 % on rows that nothing
was fitted to (2026-11).
"""

from __future__ import annotations

import functools
import math

from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.compute import dtype_nbytes, matmul_flops_per_s, stream_bytes_per_s
from cost_model.kernels.efficiency import GemmEfficiency, by_architecture, shipped_efficiency

_TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
_MOST_SPLITS = 8
_PARTIAL_NBYTES = 8  # a partial sum in float32, written and read


def gemm_flops(*, m: int, n: int, k: int, batch: int = 1) -> int:
    """Return the FLOPs of ``batch`` GEMMs ``[m, k] @ [k, n]``: two per multiply-add."""
    return 2 * batch * m * n * k


def gemm_rate_flops_per_s(device: DeviceSpec, dtype: str, efficiency: GemmEfficiency | None = None) -> float:
    """Return the FLOP/s of a large GEMM of a usual shape.

    Raises:
        ClusterError: the device has no rate for the dtype.
    """
    constants = efficiency or shipped_efficiency().gemm
    rate = matmul_flops_per_s(device, dtype)
    if not device.processors:
        return rate
    share = by_architecture(constants.fp8, device.architecture) if dtype == "fp8" else 1.0
    return rate * constants.sustained * share


def gemm_time_s(
    *,
    m: float,
    n: float,
    k: float,
    batch: float = 1,
    device: DeviceSpec,
    dtype: str,
    aligned: bool = True,
    efficiency: GemmEfficiency | None = None,
) -> float:
    """Return the seconds of ``batch`` GEMMs ``[m, k] @ [k, n]`` in one kernel; 0.0 if a size is 0.

    The kernel is launched early enough that the device never waits for the host.

    Args:
        m, n, k, batch: the shape; exchanging m and n does not change the result.
        device: the device; if its ``processors`` are not known, tiles are not rounded up.
        dtype: dtype of the operands; the result of fp8 is written in two bytes.
        aligned: whether the rows of both operands are multiples of 16 bytes. It is not derived from the shape, so that
            seconds never fall as a size grows.
        efficiency: the constants; None: the shipped ones.

    Raises:
        ClusterError: the device has no rate for the dtype.
        ValueError: a size is negative.
    """
    if min(m, n, k, batch) < 0:
        raise ValueError(f"a size of [{batch}, {m}, {k}] @ [{batch}, {k}, {n}] is negative; give 0 or more")
    if not (m and n and k and batch):
        return 0.0
    constants = efficiency or shipped_efficiency().gemm
    size, seconds_per_k, bandwidth = _rates(device, dtype, constants)
    bytes_s = batch * ((m + n) * k * size + m * n * max(size, 2)) / bandwidth
    if device.processors:
        flops_s = _tiled_time_s(m, n, k, batch, device.processors, seconds_per_k, bandwidth, constants)
    else:
        flops_s = batch * m * n * k * seconds_per_k[0]
    if not aligned:
        flops_s /= constants.misaligned
    return max(flops_s, bytes_s) + device.kernel_launch_s


def grouped_gemm_time_s(
    *,
    tokens: float,
    n: float,
    k: float,
    groups: int,
    device: DeviceSpec,
    dtype: str,
    kernel: str = "streams",
    efficiency: GemmEfficiency | None = None,
) -> float:
    """Return the seconds of the GEMMs of ``groups`` experts, ``[tokens / groups, k] @ [k, n]`` each.

    Args:
        tokens: rows of all groups together, spread evenly over the groups.
        kernel: ``streams``: one GEMM per group on a few streams (Transformer Engine); ``one by one``: one GEMM per
            group on one stream; ``grouped``: torch's one kernel for all groups.
        efficiency: the constants; None: the shipped ones.
    """
    if kernel not in ("streams", "one by one", "grouped"):
        raise ValueError(f"kernel is {kernel!r}; it is streams, one by one or grouped")
    return _groups_time_s((-(-tokens // groups), n, k), groups, device, dtype, kernel, efficiency)


def grouped_gradient_time_s(
    *,
    tokens: float,
    n: float,
    k: float,
    groups: int,
    device: DeviceSpec,
    dtype: str,
    kernel: str = "grouped",
    efficiency: GemmEfficiency | None = None,
) -> float:
    """Return the seconds of the weight gradients of experts, ``[n, tokens / groups] @ [tokens / groups, k]`` each.

    Args:
        tokens: rows of all groups together, spread evenly over the groups.
        kernel: ``one by one`` or ``grouped``, as in `grouped_gemm_time_s`.
        efficiency: the constants; None: the shipped ones.
    """
    if kernel not in ("one by one", "grouped"):
        raise ValueError(f"kernel is {kernel!r}; it is one by one or grouped")
    return _groups_time_s((n, k, tokens / groups), groups, device, dtype, kernel, efficiency)


def _groups_time_s(
    shape: tuple[float, float, float],
    groups: int,
    device: DeviceSpec,
    dtype: str,
    kernel: str,
    efficiency: GemmEfficiency | None,
) -> float:
    """Return the seconds of ``groups`` GEMMs ``[m, k] @ [k, n]`` of one ``shape`` (m, n, k)."""
    constants = efficiency or shipped_efficiency().gemm
    m, n, k = shape
    if kernel == "one by one":
        return groups * gemm_time_s(m=m, n=n, k=k, device=device, dtype=dtype, efficiency=constants)
    together_s = gemm_time_s(m=m, n=n, k=k, batch=groups, device=device, dtype=dtype, efficiency=constants)
    if kernel == "streams":
        return together_s + (groups - 1) * device.kernel_launch_s if together_s else 0.0
    return together_s / by_architecture(constants.grouped, device.architecture)


def runs_one_by_one(*, tokens: float, n: float, groups: int, architecture: str, processors: int) -> bool:
    """Return whether experts' GEMMs ``[tokens / groups, k] @ [k, n]`` should run one after the other.

    The alternative is torch's grouped kernel, which reaches about half of the rate on Blackwell, all of it elsewhere.
    One after the other is faster if the tiles of one expert's GEMM occupy a larger fraction of the processors than the
    fraction of the rate that the grouped kernel reaches.

    Args:
        tokens: rows of all groups together.
        n: the smallest number of columns of any of the GEMMs.
        architecture: the device's architecture, for example ``sm100``.
        processors: number of the device's processors; 0 if not known.
    """
    share = by_architecture(shipped_efficiency().gemm.grouped, architecture)
    tiles = tokens / groups * n / math.prod(_TILES[0])
    return share < 1.0 and processors > 0 and tiles >= share * processors


def _tiled_time_s(
    m: float,
    n: float,
    k: float,
    batch: float,
    processors: int,
    seconds_per_k: tuple[float, ...],
    bandwidth: float,
    constants: GemmEfficiency,
) -> float:
    """Return the minimum of the seconds over all tiles and splits of the depth."""
    rounded = constants.wave_rounding
    least_s = math.inf
    for (tile_m, tile_n), tile_s_per_k in zip(_TILES, seconds_per_k, strict=True):
        tiles = batch * -(-m // tile_m) * -(-n // tile_n)
        splits = 1
        partial_s = 0.0
        while True:
            waves = tiles * splits / processors
            rounded_waves = rounded * math.ceil(waves) + (1 - rounded) * max(waves, 1.0)
            least_s = min(least_s, rounded_waves * k / splits * tile_s_per_k + partial_s)
            splits *= 2
            if tiles * splits > processors or splits > _MOST_SPLITS:
                break
            partial_s = splits * batch * m * n * _PARTIAL_NBYTES / bandwidth
    return least_s


@functools.lru_cache(maxsize=256)
def _rates(device: DeviceSpec, dtype: str, constants: GemmEfficiency) -> tuple[int, tuple[float, ...], float]:
    """Return (bytes of an operand's element, for each tile the seconds of a wave per unit of depth, bytes per second).

    If the number of processors is not known, the second item is one value: the seconds of one multiply-add.
    """
    rate = gemm_rate_flops_per_s(device, dtype, constants)
    size, bandwidth = dtype_nbytes(dtype), stream_bytes_per_s(device)
    if not device.processors:
        return size, (2 / rate,), bandwidth
    shares = [
        1.0 if m * n > 128 * 128 else constants.medium_tile if m * n == 128 * 128 else constants.small_tile
        for m, n in _TILES
    ]
    per_k = tuple(2 * m * n * device.processors / (rate * share) for (m, n), share in zip(_TILES, shares, strict=True))
    return size, per_k, bandwidth
