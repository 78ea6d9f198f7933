"""What measurements add to NCCL's lines: longer latencies, and the time that pipelines take to fill.

NCCL's lines leave out launch by the host, skew between ranks, and that a message is cut into pieces which follow each
other through the ranks. Of a line with latency L and T seconds for its bytes the corrected time is

    f a L + T + r sqrt(L T / (1 + T / (u L)))

with a the factor of its protocol (``Place``), f that of the architecture (already in L where it enters the root). The
root is what the best number of pieces leaves of a pipeline of latency L (textbook: D steps of k pieces take
(D + k)(alpha + T/(D k)), least for k = sqrt(D T/alpha)); pieces have a largest size, from where on the root no longer
grows: it tends to L sqrt(u). Every part rises with L and with T, so the time never falls as bytes grow and never rises
with a faster link.

The constants are fitted to published rows by ``benchmarks/calibrate_from_published.py``; ``collectives.toml`` holds
them with the sources used. Known error: see ``cost_model.collectives.price``.
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
    """The constants of groups in one node, or of groups on several.

    Attributes:
        latency_factors: by family of lines, on NCCL's latency.
        ramps, ramp_limits: ``r`` and ``u`` above, of collectives and of pairs.
    """

    latency_factors: Mapping[Family, float]
    ramps: tuple[float, float]
    ramp_limits: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """All fitted constants of collectives: by place, by architecture, and what pairs reach of their links."""

    one_node: Place
    several_nodes: Place
    architecture_factors: Mapping[str, float]
    shares: Shares


class Curve(NamedTuple):
    """A corrected line as the numbers that a price needs; see ``CostLine`` and the module."""

    algorithm: str
    latency_s: float
    seconds_per_byte: float
    slow_bytes: float
    slow_seconds_per_byte: float
    ramp_latency_s: float
    ramp_limit_s: float

    def time_s(self, nbytes: float) -> float:
        """Seconds of a collective over ``nbytes``."""
        transfer_s = nbytes * self.seconds_per_byte
        if self.slow_bytes:
            transfer_s = max(transfer_s, min(nbytes, self.slow_bytes) * self.slow_seconds_per_byte)
        if not self.ramp_latency_s:
            return self.latency_s + transfer_s
        root = self.ramp_latency_s * transfer_s / (1.0 + transfer_s / self.ramp_limit_s)
        return self.latency_s + transfer_s + math.sqrt(root)


@functools.cache
def shipped_correction() -> Correction:
    """Return the constants of ``collectives.toml``. Read once: the file is part of the program."""
    text = resources.files("cost_model.collectives").joinpath("collectives.toml").read_text(encoding="utf-8")
    return read_correction(tomllib.loads(text))


def read_correction(tables: Mapping[str, Any]) -> Correction:
    """Return the constants of tables as ``collectives.toml`` has them."""
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
    """Return the key of ``Correction.architecture_factors``: NVIDIA's from Hopper on, those before it, or AMD's.

    Hopper and Blackwell share one: two clusters of one architecture differ more than these two do.
    """
    if cluster.device.kind == "rocm":
        return "amd"
    version = _NVIDIA.fullmatch(cluster.device.architecture)
    return "before_hopper" if version and int(version[1]) < HOPPER else "hopper_on"


def corrected(line: CostLine, *, several_nodes: bool, architecture: str, correction: Correction) -> Curve:
    """Return ``line`` with the correction of its family, place and architecture; ``none`` and ``plain`` as they are."""
    moved = (line.seconds_per_byte, line.slow_bytes, line.slow_seconds_per_byte)
    if line.family in ("none", "plain"):
        return Curve(line.algorithm, line.latency_s, *moved, ramp_latency_s=0.0, ramp_limit_s=1.0)
    place = correction.several_nodes if several_nodes else correction.one_node
    pairs = line.family == "pairs"
    latency_s = line.latency_s * correction.architecture_factors[architecture]
    return Curve(
        line.algorithm,
        latency_s * place.latency_factors[line.family],
        *moved,
        ramp_latency_s=latency_s * place.ramps[pairs] ** 2,
        ramp_limit_s=latency_s * place.ramp_limits[pairs],
    )
