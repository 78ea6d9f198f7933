"""What a parameter costs: resting in a layout, being gathered for its uses, and having its gradient reduced.

It is gathered in one of two ways. By itself: the collective of one parameter, which its module waits for. Or with its
block, by `fully_shard`: see `planner.pricing.fsdp_group_costs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model import optimizer_time_per_parameter_s, parameter_state_bytes
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.layouts.layout import Layout, sharded_dim, split_factor
from planner.graph.op_graph import Value
from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD, Lifetime, LinkQuantities, Quantity, persistent
from planner.liveness.peak_candidates import UPDATE
from planner.plan.estimate import Phase
from planner.plan.job import BYTES_PER_ELEMENT
from planner.pricing.overlap import Overlap
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import FREE, Price, add_prices
from planner.pricing.redistribution_costs import RedistributionPricer
from planner.pricing.run_spec import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOption:
    """How a parameter rests, and how it is gathered and its gradient reduced.

    Attributes:
        stored: the layout that it rests in.
        accumulated: the layout that its gradient is brought to in every backward; None: the gradient accumulates in
            the layout that its one use gives it, and is reduced once a step.
        fsdp_axes: indices of the mesh axes over which it is gathered with its block; None: by itself.
    """

    stored: Layout
    accumulated: Layout | None
    fsdp_axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterClassUse:
    """One use of equal parameters.

    Attributes:
        value: one of them.
        count: how many there are, as often as a micro-batch uses each.
        saved: whether autograd keeps the parameter for the backward, which then gathers it again.
        recomputed: whether the use is inside a checkpointed block.
        first: whether nothing is left of the backward that could hide its gradient's reduction.
        working: candidate's quantity -> how many of them an op uses there, backward, or forward in inference.
        pending: candidate's quantity -> how many of their gradients from this use wait for those from others.
        gradients: candidate's quantity -> how many of them have their gradients by then.
    """

    value: Value
    count: int
    saved: bool
    recomputed: bool
    first: bool
    working: Lifetime
    pending: Lifetime
    gradients: Lifetime


class ParameterPricer:
    """Prices of parameters in one `Run`."""

    def __init__(self, run: Run, redistribution_pricer: RedistributionPricer) -> None:
        self._run = run
        self._redistribution_pricer = redistribution_pricer
        self._overlap = Overlap.of(run.cluster.device)
        self.stored_dtype: str = run.job.master_dtype or run.job.dtype
        """The dtype that parameters rest in: the master copy's, where there is one (it is cast, and gathered)."""

    def resting(self, value: Value, choice: StorageOption, count: int, gradients: Lifetime) -> Price | None:
        """Return the price of keeping and updating ``count`` equal parameters; None where no reduction leads there.

        Args:
            gradients: candidate's quantity -> how many of them have their gradients by then.
        """
        price = self.kept(value, choice.stored, count)
        if self._run.job.training and value.requires_grad:
            price = add_prices([price, Price(charge=self._arriving(value, choice, count, gradients))])
        if choice.fsdp_axes is None:
            price = add_prices([price, self._cast(value, choice.stored, count)])
        if choice.accumulated is None:
            return price
        reduced = self._reduction(value, choice.accumulated, choice.stored, count, False, once=True)
        if reduced is None:
            return None
        if self._run.micro_batches == 1:
            return add_prices([price, reduced])
        return add_prices([price, reduced, self._accumulating(value, choice, choice.accumulated, count, gradients)])

    def _arriving(self, value: Value, choice: StorageOption, count: int, gradients: Lifetime) -> dict[Quantity, float]:
        """Return the bytes of the gradients that a backward leaves, by candidate.

        Those of cast parameters wait in the compute dtype: casts come first in a forward, and so last in its backward.
        Then the casts, which `_cast` charges throughout, give way to gradients in the stored dtype.
        """
        once = self._run.micro_batches == 1
        if choice.fsdp_axes is not None or not self._is_cast(value):
            nbytes = self.gradient_nbytes(value, choice.stored) if once else 0.0
            return gradients.charge(nbytes)
        nbytes = value.nbytes / split_factor(choice.stored, self._run.mesh.shape)
        at_end = UPDATE.quantity("gradients")
        after = self.gradient_nbytes(value, choice.stored) if once else 0.0
        return gradients.without(at_end).charge(nbytes) | {at_end: count * (after - nbytes)}

    def _is_cast(self, value: Value) -> bool:
        return BYTES_PER_ELEMENT[self.stored_dtype] != value.dtype.itemsize

    def _cast(self, value: Value, stored: Layout, count: int) -> Price:
        """Price the copies in the compute dtype that all modules see during a forward, and that autograd keeps."""
        if not self._is_cast(value):
            return FREE
        nbytes = value.nbytes / split_factor(stored, self._run.mesh.shape)
        return Price(charge={persistent("parameters"): count * nbytes})

    def kept(self, value: Value, stored: Layout, count: int) -> Price:
        """Return the price of ``count`` equal parameters at rest in ``stored``, and of the optimizer's pass."""
        numel = value.nbytes // value.dtype.itemsize // split_factor(stored, self._run.mesh.shape) * count
        job = self._run.job
        trainable = job.training and value.requires_grad
        state = parameter_state_bytes(
            numel,
            optimizer=job.optimizer,
            dtype=self.stored_dtype,
            master_dtype=self.stored_dtype,
            gradient_dtype=self.stored_dtype,
            training=trainable,
        )
        state["gradients"] = 0  # they come one by one, or accumulate unreduced, and are charged where that is known
        charge = {persistent(role): float(nbytes) for role, nbytes in state.items()}
        if trainable:
            # One fused kernel updates all parameters: its launch is not theirs, and equal blocks cost what each does.
            charge[EXPOSED] = numel * optimizer_time_per_parameter_s(
                device=self._run.cluster.device,
                optimizer=job.optimizer,
                dtype=self.stored_dtype,
                master_dtype=self.stored_dtype,
                gradient_dtype=self.stored_dtype,
            )
        return Price(charge=charge)

    # --- by itself -----------------------------------------------------------------------------------------------

    def use(self, use: ParameterClassUse, choice: StorageOption, port: PortLayouts) -> Price | None:
        """Return the price of one use, and of its gradients; None where nothing leads there.

        Args:
            port: layouts of the parameter and of its gradient in the op.
        """
        halves = [self.gathering(use, choice.stored, port.layout), self.reducing(use, choice, port.gradient)]
        found = [price for price in halves if price is not None]
        return add_prices(found) if len(found) == len(halves) else None

    def gathering(self, use: ParameterClassUse, stored: Layout, layout: Layout | None) -> Price | None:
        """Return the price of taking parameters from rest to the ``layout`` of their use, each by itself."""
        assert layout is not None
        value, calls = use.value, use.count * self._run.passes
        forward = self._gather(value, stored, layout, "forward", calls, FORWARD.blocking)
        if forward is None:
            return None
        prices = [forward]
        if layout != stored and self._run.job.phase != "training":
            prices.append(self._presented(value, stored, layout, calls, use.working))
        if self._run.job.training and (use.recomputed or use.saved):
            phase: Phase = "recompute" if use.recomputed else "backward"
            again = self._gather(value, stored, layout, phase, calls, BACKWARD.blocking)
            assert again is not None
            prices.append(again)
            if layout != stored:
                copy = value.nbytes / split_factor(layout, self._run.mesh.shape)
                prices.append(Price(charge=use.working.charge(copy)))
        return add_prices(prices)

    def reducing(self, use: ParameterClassUse, choice: StorageOption, gradient: Layout | None) -> Price | None:
        """Return the price of reducing a use's gradients to where they accumulate, or rest."""
        if gradient is None or not self._run.job.training:
            return FREE
        value, target, once = use.value, choice.accumulated or choice.stored, choice.accumulated is None
        reduced = self._reduction(value, gradient, target, use.count, use.first, once=once)
        if reduced is None:
            return None
        waiting = value.nbytes / split_factor(gradient, self._run.mesh.shape)
        prices = [reduced, Price(charge=use.pending.charge(waiting))]
        if self._run.micro_batches > 1 and once:
            prices.append(self._accumulating(value, choice, gradient, use.count, use.gradients))
        return add_prices(prices)

    def _presented(self, value: Value, stored: Layout, layout: Layout, calls: float, working: Lifetime) -> Price:
        """Price the copy of a parameter that inference uses: a slice is read and written in every step."""
        copy = value.nbytes / split_factor(layout, self._run.mesh.shape)
        charge = working.charge(copy)
        path = self._redistribution_pricer.path(value.shape, value.dtype.itemsize, stored, layout)
        if path is not None and any(step.kind == "slice" for step in path.steps):
            device = self._run.cluster.device
            charge[FORWARD.compute] = calls * (2 * copy / stream_bytes_per_s(device) + device.kernel_launch_s)
        return Price(charge=charge)

    def _gather(
        self, value: Value, stored: Layout, layout: Layout, phase: Phase, calls: float, quantities: LinkQuantities
    ) -> Price | None:
        return self._redistribution_pricer.one_way(
            value.shape, value.dtype.itemsize, stored, layout, phase=phase, calls=calls, quantities=quantities
        )

    def _accumulating(
        self, value: Value, choice: StorageOption, layout: Layout, count: int, gradients: Lifetime
    ) -> Price:
        """Price the gradients that add up over micro-batches in ``layout``: in the wire's dtype where that is ahead.

        What ``fully_shard`` has reduced over its axes it leaves in the stored dtype, as is all that has arrived.
        """
        arrived = self.gradient_nbytes(value, choice.stored)
        nbytes = self.gradient_nbytes(value, layout)
        if choice.fsdp_axes is None and layout != choice.stored:
            nbytes *= BYTES_PER_ELEMENT[self._run.job.reduce_dtype] / BYTES_PER_ELEMENT[self.stored_dtype]
        charge = {persistent("gradients"): count * nbytes}
        if arrived > nbytes:  # added up in fewer bytes than they end in: of casts, after all else
            more = arrived - nbytes
            at_end = {UPDATE.quantity("gradients"): count * more}
            charge |= at_end if self._is_cast(value) else gradients.charge(more)
        return Price(charge=charge)

    def gradient_nbytes(self, value: Value, layout: Layout) -> float:
        """Return the bytes of a gradient in ``layout``, in the dtype that the parameter rests in."""
        numel = value.nbytes / value.dtype.itemsize / split_factor(layout, self._run.mesh.shape)
        return numel * BYTES_PER_ELEMENT[self.stored_dtype]

    def _reduction(
        self, value: Value, gradient: Layout, target: Layout, count: int, first: bool, *, once: bool
    ) -> Price | None:
        """Price bringing a gradient from one layout to another: once a step, or with every micro-batch."""
        itemsize = BYTES_PER_ELEMENT[self._run.job.reduce_dtype]
        price = self._redistribution_pricer.one_way(
            value.shape,
            itemsize,
            gradient,
            target,
            phase="grad_reduce" if once else "backward",
            calls=count if once else count * self._run.passes,
            quantities=self._overlap.once_backward if once else self._overlap.backward,
        )
        if price is None or not self._run.cluster.device.overlaps:
            return price
        seconds = sum(price.charge.values())
        more = {BACKWARD.slowdown: self._overlap.slowdown_s(seconds)} | ({EXPOSED: seconds} if first else {})
        return add_prices([price, Price(charge=more)])


def fsdp_use_layouts(choice: StorageOption) -> tuple[Layout, Layout] | None:
    """Return the layouts of parameter and gradient in the one use that `fully_shard` takes it to, and from.

    None where there is none: it splits one dim on the axes that it gathers over, and keeps the layout on all others.
    """
    axes, accumulated, stored = choice.fsdp_axes, choice.accumulated, choice.stored
    if axes is None or accumulated is None:
        return None
    split = stored[axes[0]]
    if not isinstance(split, Shard) or any(stored[axis] != split or accumulated[axis] != split for axis in axes):
        return None
    if any(sharded_dim(placement) == split.dim for placement in stored[axes[-1] + 1 :]):
        return None  # an axis further in splits the dim again: no single gather leads there

    def at_use(layout: Layout, place: Placement) -> Layout:
        return tuple(place if axis in axes else other for axis, other in enumerate(layout))

    return at_use(stored, Replicate()), at_use(accumulated, Partial())
