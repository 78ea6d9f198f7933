"""What each decision costs: a region's strategy, a redistribution, a parameter's stored layout and its gathers.

Every price is a `Price`: what it adds to the quantities of a step (see `planner.problem`), and the collectives it
stands for. The integer program and the estimator both ask here, so that they cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cost_model.layout import Layout, shard_counts, split_factor
from planner import problem as quantity
from planner.communication import Communication, Exchange, Port, Price, add_prices
from planner.graph import Value
from planner.op_times import OpTime, OpTimes
from planner.profile import GraphProfile
from planner.regions import Region, RegionOp, find_op_inputs
from planner.report import Phase
from planner.run import Run
from planner.strategies.enumerate import Strategy
from planner.strategies.own_rules import inner_collectives, work_split


class Pricer:
    """Prices of single decisions in one `Run`."""

    def __init__(self, run: Run, profile: GraphProfile, communication: Communication, op_times: OpTimes) -> None:
        """Take ``communication`` on the run's mesh and ``op_times`` on its devices; other runs may use them as well."""
        self.run = run
        self.communication = communication
        self._profile = profile
        self._op_times = op_times

    # --- activations ---------------------------------------------------------------------------------------------

    def exchange(self, value: Value) -> Exchange:
        """Return what is exchanged where an activation like ``value`` is redistributed, once per micro-batch."""
        return Exchange(
            value.shape, value.dtype.itemsize, self.run.micro_batches, value.requires_grad and self.run.job.training
        )

    def redistribution(self, value: Value, source: Port, target: Port, count: int) -> Price | None:
        """Return the price of ``count`` redistributions of an activation per micro-batch, forward and backward.

        None where there is no path, or where the tensor has a gradient on one side only.
        """
        ports = self.communication.ports
        exchanged = self.exchange(value)._replace(calls=count * self.run.micro_batches)
        return self.communication.exchange(exchanged, ports.number(source), ports.number(target))

    def recomputed_redistribution(self, value: Value, source: Port, target: Port, count: int) -> Price:
        """Return the price of repeating ``count`` forward redistributions while blocks are recomputed."""
        assert source[0] is not None
        assert target[0] is not None
        calls = count * self.run.micro_batches
        price = self._move(value, source[0], target[0], "recompute", calls, quantity.BLOCKING_BACKWARD)
        assert price is not None
        return price

    def _move(
        self, value: Value, source: Layout, target: Layout, phase: Phase, calls: int, prefix: str
    ) -> Price | None:
        return self.communication.move(
            value.shape, value.dtype.itemsize, source, target, phase=phase, calls=calls, prefix=prefix
        )

    # --- regions -------------------------------------------------------------------------------------------------

    def local_nbytes(self, value: Value, layout: Layout | None) -> float:
        """Return the bytes of one device's piece of ``value``; a plain value (None) is whole everywhere."""
        if layout is None:
            return min(value.nbytes, self._profile.storage_nbytes[value.name])
        return value.nbytes / split_factor(layout, self.run.mesh.shape)

    def _op_time(self, region: Region, region_op: RegionOp, strategy: Strategy) -> OpTime:
        """Return the seconds of one op on one device's pieces."""
        touched = (*region_op.inputs, *region_op.outputs)
        mesh = self.run.mesh.shape
        whole = sum(region.slots[i].value.nbytes for i in touched) or 1
        share = sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in touched) / whole
        inputs = [region.slots[i].value for i in region_op.inputs]
        output = region_op.outputs[0]
        return self._op_times.of(
            region_op.op,
            inputs,
            region.slots[output].value,
            [_piece(value, strategy.forward[i], mesh) for i, value in zip(region_op.inputs, inputs, strict=True)],
            _piece(region.slots[output].value, strategy.forward[output], mesh),
            self._profile.ops[region_op.op.name],
            share,
            work_split([strategy.forward[i] for i in touched], mesh),
        )

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
            forward_s, backward_s = self._op_time(region, region_op, strategy)
            matmul = self._profile.ops[region_op.op.name].flops > 0
            charge[quantity.COMPUTE_FORWARD] += calls * forward_s
            if self.run.job.training:
                again = recomputes and (self.run.ac == "full" or not matmul)
                charge[quantity.COMPUTE_BACKWARD] += calls * (backward_s + (forward_s if again else 0.0))
            prices += self._inner(region, region_op, strategy, calls, recomputes)
        if self.run.job.training:
            self._saved(charge, region, strategy, count, recomputes, in_representative)
        charge[f"{quantity.TRANSIENT}{region.index}"] += self._transient(region, strategy)
        return add_prices([Price(charge=charge), *prices])

    def _inner(
        self, region: Region, region_op: RegionOp, strategy: Strategy, calls: int, recomputes: bool
    ) -> list[Price]:
        inputs = find_op_inputs(region, region_op)
        layouts = [strategy.forward[i] for i in region_op.inputs]
        prices = []
        for inner in inner_collectives(region_op.op, inputs, layouts, self.run.mesh.shape):
            phases: list[tuple[Phase, str]] = [("forward", quantity.BLOCKING_FORWARD)]
            if recomputes:
                phases.append(("recompute", quantity.BLOCKING_BACKWARD))
            for phase, prefix in phases:
                prices.append(self.communication.collective(inner.kind, inner.axis, inner.nbytes, phase, calls, prefix))
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


def _piece(value: Value, layout: Layout | None, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one device's piece; a plain value (None) is whole everywhere."""
    if layout is None:
        return value.shape
    counts = shard_counts(layout, mesh_shape, len(value.shape))
    return tuple(length // count for length, count in zip(value.shape, counts, strict=True))
