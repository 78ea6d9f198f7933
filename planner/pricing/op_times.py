"""Seconds of one op on one device's shards: `OpTimes.op_time`.

GEMMs and attention are timed by their shapes (`cost_model.kernels.gemm`, `.attention`). All other ops are timed by a
roofline of FLOPs and bytes (`cost_model.kernels.compute`). All times are times inside a training step: the stand-alone
time of the kernel, divided by the fraction of its stand-alone rate that it reaches inside a step
(`cost_model.kernels.in_step`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cost_model import DeviceSpec, op_time_s
from cost_model.kernels.attention import attention_time_s, cached_attention_time_s, causal_imbalance
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.kernels.efficiency import UnfusedEfficiency, shipped_efficiency
from cost_model.kernels.gemm import gemm_time_s, grouped_gemm_time_s, grouped_gradient_time_s, runs_one_by_one
from cost_model.kernels.in_step import in_step
from planner.graph.op_graph import ATTENTION, Op, Value
from planner.model_rewrites import fused_kernels, opaque_op
from planner.model_rewrites.experts import experts_op
from planner.model_rewrites.experts.experts_op import ExpertsArguments
from planner.model_rewrites.experts.work import ExpertsWork
from planner.plan.job import BYTES_PER_ELEMENT
from planner.plan.techniques import AttentionKernel
from planner.pricing.kernel_shapes import GemmShape, Shape, gemm_shape, with_heads
from planner.profile.op_formulas import LatentExpansion
from planner.profile.op_profile import OpProfile
from planner.strategies.axis_rule import Kernel
from planner.strategies.context_parallel import may_split
from planner.strategies.context_parallel_work import ContextParallelWork, is_causal

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}

_ROW_NBYTES = 16
"""A GEMM reads operands at full speed if their rows are multiples of this many bytes."""

_NO_BYTES = UnfusedEfficiency(forward_bytes=0, backward_bytes=0, causal_forward_bytes=0, causal_backward_bytes=0)
"""Efficiency of unfused attention without bytes, for devices whose attention bytes come from the dispatched ops."""


class OpTime(NamedTuple):
    """Seconds of an op, forward and backward."""

    forward_s: float
    backward_s: float


class LocalOp(NamedTuple):
    """An op and one device's part of it.

    Attributes:
        inputs, output: global tensors; ``output`` is the first of several.
        shapes, output_shape: shapes of the device's shards of ``inputs`` and ``output``.
        profile: profile of the unsharded op.
        bytes_fraction: bytes of the shards per byte of the global tensors.
        flops_split: number of equal parts into which the op's FLOPs are divided.
        context_work: the device's part of context-parallel attention; None for any other op.
        exchange_ranks: number of ranks among which the experts op exchanges tokens; 1 means no exchange.
        imbalance: rows of the busiest of these ranks, over their mean.
    """

    op: Op
    inputs: Sequence[Value]
    output: Value
    shapes: Sequence[Shape]
    output_shape: Shape
    profile: OpProfile
    bytes_fraction: float = 1.0
    flops_split: int = 1
    context_work: ContextParallelWork | None = None
    exchange_ranks: int = 1
    imbalance: float = 1.0

    @property
    def dtype(self) -> str:
        """The cost model's name of the output's dtype; "fp32" if it has none."""
        return _DTYPE_NAMES.get(self.output.dtype, "fp32")

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for ops that take equally long."""
        profile = self.profile
        return (
            *(self.op.target, tuple(self.shapes), self.output_shape, self.output.dtype, _is_causal(self.op)),
            *(self.bytes_fraction, self.flops_split, self.context_work, self.exchange_ranks, self.imbalance),
            *(profile.flops, profile.backward_flops, profile.nbytes, profile.backward_nbytes),
            *(profile.forward_dispatched, profile.backward_dispatched, profile.cached_tokens, profile.latents),
            tuple(value.requires_grad for value in self.inputs),
        )


class OpTimes:
    """Seconds of ops on one kind of device; each time is computed once.

    On a device that waits for its host (``host_op_s`` > 0), every op that torch dispatches takes host time, including
    views and the ops of a backward. On any other device, each op takes one kernel launch per pass.
    """

    def __init__(
        self, device: DeviceSpec, flash_attention: bool, attention_kernel: AttentionKernel | None = None
    ) -> None:
        self._host_op_s = device.host_op_s
        self._device = dataclasses.replace(device, kernel_launch_s=0.0) if self._host_op_s else device
        self._in_step = in_step(device)
        self._kernel = (attention_kernel or "flash") if flash_attention else "unfused"
        self._counts_attention_bytes = bool(self._host_op_s) and self._kernel == "unfused"
        self._times: dict[tuple[object, ...], OpTime] = {}

    def op_time(self, local: LocalOp) -> OpTime:
        """Return the seconds of one device's part of an op."""
        key = local.key
        if key not in self._times:
            self._times[key] = self._with_host_time(self._device_time(local), local.profile)
        return self._times[key]

    def _device_time(self, local: LocalOp) -> OpTime:
        op, profile = local.op, local.profile
        if local.context_work is not None:
            return self._context_parallel_attention(local.context_work, local)
        if op.target_name == experts_op.OP_NAME:
            return self._experts(local, profile.backward_flops > 0)
        if op.target_name == opaque_op.OP_NAME:
            return self._opaque(local)
        if profile.flops > 0 and op.target is ATTENTION:
            return self._cached_attention(local) if profile.cached_tokens else self._attention(local)
        shape = gemm_shape(op.target_name, local.shapes, local.output_shape) if profile.flops > 0 else None
        return self._roofline(local) if shape is None else self._gemm(local, shape)

    def _with_host_time(self, time: OpTime, profile: OpProfile) -> OpTime:
        if not self._host_op_s:
            return time
        return OpTime(
            time.forward_s + self._host_op_s * profile.forward_dispatched.ops,
            time.backward_s + self._host_op_s * profile.backward_dispatched.ops,
        )

    def least_fraction(self, op: Op, inputs: Sequence[Value]) -> float:
        """Return a lower bound on the seconds of all ranks together, as a fraction of the unsharded op's seconds.

        The bound holds for any layout. It is below 1 only for causal attention whose sequence can be sharded: the local
        kernels of context parallelism compute few masked scores. An unfused kernel on one device computes all scores,
        nearly half of which are masked. A fused kernel skips masked scores, but its triangular work is unevenly spread
        over the processors, while the local kernels are mostly rectangular.
        """
        if op.target is not ATTENTION or not is_causal(op) or not may_split(op, inputs):
            return 1.0
        if self._kernel == "unfused":
            return 0.5
        return 1.0 / (1.0 + causal_imbalance(self._device, self._kernel))

    def autograd_sum_s(self, nbytes: float) -> float:
        """Return the seconds in which autograd adds a gradient of ``nbytes`` to another: two reads and a write."""
        stream_s = 3 * nbytes / self._stream_bytes_per_s
        return stream_s + (self._host_op_s or self._device.kernel_launch_s)

    def gemm_sum_s(self, nbytes: float) -> float:
        """Return the extra seconds of a GEMM that accumulates into a gradient of ``nbytes``, which it has to read."""
        return nbytes / self._stream_bytes_per_s

    @property
    def _stream_bytes_per_s(self) -> float:
        """Bytes per second of memory-bound kernels inside a step."""
        return stream_bytes_per_s(self._device) * self._in_step.stream_share

    # --- GEMMs ---------------------------------------------------------------------------------------------------

    def _gemm(self, local: LocalOp, shape: GemmShape) -> OpTime:
        """Return the seconds of an op that is a GEMM; backward has one GEMM for each operand that needs a gradient."""
        m, n, k, batch = shape
        forward_s = self._gemm_s(m, n, k, batch, local)
        backward_s = 0.0
        if local.profile.backward_flops > 0:
            factors = local.inputs[1:3] if local.op.target_name.startswith("aten.addmm") else local.inputs[:2]
            if factors[0].requires_grad:
                backward_s += self._gemm_s(m, k, n, batch, local)
            if factors[1].requires_grad:
                backward_s += self._gemm_s(k, n, m, batch, local)
        return OpTime(forward_s, backward_s)

    def _gemm_s(self, m: int, n: int, k: int, batch: int, local: LocalOp) -> float:
        itemsize = local.output.dtype.itemsize
        aligned = k * itemsize % _ROW_NBYTES == 0 and n * itemsize % _ROW_NBYTES == 0
        alone_s = gemm_time_s(m=m, n=n, k=k, batch=batch, device=self._device, dtype=local.dtype, aligned=aligned)
        return alone_s / self._in_step.gemm_share

    def _experts(self, local: LocalOp, backward: bool) -> OpTime:
        """Return the seconds of the experts on the busiest rank, with the same number of rows for each of its experts.

        Forward runs two grouped GEMMs. Backward runs the GEMMs of the gradients that are needed, with
        respect to inputs and to weights.
        """
        inputs, dtype, ranks = local.inputs, local.dtype, local.exchange_ranks
        form = ExpertsArguments(*local.op.args).form
        work = ExpertsWork.from_shapes(form, local.shapes, inputs[4].shape[0], inputs[0].dtype.itemsize, ranks)
        work = work.on_busiest_rank(local.imbalance)
        up, down = (form.matrices * work.inner, work.width), (work.width, work.inner)
        device = self._device
        one_by_one = dtype == "bf16" and runs_one_by_one(
            tokens=work.rows,
            n=work.least_width,
            groups=work.experts,
            architecture=device.architecture,
            processors=device.processors,
        )
        kernel = "one by one" if one_by_one else "grouped"

        def gemm_s(n: int, k: int) -> float:
            alone_s = grouped_gemm_time_s(
                tokens=work.rows, n=n, k=k, groups=work.experts, device=device, dtype=dtype, kernel=kernel
            )
            return alone_s / self._in_step.expert_share

        def weight_gradient_s(n: int, k: int) -> float:
            alone_s = grouped_gradient_time_s(
                tokens=work.rows, n=n, k=k, groups=work.experts, device=device, dtype=dtype, kernel=kernel
            )
            return alone_s / self._in_step.expert_share

        forward_s = gemm_s(*up) + gemm_s(*down) + work.forward_nbytes / self._stream_bytes_per_s
        if not backward:
            return OpTime(forward_s, 0.0)
        backward_s = gemm_s(*reversed(down)) + work.backward_nbytes / self._stream_bytes_per_s
        backward_s += gemm_s(*reversed(up)) if inputs[0].requires_grad else 0.0
        backward_s += weight_gradient_s(*up) if inputs[3].requires_grad else 0.0
        backward_s += weight_gradient_s(*down) if inputs[4].requires_grad else 0.0
        return OpTime(forward_s, backward_s)

    # --- attention -----------------------------------------------------------------------------------------------

    def _attention(self, local: LocalOp) -> OpTime:
        query, value = with_heads(local.shapes[0]), with_heads(local.shapes[2])
        (_, heads, rows, _), (_, kv_heads, keys, _) = query, value
        kernels = (Kernel(rows, keys, _is_causal(local.op), heads, kv_heads),)
        return self._attention_kernels(kernels, kernels, query, value, local)

    def _context_parallel_attention(self, work: ContextParallelWork, local: LocalOp) -> OpTime:
        """Return the seconds of context-parallel attention: its kernels, and the copies that reorder its chunks."""
        kernels = self._attention_kernels(work.kernels, work.backward_kernels, work.query, work.value, local)
        bytes_per_s = self._stream_bytes_per_s
        backward_s = kernels.backward_s + work.backward_nbytes / bytes_per_s if kernels.backward_s else 0.0
        return OpTime(kernels.forward_s + work.forward_nbytes / bytes_per_s, backward_s)

    def _attention_kernels(
        self, forward: Sequence[Kernel], backward: Sequence[Kernel], query: Shape, value: Shape, local: LocalOp
    ) -> OpTime:
        """Return the seconds of attention kernels in both passes.

        Args:
            query, value: shapes of the device's shards.
        """
        profile, dtype = local.profile, local.dtype
        kind = self._kernel if len(local.shapes[0]) == 4 else "unfused"
        time = OpTime(
            sum(self.kernel_s(kernel, query, value, dtype, kind, backward=False) for kernel in forward),
            sum(self.kernel_s(kernel, query, value, dtype, kind, backward=True) for kernel in backward)
            if profile.backward_flops > 0
            else 0.0,
        )
        if not self._counts_attention_bytes:
            return time
        s_per_byte = local.bytes_fraction / stream_bytes_per_s(self._device)
        return OpTime(
            time.forward_s + profile.forward_dispatched.nbytes * s_per_byte,
            time.backward_s + profile.backward_dispatched.nbytes * s_per_byte,
        )

    def attention_kernel_s(
        self, kernel: Kernel, work: ContextParallelWork, dtype: torch.dtype, *, backward: bool
    ) -> float:
        """Return the seconds of one attention kernel of context parallelism, which a collective may overlap with."""
        dtype_name = _DTYPE_NAMES.get(dtype, "fp32")
        return self.kernel_s(kernel, work.query, work.value, dtype_name, self._kernel, backward=backward)

    def kernel_s(self, kernel: Kernel, query: Shape, value: Shape, dtype: str, kind: str, *, backward: bool) -> float:
        """Return the seconds of one call of an attention kernel.

        Args:
            query, value: shapes of the device's shards, [batch, heads, seq, head_dim]; seq and heads are not used.
            kind: "unfused", or the fused kernel: one of ``cost_model.kernels.attention.KERNELS``.
        """
        shipped = shipped_efficiency()
        return attention_time_s(
            batch=query[0],
            heads=kernel.heads,
            kv_heads=kernel.kv_heads,
            seq_q=kernel.queries,
            seq_k=kernel.keys,
            head_dim=query[3],
            head_dim_v=value[3],
            causal=kernel.causal,
            backward=backward,
            device=self._device,
            dtype=dtype,
            kernel=kind,
            efficiency=dataclasses.replace(shipped, unfused=_NO_BYTES) if self._counts_attention_bytes else shipped,
        )

    def _cached_attention(self, local: LocalOp) -> OpTime:
        """Return the seconds of attention over a KV cache, and of writing the new keys and values into the cache."""
        batch, heads, queries, head_dim = local.shapes[0]
        _, kv_heads, new, head_dim_v = local.shapes[2]
        tokens, dtype = local.profile.cached_tokens, local.dtype
        copied_nbytes = 2 * batch * kv_heads * new * (head_dim + head_dim_v) * BYTES_PER_ELEMENT[dtype]
        writing_s = copied_nbytes / stream_bytes_per_s(self._device) + 2 * self._device.kernel_launch_s
        if local.profile.kept_tokens == 0:
            writing_s = 0.0  # attention to an encoder, for one, adds nothing to the cache
        if tokens == new == queries:
            return OpTime(self._attention(local).forward_s + writing_s, 0.0)
        reading_s = cached_attention_time_s(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            tokens=tokens,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            device=self._device,
            dtype=dtype,
        )
        return OpTime(reading_s + writing_s + self._latent_expansion_s(local, tokens - new), 0.0)

    def _latent_expansion_s(self, local: LocalOp, tokens: int) -> float:
        """Return the seconds in which MLA computes keys and values of ``tokens`` earlier tokens from their latents."""
        if local.profile.latents is None:
            return 0.0
        work = LatentExpansion.of(local.shapes[1], local.shapes[2], local.profile.latents, tokens)
        copied_s = 2 * work.numel * BYTES_PER_ELEMENT[local.dtype] / self._stream_bytes_per_s
        return self._gemm_s(work.m, work.n, work.k, 1, local) + copied_s

    # --- other ops -----------------------------------------------------------------------------------------------

    def _opaque(self, local: LocalOp) -> OpTime:
        """Return the seconds of an opaque module: its matrix multiplications, and after them all other ops."""
        profile, arguments = local.profile, opaque_op.OpaqueArguments(*local.op.args)
        fraction = arguments.on_rank(local.flops_split).moved_nbytes / max(arguments.costs.moved_nbytes, 1)
        no_bytes = dataclasses.replace(profile, nbytes=0, backward_nbytes=0)
        no_flops = dataclasses.replace(profile, flops=0.0, backward_flops=0.0)
        gemms = self._roofline(local._replace(profile=no_bytes))
        others = self._roofline(local._replace(profile=no_flops, bytes_fraction=fraction))
        return OpTime(gemms.forward_s + others.forward_s, gemms.backward_s + others.backward_s)

    def _roofline(self, local: LocalOp) -> OpTime:
        """Return the seconds of an op by the roofline of its FLOPs and bytes."""
        profile, matmul, device = local.profile, local.profile.flops > 0, self._device
        nbytes, backward_nbytes = profile.nbytes, profile.backward_nbytes
        if self._host_op_s and not matmul:
            nbytes, backward_nbytes = profile.forward_dispatched.nbytes, profile.backward_dispatched.nbytes
        forward_s = op_time_s(
            flops=profile.flops / local.flops_split,
            nbytes=nbytes * local.bytes_fraction,
            device=device,
            dtype=local.dtype,
            matmul=matmul,
        )
        backward_s = op_time_s(
            flops=profile.backward_flops / local.flops_split,
            nbytes=backward_nbytes * local.bytes_fraction,
            device=device,
            dtype=local.dtype,
            matmul=matmul,
        )
        is_fused = local.op.target_name in fused_kernels.NAMES
        stream_share = self._in_step.fused_stream_share if is_fused else self._in_step.stream_share
        rate_fraction = self._in_step.gemm_share if matmul else stream_share
        return OpTime(forward_s / rate_fraction, backward_s / rate_fraction)


def _is_causal(op: Op) -> bool:
    """Return whether ``op`` is attention whose kernel applies a causal mask."""
    return op.target is ATTENTION and is_causal(op)
