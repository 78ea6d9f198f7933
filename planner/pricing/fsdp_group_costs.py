"""What it costs that the parameters of a block are gathered together, by `fully_shard`: one flat collective.

It runs ahead of the compute that needs it. Its time is a straight line, `CollectiveLine`, so that its bytes can be
charged to each parameter and its latency to the block, once. After a block's forward its parameters are dropped and
gathered again for its backward, or kept until then, or until the last backward of the step: all of a block's alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.layouts.layout import split_factor
from planner.graph.op_graph import Value
from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD, Lifetime, Quantity, persistent
from planner.liveness.parameter_classes import FsdpGroup
from planner.plan.estimate import Phase
from planner.plan.job import BYTES_PER_ELEMENT
from planner.plan.reshard import ReshardAfter
from planner.pricing.overlap import Overlap
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import Collective, Price, add_prices
from planner.pricing.redistribution_costs import RedistributionPricer
from planner.pricing.run_spec import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """A collective's seconds as ``latency_s + nbytes * seconds_per_byte``.

    It goes through two points of the cost model: the parameters of a whole block, and as many bytes as remain of them
    where the other axes split them. Between and near them the model itself is nearly straight.
    """

    latency_s: float
    seconds_per_byte: float


class FsdpGroupPricer:
    """Prices of flat collectives in one `Run`."""

    def __init__(self, run: Run, redistribution_pricer: RedistributionPricer) -> None:
        self._run = run
        self._redistribution_pricer = redistribution_pricer
        self._overlap = Overlap.of(run.cluster.device)
        self._lines: dict[tuple[CollectiveKind, tuple[int, ...], int, int], CollectiveLine] = {}

    @property
    def reshard_options(self) -> tuple[ReshardAfter, ...]:
        """How long gathered parameters may be kept.

        Not from forward to backward in a pipeline: there a device runs backwards without a forward between them, before
        which it would gather. And for a step only where that is more than one micro-batch.
        """
        found = [ReshardAfter.FORWARD]
        if self._run.place is None:
            found.append(ReshardAfter.BACKWARD)
        if self._run.micro_batches > 1:
            found.append(ReshardAfter.STEP)
        return tuple(found)

    def use(
        self,
        value: Value,
        use: PortLayouts,
        blocks: tuple[tuple[FsdpGroup, int], ...],
        gradients: tuple[float, Lifetime],
    ) -> Price:
        """Return the price of parameters that are gathered with their blocks: bytes that it takes to reduce them.

        Args:
            use: to which `fully_shard` takes them.
            blocks: each kind of block that such parameters are in, and how many of them one such block holds.
            gradients: bytes of one that is reduced; and at which candidates how many are there whole, waiting for their
                block's.
        """
        assert use.layout is not None
        numel = value.nbytes // value.dtype.itemsize // split_factor(use.layout, self._run.mesh.shape)
        prices = []
        for block, held in blocks:
            reducing = numel * held * self._reduce_itemsize
            prices.append(Price(charge=block.reduce_buffers.charge(float(reducing))))
        if self._run.micro_batches == 1:
            # In place of the shards that rest.
            more = max(numel * value.dtype.itemsize - gradients[0], 0.0)
            prices.append(Price(charge=gradients[1].charge(more)))
        return add_prices(prices)

    def by_size(
        self, block: FsdpGroup, axes: tuple[int, ...], numel: int, itemsize: int, keeping: ReshardAfter
    ) -> Price:
        """Return what it costs that a kind of block gathers and reduces ``numel`` elements: that of bytes alone.

        Dropped after the forward, they are there while their block or the one after it runs. Kept until the backward,
        they take memory from the block's forward on; kept for the step, all the time, as do unreduced gradients.
        """
        gather, reduce = self._line("all_gather", axes, block, itemsize), self._reduction(axes, block)
        gather_s = numel * itemsize * gather.seconds_per_byte
        charge = self._times(block, axes, gather_s, numel * self._reduce_itemsize * reduce.seconds_per_byte, keeping)
        nbytes = float(numel * itemsize)
        if keeping is ReshardAfter.FORWARD:
            charge |= block.unsharded.charge(nbytes)
        elif keeping is ReshardAfter.BACKWARD:
            charge |= block.unsharded_until_backward.charge(nbytes)
        else:
            charge |= self._for_the_step(block, axes, numel, itemsize)
        return Price(charge=charge)

    def _for_the_step(
        self, block: FsdpGroup, axes: tuple[int, ...], numel: int, itemsize: int
    ) -> dict[Quantity, float]:
        """Return the bytes that are there from the first forward to the last backward, and the seconds of adding up.

        Whole gradients are there in place of the shards that `ParameterPricer.resting` counts. While a block runs
        backward, those of its micro-batch come one by one, unless it is to them that they are added.
        """
        reduced = self._reduce_itemsize
        shard = BYTES_PER_ELEMENT[self._run.job.master_dtype or self._run.job.dtype] / self._ranks(axes)
        charge = {
            persistent("parameters"): float(block.count * numel * itemsize),
            persistent("gradients"): block.count * numel * (reduced - shard),
        }
        if reduced == itemsize:
            return charge
        charge |= block.unreduced.charge(float(numel * itemsize))
        seconds = numel * (itemsize + 2 * reduced) / stream_bytes_per_s(self._run.cluster.device)
        charge[BACKWARD.compute] = block.count * self._run.passes * seconds
        return charge

    def latency(self, block: FsdpGroup, axes: tuple[int, ...], itemsize: int, keeping: ReshardAfter) -> Price:
        """Return what a kind of block's gathers and reductions cost before their first byte."""
        gather, reduce = self._line("all_gather", axes, block, itemsize), self._reduction(axes, block)
        return Price(charge=self._times(block, axes, gather.latency_s, reduce.latency_s, keeping))

    def collectives(
        self, block: FsdpGroup, axes: tuple[int, ...], numel: int, itemsize: int, keeping: ReshardAfter
    ) -> Price:
        """Return the flat collectives, uncharged, of a kind of block that gathers ``numel`` elements."""
        name, for_step = ",".join(self._run.mesh.names[axis] for axis in axes), keeping is ReshardAfter.STEP
        calls = block.count * (1 if for_step else self._run.passes)
        rows: list[tuple[CollectiveKind, Phase, int]] = [
            ("all_gather", "param_gather" if for_step else "forward", itemsize)
        ]
        if keeping is ReshardAfter.FORWARD:
            rows.append(("all_gather", "backward", itemsize))
        rows.append(("reduce_scatter", "grad_reduce" if for_step else "backward", self._reduce_itemsize))
        collectives = []
        for kind, phase, size in rows:
            line = self._line(kind, axes, block, size)
            time_s = line.latency_s + numel * size * line.seconds_per_byte
            collectives.append(
                Collective(kind=kind, axis=name, phase=phase, nbytes=numel * size, count=calls, time_s=time_s)
            )
        return Price(collectives=tuple(collectives))

    @property
    def _reduce_itemsize(self) -> int:
        return BYTES_PER_ELEMENT[self._run.job.reduce_dtype]

    def _times(
        self, block: FsdpGroup, axes: tuple[int, ...], gather_s: float, reduce_s: float, keeping: ReshardAfter
    ) -> dict[Quantity, float]:
        """Return what it takes that every block of a kind gathers and reduces, in so many seconds each time.

        Hidden are all but, where the kind is the model's first, one gather per micro-batch and the last reduction; and
        a gather per micro-batch before each further chunk of the model.
        """
        link, for_step = self._redistribution_pricer.flat_link(axes), keeping is ReshardAfter.STEP
        passes = 1 if for_step else self._run.passes
        calls = block.count * passes
        exposed_gathers = passes * (block.is_first + (0 if for_step else block.chunk_heads))
        exposed_reductions = int(block.is_first)
        forward_s = (calls - exposed_gathers) * gather_s
        backward_s = (calls - exposed_reductions) * reduce_s + (
            calls * gather_s if keeping is ReshardAfter.FORWARD else 0.0
        )
        overlap = self._overlap
        return {
            (overlap.once_forward if for_step else overlap.forward)[link]: forward_s,
            (overlap.once_backward if for_step else overlap.backward)[link]: backward_s,
            EXPOSED: exposed_gathers * gather_s + exposed_reductions * reduce_s,
            FORWARD.slowdown: overlap.slowdown_s(forward_s),
            BACKWARD.slowdown: overlap.slowdown_s(backward_s),
        }

    def _reduction(self, axes: tuple[int, ...], block: FsdpGroup) -> CollectiveLine:
        return self._line("reduce_scatter", axes, block, self._reduce_itemsize)

    @property
    def _copying_s_per_byte(self) -> float:
        """Seconds per byte of copying parameters out of a flat buffer, or gradients into one, both in new memory.

        0.0 where kernels are charged, and the host is not: there it counts as part of the collective.
        """
        device = self._run.cluster.device
        return 2 / stream_bytes_per_s(device) + device.first_touch_s_per_byte if device.host_op_s else 0.0

    def _ranks(self, axes: tuple[int, ...]) -> int:
        return math.prod(self._run.mesh.shape[axis] for axis in axes)

    def _line(self, kind: CollectiveKind, axes: tuple[int, ...], block: FsdpGroup, itemsize: int) -> CollectiveLine:
        high = block.numel * itemsize
        key = (kind, axes, high, itemsize)
        if key not in self._lines:
            others = self._run.mesh.size // self._ranks(axes)
            low = max(high // max(others, 2), 1)
            at_low, at_high = (self._redistribution_pricer.flat_time_s(kind, axes, nbytes) for nbytes in (low, high))
            slope = (at_high - at_low) / (high - low) if high > low else 0.0
            latency_s = max(at_low - low * slope, 0.0)
            self._lines[key] = CollectiveLine(latency_s=latency_s, seconds_per_byte=slope + self._copying_s_per_byte)
        return self._lines[key]
