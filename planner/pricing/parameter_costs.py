"""Prices of parameters: state, all-gathers of parameters in no FSDP group, and the reduction of gradients.

`ParameterPricer.storage` prices a parameter between its uses: the bytes of parameter, optimizer state and gradient, and
the seconds of the optimizer's update. `ParameterPricer.use` prices one use of a parameter that is all-gathered by
itself: the module waits for the all-gather (blocking), and the reduction of the gradient overlaps with the backward.
Parameters in FSDP groups are priced in `planner.pricing.fsdp_group_costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.layouts.layout import Layout, split_factor
from planner.graph.op_graph import Value
from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD, Lifetime, LinkQuantities, Quantity, persistent
from planner.liveness.peak_candidates import UPDATE
from planner.liveness.structure import Structure
from planner.plan.estimate import Phase
from planner.plan.job import BYTES_PER_ELEMENT
from planner.pricing.optimizer_update import OptimizerPricer
from planner.pricing.overlap import Overlap
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import FREE, Price, add_prices
from planner.pricing.redistribution_costs import RedistributionPricer
from planner.pricing.run_spec import Run
from planner.pricing.storage_options import StorageOption


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterClassUse:
    """One use of all parameters of a class.

    Attributes:
        value: one of the parameters.
        count: uses per micro-batch, of all parameters of the class together; 0: the parameters are used as they were
            redistributed for another use.
        saved: whether autograd saves the parameter for backward, so that the backward all-gathers it again.
        recomputed: whether the use is inside a checkpointed block.
        last_in_backward: whether the use comes last in the backward, so that its gradient's reduction has no compute to
            overlap with.
        working: lifetime of all-gathered parameters, while an op uses them in the backward (in inference: the forward).
        pending: lifetime of gradients of this use while they wait for the gradients of the parameter's other uses.
        gradients: lifetime of the parameters' gradients.
    """

    value: Value
    count: int
    saved: bool
    recomputed: bool
    last_in_backward: bool
    working: Lifetime
    pending: Lifetime
    gradients: Lifetime


class ParameterPricer:
    """Prices of parameters in one `Run`.

    Trained parameters are stored in the dtype of the master copy, if the job has one, and cast to the compute dtype
    before they are all-gathered. Frozen ones are stored in the compute dtype.

    Args:
        parameters: parameter value -> its FQNs.
    """

    def __init__(
        self, run: Run, redistribution_pricer: RedistributionPricer, parameters: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._run = run
        self._redistribution_pricer = redistribution_pricer
        self.optimizer = OptimizerPricer(run, redistribution_pricer, parameters)
        self._overlap = Overlap.of(run.cluster.device)

    # --- between uses --------------------------------------------------------------------------------------------

    def storage(self, value: Value, option: StorageOption, count: int, gradients: Lifetime) -> Price | None:
        """Return the price of storing and updating ``count`` equal parameters, in bytes and seconds of a step.

        None if no redistribution leads from the gradients' accumulated layout to the stored layout.

        Args:
            gradients: lifetime of the gradients.
        """
        price = self.state(value, option.stored, count)
        if self._run.job.training and value.requires_grad:
            price = add_prices([price, Price(charge=self._gradients_of_backward(value, option, count, gradients))])
        if option.fsdp_axes is None:
            price = add_prices([price, self._compute_copies(value, option.stored, count)])
        if option.accumulated is None:
            return price
        reduction = self._reduction(value, option.accumulated, option.stored, count, False, once=True)
        if reduction is None:
            return None
        if self._run.micro_batches == 1:
            return add_prices([price, reduction])
        accumulating = self._accumulating(value, option, option.accumulated, count, gradients)
        return add_prices([price, reduction, accumulating])

    def state(self, value: Value, stored: Layout, count: int) -> Price:
        """Return the price of ``count`` stored parameters and their optimizer state, and of the optimizer's update."""
        if not (self._run.job.training and value.requires_grad):
            split = split_factor(stored, self._run.mesh.shape)
            return Price(charge={persistent("parameters"): float(value.nbytes // split * count)})
        return self.optimizer.price(value, stored, count)

    def unread_nbytes(self, structure: Structure) -> float:
        """Return the bytes of the parameters that no op reads: they rest whole on every rank."""
        graph, read = structure.regions.graph, {name for each in structure.parameters for name in each.values}
        values = [graph.values[name] for name in graph.parameters if name not in read]
        return sum(value.nbytes / value.dtype.itemsize * self._stored_itemsize(value) for value in values)

    def gradient_nbytes(self, value: Value, layout: Layout) -> float:
        """Return the bytes of one device's shard of a gradient in ``layout``, in the stored dtype."""
        numel = value.nbytes / value.dtype.itemsize / split_factor(layout, self._run.mesh.shape)
        return numel * self._stored_itemsize(value)

    def _stored_itemsize(self, value: Value) -> int:
        job = self._run.job
        trained = job.training and value.requires_grad
        return BYTES_PER_ELEMENT[job.stored_dtype] if trained else value.dtype.itemsize

    def _gradients_of_backward(
        self, value: Value, option: StorageOption, count: int, gradients: Lifetime
    ) -> dict[Quantity, float]:
        """Return the charge of the gradients that a backward computes, in bytes by lifetime.

        Gradients of cast parameters are in the compute dtype until the backward of the casts. That comes last, because
        the casts come first in the forward. At the update, the gradients are in the stored dtype, and the compute
        copies are freed. `_compute_copies` charges the copies for the whole step, so they are subtracted here.
        """
        one_micro_batch = self._run.micro_batches == 1
        if option.fsdp_axes is not None or not self._is_cast(value):
            nbytes = self.gradient_nbytes(value, option.stored) if one_micro_batch else 0.0
            return gradients.charge(nbytes)
        nbytes = value.nbytes / split_factor(option.stored, self._run.mesh.shape)
        at_update = UPDATE.quantity("gradients")
        nbytes_at_update = self.gradient_nbytes(value, option.stored) if one_micro_batch else 0.0
        return gradients.without(at_update).charge(nbytes) | {at_update: count * (nbytes_at_update - nbytes)}

    def _is_cast(self, value: Value) -> bool:
        return self._stored_itemsize(value) != value.dtype.itemsize

    def _compute_copies(self, value: Value, stored: Layout, count: int) -> Price:
        """Return the price of copies in the compute dtype, which autograd saves of all parameters at once."""
        if not self._is_cast(value):
            return FREE
        nbytes = value.nbytes / split_factor(stored, self._run.mesh.shape)
        return Price(charge={persistent("parameters"): count * nbytes})

    def _accumulating(
        self, value: Value, option: StorageOption, layout: Layout, count: int, gradients: Lifetime
    ) -> Price:
        """Return the price, in bytes, of gradients that accumulate over micro-batches in ``layout``.

        Gradients that are reduced later accumulate in ``reduce_dtype``. All other gradients, and all gradients under
        ``fully_shard``, accumulate in the stored dtype.
        """
        final_nbytes = self.gradient_nbytes(value, option.stored)
        nbytes = self.gradient_nbytes(value, layout)
        if option.fsdp_axes is None and layout != option.stored:
            nbytes *= BYTES_PER_ELEMENT[self._run.job.reduce_dtype] / self._stored_itemsize(value)
        charge = {persistent("gradients"): count * nbytes}
        if final_nbytes > nbytes:  # final gradients are larger; for cast parameters they exist at the update only
            more = final_nbytes - nbytes
            at_update = {UPDATE.quantity("gradients"): count * more}
            charge |= at_update if self._is_cast(value) else gradients.charge(more)
        return Price(charge=charge)

    def _reduction(
        self, value: Value, source: Layout, target: Layout, count: int, last_in_backward: bool, *, once: bool
    ) -> Price | None:
        """Return the price of reducing gradients from ``source`` to ``target``; None where there is no path.

        Args:
            once: whether the gradients are reduced once a step; otherwise they are reduced in every micro-batch.
        """
        price = self._redistribution_pricer.one_way(
            value.shape,
            BYTES_PER_ELEMENT[self._run.job.reduce_dtype],
            source,
            target,
            phase="grad_reduce" if once else "backward",
            calls=count if once else count * self._run.passes,
            quantities=self._overlap.once_backward if once else self._overlap.backward,
        )
        if price is None or not self._run.cluster.device.overlaps:
            return price
        seconds = sum(price.charge.values())
        slowdown = {BACKWARD.slowdown: self._overlap.slowdown_s(seconds)}
        exposed = {EXPOSED: seconds} if last_in_backward else {}
        return add_prices([price, Price(charge=slowdown | exposed)])

    # --- one use -------------------------------------------------------------------------------------------------

    def use(self, use: ParameterClassUse, option: StorageOption, port: PortLayouts) -> Price | None:
        """Return the price of one use and of the reduction of its gradients, in seconds and bytes of a step.

        None where no redistribution leads to the layouts of ``port``.

        Args:
            port: layouts of the parameter and of its gradient in the op.
        """
        prices = [self.gather(use, option.stored, port.layout), self.reduce(use, option, port.gradient)]
        possible = [price for price in prices if price is not None]
        return add_prices(possible) if len(possible) == len(prices) else None

    def gather(self, use: ParameterClassUse, stored: Layout, layout: Layout | None) -> Price | None:
        """Return the price of one use's redistributions from ``stored`` to ``layout``; None if there is no path.

        They run in the forward and, if the copy is not kept, in the backward or recomputation; the copy's bytes count.
        """
        assert layout is not None
        value, calls = use.value, use.count * self._run.passes
        forward = self._one_way(value, stored, layout, "forward", calls, FORWARD.blocking)
        if forward is None:
            return None
        if not use.count:
            return FREE
        prices = [forward]
        if layout != stored and self._run.job.phase != "training":
            prices.append(self._inference_copy(value, stored, layout, calls, use.working))
        if self._run.job.training and (use.recomputed or use.saved):
            phase: Phase = "recompute" if use.recomputed else "backward"
            reallgathered = self._one_way(value, stored, layout, phase, calls, BACKWARD.blocking)
            assert reallgathered is not None
            prices.append(reallgathered)
            if layout != stored:
                copy_nbytes = value.nbytes / split_factor(layout, self._run.mesh.shape)
                prices.append(Price(charge=use.working.charge(copy_nbytes)))
        return add_prices(prices)

    def reduce(self, use: ParameterClassUse, option: StorageOption, gradient: Layout | None) -> Price | None:
        """Return the price of reducing a use's gradients to the layout in which they accumulate or are stored.

        None if there is no path.

        Args:
            gradient: layout of the gradients as the op computes them; None if there are no gradients.
        """
        if gradient is None or not self._run.job.training:
            return FREE
        value, target, once = use.value, option.accumulated or option.stored, option.accumulated is None
        reduction = self._reduction(value, gradient, target, use.count, use.last_in_backward, once=once)
        if reduction is None:
            return None
        if not use.count:
            return FREE
        pending_nbytes = value.nbytes / split_factor(gradient, self._run.mesh.shape)
        prices = [reduction, Price(charge=use.pending.charge(pending_nbytes))]
        if self._run.micro_batches > 1 and once:
            prices.append(self._accumulating(value, option, gradient, use.count, use.gradients))
        return add_prices(prices)

    def _inference_copy(self, value: Value, stored: Layout, layout: Layout, calls: float, working: Lifetime) -> Price:
        """Return the price of the compute copy in inference: its bytes, and the seconds of a slice if there is one."""
        nbytes = value.nbytes / split_factor(layout, self._run.mesh.shape)
        charge = working.charge(nbytes)
        path = self._redistribution_pricer.path(value.shape, value.dtype.itemsize, stored, layout)
        if path is not None and any(step.kind == "slice" for step in path.steps):
            device = self._run.cluster.device
            slice_s = 2 * nbytes / stream_bytes_per_s(device) + device.kernel_launch_s
            charge[FORWARD.compute] = calls * slice_s
        return Price(charge=charge)

    def _one_way(
        self, value: Value, source: Layout, target: Layout, phase: Phase, calls: float, quantities: LinkQuantities
    ) -> Price | None:
        return self._redistribution_pricer.one_way(
            value.shape, value.dtype.itemsize, source, target, phase=phase, calls=calls, quantities=quantities
        )
