"""What each decision about activations costs: a region's strategy, a redistribution, a copy that autograd keeps.

Parameters are priced in `parameter_costs`, what moves tensors in `redistribution_costs`.

Every price is a `Price`: what it adds to the quantities of a step (see `planner.ilp.problem`), and the collectives it
stands for. The integer program and the estimator both ask here, so that they cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from cost_model import dispatched_collective_time_s
from cost_model.layouts.layout import Layout, split_factor
from planner.graph.op_graph import Value
from planner.ilp import problem as quantity
from planner.ilp.problem import Lifetime
from planner.liveness.class_timeline import ClassTimeline
from planner.liveness.multiplicity import Multiplicity
from planner.model_rewrites import experts
from planner.plan.estimate import Phase
from planner.plan.job import CheckpointingMode
from planner.pricing.op_times import OpTime, OpTimes
from planner.pricing.overlap import AdjacentGemms, Overlap, link_of
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import Collective, Price, add_prices
from planner.pricing.redistribution_costs import RedistributedTensor, RedistributionPricer
from planner.pricing.run_spec import PIPELINE_AXIS, Run, StagePlace
from planner.profile.op_profile import GraphProfile
from planner.regions.regions import Region, RegionOp, find_op_inputs, is_received, is_sent
from planner.strategies import context_parallel
from planner.strategies.context_parallel import ContextParallelWork
from planner.strategies.enumerate import Strategy
from planner.strategies.expert_parallel import exchange_ranks
from planner.strategies.inner_collectives import InnerCollective
from planner.strategies.own_rules import inner_collectives, piece_shape, work_split


class ActivationPricer:
    """Prices of single decisions in one `Run`."""

    def __init__(
        self, run: Run, profile: GraphProfile, redistribution_pricer: RedistributionPricer, op_times: OpTimes
    ) -> None:
        """Price on the mesh of ``redistribution_pricer`` and the devices of ``op_times``; runs may share both."""
        self.run = run
        self.redistribution_pricer = redistribution_pricer
        self._profile = profile
        self._op_times = op_times
        self._overlap = Overlap.of(run.cluster.device)

    # --- activations ---------------------------------------------------------------------------------------------

    def redistributed_tensor(self, value: Value, beside: AdjacentGemms | None = None) -> RedistributedTensor:
        """Return what is exchanged where an activation like ``value`` is redistributed, once per micro-batch.

        Args:
            beside: the products that hide it, where the job has it so.
        """
        return RedistributedTensor(
            value.shape, value.dtype.itemsize, self.run.passes, value.requires_grad and self.run.job.training, beside
        )

    def redistribution(
        self, value: Value, source: PortLayouts, target: PortLayouts, count: int, beside: AdjacentGemms | None = None
    ) -> Price | None:
        """Return the price of ``count`` redistributions of an activation per micro-batch, forward and backward.

        None where there is no path, or where the tensor has a gradient on one side only.
        """
        ports = self.redistribution_pricer.ports
        exchanged = self.redistributed_tensor(value, beside)._replace(calls=count * self.run.passes)
        return self.redistribution_pricer.both_ways(exchanged, ports.number(source), ports.number(target))

    def recomputed_redistribution(
        self, value: Value, source: PortLayouts, target: PortLayouts, count: int, beside: AdjacentGemms | None = None
    ) -> Price:
        """Return the price of repeating ``count`` forward redistributions while blocks are recomputed."""
        assert source[0] is not None
        assert target[0] is not None
        calls = count * self.run.passes
        price = self._move(value, source[0], target[0], "recompute", calls, quantity.BLOCKING_BACKWARD)
        assert price is not None
        if beside is None:
            return price
        path = self.redistribution_pricer.path(value.shape, value.dtype.itemsize, source[0], target[0])
        return self.redistribution_pricer.overlap_with_gemms(
            price, path, quantity.BACKWARD, beside.consumers.forward, beside.producer.forward
        )

    def _move(
        self, value: Value, source: Layout, target: Layout, phase: Phase, calls: float, prefix: str
    ) -> Price | None:
        return self.redistribution_pricer.one_way(
            value.shape, value.dtype.itemsize, source, target, phase=phase, calls=calls, prefix=prefix
        )

    # --- regions -------------------------------------------------------------------------------------------------

    def local_nbytes(self, value: Value, layout: Layout | None) -> float:
        """Return the bytes of one device's piece of ``value``; a plain value (None) is whole everywhere."""
        if layout is None:
            return min(value.nbytes, self._profile.storage_nbytes[value.name])
        return value.nbytes / split_factor(layout, self.run.mesh.shape)

    def _handed_over(self, region: Region, strategy: Strategy, count: int) -> Iterator[Price]:
        """Yield what a pipeline stage sends: what it hands on, and the gradient of what it was handed.

        ``count`` times in a micro-batch: that of the stage's chunks which hand it over.
        """
        if self.run.place is None:
            return
        for slot, layout, gradient in zip(region.slots, strategy.forward, strategy.gradient, strict=True):
            if is_sent(region, slot):
                yield self._sent(self.run.place, slot.value, layout, "forward", count)
            if is_received(slot) and self.run.job.training:
                yield self._sent(self.run.place, slot.value, gradient, "backward", count)

    def _sent(
        self, place: StagePlace, value: Value, layout: Layout | None, phase: Literal["forward", "backward"], count: int
    ) -> Price:
        """Return the price of ``count`` messages a micro-batch from each rank to its own in the next stage, or back."""
        group, nbytes, calls = place.group(self.run.mesh), round(self.local_nbytes(value, layout)), self.run.passes
        time_s = dispatched_collective_time_s("send_recv", nbytes, group, place.cluster)
        ahead = self.run.passes_ahead
        charge = self._overlap.blocking(phase, link_of(group), count * (calls - ahead) * time_s)
        for name, amount in self._overlap.overlapped_messages(phase, group, count * ahead * time_s).items():
            charge[name] = charge.get(name, 0.0) + amount
        found = Collective(
            kind="send_recv", axis=PIPELINE_AXIS, phase=phase, nbytes=nbytes, count=count * calls, time_s=time_s
        )
        return Price(charge=charge, collectives=(found,))

    def _op_time(self, region: Region, region_op: RegionOp, strategy: Strategy) -> OpTime:
        """Return the seconds of one op on one device's pieces."""
        touched = (*region_op.inputs, *region_op.outputs)
        mesh = self.run.mesh.shape
        whole = sum(region.slots[i].value.nbytes for i in touched) or 1
        share = sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in touched) / whole
        inputs = [region.slots[i].value for i in region_op.inputs]
        output = region_op.outputs[0]
        profile = self._profile.ops[region_op.op.name]
        return self._op_times.of(
            region_op.op,
            inputs,
            region.slots[output].value,
            [piece_shape(value, strategy.forward[i], mesh) for i, value in zip(region_op.inputs, inputs, strict=True)],
            piece_shape(region.slots[output].value, strategy.forward[output], mesh),
            profile,
            share,
            work_split([strategy.forward[i] for i in touched], mesh),
            self._context_work(region, region_op, strategy),
            exchange_ranks(region_op.op, [strategy.forward[i] for i in region_op.inputs], mesh),
        )

    def _sums_s(
        self,
        region: Region,
        region_op: RegionOp,
        strategy: Strategy,
        sums: Mapping[int, int],
        joins: Mapping[int, int],
    ) -> float:
        """Return the seconds in which gradients of an op's inputs are added to those of other uses: by autograd, or by
        the op's product (as if all that join read the tensor in one layout: of two, autograd adds both)."""
        added = ((sums, self._op_times.sum_s), (joins, self._op_times.join_s))
        return sum(
            times * seconds(self._gradient_nbytes(region, region_op.inputs[position], strategy))
            for counts, seconds in added
            for position, times in counts.items()
        )

    def _gradient_nbytes(self, region: Region, slot: int, strategy: Strategy) -> float:
        layout = strategy.gradient[slot] or strategy.forward[slot]
        return self.local_nbytes(region.slots[slot].value, layout)

    def region(
        self,
        region: Region,
        strategy: Strategy,
        *,
        count: int,
        mode: CheckpointingMode | None,
        alive: ClassTimeline | None,
        throughout: Lifetime,
        arguments: Sequence[int],
        sums: Sequence[Mapping[int, int]],
        joins: Sequence[Mapping[int, int]],
    ) -> Price:
        """Return the price of ``count`` equal regions under ``strategy``, redistributions left out.

        Args:
            mode: how the block that the region is in is checkpointed, None where it is in none that is.
            alive: what of the regions is alive at which candidates; None where nobody asks for the peak.
            throughout: of what is alive at all candidates of a forward and backward.
            arguments: slots that show what the model is called with; the caller holds that, for every micro-batch in
                flight. Of a stage also what it hands on, which waits for its gradient.
            sums: for each op, input -> in how many of the regions its gradient is added to that of an earlier use.
            joins: likewise, in how many the op's product adds to a gradient that is there.
        """
        charge: dict[str, float] = defaultdict(float)
        for slot in arguments:
            held = region.slots[slot].value
            nbytes = self.local_nbytes(held, strategy.forward[slot])
            charge[quantity.MEMORY + "activations"] += self.run.in_flight * nbytes
        prices = list(self._handed_over(region, strategy, count))
        calls = count * self.run.passes
        for region_op, *added in zip(region.ops, sums, joins, strict=True):
            forward_s, backward_s = self._op_time(region, region_op, strategy)
            matmul = self._profile.ops[region_op.op.name].flops > 0
            cache_nbytes = self._cache_nbytes(region, region_op, strategy)
            if cache_nbytes:
                charge[quantity.MEMORY + "kv_cache"] += count * cache_nbytes
            charge[quantity.COMPUTE_FORWARD] += calls * forward_s
            if self.run.job.training:
                again = mode == "full" or (mode == "selective" and not matmul)
                charge[quantity.COMPUTE_BACKWARD] += calls * (backward_s + (forward_s if again else 0.0))
                charge[quantity.COMPUTE_BACKWARD] += self.run.passes * self._sums_s(region, region_op, strategy, *added)
            prices += self._inner(region, region_op, strategy, calls, mode)
        if self.run.job.has_peak_candidates:
            if alive is not None:
                charge.update(self._alive(region, strategy, alive, throughout))
        else:
            charge[f"{quantity.TRANSIENT}{region.index}"] += self._transient(region, strategy)
        return add_prices([Price(charge=charge), *prices])

    def _cache_nbytes(self, region: Region, region_op: RegionOp, strategy: Strategy) -> float:
        """Return the bytes of the keys and values that one device keeps for an op of attention: laid out as it is."""
        tokens = self._profile.ops[region_op.op.name].cached_tokens
        if not tokens:
            return 0.0
        keys_and_values = [(region.slots[i].value, strategy.forward[i]) for i in region_op.inputs[1:3]]
        return sum(self.local_nbytes(value, layout) / value.shape[2] * tokens for value, layout in keys_and_values)

    def _inner(
        self, region: Region, region_op: RegionOp, strategy: Strategy, calls: float, mode: CheckpointingMode | None
    ) -> list[Price]:
        inputs = find_op_inputs(region, region_op)
        layouts = [strategy.forward[i] for i in region_op.inputs]
        prices = []
        for inner in inner_collectives(region_op.op, inputs, layouts, self.run.mesh.shape):
            phases: list[tuple[Phase, quantity.PhaseQuantities]] = []
            if inner.phase == "forward":
                phases.append(("forward", quantity.FORWARD))
                if mode is not None:
                    phases.append(("recompute", quantity.BACKWARD))
            elif self.run.job.training:
                phases.append(("backward", quantity.BACKWARD))
            for phase, kind in phases:
                price = self.redistribution_pricer.collective(
                    inner.kind, inner.axis, inner.nbytes, phase, calls, kind.blocking
                )
                # What selective checkpointing keeps is not computed again, and hides nothing.
                runs = phase != "recompute" or mode == "full"
                hidden_s = self._hidden_s(region, region_op, strategy, inner, price) if runs else 0.0
                prices.append(self.redistribution_pricer.overlap(price, kind, hidden_s))
        return prices

    def _hidden_s(
        self, region: Region, region_op: RegionOp, strategy: Strategy, inner: InnerCollective, price: Price
    ) -> float:
        """Return the seconds of one call of a collective inside an op that run beside what the op computes."""
        if inner.beside is None or not self.run.cluster.device.overlaps:
            return 0.0
        work = self._context_work(region, region_op, strategy)
        assert work is not None, "attention alone computes beside its collectives"
        dtype = region.slots[region_op.outputs[0]].value.dtype
        computed_s = self._op_times.beside_s(inner.beside, work, dtype, backward=inner.phase == "backward")
        return min(price.collectives[0].time_s, computed_s)

    def _inside(self, region: Region, region_op: RegionOp, strategy: Strategy) -> tuple[float, float, float, float]:
        """Return the bytes that one device has inside an op: kept for the backward, results of products, at work in
        the backward, and at work in the forward."""
        profile, mesh = self._profile.ops[region_op.op.name], self.run.mesh.shape
        if not (profile.saved_extra_nbytes or profile.cached_extra_nbytes or profile.backward_extra_nbytes):
            return 0.0, 0.0, 0.0, 0.0
        if region_op.op.target_name == experts.OP_NAME:
            # Where each expert is split, its tokens need not be.
            values = find_op_inputs(region, region_op)
            layouts = [strategy.forward[i] for i in region_op.inputs]
            shapes = [piece_shape(value, layout, mesh) for value, layout in zip(values, layouts, strict=True)]
            ranks = exchange_ranks(region_op.op, layouts, mesh)
            work = experts.ExpertsWork.from_shapes(shapes, values[4].shape[0], values[0].dtype.itemsize, ranks)
            return work.saved_nbytes, work.gemm_output_nbytes, work.backward_rise_nbytes, work.forward_peak_nbytes
        context = self._context_work(region, region_op, strategy)
        if context is not None:
            return (
                context.saved_nbytes + self._kept_beside(region, region_op, strategy),
                context.gemm_output_nbytes,
                context.backward_rise_nbytes,
                context.forward_peak_nbytes,
            )
        split = work_split([strategy.forward[i] for i in (*region_op.inputs, *region_op.outputs)], mesh)
        return (
            profile.saved_extra_nbytes / split,
            profile.cached_extra_nbytes / split,
            profile.backward_extra_nbytes / split,
            profile.forward_peak_nbytes / split,
        )

    def _context_work(self, region: Region, region_op: RegionOp, strategy: Strategy) -> ContextParallelWork | None:
        """Return what attention takes on one device whose sequence is split; None for any other op."""
        mesh = self.run.mesh.shape
        layouts = [strategy.forward[i] for i in region_op.inputs]
        axis = context_parallel.split_axis(region_op.op, layouts, mesh)
        if axis is None:
            return None
        values = find_op_inputs(region, region_op)
        shapes = [piece_shape(value, layout, mesh) for value, layout in zip(values, layouts, strict=True)]
        return ContextParallelWork.of(region_op.op, shapes, values[0].dtype.itemsize, mesh[axis])

    def _kept_beside(self, region: Region, region_op: RegionOp, strategy: Strategy) -> float:
        """Return the bytes of query, key, value and result that the op keeps, and the profiled kernel does not."""
        saved = self._profile.ops[region_op.op.name].saved
        slots = (*region_op.inputs[:3], region_op.outputs[0])
        beside = [i for i in slots if self._profile.root[region.slots[i].value.name] not in saved]
        return sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in beside)

    def _alive(
        self, region: Region, strategy: Strategy, alive: ClassTimeline, throughout: Lifetime
    ) -> dict[str, float]:
        """Return the bytes that the regions add, by lifetime: kept, gradients, and what an op works on."""
        made = np.array([self.local_nbytes(s.value, p) for s, p in zip(region.slots, strategy.forward, strict=True)])
        gradients = np.array([
            self.local_nbytes(slot.value, strategy.forward[i] if strategy.gradient[i] is None else strategy.gradient[i])
            for i, slot in enumerate(region.slots)
        ])  # fmt: skip
        extra, cached, working, running = np.zeros((4, len(region.ops)))
        for index, region_op in enumerate(region.ops):
            extra[index], cached[index], working[index], running[index] = self._inside(region, region_op, strategy)
        if not self.run.job.training:
            working = running  # the op itself, in the forward
        found: dict[str, float] = defaultdict(float)
        for lifetime, nbytes in alive.add_up(
            made=made, extra=extra, cached=cached, running=running, gradients=gradients, working=working
        ):
            found[lifetime] += nbytes
        others = self.run.in_flight - 1
        if others:
            held = (
                made @ alive.saved_after_forward
                + extra @ alive.saved_extra_after_forward
                + cached @ alive.cached_extra_after_forward
            )
            found[throughout] += others * float(held)
        return found

    def _transient(self, region: Region, strategy: Strategy) -> float:
        """Return the bytes that the region's largest op works on in a forward of a model traced for training."""
        return max((self._touched_nbytes(region, op, strategy) for op in region.ops), default=0.0)

    def _touched_nbytes(self, region: Region, region_op: RegionOp, strategy: Strategy) -> float:
        context = self._context_work(region, region_op, strategy)
        slots = (*region_op.inputs, *region_op.outputs)
        inside = 0.0 if context is None else context.forward_peak_nbytes - context.result_nbytes
        return inside + sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in slots)

    def copy(
        self,
        value: Value,
        layout: Layout,
        multiplicity: Multiplicity,
        throughout: Lifetime,
        *,
        reallgather: bool = False,
    ) -> Price:
        """Return the price of keeping copies of ``value`` in ``layout`` as often as ``multiplicity`` says.

        Args:
            reallgather: whether they are made again in the backward instead, and there for as long as it reads them.
        """
        nbytes = self.local_nbytes(value, layout)
        if reallgather:
            return Price(charge=multiplicity.reallgathered_lifetime.charge(nbytes))
        others = multiplicity.live_after_forward * (self.run.in_flight - 1)
        return add_prices([
            Price(charge=multiplicity.lifetime.charge(nbytes)), Price(charge=throughout.charge(others * nbytes))
        ])  # fmt: skip
