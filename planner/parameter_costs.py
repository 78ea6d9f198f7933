"""What a parameter costs: resting in a layout, being gathered for its uses, and having its gradient reduced.

It is gathered in one of two ways. By itself: the collective of one parameter, which its module waits for. Or with its
block, by `fully_shard`: all parameters of the block that are gathered so share one flat collective, which runs ahead
of the compute that needs it. The time of a flat collective is a straight line, `CollectiveLine`, so that its bytes can
be charged to each parameter and its latency to the block, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model import optimizer_time_per_parameter_s, parameter_state_bytes
from cost_model.compute import stream_bytes_per_s
from cost_model.in_step import in_step
from cost_model.layout import Layout, sharded_dim, split_factor
from planner import problem as quantity
from planner.communication import FREE, Collective, Communication, Port, Price, add_prices
from planner.graph import Value
from planner.job import BYTES_PER_ELEMENT
from planner.moments import UPDATE
from planner.parameter_classes import BlockGather
from planner.report import CollectiveKind, Phase
from planner.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChoice:
    """How a parameter rests, and how it is gathered and its gradient reduced.

    Attributes:
        stored: the layout that it rests in.
        accumulated: the layout that its gradient is brought to in every backward; None: the gradient accumulates in
            the layout that its one use gives it, and is reduced once a step.
        gathered_over: index of the mesh axis over which it is gathered with its block; None: by itself.
    """

    stored: Layout
    accumulated: Layout | None
    gathered_over: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """A collective's seconds as ``latency_s + nbytes * seconds_per_byte``.

    It goes through two points of the cost model: the parameters of a whole block, and as many bytes as remain of them
    where the other axes split them. Between and near them the model itself is nearly straight.
    """

    latency_s: float
    seconds_per_byte: float


class ParameterPricer:
    """Prices of parameters in one `Run`."""

    def __init__(self, run: Run, communication: Communication) -> None:
        self._run = run
        self._communication = communication
        self._lines: dict[tuple[CollectiveKind, int, int, int], CollectiveLine] = {}
        self._taken_share = in_step(run.cluster.device).taken_share if self._overlaps else 0.0

    @property
    def _overlaps(self) -> bool:
        return self._run.cluster.device.overlaps

    @property
    def _hidden_forward(self) -> str:
        """Where communication is charged that the forward hides, if the device can."""
        return quantity.PREFETCH_FORWARD if self._overlaps else quantity.BLOCKING_FORWARD

    @property
    def _hidden_backward(self) -> str:
        """Where communication is charged that the backward hides, if the device can."""
        return quantity.PREFETCH_BACKWARD if self._overlaps else quantity.BLOCKING_BACKWARD

    @property
    def stored_dtype(self) -> str:
        """The dtype that parameters rest in: the master copy's, where there is one (it is cast, and gathered)."""
        return self._run.job.master_dtype or self._run.job.dtype

    def resting(self, value: Value, choice: StoredChoice, count: int, gradients: Mapping[str, int]) -> Price | None:
        """Return the price of keeping and updating ``count`` equal parameters; None where no reduction leads there.

        Args:
            gradients: moment's quantity -> how many of them have their gradients by then.
        """
        price = self.kept(value, choice.stored, count)
        if self._run.job.training and value.requires_grad:
            price = add_prices([price, Price(charge=self._arriving(value, choice, count, gradients))])
        if choice.gathered_over is None:
            price = add_prices([price, self._cast(value, choice.stored, count)])
        if choice.accumulated is None:
            return price
        reduced = self._reduction(value, choice.accumulated, choice.stored, count, False, once=True)
        if reduced is None:
            return None
        if self._run.micro_batches == 1:
            return add_prices([price, reduced])
        return add_prices([price, reduced, self._gradient_memory(value, choice.accumulated, count)])

    def _arriving(
        self, value: Value, choice: StoredChoice, count: int, gradients: Mapping[str, int]
    ) -> dict[str, float]:
        """Return the bytes of the gradients that a backward leaves, by moment.

        Those of cast parameters wait in the compute dtype: casts come first in a forward, and so last in its backward.
        Then the casts, which `_cast` charges throughout, give way to gradients in the stored dtype.
        """
        once = self._run.micro_batches == 1
        if choice.gathered_over is not None or not self._is_cast(value):
            nbytes = self._gradient_nbytes(value, choice.stored) if once else 0.0
            return {name: n * nbytes for name, n in gradients.items() if nbytes}
        nbytes = value.nbytes / split_factor(choice.stored, self._run.mesh.shape)
        arriving = {name: n * nbytes for name, n in gradients.items()}
        after = self._gradient_nbytes(value, choice.stored) if once else 0.0
        return arriving | {UPDATE.quantity("gradients"): count * (after - nbytes)}

    def _is_cast(self, value: Value) -> bool:
        return BYTES_PER_ELEMENT[self.stored_dtype] != value.dtype.itemsize

    def _cast(self, value: Value, stored: Layout, count: int) -> Price:
        """Price the copies in the compute dtype that all modules see during a forward, and that autograd keeps."""
        if not self._is_cast(value):
            return FREE
        nbytes = value.nbytes / split_factor(stored, self._run.mesh.shape)
        return Price(charge={quantity.MEMORY + "parameters": count * nbytes})

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
        charge = {quantity.MEMORY + role: float(nbytes) for role, nbytes in state.items()}
        if trainable:
            # One fused kernel updates all parameters: its launch is not theirs, and equal blocks cost what each does.
            charge[quantity.EXPOSED] = numel * optimizer_time_per_parameter_s(
                device=self._run.cluster.device,
                optimizer=job.optimizer,
                dtype=self.stored_dtype,
                master_dtype=self.stored_dtype,
                gradient_dtype=self.stored_dtype,
            )
        return Price(charge=charge)

    # --- by itself -----------------------------------------------------------------------------------------------

    def use(
        self,
        value: Value,
        choice: StoredChoice,
        use: Port,
        *,
        count: int,
        saved: bool,
        recomputed: bool,
        first: bool,
        working: Mapping[str, int],
        pending: Mapping[str, int],
    ) -> Price | None:
        """Return the price of using ``count`` equal parameters, each gathered by itself, and of their gradients.

        Args:
            use: layouts of the parameter and of its gradient in the op.
            saved: whether autograd keeps the parameter for the backward, which then gathers it again.
            recomputed: whether the use is inside a checkpointed block.
            first: whether nothing is left of the backward that could hide its gradient's reduction.
            working: moment's quantity -> how many of them an op uses at that moment, backward, or forward in inference.
            pending: moment's quantity -> how many of their gradients from this use wait for those from others.
        """
        layout, gradient = use
        assert layout is not None
        calls = count * self._run.passes
        forward = self._gather(value, choice.stored, layout, "forward", calls, quantity.BLOCKING_FORWARD)
        if forward is None:
            return None
        prices = [forward]
        training = self._run.job.training
        if layout != choice.stored and self._run.job.phase != "training":
            prices.append(self._presented(value, choice.stored, layout, calls, working))
        if training and (recomputed or saved):
            phase: Phase = "recompute" if recomputed else "backward"
            again = self._gather(value, choice.stored, layout, phase, calls, quantity.BLOCKING_BACKWARD)
            assert again is not None
            prices.append(again)
            if layout != choice.stored:
                copy = value.nbytes / split_factor(layout, self._run.mesh.shape)
                prices.append(Price(charge={name: n * copy for name, n in working.items()}))
        if gradient is not None and training:
            target = choice.accumulated or choice.stored
            reduced = self._reduction(value, gradient, target, count, first, once=choice.accumulated is None)
            if reduced is None:
                return None
            prices.append(reduced)
            waiting = value.nbytes / split_factor(gradient, self._run.mesh.shape)
            prices.append(Price(charge={name: n * waiting for name, n in pending.items()}))
            if self._run.micro_batches > 1 and choice.accumulated is None:
                prices.append(self._gradient_memory(value, gradient, count))
        return add_prices(prices)

    def _presented(self, value: Value, stored: Layout, layout: Layout, calls: int, working: Mapping[str, int]) -> Price:
        """Price the copy of a parameter that inference uses: a slice is read and written in every step."""
        copy = value.nbytes / split_factor(layout, self._run.mesh.shape)
        charge = {name: n * copy for name, n in working.items()}
        path = self._communication.path(value.shape, value.dtype.itemsize, stored, layout)
        if path is not None and any(step.kind == "slice" for step in path.steps):
            device = self._run.cluster.device
            charge[quantity.COMPUTE_FORWARD] = calls * (2 * copy / stream_bytes_per_s(device) + device.kernel_launch_s)
        return Price(charge=charge)

    def _gather(
        self, value: Value, stored: Layout, layout: Layout, phase: Phase, calls: int, prefix: str
    ) -> Price | None:
        return self._communication.move(
            value.shape, value.dtype.itemsize, stored, layout, phase=phase, calls=calls, prefix=prefix
        )

    def _gradient_memory(self, value: Value, layout: Layout, count: int) -> Price:
        return Price(charge={quantity.MEMORY + "gradients": count * self._gradient_nbytes(value, layout)})

    def _gradient_nbytes(self, value: Value, layout: Layout) -> float:
        numel = value.nbytes / value.dtype.itemsize / split_factor(layout, self._run.mesh.shape)
        return numel * BYTES_PER_ELEMENT[self.stored_dtype]

    def _reduction(
        self, value: Value, gradient: Layout, target: Layout, count: int, first: bool, *, once: bool
    ) -> Price | None:
        """Price bringing a gradient from one layout to another: once a step, or with every micro-batch."""
        itemsize = BYTES_PER_ELEMENT[self._run.job.reduce_dtype]
        price = self._communication.move(
            value.shape,
            itemsize,
            gradient,
            target,
            phase="grad_reduce" if once else "backward",
            calls=count if once else count * self._run.passes,
            prefix=self._hidden_backward,
        )
        if price is None or not self._overlaps:
            return price
        seconds = sum(price.charge.values())
        more = {quantity.SLOWDOWN_BACKWARD: self._slowdown_s(seconds)} | ({quantity.EXPOSED: seconds} if first else {})
        return add_prices([price, Price(charge=more)])

    # --- with its block ------------------------------------------------------------------------------------------

    def use_with_block(
        self,
        value: Value,
        choice: StoredChoice,
        use: Port,
        blocks: tuple[tuple[BlockGather, int], ...],
        unreduced: Mapping[str, int],
    ) -> Price | None:
        """Return the price of parameters that are gathered with their blocks, all but the latency of that.

        None where `fully_shard` cannot: it splits on one axis, and keeps the layout on all others.

        Args:
            blocks: each kind of block that such parameters are in, and how many of them one such block holds.
            unreduced: moment's quantity -> how many of their gradients are there whole, waiting for their block's.
        """
        axis = choice.gathered_over
        if axis is None or use[0] is None or not is_fully_sharded(choice, use):
            return None
        numel = value.nbytes // value.dtype.itemsize // split_factor(use[0], self._run.mesh.shape)
        prices = []
        for block, held in blocks:
            price = self._flat(block, axis, numel * held, value.dtype.itemsize, latency=False)
            size, reduced = value.dtype.itemsize, self._reduce_itemsize
            nbytes = {
                name: float(numel * held * (whole * size + reducing * reduced))
                for name, (whole, reducing) in block.moments.items()
            }
            prices.append(add_prices([price, Price(charge=nbytes)]))
        if self._run.micro_batches == 1:
            # In place of the shards that `resting` counts.
            more = numel * value.dtype.itemsize - self._gradient_nbytes(value, choice.stored)
            prices.append(Price(charge={name: count * max(more, 0.0) for name, count in unreduced.items()}))
        return add_prices(prices)

    @property
    def _reduce_itemsize(self) -> int:
        return BYTES_PER_ELEMENT[self._run.job.reduce_dtype]

    def block_latency(self, block: BlockGather, axis: int, itemsize: int) -> Price:
        """Return what the flat collectives of a kind of block cost before their first byte."""
        return self._flat(block, axis, 0, itemsize, latency=True)

    def block_collectives(self, block: BlockGather, axis: int, numel: int, itemsize: int) -> Price:
        """Return the flat collectives, uncharged, of a kind of block that gathers ``numel`` elements."""
        name = self._run.mesh.names[axis]
        calls = block.count * self._run.passes
        rows: list[tuple[CollectiveKind, Phase, int]] = [
            ("all_gather", "forward", itemsize),
            ("all_gather", "backward", itemsize),
            ("reduce_scatter", "backward", self._reduce_itemsize),
        ]
        collectives = []
        for kind, phase, size in rows:
            line = self._line(kind, axis, block, size)
            time_s = line.latency_s + numel * size * line.seconds_per_byte
            collectives.append(
                Collective(kind=kind, axis=name, phase=phase, nbytes=numel * size, count=calls, time_s=time_s)
            )
        return Price(collectives=tuple(collectives))

    def _flat(self, block: BlockGather, axis: int, numel: int, itemsize: int, *, latency: bool) -> Price:
        """Price latency or bytes of a kind of block's flat collectives.

        Hidden are all but, where the kind is the model's first, one gather per micro-batch and the last reduction.
        """
        gather = self._line("all_gather", axis, block, itemsize)
        reduce = self._line("reduce_scatter", axis, block, self._reduce_itemsize)
        gather_s = gather.latency_s if latency else numel * itemsize * gather.seconds_per_byte
        reduce_s = reduce.latency_s if latency else numel * self._reduce_itemsize * reduce.seconds_per_byte
        link, passes = self._communication.link(axis), self._run.passes
        calls = block.count * passes
        exposed_gathers, exposed_reductions = (passes, 1) if block.is_first else (0, 0)
        forward_s = (calls - exposed_gathers) * gather_s
        backward_s = calls * gather_s + (calls - exposed_reductions) * reduce_s
        charge = {
            self._hidden_forward + link: forward_s,
            self._hidden_backward + link: backward_s,
            quantity.EXPOSED: exposed_gathers * gather_s + exposed_reductions * reduce_s,
            quantity.SLOWDOWN_FORWARD: self._slowdown_s(forward_s),
            quantity.SLOWDOWN_BACKWARD: self._slowdown_s(backward_s),
        }
        return Price(charge=charge)

    def _slowdown_s(self, hidden_s: float) -> float:
        """Return by how much compute takes longer where so many seconds of communication run beside it."""
        return hidden_s * self._taken_share

    @property
    def _copying_s_per_byte(self) -> float:
        """Seconds per byte of copying parameters out of a flat buffer, or gradients into one, both in new memory.

        0.0 where kernels are charged, and the host is not: there it counts as part of the collective.
        """
        device = self._run.cluster.device
        return 2 / stream_bytes_per_s(device) + device.first_touch_s_per_byte if device.host_op_s else 0.0

    def _line(self, kind: CollectiveKind, axis: int, block: BlockGather, itemsize: int) -> CollectiveLine:
        high = block.numel * itemsize
        key = (kind, axis, high, itemsize)
        if key not in self._lines:
            others = self._run.mesh.size // self._run.mesh.shape[axis]
            low = max(high // max(others, 2), 1)
            at_low, at_high = (self._communication.time_s(kind, axis, nbytes) for nbytes in (low, high))
            slope = (at_high - at_low) / (high - low) if high > low else 0.0
            latency_s = max(at_low - low * slope, 0.0)
            self._lines[key] = CollectiveLine(latency_s=latency_s, seconds_per_byte=slope + self._copying_s_per_byte)
        return self._lines[key]


def is_fully_sharded(choice: StoredChoice, use: Port) -> bool:
    """Tell whether `fully_shard` takes a parameter from rest to its use, and its gradient to where it accumulates."""
    axis, accumulated = choice.gathered_over, choice.accumulated
    layout, gradient = use
    if axis is None or accumulated is None or layout is None or gradient is None:
        return False
    others = [a for a in range(len(choice.stored)) if a != axis]
    split = choice.stored[axis]
    if not isinstance(split, Shard) or any(sharded_dim(placement) == split.dim for placement in layout[axis + 1 :]):
        return False  # an axis further in splits the dim again: no single gather leads there
    return (
        accumulated[axis] == split
        and layout[axis] == Replicate()
        and gradient[axis] == Partial()
        and all(choice.stored[a] == layout[a] and gradient[a] == accumulated[a] for a in others)
    )
