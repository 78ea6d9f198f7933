"""The fitted constants of matrix multiplication and attention, read from ``efficiency.toml``.

``benchmarks/calibrate_from_published.py`` fits and writes them; the file names the sources and rows of each table.
A constant that differs between architectures is a table by architecture with a ``default``.
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
    """How far a matrix multiplication stays behind the best one of its device.

    Attributes:
        sustained: share of the device's ``gemm_efficiency`` that a usual large shape reaches; the catalogue's figure
            is the best shape of a search.
        wave_rounding: how much of a last, partly filled wave of tiles is paid for, in [0, 1]; the rest is
            balanced away by the choice of tiles and by splitting.
        medium_tile, small_tile: rate of 128 x 128 tiles, and of those with a side of 64, relative to 128 x 256.
        fp8: by architecture, share of the peak that fp8 reaches, relative to the share that bf16 reaches.
        grouped: by architecture, rate of torch's grouped kernel relative to one multiplication of the same tiles.
        misaligned: rate where a row of an operand is no multiple of 16 bytes, relative to where it is.
        isolated_launch_s: what a benchmark of one kernel between two events adds; no part of a full queue's time.
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
        cost: seconds of one score, by head dim, as the head dim whose FLOPs take as long at ``basis`` rate.
        fill_keys, causal_fill_keys: keys that starting and ending one row of tiles costs, without and with a causal
            mask (whose diagonal tiles are computed whole).
        imbalance: share by which unequal rows of a causal mask prolong the kernel.
    """

    cost: tuple[float, ...]
    fill_keys: float
    causal_fill_keys: float
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashEfficiency:
    """A fused attention kernel: the head dims that it was measured at, and its two passes."""

    head_dims: tuple[int, ...]
    forward: PassEfficiency
    backward: PassEfficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfusedEfficiency:
    """Bytes that attention without a fused kernel moves for each score, by pass, and on top for a causal mask."""

    forward_bytes: float
    backward_bytes: float
    causal_forward_bytes: float
    causal_backward_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """All fitted constants; ``flash`` holds (kernel, constants) pairs."""

    gemm: GemmEfficiency
    flash: tuple[tuple[str, FlashEfficiency], ...]
    unfused: UnfusedEfficiency


def by_architecture(table: ByArchitecture, architecture: str) -> float:
    """Return the table's figure for ``architecture``, its ``default`` where it has none."""
    figures = dict(table)
    return figures.get(architecture, figures["default"])


def read_efficiency(tables: Mapping[str, Any]) -> Efficiency:
    """Return the constants in the tables of an ``efficiency.toml``; keys ``sources`` and ``rows`` are for readers.

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
    """Return the constants of ``efficiency.toml``. Read once: the file is part of the program."""
    text = resources.files("cost_model.kernels").joinpath("efficiency.toml").read_text(encoding="utf-8")
    return read_efficiency(tomllib.loads(text))


def _figures(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in ("sources", "rows")}


def _read_pass(table: Mapping[str, Any]) -> PassEfficiency:
    figures = _figures(table)
    figures["cost"] = tuple(figures["cost"])
    return PassEfficiency(**figures)
