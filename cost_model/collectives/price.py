"""Seconds of one collective on one group of ranks of one cluster.

The price is that of the fastest algorithm, as NCCL chooses it: rings, trees and PAT in three protocols (``nccl``),
reduction in the switch (``nvls``), messages between pairs (``point_to_point``). Each algorithm's seconds are linear in
nbytes, and corrected by measurements (``correction``). Measured sweeps of the cluster replace the model
(``sweep_prices``). Devices of kind ``cpu`` have rings, trees and pairs without correction.

Known error (2026-11, 153 measured rows of trust A and B from sources that nothing was fitted to; benchmarks:
``python -m published.pricing.collectives``): mean 9 % in one node, 2 % from 256 MiB up; 19 % on several nodes, 6 % from
256 MiB up. Below 1 MiB two clusters of one shape differ by up to 2x, so a better price needs a sweep of the cluster.
The form of the correction was chosen with these rows in view, only its constants were not. With every source left out
of the fit in turn, the means are 13 % and 25 % (``python -m published.fit.collectives``). V100, MI250X, racks,
all-to-all and send/recv depend on one source each.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from cost_model.collectives.axis_groups import AxisGroup, axes_group, axis_group, card_rate_bytes_per_s
from cost_model.collectives.correction import Correction, Curve, architecture_class, corrected, shipped_correction
from cost_model.collectives.nccl import CostLine, ring_and_tree_lines
from cost_model.collectives.nvls import nvls_line
from cost_model.collectives.point_to_point import Shares, pair_line
from cost_model.collectives.sweep_prices import SweepPrice, sweep_price
from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.collective_kinds import COLLECTIVE_KINDS, CollectiveKind

__all__ = [
    "AxisGroup",
    "CollectiveKind",
    "CostLine",
    "axes_group",
    "axis_group",
    "card_rate_bytes_per_s",
    "collective_lines",
    "collective_time_s",
    "collective_times_s",
    "fastest_algorithm",
]


OPS_AROUND_A_COLLECTIVE = 4
"""Host time of the executor's redistribution around a collective, in DTensor ops: it dispatches two ops, looks up the
path in Python, and constructs the DTensor. Measured 2026-11-22 on two fake processes of one CPU, in forward, in
backward, and for a gradient: 3.5 to 5.3."""


def collective_lines(
    kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec, shares: Shares | None = None
) -> tuple[CostLine, ...]:
    """Return the uncorrected cost line of every algorithm that implements the collective.

    Args:
        kind, group, cluster: as for ``collective_time_s``.
        shares: fractions of the rates of links and cards that messages between pairs reach; None: the shipped ones.

    Raises:
        ValueError: ``kind`` is not in ``CollectiveKind``.
    """
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVE_KINDS)}")
    if group.size == 1:
        return (CostLine("none", "none", 0.0, 0.0),)
    if kind in ("all_to_all", "send_recv"):
        return (pair_line(kind, group, cluster, shares or shipped_correction().shares),)
    lines = ring_and_tree_lines(kind, group, cluster)
    in_switch = nvls_line(group, cluster) if kind == "all_reduce" else None
    return (*lines, in_switch) if in_switch else tuple(lines)


def collective_time_s(kind: CollectiveKind, nbytes: float, group: AxisGroup, cluster: ClusterSpec) -> float:
    """Return the seconds of one collective; 0.0 for a group of one or for no bytes.

    Args:
        kind: the collective.
        nbytes: bytes of the full buffer, as nccl-tests counts it: the output of an all_gather, the input of a
            reduce_scatter, the buffer of an all_reduce or broadcast, one rank's buffer of an all_to_all (its own part
            included), the message of a send_recv.
        group: the ranks on the nodes, from ``axis_group``.
        cluster: devices and links.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it cannot be negative; give 0 or more")
    if nbytes == 0:
        return 0.0
    if cluster.sweeps:
        measured = _swept(kind, group, cluster)
        if measured is not None:
            return measured.time_s(nbytes)
    return _fastest_s(_curves(kind, group, cluster), nbytes)


def dispatched_collective_time_s(kind: CollectiveKind, nbytes: float, group: AxisGroup, cluster: ClusterSpec) -> float:
    """Return the seconds of one collective of a redistribution, including the host's ops around the collective.

    The arguments are those of ``collective_time_s``, and so is the result where the device does not wait for its host.
    """
    seconds = collective_time_s(kind, nbytes, group, cluster)
    host_op_s = cluster.device.host_op_s
    return seconds + OPS_AROUND_A_COLLECTIVE * host_op_s if seconds and host_op_s else seconds


def collective_times_s(
    kind: CollectiveKind, nbytes: NDArray[np.generic], group: AxisGroup, cluster: ClusterSpec
) -> NDArray[np.float64]:
    """Return ``collective_time_s`` for each element of ``nbytes``, in its shape."""
    sizes = np.asarray(nbytes, dtype=np.float64)
    if np.any(sizes < 0):
        raise ValueError("nbytes has a negative size; give 0 or more")
    times = [collective_time_s(kind, size, group, cluster) for size in sizes.ravel().tolist()]
    return np.array(times, dtype=np.float64).reshape(sizes.shape)


def fastest_algorithm(kind: CollectiveKind, nbytes: float, group: AxisGroup, cluster: ClusterSpec) -> str:
    """Return the fastest algorithm and protocol, whose seconds ``collective_time_s`` returns without a sweep."""
    return min(_curves(kind, group, cluster), key=lambda curve: curve.time_s(nbytes)).algorithm


def _fastest_s(curves: tuple[Curve, ...], nbytes: float) -> float:
    best_s = math.inf
    for curve in curves:
        if curve.latency_s < best_s:
            best_s = min(best_s, curve.time_s(nbytes))
    return best_s


@functools.lru_cache(maxsize=65536)
def _curves(kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec) -> tuple[Curve, ...]:
    return price_curves(kind, group, cluster, shipped_correction())


def price_curves(
    kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec, correction: Correction
) -> tuple[Curve, ...]:
    """Return the corrected cost lines of those algorithms that may be fastest at some size, least latency first."""
    lines = collective_lines(kind, group, cluster, correction.shares)
    architecture = architecture_class(cluster)
    curves = [
        corrected(line, several_nodes=group.nodes > 1, architecture=architecture, correction=correction)
        for line in lines
    ]
    curves.sort(key=lambda curve: (curve.latency_s, curve.seconds_per_byte))
    fastest: list[Curve] = []
    for curve in curves:
        if not any(_never_slower(other, curve) for other in fastest):
            fastest.append(curve)
    return tuple(fastest)


def _never_slower(one: Curve, other: Curve) -> bool:
    """Return whether every term of ``one`` is at most the same term of ``other``."""
    return (
        one.latency_s <= other.latency_s
        and one.seconds_per_byte <= other.seconds_per_byte
        and one.ramp_latency_s <= other.ramp_latency_s
        and one.ramp_limit_s <= other.ramp_limit_s
    )


@functools.lru_cache(maxsize=65536)
def _swept(kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec) -> SweepPrice | None:
    def modelled_s(kind: CollectiveKind, nbytes: float, group: AxisGroup, cluster: ClusterSpec) -> float:
        return _fastest_s(_curves(kind, group, cluster), nbytes)

    return sweep_price(kind, group, cluster, modelled_s)
