"""Prices from measured sweeps: between their points, beyond them, and on groups of other shapes.

The group that was swept takes its measured times, joined straight in the logarithms of bytes and seconds; where noise
lets a larger message be faster, both take their geometric mean, so that the time never falls as bytes grow. Beyond the
ends, and on groups of other shapes, the model's time is scaled by how far the sweep was from it at the end's, or the
same, size. A sweep speaks for groups in one node or for groups on several, as it was measured; an all-gather and a
reduce-scatter speak for each other where only one of them was swept.

Known error: leaving one size out of a published sweep, between its points: mean 6 % in one node and on several
(``published.pricing.collectives.price_with_sweep``). An end that is left out is as far off as the model's slope there.
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
"""(kind, bytes, group, cluster) -> seconds without any sweep."""

_ALIKE: dict[CollectiveKind, CollectiveKind] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPrice:
    """The price of one collective on one group.

    Attributes:
        log_nbytes, log_times: logarithms of sizes and of seconds, neither falling.
        end_ratios: measured over modelled at the smallest and at the largest size.
        modelled_s: the model's seconds for a size, which takes over beyond the ends.
    """

    log_nbytes: tuple[float, ...]
    log_times: tuple[float, ...]
    end_ratios: tuple[float, float]
    modelled_s: Callable[[float], float]

    def time_s(self, nbytes: float) -> float:
        """Seconds of a collective over ``nbytes`` > 0."""
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
    """Return the price from the cluster's sweep that is nearest in shape, None where none speaks for the group."""
    if group.size == 1:
        return None
    sweep = _nearest(kind, group, cluster.sweeps)
    if sweep is None:
        return None
    swept = AxisGroup(nodes=sweep.nodes, ranks_per_node=sweep.ranks_per_node, groups_per_node=1)
    bare = replace(cluster, sweeps=())
    then = replace(
        bare,
        intra_node=sweep.intra_node or cluster.intra_node,
        inter_node=sweep.inter_node or cluster.inter_node,
        cards_per_node=sweep.cards_per_node or cluster.cards_per_node,
    )
    ratios = [
        time_s / modelled_s(sweep.kind, nbytes, swept, then)
        for nbytes, time_s in zip(sweep.nbytes, sweep.times_s, strict=True)
    ]
    times = [
        math.log(ratio * modelled_s(kind, nbytes, group, bare))
        for nbytes, ratio in zip(sweep.nbytes, ratios, strict=True)
    ]
    return SweepPrice(
        log_nbytes=tuple(math.log(nbytes) for nbytes in sweep.nbytes),
        log_times=never_falling(times),
        end_ratios=(ratios[0], ratios[-1]),
        modelled_s=lambda nbytes: modelled_s(kind, nbytes, group, bare),
    )


def never_falling(values: Sequence[float]) -> tuple[float, ...]:
    """Return the never-falling sequence that is nearest to ``values`` in squares (pool adjacent violators)."""
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
