"""Prices of FSDP groups: the flat all-gather and reduce-scatter of a block's parameters under ``fully_shard``.

All kinds of blocks of a model use the same mesh axes, flattened into one. A group's collectives overlap with the
compute of the neighbouring block, except for the model's first all-gather and its last reduce-scatter. `ReshardAfter`
says when a block frees its unsharded parameters: after its forward (they are all-gathered again in the backward), after
its backward, or after the last backward of the step.

A collective's seconds are a linear function of its bytes (`CollectiveLine`), as the integer program needs it:
`FsdpGroupPricer.bandwidth` is charged for each parameter of a group, `FsdpGroupPricer.latency` once for the group.
Frozen parameters are all-gathered with the others, and have no gradients to reduce.
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
from planner.pricing.price import FREE, Collective, Price, add_prices
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """What an FSDP group has on one device: bytes of its all-gather's result, elements of its unreduced gradients.

    The all-gather is of bytes where the group's parameters have several dtypes, such as quantized weights and adapters.
    """

    gathered_nbytes: int
    reduced: int


class FsdpGroupPricer:
    """Seconds and bytes of FSDP groups in one `Run`: one mesh, checkpointing mode and number of micro-batches."""

    def __init__(self, run: Run, redistribution_pricer: RedistributionPricer) -> None:
        self._run = run
        self._redistribution_pricer = redistribution_pricer
        self._overlap = Overlap.of(run.cluster.device)
        self._lines: dict[tuple[CollectiveKind, tuple[int, ...], int], CollectiveLine] = {}

    @property
    def reshard_options(self) -> tuple[ReshardAfter, ...]:
        """The `ReshardAfter` modes that blocks can use in this run.

        ``BACKWARD`` is not possible in a pipeline: a stage runs several backwards in a row, without a forward before
        each of them that all-gathers the parameters. ``STEP`` needs several micro-batches.
        """
        if self._run.reshard_after is not None:
            return (self._run.reshard_after,)
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
        if not value.requires_grad:
            return FREE
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

    def bandwidth(self, group: FsdpGroup, axes: tuple[int, ...], sizes: GroupSizes, reshard: ReshardAfter) -> Price:
        """Return the price of ``sizes`` in each block of a kind, in seconds and bytes of a step.

        The price is proportional to ``sizes``; `latency` prices the rest. ``reshard`` decides how long unsharded
        parameters take memory. ``FORWARD``: while their block or the block that prefetches them runs. ``BACKWARD``:
        from the block's forward to its backward. ``STEP``: for the whole step; unreduced gradients take memory as well.
        """
        gather_s = sizes.gathered_nbytes * self._gather_line(axes, group).seconds_per_byte
        reduce_s = 0.0
        if sizes.reduced:
            reduce_s = sizes.reduced * self._reduce_itemsize * self._reduce_line(axes, group).seconds_per_byte
        charge = self._seconds(group, axes, gather_s, reduce_s, reshard)
        nbytes = float(sizes.gathered_nbytes)
        if reshard is ReshardAfter.FORWARD:
            charge |= group.unsharded.charge(nbytes)
        elif reshard is ReshardAfter.BACKWARD:
            charge |= group.unsharded_until_backward.charge(nbytes)
        else:
            charge |= self._unsharded_for_the_step(group, axes, sizes)
        return Price(charge=charge)

    def _unsharded_for_the_step(
        self, group: FsdpGroup, axes: tuple[int, ...], sizes: GroupSizes
    ) -> dict[Quantity, float]:
        """Return the charge of ``ReshardAfter.STEP``: bytes for the whole step, and seconds of accumulating gradients.

        Unreduced gradients replace the shards that `ParameterPricer.storage` charges. While a block's backward runs,
        the gradients of the current micro-batch are live as well, unless gradients accumulate in place (because the
        compute and the reduction have the same dtype size).
        """
        itemsize, reduce_itemsize = BYTES_PER_ELEMENT[self._run.job.dtype], self._reduce_itemsize
        stored_itemsize = BYTES_PER_ELEMENT[self._run.job.stored_dtype]
        more_per_gradient = reduce_itemsize - stored_itemsize / self._ranks(axes)
        charge = {
            persistent("parameters"): float(group.count * sizes.gathered_nbytes),
            persistent("gradients"): group.count * sizes.reduced * more_per_gradient,
        }
        if reduce_itemsize == itemsize:
            return charge
        charge |= group.unreduced.charge(float(sizes.reduced * itemsize))
        sum_s = sizes.reduced * (itemsize + 2 * reduce_itemsize) / stream_bytes_per_s(self._run.cluster.device)
        charge[BACKWARD.compute] = group.count * self._run.passes * sum_s
        return charge

    def gather_latency(self, group: FsdpGroup, axes: tuple[int, ...], reshard: ReshardAfter) -> Price:
        """Return the price of the latencies of the all-gathers of all blocks of a kind, in seconds of a step."""
        gather = self._gather_line(axes, group)
        return Price(charge=self._seconds(group, axes, gather.latency_s, 0.0, reshard))

    def reduce_latency(self, group: FsdpGroup, axes: tuple[int, ...], reshard: ReshardAfter) -> Price:
        """Return the price of the latencies of the reduce-scatters of all blocks of a kind, in seconds of a step."""
        return Price(charge=self._seconds(group, axes, 0.0, self._reduce_line(axes, group).latency_s, reshard))

    def collectives(self, group: FsdpGroup, axes: tuple[int, ...], sizes: GroupSizes, reshard: ReshardAfter) -> Price:
        """Return the collectives of all blocks of a kind with ``sizes`` each, as a price without a charge."""
        axis, for_step = ",".join(self._run.mesh.names[axis] for axis in axes), reshard is ReshardAfter.STEP
        calls = group.count * (1 if for_step else self._run.passes)
        gathered_nbytes, reduced_nbytes = sizes.gathered_nbytes, sizes.reduced * self._reduce_itemsize
        rows: list[tuple[CollectiveKind, Phase, int]] = [
            ("all_gather", "param_gather" if for_step else "forward", gathered_nbytes)
        ]
        if reshard is ReshardAfter.FORWARD:
            rows.append(("all_gather", "backward", gathered_nbytes))
        if reduced_nbytes:
            rows.append(("reduce_scatter", "grad_reduce" if for_step else "backward", reduced_nbytes))
        collectives = []
        for kind, phase, nbytes in rows:
            gathers = kind == "all_gather"
            line = self._gather_line(axes, group) if gathers else self._reduce_line(axes, group)
            time_s = line.latency_s + nbytes * line.seconds_per_byte
            collectives.append(Collective(kind=kind, axis=axis, phase=phase, nbytes=nbytes, count=calls, time_s=time_s))
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
        return self._line_through("reduce_scatter", axes, group.trained_numel * self._reduce_itemsize)

    @property
    def _copy_s_per_byte(self) -> float:
        """Seconds per byte of copying parameters out of a flat buffer, or gradients into a flat buffer, in new memory.

        0.0 if the host's work is not charged per op: the collective's time then includes the copy.
        """
        device = self._run.cluster.device
        return 2 / stream_bytes_per_s(device) + device.first_touch_s_per_byte if device.host_op_s else 0.0

    def _ranks(self, axes: tuple[int, ...]) -> int:
        return math.prod(self._run.mesh.shape[axis] for axis in axes)

    def _gather_line(self, axes: tuple[int, ...], group: FsdpGroup) -> CollectiveLine:
        return self._line_through("all_gather", axes, group.nbytes)

    def _line_through(self, kind: CollectiveKind, axes: tuple[int, ...], high: int) -> CollectiveLine:
        """Return the line of one collective over ``axes``, of ``high`` bytes or fewer."""
        key = (kind, axes, high)
        if key not in self._lines:
            other_ranks = self._run.mesh.size // self._ranks(axes)
            low = max(high // max(other_ranks, 2), 1)
            low_s, high_s = (self._redistribution_pricer.flat_time_s(kind, axes, nbytes) for nbytes in (low, high))
            slope = (high_s - low_s) / (high - low) if high > low else 0.0
            latency_s = max(low_s - low * slope, 0.0)
            self._lines[key] = CollectiveLine(latency_s=latency_s, seconds_per_byte=slope + self._copy_s_per_byte)
        return self._lines[key]
