"""The fitted constants of GEMMs and attention, read from ``efficiency.toml``.

``benchmarks/calibrate_from_published.py`` fits and writes them. The file has the date, and the sources and rows that
each table was fitted to. A constant that differs between architectures is a table by architecture with a ``default``.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

ByArchitecture = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmEfficiency:
    """The rates of GEMMs relative to the best GEMM of their device.

    Attributes:
        sustained: rate of a usual large shape over that of the device's ``gemm_efficiency``, which is the rate of the
            best shape of a search.
        wave_rounding: fraction of a partly filled last wave's idle part that takes time, in [0, 1]. With 1 the wave
            takes as long as a full one. The choice of tiles and the splitting of the depth balance the rest.
        medium_tile, small_tile: rate of 128 x 128 tiles, and of tiles with a side of 64, relative to 128 x 256 tiles.
        fp8: by architecture, fraction of the peak that fp8 reaches, over the fraction that bf16 reaches.
        grouped: by architecture, rate of torch's grouped kernel relative to one GEMM with the same tiles.
        misaligned: rate if a row of an operand is not a multiple of 16 bytes, relative to the rate if it is.
        isolated_launch_s: seconds that a benchmark of one kernel between two events adds; a full queue does not add
            them.
    """

    sustained: float
    wave_rounding: float
    medium_tile: float
    small_tile: float
    fp8: ByArchitecture
    grouped: ByArchitecture
    misaligned: float
    isolated_launch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEfficiency:
    """One pass (forward or backward) of a fused attention kernel on the architecture that it was measured on.

    Attributes:
        cost: for each measured head dim, the seconds of one score, expressed as the head dim whose FLOPs take as long
            at the rate of the matrix instructions.
        fill_keys, causal_fill_keys: cost of starting and ending one row of tiles, in keys, without and with a causal
            mask (whose diagonal tiles are computed whole).
        imbalance: fraction by which the unequal rows of a causal mask prolong the kernel.
    """

    cost: tuple[float, ...]
    fill_keys: float
    causal_fill_keys: float
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashEfficiency:
    """A fused attention kernel: the measured head dims, and the constants of its two passes."""

    head_dims: tuple[int, ...]
    forward: PassEfficiency
    backward: PassEfficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfusedEfficiency:
    """Bytes per score that unfused attention in a 2-byte dtype moves in each pass, and that a causal mask adds."""

    forward_bytes: float
    backward_bytes: float
    causal_forward_bytes: float
    causal_backward_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """All fitted constants; ``flash`` has (kernel, constants) pairs."""

    gemm: GemmEfficiency
    flash: tuple[tuple[str, FlashEfficiency], ...]
    unfused: UnfusedEfficiency


def by_architecture(table: ByArchitecture, architecture: str) -> float:
    """Return the table's figure for ``architecture``, or its ``default`` if it has no such figure."""
    figures = dict(table)
    return figures.get(architecture, figures["default"])


def read_efficiency(tables: Mapping[str, Any]) -> Efficiency:
    """Return the constants of the parsed tables of an ``efficiency.toml``, without the keys ``sources`` and ``rows``.

    Raises:
        KeyError, TypeError: a table or a figure is missing or unknown.
    """
    gemm = _figures(tables["gemm"])
    for name in ("fp8", "grouped"):
        gemm[name] = tuple(sorted(gemm[name].items()))
    flash = tuple(
        (
            kernel,
            FlashEfficiency(
                head_dims=tuple(table["head_dims"]),
                forward=_read_pass(table["forward"]),
                backward=_read_pass(table["backward"]),
            ),
        )
        for kernel, table in tables["flash"].items()
    )
    return Efficiency(
        gemm=GemmEfficiency(**gemm), flash=flash, unfused=UnfusedEfficiency(**_figures(tables["unfused"]))
    )


@functools.cache
def shipped_efficiency() -> Efficiency:
    """Return the constants of ``efficiency.toml``; cached, since the file is part of the program."""
    text = resources.files("cost_model.kernels").joinpath("efficiency.toml").read_text(encoding="utf-8")
    return read_efficiency(tomllib.loads(text))


def _figures(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in ("sources", "rows")}


def _read_pass(table: Mapping[str, Any]) -> PassEfficiency:
    figures = _figures(table)
    figures["cost"] = tuple(figures["cost"])
    return PassEfficiency(**figures)
