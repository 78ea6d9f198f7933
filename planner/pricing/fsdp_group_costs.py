"""Prices of FSDP groups: the flat all-gather and reduce-scatter of a block's parameters under ``fully_shard``.

All kinds of blocks of a model use the same mesh axes, flattened into one. A group's collectives overlap with the
compute of the neighbouring block, except for the model's first all-gather and its last reduce-scatter. `ReshardAfter`
says when a block frees its unsharded parameters: after its forward (they are all-gathered again in the backward), after
its backward, or after the last backward of the step.

A collective's seconds are a linear function of its bytes (`CollectiveLine`), as the integer program needs it:
`FsdpGroupPricer.bandwidth` is charged for each parameter of a group, `FsdpGroupPricer.latency` once for the group.
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

    The line goes through two points of the cost model: the bytes of all parameters of a block, and these bytes divided
    by the number of ranks on the other mesh axes (at least 2). Between and near these points the cost model is nearly
    linear.
    """

    latency_s: float
    seconds_per_byte: float


class FsdpGroupPricer:
    """Seconds and bytes of FSDP groups in one `Run`: one mesh, checkpointing mode and number of micro-batches."""

    def __init__(self, run: Run, redistribution_pricer: RedistributionPricer) -> None:
        self._run = run
        self._redistribution_pricer = redistribution_pricer
        self._overlap = Overlap.of(run.cluster.device)
        self._lines: dict[tuple[CollectiveKind, tuple[int, ...], int, int], CollectiveLine] = {}

    @property
    def reshard_options(self) -> tuple[ReshardAfter, ...]:
        """The `ReshardAfter` modes that blocks can use in this run.

        ``BACKWARD`` is not possible in a pipeline: a stage runs several backwards in a row, without a forward before
        each of them that all-gathers the parameters. ``STEP`` needs several micro-batches.
        """
        options = [ReshardAfter.FORWARD]
        if self._run.place is None:
            options.append(ReshardAfter.BACKWARD)
        if self._run.micro_batches > 1:
            options.append(ReshardAfter.STEP)
        return tuple(options)

    def use(
        self,
        value: Value,
        port: PortLayouts,
        groups: tuple[tuple[FsdpGroup, int], ...],
        gradients: tuple[float, Lifetime],
    ) -> Price:
        """Return the price of one use of parameters in FSDP groups: the bytes of gradients that are not reduced yet.

        Args:
            value: one of the parameters.
            port: layouts of parameter and gradient in the use.
            groups: for each kind of block with these parameters, the group and their number in one such block.
            gradients: bytes of one reduced gradient, and the lifetime of unreduced gradients, which wait until all
                gradients of their block exist.
        """
        assert port.layout is not None
        numel = value.nbytes // value.dtype.itemsize // split_factor(port.layout, self._run.mesh.shape)
        prices = []
        for group, parameter_count in groups:
            buffer_nbytes = numel * parameter_count * self._reduce_itemsize
            prices.append(Price(charge=group.reduce_buffers.charge(float(buffer_nbytes))))
        if self._run.micro_batches == 1:
            # An unreduced gradient replaces the reduced shard that `ParameterPricer.storage` charges.
            reduced_nbytes, unreduced = gradients
            prices.append(Price(charge=unreduced.charge(max(numel * value.dtype.itemsize - reduced_nbytes, 0.0))))
        return add_prices(prices)

    def bandwidth(
        self, group: FsdpGroup, axes: tuple[int, ...], numel: int, itemsize: int, reshard: ReshardAfter
    ) -> Price:
        """Return the price of ``numel`` elements in each block of a kind, in seconds and bytes of a step.

        The price is proportional to ``numel``; `latency` prices the rest. ``reshard`` decides how long unsharded
        parameters take memory. ``FORWARD``: while their block or the block that prefetches them runs. ``BACKWARD``:
        from the block's forward to its backward. ``STEP``: for the whole step; unreduced gradients take memory as well.

        Args:
            itemsize: bytes per element of the all-gather.
        """
        gather, reduce = self._line("all_gather", axes, group, itemsize), self._reduce_line(axes, group)
        gather_s = numel * itemsize * gather.seconds_per_byte
        reduce_s = numel * self._reduce_itemsize * reduce.seconds_per_byte
        charge = self._seconds(group, axes, gather_s, reduce_s, reshard)
        nbytes = float(numel * itemsize)
        if reshard is ReshardAfter.FORWARD:
            charge |= group.unsharded.charge(nbytes)
        elif reshard is ReshardAfter.BACKWARD:
            charge |= group.unsharded_until_backward.charge(nbytes)
        else:
            charge |= self._unsharded_for_the_step(group, axes, numel, itemsize)
        return Price(charge=charge)

    def _unsharded_for_the_step(
        self, group: FsdpGroup, axes: tuple[int, ...], numel: int, itemsize: int
    ) -> dict[Quantity, float]:
        """Return the charge of ``ReshardAfter.STEP``: bytes for the whole step, and seconds of accumulating gradients.

        Unreduced gradients replace the shards that `ParameterPricer.storage` charges. While a block's backward runs,
        the gradients of the current micro-batch are live as well, unless gradients accumulate in place (because the
        all-gather and the reduction have the same dtype size).
        """
        reduce_itemsize = self._reduce_itemsize
        stored_itemsize = BYTES_PER_ELEMENT[self._run.job.master_dtype or self._run.job.dtype]
        charge = {
            persistent("parameters"): float(group.count * numel * itemsize),
            persistent("gradients"): group.count * numel * (reduce_itemsize - stored_itemsize / self._ranks(axes)),
        }
        if reduce_itemsize == itemsize:
            return charge
        charge |= group.unreduced.charge(float(numel * itemsize))
        sum_s = numel * (itemsize + 2 * reduce_itemsize) / stream_bytes_per_s(self._run.cluster.device)
        charge[BACKWARD.compute] = group.count * self._run.passes * sum_s
        return charge

    def latency(self, group: FsdpGroup, axes: tuple[int, ...], itemsize: int, reshard: ReshardAfter) -> Price:
        """Return the price of the latencies of the collectives of all blocks of a kind, in seconds of a step."""
        gather, reduce = self._line("all_gather", axes, group, itemsize), self._reduce_line(axes, group)
        return Price(charge=self._seconds(group, axes, gather.latency_s, reduce.latency_s, reshard))

    def collectives(
        self, group: FsdpGroup, axes: tuple[int, ...], numel: int, itemsize: int, reshard: ReshardAfter
    ) -> Price:
        """Return the collectives of all blocks of a kind with ``numel`` elements each, as a price without a charge."""
        axis, for_step = ",".join(self._run.mesh.names[axis] for axis in axes), reshard is ReshardAfter.STEP
        calls = group.count * (1 if for_step else self._run.passes)
        rows: list[tuple[CollectiveKind, Phase, int]] = [
            ("all_gather", "param_gather" if for_step else "forward", itemsize)
        ]
        if reshard is ReshardAfter.FORWARD:
            rows.append(("all_gather", "backward", itemsize))
        rows.append(("reduce_scatter", "grad_reduce" if for_step else "backward", self._reduce_itemsize))
        collectives = []
        for kind, phase, size in rows:
            line = self._line(kind, axes, group, size)
            time_s = line.latency_s + numel * size * line.seconds_per_byte
            collectives.append(
                Collective(kind=kind, axis=axis, phase=phase, nbytes=numel * size, count=calls, time_s=time_s)
            )
        return Price(collectives=tuple(collectives))

    @property
    def _reduce_itemsize(self) -> int:
        return BYTES_PER_ELEMENT[self._run.job.reduce_dtype]

    def _seconds(
        self, group: FsdpGroup, axes: tuple[int, ...], gather_s: float, reduce_s: float, reshard: ReshardAfter
    ) -> dict[Quantity, float]:
        """Return the charge of the collectives of all blocks of a kind, given the seconds of one call of each.

        The model's first kind has one exposed all-gather per micro-batch and an exposed last reduce-scatter. Each later
        chunk of the model begins with one exposed all-gather per micro-batch. With ``STEP``, each block has one
        all-gather per step, and only the first kind exposes one. All other collectives overlap with compute.
        """
        link, for_step = self._redistribution_pricer.flat_link(axes), reshard is ReshardAfter.STEP
        passes = 1 if for_step else self._run.passes
        calls = group.count * passes
        exposed_gathers = passes * (group.is_first + (0 if for_step else group.chunk_heads))
        exposed_reductions = int(group.is_first)
        backward_gather_s = calls * gather_s if reshard is ReshardAfter.FORWARD else 0.0
        forward_s = (calls - exposed_gathers) * gather_s
        backward_s = (calls - exposed_reductions) * reduce_s + backward_gather_s
        overlap = self._overlap
        return {
            (overlap.once_forward if for_step else overlap.forward)[link]: forward_s,
            (overlap.once_backward if for_step else overlap.backward)[link]: backward_s,
            EXPOSED: exposed_gathers * gather_s + exposed_reductions * reduce_s,
            FORWARD.slowdown: overlap.slowdown_s(forward_s),
            BACKWARD.slowdown: overlap.slowdown_s(backward_s),
        }

    def _reduce_line(self, axes: tuple[int, ...], group: FsdpGroup) -> CollectiveLine:
        return self._line("reduce_scatter", axes, group, self._reduce_itemsize)

    @property
    def _copy_s_per_byte(self) -> float:
        """Seconds per byte of copying parameters out of a flat buffer, or gradients into a flat buffer, in new memory.

        0.0 if the host's work is not charged per op: the collective's time then includes the copy.
        """
        device = self._run.cluster.device
        return 2 / stream_bytes_per_s(device) + device.first_touch_s_per_byte if device.host_op_s else 0.0

    def _ranks(self, axes: tuple[int, ...]) -> int:
        return math.prod(self._run.mesh.shape[axis] for axis in axes)

    def _line(self, kind: CollectiveKind, axes: tuple[int, ...], group: FsdpGroup, itemsize: int) -> CollectiveLine:
        """Return the line of one collective of a group over ``axes``."""
        high = group.numel * itemsize
        key = (kind, axes, high, itemsize)
        if key not in self._lines:
            other_ranks = self._run.mesh.size // self._ranks(axes)
            low = max(high // max(other_ranks, 2), 1)
            low_s, high_s = (self._redistribution_pricer.flat_time_s(kind, axes, nbytes) for nbytes in (low, high))
            slope = (high_s - low_s) / (high - low) if high > low else 0.0
            latency_s = max(low_s - low * slope, 0.0)
            self._lines[key] = CollectiveLine(latency_s=latency_s, seconds_per_byte=slope + self._copy_s_per_byte)
        return self._lines[key]
