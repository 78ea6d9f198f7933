"""Seconds of collectives from measured sweeps: between their points, beyond them, and for groups of other shapes.

For the group that was swept, the measured times are interpolated linearly in the logarithms of bytes and seconds. Where
noise makes a larger message faster, these messages get the geometric mean of their times, so that the time never falls
as bytes grow. Beyond the smallest and the largest size, the model's time is scaled by the ratio of measured to modelled
time at that size. For a group of another shape, the model's time of each swept size is scaled by the ratio at the same
size. A sweep of a group in one node holds for other groups in one node, a sweep on several nodes for groups on several
nodes. If only one of all-gather and reduce-scatter was swept, its sweep holds for both.

Known error (2026-11, one size left out of a published sweep, ``published.pricing.collectives.price_with_sweep``): mean
4 % between the points in one node, 6 % on several. Beyond the ends it is that of the model's slope.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cost_model.collectives.axis_groups import AxisGroup
from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.hardware.sweep import Sweep

ModelledTime = Callable[[CollectiveKind, float, AxisGroup, ClusterSpec], float]
"""(kind, bytes, group, cluster) -> seconds by the model, without sweeps."""

_ALIKE: dict[CollectiveKind, CollectiveKind] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPrice:
    """The price of one collective on one group.

    Attributes:
        log_nbytes, log_times: logarithms of bytes and of seconds; neither sequence falls.
        end_ratios: measured over modelled seconds, at the smallest and at the largest size.
        modelled_s: bytes -> the model's seconds, for sizes beyond the ends.
    """

    log_nbytes: tuple[float, ...]
    log_times: tuple[float, ...]
    end_ratios: tuple[float, float]
    modelled_s: Callable[[float], float]

    def time_s(self, nbytes: float) -> float:
        """Return the seconds of a collective over ``nbytes`` > 0."""
        place = math.log(nbytes)
        if place <= self.log_nbytes[0]:
            return min(math.exp(self.log_times[0]), self.end_ratios[0] * self.modelled_s(nbytes))
        if place >= self.log_nbytes[-1]:
            return max(math.exp(self.log_times[-1]), self.end_ratios[1] * self.modelled_s(nbytes))
        after = bisect_right(self.log_nbytes, place)
        left, right = self.log_nbytes[after - 1], self.log_nbytes[after]
        low, high = self.log_times[after - 1], self.log_times[after]
        return math.exp(low + (high - low) * (place - left) / (right - left))


def sweep_price(
    kind: CollectiveKind, group: AxisGroup, cluster: ClusterSpec, modelled_s: ModelledTime
) -> SweepPrice | None:
    """Return the price from the cluster's sweep of the nearest shape; None if no sweep holds for the group."""
    if group.size == 1:
        return None
    sweep = _nearest(kind, group, cluster.sweeps)
    if sweep is None:
        return None
    swept = AxisGroup(nodes=sweep.nodes, ranks_per_node=sweep.ranks_per_node, groups_per_node=1)
    bare = replace(cluster, sweeps=())
    as_swept = replace(
        bare,
        intra_node=sweep.intra_node or cluster.intra_node,
        inter_node=sweep.inter_node or cluster.inter_node,
        cards_per_node=sweep.cards_per_node or cluster.cards_per_node,
    )
    ratios = [
        time_s / modelled_s(sweep.kind, nbytes, swept, as_swept)
        for nbytes, time_s in zip(sweep.nbytes, sweep.times_s, strict=True)
    ]
    times = [
        math.log(ratio * modelled_s(kind, nbytes, group, bare))
        for nbytes, ratio in zip(sweep.nbytes, ratios, strict=True)
    ]
    return SweepPrice(
        log_nbytes=tuple(math.log(nbytes) for nbytes in sweep.nbytes),
        log_times=non_decreasing(times),
        end_ratios=(ratios[0], ratios[-1]),
        modelled_s=lambda nbytes: modelled_s(kind, nbytes, group, bare),
    )


def non_decreasing(values: Sequence[float]) -> tuple[float, ...]:
    """Return the non-decreasing sequence nearest to ``values`` in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # (mean, count)
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, size = blocks.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return tuple(mean for mean, count in blocks for _ in range(count))


def _nearest(kind: CollectiveKind, group: AxisGroup, sweeps: Sequence[Sweep]) -> Sweep | None:
    fitting = [
        sweep for sweep in sweeps if sweep.kind in (kind, _ALIKE.get(kind)) and (sweep.nodes == 1) == (group.nodes == 1)
    ]

    def distance(sweep: Sweep) -> tuple[float, bool]:
        apart = abs(math.log(sweep.nodes / group.nodes)) + abs(math.log(sweep.ranks_per_node / group.ranks_per_node))
        return apart, sweep.kind != kind

    return min(fitting, key=distance, default=None)
