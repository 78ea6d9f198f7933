"""What each decision costs: a region's strategy, a redistribution, a parameter's stored layout and its gathers.

Every price is a `Price`: what it adds to the quantities of a step (see `planner.problem`), and the collectives it
stands for. The integer program and the estimator both ask here, so that they cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cost_model import (
    ClusterSpec,
    axis_group,
    collective_time_s,
    op_time_s,
    optimizer_step_time_s,
    parameter_state_bytes,
)
from cost_model.layout import Layout, MeshSpec, split_factor
from cost_model.redistribute import NoPathError, Redistribution, RedistributionPlanner
from planner import problem as quantity
from planner.graph import Value
from planner.job import BYTES_PER_ELEMENT, Job
from planner.profile import GraphProfile
from planner.regions import Region, RegionOp, find_op_inputs
from planner.report import CollectiveKind, Phase
from planner.strategies.enumerate import Strategy
from planner.strategies.own_rules import inner_collectives, work_split

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}

Port = tuple[Layout | None, Layout | None]
"""A tensor's layout at a boundary and its gradient's; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """``count`` equal calls in a step: ``nbytes`` is the full buffer of one, ``time_s`` the seconds of one."""

    kind: CollectiveKind
    axis: str
    phase: Phase
    nbytes: int
    count: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a decision adds to a step, and the collectives in it."""

    charge: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()


def add_prices(prices: Iterable[Price]) -> Price:
    """Return the sum of ``prices``."""
    charge: dict[str, float] = defaultdict(float)
    collectives: list[Collective] = []
    for price in prices:
        for name, amount in price.charge.items():
            charge[name] += amount
        collectives += price.collectives
    return Price(charge=charge, collectives=tuple(collectives))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is priced: the job, on a mesh of a cluster, cut into micro-batches, with one mode of checkpointing."""

    job: Job
    cluster: ClusterSpec
    mesh: MeshSpec
    micro_batches: int
    ac: str

    @property
    def flash_attention(self) -> bool:
        """Whether attention runs in a fused kernel."""
        return self.cluster.device.flash_attention if self.job.flash_attention is None else self.job.flash_attention


class Pricer:
    """Prices of single decisions in one `Run`."""

    def __init__(self, run: Run, profile: GraphProfile) -> None:
        self.run = run
        self._profile = profile
        self._groups = {name: axis_group(run.mesh, name, run.cluster) for name in run.mesh.names}
        self._paths = RedistributionPlanner(run.mesh.shape, self._step_time_s)

    # --- communication -------------------------------------------------------------------------------------------

    def _step_time_s(self, kind: CollectiveKind, axis: int, nbytes: int) -> float:
        return collective_time_s(kind, nbytes, self._groups[self.run.mesh.names[axis]], self.run.cluster)

    def _link(self, axis: str) -> str:
        """Name the wires that ``axis`` communicates over."""
        return "between-nodes" if self._groups[axis].nodes > 1 else "inside-node"

    def path(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution | None:
        """Return the cheapest redistribution, None where there is none."""
        try:
            return self._paths.path(shape, itemsize, source, target)
        except NoPathError:
            return None

    def _communicate(self, path: Redistribution, phase: Phase, count: int, prefix: str) -> Price:
        charge: dict[str, float] = defaultdict(float)
        collectives = []
        for step in path.steps:
            if step.kind == "slice":
                continue
            axis = self.run.mesh.names[step.axis]
            time_s = self._step_time_s(step.kind, step.axis, step.nbytes)
            charge[prefix + self._link(axis)] += count * time_s
            collectives.append(
                Collective(kind=step.kind, axis=axis, phase=phase, nbytes=step.nbytes, count=count, time_s=time_s)
            )
        return Price(charge=charge, collectives=tuple(collectives))

    def redistribution(self, value: Value, source: Port, target: Port, count: int) -> Price | None:
        """Return the price of ``count`` redistributions of an activation, forward and backward, per micro-batch.

        None where there is no path, or where the tensor has a gradient on one side only.
        """
        (source_layout, source_gradient), (layout, gradient) = source, target
        if source_layout is None or layout is None:
            return None
        forward = self.path(value.shape, value.dtype.itemsize, source_layout, layout)
        if forward is None:
            return None
        calls = count * self.run.micro_batches
        price = self._communicate(forward, "forward", calls, quantity.BLOCKING_FORWARD)
        if source_gradient is None or gradient is None or not self.run.job.training:
            return price
        backward = self.path(value.shape, value.dtype.itemsize, gradient, source_gradient)
        if backward is None:
            return None
        return add_prices((price, self._communicate(backward, "backward", calls, quantity.BLOCKING_BACKWARD)))

    def recomputed_redistribution(self, value: Value, source: Port, target: Port, count: int) -> Price:
        """Return the price of repeating ``count`` forward redistributions while blocks are recomputed."""
        assert source[0] is not None
        assert target[0] is not None
        path = self.path(value.shape, value.dtype.itemsize, source[0], target[0])
        assert path is not None
        return self._communicate(path, "recompute", count * self.run.micro_batches, quantity.BLOCKING_BACKWARD)

    # --- regions -------------------------------------------------------------------------------------------------

    def local_nbytes(self, value: Value, layout: Layout | None) -> float:
        """Return the bytes of one device's piece of ``value``; a plain value (None) is whole everywhere."""
        if layout is None:
            return min(value.nbytes, self._profile.storage_nbytes[value.name])
        return value.nbytes / split_factor(layout, self.run.mesh.shape)

    def _op_times_s(self, region: Region, region_op: RegionOp, strategy: Strategy) -> tuple[float, float, bool]:
        """Return (forward seconds, backward seconds, whether it is a matrix product) of one op."""
        profile = self._profile.ops[region_op.op.name]
        touched = (*region_op.inputs, *region_op.outputs)
        split = work_split([strategy.forward[i] for i in touched], self.run.mesh.shape)
        dtype = _DTYPE_NAMES.get(region.slots[region_op.outputs[0]].value.dtype, "fp32")
        device = self.run.cluster.device
        whole = sum(region.slots[i].value.nbytes for i in touched) or 1
        share = sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in touched) / whole
        matmul = profile.flops > 0
        forward = op_time_s(
            flops=profile.flops / split, nbytes=profile.nbytes * share, device=device, dtype=dtype, matmul=matmul
        )
        backward = op_time_s(
            flops=profile.backward_flops / split,
            nbytes=profile.backward_nbytes * share,
            device=device,
            dtype=dtype,
            matmul=matmul,
        )
        return forward, backward, matmul

    def region(
        self, region: Region, strategy: Strategy, *, count: int, block: str | None, in_representative: Mapping[str, int]
    ) -> Price:
        """Return the price of ``count`` equal regions under ``strategy``, redistributions left out.

        Args:
            block: the block that the region is in, None where it is in none or nothing is checkpointed.
            in_representative: name of a kind of block -> how many of these regions one such block holds.
        """
        charge: dict[str, float] = defaultdict(float)
        prices: list[Price] = []
        calls = count * self.run.micro_batches
        recomputes = block is not None
        for region_op in region.ops:
            forward_s, backward_s, matmul = self._op_times_s(region, region_op, strategy)
            charge[quantity.COMPUTE_FORWARD] += calls * forward_s
            if self.run.job.training:
                again = recomputes and (self.run.ac == "full" or not matmul)
                charge[quantity.COMPUTE_BACKWARD] += calls * (backward_s + (forward_s if again else 0.0))
            prices += self._inner(region, region_op, strategy, calls, recomputes)
        if self.run.job.training:
            self._saved(charge, region, strategy, count, recomputes, in_representative)
        charge[f"{quantity.TRANSIENT}{region.index}"] += self._transient(region, strategy)
        return add_prices((Price(charge=charge), *prices))

    def _inner(
        self, region: Region, region_op: RegionOp, strategy: Strategy, calls: int, recomputes: bool
    ) -> list[Price]:
        inputs = find_op_inputs(region, region_op)
        layouts = [strategy.forward[i] for i in region_op.inputs]
        prices = []
        for inner in inner_collectives(region_op.op, inputs, layouts, self.run.mesh.shape):
            axis = self.run.mesh.names[inner.axis]
            time_s = self._step_time_s(inner.kind, inner.axis, inner.nbytes)
            phases: list[tuple[Phase, str]] = [("forward", quantity.BLOCKING_FORWARD)]
            if recomputes:
                phases.append(("recompute", quantity.BLOCKING_BACKWARD))
            for phase, prefix in phases:
                collective = Collective(
                    kind=inner.kind, axis=axis, phase=phase, nbytes=inner.nbytes, count=calls, time_s=time_s
                )
                prices.append(Price(charge={prefix + self._link(axis): calls * time_s}, collectives=(collective,)))
        return prices

    def _saved(
        self,
        charge: dict[str, float],
        region: Region,
        strategy: Strategy,
        count: int,
        recomputes: bool,
        in_representative: Mapping[str, int],
    ) -> None:
        """Add what autograd keeps of tensors made in the region: to the backward, or while its block is recomputed."""
        kept, matmul_outputs = self._saved_inside(region, strategy)
        activations = quantity.MEMORY + "activations"
        if not recomputes:
            charge[activations] += count * kept
            return
        stays = matmul_outputs if self.run.ac == "selective" else 0.0
        charge[activations] += count * stays
        for kind, number in in_representative.items():
            charge[quantity.RECOMPUTED + kind] += number * max(kept - stays, 0.0)

    def _saved_inside(self, region: Region, strategy: Strategy) -> tuple[float, float]:
        made: dict[str, float] = {}
        by_matmul: set[str] = set()
        for region_op in region.ops:
            for position in region_op.outputs:
                value = region.slots[position].value
                if self._profile.root[value.name] == value.name:
                    made[value.name] = self.local_nbytes(value, strategy.forward[position])
                    if self._profile.ops[region_op.op.name].flops > 0:
                        by_matmul.add(value.name)
        saved: set[str] = set()
        extra = 0.0
        for region_op in region.ops:
            profile = self._profile.ops[region_op.op.name]
            saved.update(profile.saved)
            if profile.saved_extra_nbytes:
                layouts = [strategy.forward[i] for i in (*region_op.inputs, *region_op.outputs)]
                extra += profile.saved_extra_nbytes / work_split(layouts, self.run.mesh.shape)
        kept = sum(nbytes for name, nbytes in made.items() if name in saved) + extra
        return kept, sum(made[name] for name in by_matmul)

    def _transient(self, region: Region, strategy: Strategy) -> float:
        """Return the bytes that the region's largest op works on, gradients and computed parameters included."""
        largest = 0.0
        for region_op in region.ops:
            inputs = sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in region_op.inputs)
            outputs = sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in region_op.outputs)
            largest = max(largest, inputs + 2 * outputs)
        computed = 0.0
        for position, slot in enumerate(region.slots):
            if slot.origin == "parameter" and slot.value.requires_grad and self.run.job.training:
                gradient = strategy.gradient[position]
                computed += self.local_nbytes(slot.value, gradient) if gradient is not None else 0.0
        return largest + computed

    def copy(self, value: Value, layout: Layout, count: float, quantity_name: str) -> Price:
        """Return the price of keeping ``count`` copies of ``value`` in ``layout``."""
        return Price(charge={quantity_name: count * self.local_nbytes(value, layout)})

    # --- parameters ----------------------------------------------------------------------------------------------

    @property
    def _stored_nbytes(self) -> int:
        return BYTES_PER_ELEMENT[self.stored_dtype]

    @property
    def stored_dtype(self) -> str:
        """The dtype that parameters rest in: the master copy's, where there is one (it is cast, and gathered)."""
        return self.run.job.master_dtype or self.run.job.dtype

    def parameter(self, value: Value, stored: Layout, count: int) -> Price:
        """Return the price of keeping and updating ``count`` equal parameters in ``stored`` layout."""
        numel = value.nbytes // value.dtype.itemsize // split_factor(stored, self.run.mesh.shape) * count
        job = self.run.job
        trainable = job.training and value.requires_grad
        state = parameter_state_bytes(
            numel,
            optimizer=job.optimizer,
            dtype=self.stored_dtype,
            master_dtype=self.stored_dtype,
            gradient_dtype=self.stored_dtype,
            training=trainable,
        )
        if self.run.micro_batches > 1:
            state["gradients"] = 0  # they accumulate unreduced: see parameter_use
        charge = {quantity.MEMORY + role: float(nbytes) for role, nbytes in state.items()}
        if trainable:
            charge[quantity.EXPOSED] = optimizer_step_time_s(
                numel,
                device=self.run.cluster.device,
                optimizer=job.optimizer,
                dtype=self.stored_dtype,
                master_dtype=self.stored_dtype,
                gradient_dtype=self.stored_dtype,
            )
        return Price(charge=charge)

    def parameter_use(
        self,
        value: Value,
        stored: Layout,
        accumulated: Layout | None,
        use: Port,
        *,
        count: int,
        saved: bool,
        recomputed: bool,
        first: bool,
    ) -> Price | None:
        """Return the price of using ``count`` equal parameters: gathers, and the reduction of the gradient.

        Args:
            stored: the layout they rest in.
            accumulated: the layout that each use's gradient is brought to in every backward; None: left as it comes.
            use: layouts of the parameter and of its gradient in the op.
            saved: whether autograd keeps the parameter for the backward, which then gathers it again.
            recomputed: whether the use is inside a checkpointed block.
            first: whether nothing runs before it that could hide its gather.
        """
        layout, gradient = use
        assert layout is not None
        gather = self.path(value.shape, value.dtype.itemsize, stored, layout)
        if gather is None:
            return None
        calls = count * self.run.micro_batches
        prices = [self._communicate(gather, "forward", calls, quantity.PREFETCH_FORWARD)]
        if self.run.job.training and recomputed:
            prices.append(self._communicate(gather, "recompute", calls, quantity.PREFETCH_BACKWARD))
        elif self.run.job.training and saved:
            prices.append(self._communicate(gather, "backward", calls, quantity.PREFETCH_BACKWARD))
        if first:
            prices.append(Price(charge={quantity.EXPOSED: calls * gather.time_s}))
        if gradient is not None and self.run.job.training:
            reduced = self._reduction(value, gradient, accumulated or stored, count, first, once=accumulated is None)
            if reduced is None:
                return None
            prices.append(reduced)
            if self.run.micro_batches > 1 and accumulated is None:
                prices.append(self._gradient_memory(value, gradient, count))
        return add_prices(prices)

    def accumulated_gradient(self, value: Value, accumulated: Layout, stored: Layout, count: int) -> Price | None:
        """Return the price of reducing a gradient that several uses have accumulated in ``accumulated`` layout."""
        reduced = self._reduction(value, accumulated, stored, count, False, once=True)
        if reduced is None or self.run.micro_batches == 1:
            return reduced
        return add_prices((reduced, self._gradient_memory(value, accumulated, count)))

    def _gradient_memory(self, value: Value, layout: Layout, count: int) -> Price:
        nbytes = self.local_nbytes(value, layout) / value.dtype.itemsize * self._stored_nbytes
        return Price(charge={quantity.MEMORY + "gradients": count * nbytes})

    def _reduction(
        self, value: Value, gradient: Layout, target: Layout, count: int, first: bool, *, once: bool
    ) -> Price | None:
        """Price bringing a gradient from one layout to another: once a step, or with every micro-batch."""
        path = self.path(value.shape, BYTES_PER_ELEMENT[self.run.job.reduce_dtype], gradient, target)
        if path is None:
            return None
        calls = count if once else count * self.run.micro_batches
        price = self._communicate(path, "grad_reduce" if once else "backward", calls, quantity.PREFETCH_BACKWARD)
        return add_prices((price, Price(charge={quantity.EXPOSED: calls * path.time_s}))) if first else price
