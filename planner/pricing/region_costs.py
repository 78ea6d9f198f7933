"""Prices of strategies: `RegionPricer.price` sums compute, collectives inside ops, pipeline messages and memory.

Redistributions between regions are priced in `redistribution_costs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from cost_model import dispatched_collective_time_s
from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Op, Value
from planner.ilp.quantities import (
    BACKWARD,
    FORWARD,
    Lifetime,
    LinkQuantities,
    PhaseQuantities,
    Quantity,
    persistent,
    transient,
)
from planner.liveness.class_timeline import ClassTimeline
from planner.model_rewrites.experts import experts_op
from planner.plan.estimate import Phase
from planner.plan.job import CheckpointingMode
from planner.pricing.op_times import LocalOp, OpTime, OpTimes
from planner.pricing.overlap import Overlap, link_of
from planner.pricing.price import Collective, Price, add_prices
from planner.pricing.redistribution_costs import RedistributionPricer
from planner.pricing.region_memory import RegionMemory, context_parallel_work
from planner.pricing.run_spec import PIPELINE_AXIS, Run, StagePlace
from planner.profile.op_profile import GraphProfile
from planner.regions.regions import Region, RegionOp, find_op_inputs, is_received, is_sent
from planner.strategies.axis_rule import InnerCollective
from planner.strategies.enumerate import Strategy
from planner.strategies.expert_parallel import exchange_ranks
from planner.strategies.own_collectives import inner_collectives, shard_shape, work_split

_OpLayouts = tuple[str, tuple[Layout | None, ...]]


def _layouts_of(region_op: RegionOp, strategy: Strategy) -> _OpLayouts:
    """Return an op's name and the layouts of its tensors: many strategies of a region have an op in one layout."""
    return region_op.op.name, tuple([strategy.forward[i] for i in (*region_op.inputs, *region_op.outputs)])


class RegionPricer:
    """Prices of the strategies of regions in one `Run`."""

    def __init__(
        self,
        run: Run,
        profile: GraphProfile,
        memory: RegionMemory,
        redistribution_pricer: RedistributionPricer,
        op_times: OpTimes,
    ) -> None:
        self._run = run
        self._profile = profile
        self._memory = memory
        self._collectives = redistribution_pricer
        self._op_times = op_times
        self._overlap = Overlap.of(run.cluster.device)
        self._times: dict[_OpLayouts, OpTime] = {}
        self._inner: dict[tuple[_OpLayouts, Layout | None, float, CheckpointingMode | None], list[Price]] = {}

    def price(
        self,
        region: Region,
        strategy: Strategy,
        *,
        count: int,
        checkpointing: CheckpointingMode | None,
        timeline: ClassTimeline | None,
        throughout: Lifetime,
        boundary_slots: Sequence[int],
        autograd_sums: Sequence[Mapping[int, int]],
        gemm_sums: Sequence[Mapping[int, int]],
    ) -> Price:
        """Return the price of ``count`` equal regions under ``strategy``, in seconds and bytes of a step.

        Args:
            count: number of the regions.
            checkpointing: how the regions' blocks are checkpointed; None if they are not.
            timeline: number of live tensors of the regions at each peak candidate; None: peak memory is not priced.
            throughout: lifetime of activations of other micro-batches in flight.
            boundary_slots: slots of the model's inputs, which are live for every micro-batch in flight. In a pipeline
                stage also the slots of its outputs, which are live until their gradients arrive.
            autograd_sums: for each op, position of an input -> number of regions in which autograd adds the input's
                gradient to the gradient of another use.
            gemm_sums: for each op, position of an input -> number of regions in which the op's GEMM adds to an existing
                gradient.
        """
        charge: dict[Quantity, float] = defaultdict(float)
        for slot in boundary_slots:
            nbytes = self._memory.local_nbytes(region.slots[slot].value, strategy.forward[slot])
            charge[persistent("activations")] += self._run.in_flight * nbytes
        prices = list(self._pipeline_messages(region, strategy, count))
        calls = count * self._run.passes
        for region_op, *sums in zip(region.ops, autograd_sums, gemm_sums, strict=True):
            forward_s, backward_s = self.op_time(region, region_op, strategy, checkpointing)
            cache_nbytes = self._memory.kv_cache_nbytes(region, region_op, strategy)
            if cache_nbytes:
                charge[persistent("kv_cache")] += count * cache_nbytes
            charge[FORWARD.compute] += calls * forward_s
            if self._run.job.training:
                charge[BACKWARD.compute] += calls * backward_s
                sums_s = self._gradient_sums_s(region, region_op, strategy, *sums)
                charge[BACKWARD.compute] += self._run.passes * sums_s
            key = _layouts_of(region_op, strategy), strategy.gradient[region_op.outputs[0]], calls, checkpointing
            if key not in self._inner:
                self._inner[key] = self._inner_collectives(region, region_op, strategy, calls, checkpointing)
            prices += self._inner[key]
        if self._run.job.has_peak_candidates:
            if timeline is not None:
                charge.update(self._memory.by_lifetime(region, strategy, timeline, throughout))
        else:
            charge[transient(region.index)] += self._memory.largest_op_nbytes(region, strategy)
        return add_prices([Price(charge=charge), *prices])

    # --- compute -------------------------------------------------------------------------------------------------

    def op_time(
        self, region: Region, region_op: RegionOp, strategy: Strategy, checkpointing: CheckpointingMode | None
    ) -> OpTime:
        """Return the seconds of one op on one device's shards; in the backward, with those of its recomputation."""
        time = self._op_time(region, region_op, strategy)
        if checkpointing is None:
            return time
        has_gemm = self._profile.ops[region_op.op.name].flops > 0
        recomputes = checkpointing == "full" or not has_gemm
        return OpTime(time.forward_s, time.backward_s + (time.forward_s if recomputes else 0.0))

    def _op_time(self, region: Region, region_op: RegionOp, strategy: Strategy) -> OpTime:
        """Return the seconds of one op on one device's shards, without recomputation."""
        key = _layouts_of(region_op, strategy)
        if key not in self._times:
            self._times[key] = self._computed_op_time(region, region_op, strategy)
        return self._times[key]

    def _computed_op_time(self, region: Region, region_op: RegionOp, strategy: Strategy) -> OpTime:
        op, mesh_shape, rounded = region_op.op, self._run.mesh.shape, self._collectives.rounded
        slots = (*region_op.inputs, *region_op.outputs)
        global_nbytes = sum(region.slots[i].value.nbytes for i in slots) or 1
        local_nbytes = sum(self._memory.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in slots)
        inputs = [region.slots[i].value for i in region_op.inputs]
        layouts = [strategy.forward[i] for i in region_op.inputs]
        output = region_op.outputs[0]
        local = LocalOp(
            op=op,
            inputs=inputs,
            output=region.slots[output].value,
            shapes=[shard_shape(v, layout, mesh_shape, rounded) for v, layout in zip(inputs, layouts, strict=True)],
            output_shape=shard_shape(region.slots[output].value, strategy.forward[output], mesh_shape, rounded),
            profile=self._profile.ops[op.name],
            bytes_fraction=local_nbytes / global_nbytes,
            flops_split=work_split([strategy.forward[i] for i in slots], mesh_shape),
            context_work=context_parallel_work(region, region_op, strategy, mesh_shape),
            exchange_ranks=exchange_ranks(op, layouts, mesh_shape),
            imbalance=self._run.job.expert_imbalance,
        )
        return self._op_times.op_time(local)

    def _gradient_sums_s(
        self,
        region: Region,
        region_op: RegionOp,
        strategy: Strategy,
        autograd_sums: Mapping[int, int],
        gemm_sums: Mapping[int, int],
    ) -> float:
        """Return the seconds per micro-batch, over all regions, of adding input gradients of an op to other gradients.

        GEMMs that accumulate the gradient of one tensor are priced as if all of them read the tensor in the same
        layout. (If they read it in two layouts, autograd adds the two gradients.)
        """
        sums = ((autograd_sums, self._op_times.autograd_sum_s), (gemm_sums, self._op_times.gemm_sum_s))
        return sum(
            count * sum_s(self._memory.gradient_nbytes(region, region_op.inputs[position], strategy))
            for counts, sum_s in sums
            for position, count in counts.items()
        )

    # --- collectives inside ops ----------------------------------------------------------------------------------

    def _inner_collectives(
        self,
        region: Region,
        region_op: RegionOp,
        strategy: Strategy,
        calls: float,
        checkpointing: CheckpointingMode | None,
    ) -> list[Price]:
        inputs = find_op_inputs(region, region_op)
        layouts = [strategy.forward[i] for i in region_op.inputs]
        prices = []
        arriving = strategy.gradient[region_op.outputs[0]]
        for inner in inner_collectives(region_op.op, inputs, layouts, self._run.mesh.shape, arriving):
            phases: list[tuple[Phase, PhaseQuantities]] = []
            if inner.phase == "forward":
                phases.append(("forward", FORWARD))
                if checkpointing is not None:
                    phases.append(("recompute", BACKWARD))
            elif self._run.job.training:
                phases.append(("backward", BACKWARD))
            for phase, names in phases:
                price = self._inner_collective(region_op.op, inner, phase, calls, names.blocking)
                # Selective checkpointing saves attention's result: no kernel runs again that could overlap.
                computes = phase != "recompute" or checkpointing == "full"
                overlapped_s = self._overlapped_s(region, region_op, strategy, inner, price) if computes else 0.0
                prices.append(self._collectives.overlap(price, names, overlapped_s))
        return prices

    def _inner_collective(
        self, op: Op, inner: InnerCollective, phase: Phase, calls: float, quantities: LinkQuantities
    ) -> Price:
        """Return the price of a collective inside ``op``; exchanges of tokens last as long as on the busiest rank."""
        imbalance = self._run.job.expert_imbalance if op.target_name == experts_op.OP_NAME else 1.0
        nbytes = round(inner.nbytes * imbalance)
        price = self._collectives.collective(inner.kind, inner.axis, nbytes, phase, calls, quantities)
        # The plan states the mean, which is what runs with balanced experts.
        collectives = tuple(replace(collective, nbytes=inner.nbytes) for collective in price.collectives)
        return replace(price, collectives=collectives)

    def _overlapped_s(
        self, region: Region, region_op: RegionOp, strategy: Strategy, inner: InnerCollective, price: Price
    ) -> float:
        """Return the seconds of one call of a collective inside an op that overlap with the op's own compute."""
        if inner.overlapped_with is None or not self._run.cluster.device.overlaps:
            return 0.0
        work = context_parallel_work(region, region_op, strategy, self._run.mesh.shape)
        assert work is not None, "only attention overlaps its collectives with compute"
        dtype = region.slots[region_op.outputs[0]].value.dtype
        compute_s = self._op_times.attention_kernel_s(
            inner.overlapped_with, work, dtype, backward=inner.phase == "backward"
        )
        return min(price.collectives[0].time_s, compute_s)

    # --- pipeline messages ---------------------------------------------------------------------------------------

    def _pipeline_messages(self, region: Region, strategy: Strategy, count: int) -> Iterator[Price]:
        """Yield the prices of a pipeline stage's messages: activations in the forward, gradients in the backward.

        Args:
            count: messages per micro-batch, which is the number of the stage's chunks that have the region.
        """
        if self._run.place is None:
            return
        for slot, layout, gradient in zip(region.slots, strategy.forward, strategy.gradient, strict=True):
            if is_sent(region, slot):
                yield self._message(self._run.place, slot.value, layout, "forward", count)
            if is_received(slot) and self._run.job.training:
                yield self._message(self._run.place, slot.value, gradient, "backward", count)

    def _message(
        self, place: StagePlace, value: Value, layout: Layout | None, phase: Literal["forward", "backward"], count: int
    ) -> Price:
        """Return the price of ``count`` messages per micro-batch from each rank to its peer in another stage."""
        group, nbytes = place.group(self._run.mesh), round(self._memory.local_nbytes(value, layout))
        calls, overlapped_calls = self._run.passes, self._run.overlapped_message_passes
        time_s = dispatched_collective_time_s("send_recv", nbytes, group, place.cluster)
        charge = self._overlap.blocking(phase, link_of(group), count * (calls - overlapped_calls) * time_s)
        overlapped = self._overlap.overlapped_messages(phase, group, count * overlapped_calls * time_s)
        for name, amount in overlapped.items():
            charge[name] = charge.get(name, 0.0) + amount
        messages = Collective(
            kind="send_recv", axis=PIPELINE_AXIS, phase=phase, nbytes=nbytes, count=count * calls, time_s=time_s
        )
        return Price(charge=charge, collectives=(messages,))
