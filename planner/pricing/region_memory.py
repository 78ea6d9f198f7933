"""Bytes of a region on one device: activations saved for backward, gradients, and live tensors inside its ops."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from cost_model.layouts.layout import Layout, split_factor
from planner.graph.layer_caches import decoding_step
from planner.graph.op_graph import Value
from planner.ilp.quantities import Lifetime, Quantity
from planner.liveness.class_timeline import ClassTimeline
from planner.model_rewrites.experts import experts_op
from planner.model_rewrites.experts.experts_op import ExpertsArguments
from planner.model_rewrites.experts.work import ExpertsWork
from planner.pricing.run_spec import Run
from planner.profile.op_profile import GraphProfile
from planner.regions.regions import Region, RegionOp, find_op_inputs
from planner.strategies import context_parallel
from planner.strategies.context_parallel_work import ContextParallelWork
from planner.strategies.enumerate import Strategy
from planner.strategies.expert_parallel import exchange_ranks
from planner.strategies.own_collectives import shard_shape, work_split


class InnerNbytes(NamedTuple):
    """Bytes, on one device, of tensors that exist only inside an op.

    Attributes:
        saved: saved for backward.
        gemm_outputs: GEMM outputs that are not outputs of the op; selective checkpointing saves them.
        backward_rise: peak in the backward, beyond the bytes at its start and the gradients that it returns.
        forward_peak: peak in the forward, beyond the inputs.
    """

    saved: float
    gemm_outputs: float
    backward_rise: float
    forward_peak: float


_NO_INNER_NBYTES = InnerNbytes(0.0, 0.0, 0.0, 0.0)


class RegionMemory:
    """Bytes of regions on one device in one `Run`."""

    def __init__(self, run: Run, profile: GraphProfile) -> None:
        self._run = run
        self._profile = profile
        self._mesh_shape = run.mesh.shape

    def local_nbytes(self, value: Value, layout: Layout | None) -> float:
        """Return the bytes of one device's shard of ``value``; a plain value (layout None) is unsharded."""
        if layout is None:
            return min(value.nbytes, self._profile.storage_nbytes[value.name])
        return value.nbytes / split_factor(layout, self._mesh_shape)

    def gradient_nbytes(self, region: Region, slot: int, strategy: Strategy) -> float:
        """Return the bytes of one device's shard of a slot's gradient.

        A gradient without a layout counts with the layout of its tensor.
        """
        gradient = strategy.gradient[slot]
        return self.local_nbytes(region.slots[slot].value, strategy.forward[slot] if gradient is None else gradient)

    def kv_cache_nbytes(self, region: Region, region_op: RegionOp, strategy: Strategy) -> float:
        """Return the bytes of an op's cache on one device.

        Keys and values are sharded as the op reads them, but a device has at least one head; states in a step of
        decoding as the step reads them. Latents, and states after a prompt, are sharded by samples alone.
        """
        profile, cache = self._profile.ops[region_op.op.name], region_op.op.cache
        if region_op.op.target_name == decoding_step.OP_NAME:
            state = region_op.outputs[0]
            nbytes = self.local_nbytes(region.slots[state].value, strategy.forward[state])
            tokens = decoding_step.growing_tokens(region_op.op)
            return nbytes * (tokens + 1) / tokens if tokens else nbytes
        if cache is not None and cache.state_nbytes:
            result = region_op.outputs[0]
            samples = shard_shape(region.slots[result].value, strategy.forward[result], self._mesh_shape)[0]
            return float(samples * cache.state_nbytes)
        if cache is not None and cache.kv_nbytes:
            result = region_op.outputs[0]
            value, layout = region.slots[result].value, strategy.forward[result]
            return self.local_nbytes(value, layout) / value.nbytes * value.shape[0] * cache.kv_nbytes
        if not profile.kept_tokens:
            return 0.0
        if profile.latents is not None:
            keys = region.slots[region_op.inputs[1]].value
            samples = shard_shape(keys, strategy.forward[region_op.inputs[1]], self._mesh_shape)[0]
            return float(samples * profile.kept_tokens * sum(profile.latents) * keys.dtype.itemsize)
        nbytes = 0.0
        for i in region_op.inputs[1:3]:
            value = region.slots[i].value
            batch, heads, _, width = shard_shape(value, strategy.forward[i], self._mesh_shape)
            kept_heads = max(heads * profile.kv_heads // value.shape[1], 1)
            nbytes += batch * kept_heads * profile.kept_tokens * width * value.dtype.itemsize
        return nbytes

    def by_lifetime(
        self, region: Region, strategy: Strategy, timeline: ClassTimeline, throughout: Lifetime
    ) -> dict[Quantity, float]:
        """Return the bytes of all regions of a class, by lifetime.

        Args:
            timeline: how many of the class's tensors are live at each peak candidate.
            throughout: lifetime of activations of other micro-batches in flight.
        """
        tensors = np.array([
            self.local_nbytes(slot.value, layout) for slot, layout in zip(region.slots, strategy.forward, strict=True)
        ])  # fmt: skip
        gradients = np.array([self.gradient_nbytes(region, i, strategy) for i in range(len(region.slots))])
        saved, gemm_outputs, backward_rise, forward_peak = np.zeros((4, len(region.ops)))
        for i, region_op in enumerate(region.ops):
            saved[i], gemm_outputs[i], backward_rise[i], forward_peak[i] = self._inside(region, region_op, strategy)
        nbytes: dict[Quantity, float] = defaultdict(float)
        for lifetime, amount in timeline.add_up(
            tensors=tensors,
            extra=saved,
            cached=gemm_outputs,
            running=forward_peak,
            gradients=gradients,
            # In inference the peak is in the forward of an op.
            working=backward_rise if self._run.job.training else forward_peak,
        ):
            nbytes[lifetime] += amount
        other_micro_batches = self._run.in_flight - 1
        if other_micro_batches:
            saved_nbytes = (
                tensors @ timeline.saved_after_forward
                + saved @ timeline.saved_extra_after_forward
                + gemm_outputs @ timeline.cached_extra_after_forward
            )
            nbytes[throughout] += other_micro_batches * float(saved_nbytes)
        return nbytes

    def largest_op_nbytes(self, region: Region, strategy: Strategy) -> float:
        """Return the bytes that the region's largest op needs in a forward: inputs, outputs and inner tensors."""
        return max((self._op_nbytes(region, region_op, strategy) for region_op in region.ops), default=0.0)

    def _op_nbytes(self, region: Region, region_op: RegionOp, strategy: Strategy) -> float:
        work = context_parallel_work(region, region_op, strategy, self._mesh_shape)
        slots = (*region_op.inputs, *region_op.outputs)
        inner = 0.0 if work is None else work.forward_peak_nbytes - work.result_nbytes
        return inner + sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in slots)

    def _inside(self, region: Region, region_op: RegionOp, strategy: Strategy) -> InnerNbytes:
        profile, mesh_shape = self._profile.ops[region_op.op.name], self._mesh_shape
        if not (profile.saved_extra_nbytes or profile.cached_extra_nbytes or profile.backward_extra_nbytes):
            return _NO_INNER_NBYTES
        if region_op.op.target_name == experts_op.OP_NAME:
            return self._inside_experts(region, region_op, strategy)
        work = context_parallel_work(region, region_op, strategy, mesh_shape)
        if work is not None:
            return InnerNbytes(
                saved=work.saved_nbytes + self._saved_in_addition(region, region_op, strategy),
                gemm_outputs=work.partial_results_nbytes,
                backward_rise=work.backward_rise_nbytes,
                forward_peak=work.forward_peak_nbytes,
            )
        split = work_split([strategy.forward[i] for i in (*region_op.inputs, *region_op.outputs)], mesh_shape)
        return InnerNbytes(
            saved=profile.saved_extra_nbytes / split,
            gemm_outputs=profile.cached_extra_nbytes / split,
            backward_rise=profile.backward_extra_nbytes / split,
            forward_peak=profile.forward_peak_nbytes / split,
        )

    def _inside_experts(self, region: Region, region_op: RegionOp, strategy: Strategy) -> InnerNbytes:
        """Return the bytes inside the experts op, by its local shapes: an axis may split experts and not tokens."""
        values = find_op_inputs(region, region_op)
        layouts = [strategy.forward[i] for i in region_op.inputs]
        shapes = [shard_shape(value, layout, self._mesh_shape) for value, layout in zip(values, layouts, strict=True)]
        ranks = exchange_ranks(region_op.op, layouts, self._mesh_shape)
        form = ExpertsArguments(*region_op.op.args).form
        work = ExpertsWork.from_shapes(form, shapes, values[4].shape[0], values[0].dtype.itemsize, ranks)
        work = work.on_busiest_rank(self._run.job.expert_imbalance)
        return InnerNbytes(
            saved=work.saved_nbytes,
            gemm_outputs=work.gemm_output_nbytes,
            backward_rise=work.backward_rise_nbytes,
            forward_peak=work.forward_peak_nbytes,
        )

    def _saved_in_addition(self, region: Region, region_op: RegionOp, strategy: Strategy) -> float:
        """Return the bytes of queries, keys, values and results that context parallelism alone saves.

        The profiled op, without context parallelism, does not save these.
        """
        saved = self._profile.ops[region_op.op.name].saved
        slots = (*region_op.inputs[:3], region_op.outputs[0])
        more = [i for i in slots if self._profile.root[region.slots[i].value.name] not in saved]
        return sum(self.local_nbytes(region.slots[i].value, strategy.forward[i]) for i in more)


def context_parallel_work(
    region: Region, region_op: RegionOp, strategy: Strategy, mesh_shape: tuple[int, ...]
) -> ContextParallelWork | None:
    """Return one device's part of an attention op whose sequence is split; None for any other op."""
    layouts = [strategy.forward[i] for i in region_op.inputs]
    axis = context_parallel.split_axis(region_op.op, layouts, mesh_shape)
    if axis is None:
        return None
    values = find_op_inputs(region, region_op)
    shapes = [shard_shape(value, layout, mesh_shape) for value, layout in zip(values, layouts, strict=True)]
    return ContextParallelWork.of(region_op.op, shapes, values[0].dtype.itemsize, mesh_shape[axis])
