"""Corrections of NCCL's cost lines: longer latencies, and the time to fill a pipeline of pieces.

NCCL's lines omit the launch by the host, the skew between ranks, and the pipeline in which the pieces of a message
follow each other through the ranks. For a line with latency L and transfer seconds T, the corrected time is

    f a L + T + r sqrt(L T / (1 + T / (u L)))

where a is the factor of the line's family, r and u are factors of the place (``Place``), and f is the factor of the
architecture. L under the root includes f. The root is the cost of a pipeline of latency L with the best number of
pieces: D steps of k pieces take (D + k)(alpha + T/(D k)), which is least for k = sqrt(D T/alpha). Pieces have a largest
size, so the root tends to L sqrt(u) as T grows. Every term rises with L and with T: the time never falls as bytes grow,
and never rises with a faster link.

Source of the constants: fitted to published rows by ``benchmarks/calibrate_from_published.py``; ``collectives.toml``
holds them with the sources used. Known error: see ``cost_model.collectives.price``.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from cost_model.collectives.nccl import CostLine, Family
from cost_model.collectives.point_to_point import Shares
from cost_model.hardware.cluster import ClusterSpec

HOPPER = 90
_NVIDIA = re.compile(r"sm(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The fitted constants of groups in one node, or of groups on several nodes.

    Attributes:
        latency_factors: family of a line -> factor on NCCL's latency, ``a`` in the module's docstring.
        ramps, ramp_limits: ``r`` and ``u`` in the module's docstring, each as (for collectives, for pairs).
    """

    latency_factors: Mapping[Family, float]
    ramps: tuple[float, float]
    ramp_limits: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """All fitted constants of collectives: by place, by architecture, and the fractions of rates that pairs reach."""

    one_node: Place
    several_nodes: Place
    architecture_factors: Mapping[str, float]
    shares: Shares


class Curve(NamedTuple):
    """A corrected cost line, as the numbers that a price needs; see ``CostLine`` and the module's docstring."""

    algorithm: str
    latency_s: float
    seconds_per_byte: float
    slow_bytes: float
    slow_seconds_per_byte: float
    ramp_latency_s: float
    ramp_limit_s: float

    def time_s(self, nbytes: float) -> float:
        """Return the seconds of a collective over ``nbytes``."""
        transfer_s = nbytes * self.seconds_per_byte
        if self.slow_bytes:
            transfer_s = max(transfer_s, min(nbytes, self.slow_bytes) * self.slow_seconds_per_byte)
        if not self.ramp_latency_s:
            return self.latency_s + transfer_s
        root = self.ramp_latency_s * transfer_s / (1.0 + transfer_s / self.ramp_limit_s)
        return self.latency_s + transfer_s + math.sqrt(root)


@functools.cache
def shipped_correction() -> Correction:
    """Return the constants of ``collectives.toml``; cached, since the file is part of the program."""
    text = resources.files("cost_model.collectives").joinpath("collectives.toml").read_text(encoding="utf-8")
    return read_correction(tomllib.loads(text))


def read_correction(tables: Mapping[str, Any]) -> Correction:
    """Return the constants of the parsed tables of a ``collectives.toml``."""
    pairs = tables["pairs"]
    return Correction(
        one_node=_place(tables["one_node"]),
        several_nodes=_place(tables["several_nodes"]),
        architecture_factors=dict(tables["architectures"]),
        shares=Shares(
            link=pairs["link_share"],
            card=pairs["card_share"],
            few_channels_bytes_per_s=pairs["few_channels_bytes_per_s"],
            few_channels_bytes=pairs["few_channels_bytes"],
        ),
    )


def _place(table: Mapping[str, float]) -> Place:
    return Place(
        latency_factors={
            "LL": table["ll_latency"],
            "LL128": table["ll128_latency"],
            "Simple": table["simple_latency"],
            "nvls": table["nvls_latency"],
            "pairs": table["pairs_latency"],
        },
        ramps=(table["ramp"], table["pairs_ramp"]),
        ramp_limits=(table["ramp_limit"], table["pairs_ramp_limit"]),
    )


def architecture_class(cluster: ClusterSpec) -> str:
    """Return the key of ``Correction.architecture_factors``: ``hopper_on``, ``before_hopper`` or ``amd``.

    Hopper and Blackwell share one factor: two clusters of one architecture differ by more than the two architectures.
    """
    if cluster.device.kind == "rocm":
        return "amd"
    version = _NVIDIA.fullmatch(cluster.device.architecture)
    return "before_hopper" if version and int(version[1]) < HOPPER else "hopper_on"


def corrected(line: CostLine, *, several_nodes: bool, architecture: str, correction: Correction) -> Curve:
    """Return ``line`` with the correction of its family, place and architecture; ``none`` and ``plain`` get none."""
    transfer = (line.seconds_per_byte, line.slow_bytes, line.slow_seconds_per_byte)
    if line.family in ("none", "plain"):
        return Curve(line.algorithm, line.latency_s, *transfer, ramp_latency_s=0.0, ramp_limit_s=1.0)
    place = correction.several_nodes if several_nodes else correction.one_node
    pairs = line.family == "pairs"
    latency_s = line.latency_s * correction.architecture_factors[architecture]
    return Curve(
        line.algorithm,
        latency_s * place.latency_factors[line.family],
        *transfer,
        ramp_latency_s=latency_s * place.ramps[pairs] ** 2,
        ramp_limit_s=latency_s * place.ramp_limits[pairs],
    )
