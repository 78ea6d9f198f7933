"""Seconds of one op on one device's pieces: by shape for matrix products and attention, else by FLOPs and bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cost_model import DeviceSpec, op_time_s
from cost_model.kernels.attention import attention_time_s, cached_attention_time_s, causal_imbalance
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.kernels.efficiency import UnfusedEfficiency, shipped_efficiency
from cost_model.kernels.gemm import gemm_time_s, grouped_gemm_time_s, grouped_gradient_time_s, runs_one_by_one
from cost_model.kernels.in_step import in_step
from planner.graph.op_graph import Op, Value
from planner.model_rewrites import experts, fused_kernels
from planner.plan.job import BYTES_PER_ELEMENT, AttentionKernel
from planner.profile.op_profile import OpProfile
from planner.profile.profile import ATTENTION
from planner.strategies.context_parallel import ContextParallelWork, is_causal, may_split
from planner.strategies.inner_collectives import Kernel

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}

_ROW_NBYTES = 16
"""Rows of operands that are multiples of this are read at full speed."""

_NO_BYTES = UnfusedEfficiency(forward_bytes=0, backward_bytes=0, causal_forward_bytes=0, causal_backward_bytes=0)
"""For attention whose bytes are counted."""

Shape = tuple[int, ...]


class Product(NamedTuple):
    """A matrix product: ``batch`` times ``[m, k] @ [k, n]``."""

    m: int
    n: int
    k: int
    batch: int = 1


class OpTime(NamedTuple):
    """Seconds of an op, forward and backward."""

    forward_s: float
    backward_s: float


def product_of(target_name: str, shapes: Sequence[Shape], output: Shape) -> Product | None:
    """Return the matrix product that an op runs on inputs of ``shapes``; None where it runs none, or none known here.

    Args:
        target_name: as in ``aten.linear.default``.
        shapes: of the inputs, ``[..., k]`` and ``[n, k]`` of a linear for example.
        output: shape of the result.
    """
    name = target_name.removeprefix("aten.").partition(".")[0]
    if name == "linear":
        return Product(m=math.prod(shapes[0][:-1]), n=shapes[1][0], k=shapes[0][-1])
    if name == "addmm":
        return Product(m=shapes[1][0], n=shapes[2][1], k=shapes[1][1])
    if name in ("mm", "bmm", "matmul") and len(shapes[0]) > 1 and len(shapes[1]) > 1:
        if len(shapes[1]) == 2:
            return Product(m=math.prod(shapes[0][:-1]), n=shapes[1][1], k=shapes[0][-1])
        return Product(m=output[-2], n=output[-1], k=shapes[0][-1], batch=math.prod(output[:-2]))
    if name in ("conv2d", "convolution") and len(output) == 4:
        weight = shapes[1]
        return Product(m=output[0] * math.prod(output[2:]), n=output[1], k=math.prod(weight[1:]))
    return None


class OpTimes:
    """Times of ops on one kind of device, remembered by the shapes of their pieces.

    A device that waits for its host (``host_op_s``) is charged for everything that is dispatched: views, what a
    backward is made of. One that does not is charged for one kernel per op and pass, as it runs inside a step.
    """

    def __init__(
        self, device: DeviceSpec, flash_attention: bool, attention_kernel: AttentionKernel | None = None
    ) -> None:
        self._host_op_s = device.host_op_s
        self._device = dataclasses.replace(device, kernel_launch_s=0.0) if self._host_op_s else device
        self._in_step = in_step(device)
        self._kernel = (attention_kernel or "flash") if flash_attention else "unfused"
        self._known: dict[tuple[object, ...], OpTime] = {}

    def of(
        self,
        op: Op,
        inputs: Sequence[Value],
        output: Value,
        shapes: Sequence[Shape],
        local_output: Shape,
        profile: OpProfile,
        share: float,
        split: int,
        context: ContextParallelWork | None = None,
        exchange_ranks: int = 1,
    ) -> OpTime:
        """Return the seconds of ``op`` on one device.

        Args:
            inputs, output: whole tensors (the first output).
            shapes, local_output: of the device's pieces of them.
            profile: of the whole op.
            share: of the op's bytes that the pieces hold.
            split: into how many equal parts its FLOPs are divided.
            context: of attention whose sequence is split.
            exchange_ranks: among which experts' tokens change places.
        """
        matmul = profile.flops > 0
        key = (
            *(
                op.target,
                tuple(shapes),
                local_output,
                output.dtype,
                _is_causal(op),
                share,
                split,
                context,
                exchange_ranks,
            ),
            *(profile.flops, profile.backward_flops, profile.nbytes, profile.backward_nbytes),
            *(profile.forward_dispatched, profile.backward_dispatched, profile.cached_tokens),
            tuple(value.requires_grad for value in inputs),
        )
        if key not in self._known:
            dtype = _DTYPE_NAMES.get(output.dtype, "fp32")
            if context is not None:
                found: OpTime | None = self._context(context, profile, dtype, share)
            elif op.target_name == experts.OP_NAME:
                found = self._experts(inputs, shapes, dtype, profile.backward_flops > 0, exchange_ranks)
            else:
                by_shape = (op, inputs, output, shapes, local_output, profile, dtype, share)
                found = self._by_shape(*by_shape) if matmul else None
            self._known[key] = self._with_host(found or self._by_roofline(op, profile, share, split, dtype), profile)
        return self._known[key]

    def least_share(self, op: Op, inputs: Sequence[Value]) -> float:
        """Return of an op's seconds unsplit the part that all ranks together take at least, however it is split.

        Not all of them where a causal mask is the kernel's own and the sequence is split. Most of what it hides is not
        formed then: of all scores nearly half are left where all were formed, and where the kernel forms no more than
        it has to, most of them are no triangle any more, whose rows keep processors busy for unequal times.
        """
        if op.target is not ATTENTION or not is_causal(op) or not may_split(op, inputs):
            return 1.0
        if self._kernel == "unfused":
            return 0.5
        return 1.0 / (1.0 + causal_imbalance(self._device, self._kernel))

    def beside_s(self, kernel: Kernel, work: ContextParallelWork, dtype: torch.dtype, *, backward: bool) -> float:
        """Return the seconds of a kernel of attention in pieces, as those that communication runs beside."""
        return self.kernel_s(kernel, work.query, work.value, _DTYPE_NAMES.get(dtype, "fp32"), backward=backward)

    def sum_s(self, nbytes: float) -> float:
        """Return the seconds of adding a gradient of ``nbytes`` to another."""
        stream_s = 3 * nbytes / (stream_bytes_per_s(self._device) * self._in_step.stream_share)
        return stream_s + (self._host_op_s or self._device.kernel_launch_s)

    def join_s(self, nbytes: float) -> float:
        """Return the seconds by which a product takes longer that adds to a gradient of ``nbytes``: it reads that."""
        return nbytes / (stream_bytes_per_s(self._device) * self._in_step.stream_share)

    def _with_host(self, time: OpTime, profile: OpProfile) -> OpTime:
        if not self._host_op_s:
            return time
        return OpTime(
            time.forward_s + self._host_op_s * profile.forward_dispatched.ops,
            time.backward_s + self._host_op_s * profile.backward_dispatched.ops,
        )

    def _by_shape(
        self,
        op: Op,
        inputs: Sequence[Value],
        output: Value,
        shapes: Sequence[Shape],
        local_output: Shape,
        profile: OpProfile,
        dtype: str,
        share: float,
    ) -> OpTime | None:
        if op.target is ATTENTION and profile.cached_tokens:
            return self._cached_attention(op, shapes, profile, dtype, share)
        if op.target is ATTENTION:
            return self._attention(op, shapes, profile, dtype, share)
        product = product_of(op.target_name, shapes, local_output)
        if product is None:
            return None
        m, n, k, batch = product
        forward_s = self._product_s(m, n, k, batch, output, dtype)
        backward_s = 0.0
        if profile.backward_flops > 0:
            factors = inputs[1:3] if op.target_name.startswith("aten.addmm") else inputs[:2]
            if factors[0].requires_grad:
                backward_s += self._product_s(m, k, n, batch, output, dtype)
            if factors[1].requires_grad:
                backward_s += self._product_s(k, n, m, batch, output, dtype)
        return OpTime(forward_s, backward_s)

    def _product_s(self, m: int, n: int, k: int, batch: int, output: Value, dtype: str) -> float:
        itemsize = output.dtype.itemsize
        aligned = k * itemsize % _ROW_NBYTES == 0 and n * itemsize % _ROW_NBYTES == 0
        alone_s = gemm_time_s(m=m, n=n, k=k, batch=batch, device=self._device, dtype=dtype, aligned=aligned)
        return alone_s / self._in_step.gemm_share

    def _attention(self, op: Op, shapes: Sequence[Shape], profile: OpProfile, dtype: str, share: float) -> OpTime:
        (_, heads, rows, _), (_, kv_heads, keys, _) = shapes[0], shapes[2]
        kernels = (Kernel(rows, keys, _is_causal(op), heads, kv_heads),)
        return self._kernels(kernels, kernels, (shapes[0], shapes[2]), profile, dtype, share)

    def _context(self, work: ContextParallelWork, profile: OpProfile, dtype: str, share: float) -> OpTime:
        """Return the seconds of attention whose sequence is split: of its kernels, and of putting pieces in order."""
        found = self._kernels(work.kernels, work.backward_kernels, (work.query, work.value), profile, dtype, share)
        bytes_per_s = stream_bytes_per_s(self._device) * self._in_step.stream_share
        backward_s = found.backward_s + work.backward_nbytes / bytes_per_s if found.backward_s else 0.0
        return OpTime(found.forward_s + work.forward_nbytes / bytes_per_s, backward_s)

    def _kernels(
        self,
        forward: Sequence[Kernel],
        backward: Sequence[Kernel],
        pieces: tuple[Shape, Shape],
        profile: OpProfile,
        dtype: str,
        share: float,
    ) -> OpTime:
        """Return the seconds of the kernels of both passes, on ``pieces`` of queries and values."""
        counted = bool(self._host_op_s) and self._kernel == "unfused"
        found = OpTime(
            sum(self.kernel_s(kernel, *pieces, dtype, backward=False) for kernel in forward),
            sum(self.kernel_s(kernel, *pieces, dtype, backward=True) for kernel in backward)
            if profile.backward_flops > 0
            else 0.0,
        )
        if not counted:
            return found
        per_byte = share / stream_bytes_per_s(self._device)
        return OpTime(
            found.forward_s + profile.forward_dispatched.nbytes * per_byte,
            found.backward_s + profile.backward_dispatched.nbytes * per_byte,
        )

    def kernel_s(self, kernel: Kernel, query: Shape, value: Shape, dtype: str, *, backward: bool) -> float:
        """Return the seconds of one call of the attention kernel.

        Args:
            query, value: shapes of a device's pieces, [batch, heads, rows, width]: of them batch and width count.
        """
        counted = bool(self._host_op_s) and self._kernel == "unfused"
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
            kernel=self._kernel,
            efficiency=dataclasses.replace(shipped, unfused=_NO_BYTES) if counted else shipped,
        )

    def _cached_attention(
        self, op: Op, shapes: Sequence[Shape], profile: OpProfile, dtype: str, share: float
    ) -> OpTime:
        """Return the seconds of attention, and of writing the new keys and values where the cache has room for them."""
        batch, heads, _, head_dim = shapes[0]
        _, kv_heads, new, head_dim_v = shapes[2]
        itemsize = BYTES_PER_ELEMENT[dtype]
        copied = 2 * batch * kv_heads * new * (head_dim + head_dim_v) * itemsize
        writing_s = copied / stream_bytes_per_s(self._device) + 2 * self._device.kernel_launch_s
        if profile.cached_tokens == new:
            return OpTime(self._attention(op, shapes, profile, dtype, share).forward_s + writing_s, 0.0)
        reading_s = cached_attention_time_s(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            tokens=profile.cached_tokens,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            device=self._device,
            dtype=dtype,
        )
        return OpTime(reading_s + writing_s, 0.0)

    def _experts(
        self, inputs: Sequence[Value], shapes: Sequence[Shape], dtype: str, backward: bool, ranks: int
    ) -> OpTime:
        """Return the seconds of the experts on this rank, equally busy."""
        work = experts.ExpertsWork.from_shapes(shapes, inputs[4].shape[0], inputs[0].dtype.itemsize, ranks)
        bytes_per_s = stream_bytes_per_s(self._device) * self._in_step.stream_share
        up, down = (2 * work.inner, work.width), (work.width, work.inner)

        device = self._device
        apart = dtype == "bf16" and runs_one_by_one(
            tokens=work.rows,
            n=work.least_width,
            groups=work.experts,
            architecture=device.architecture,
            processors=device.processors,
        )
        kernel = "one by one" if apart else "grouped"

        def product_s(n: int, k: int) -> float:
            alone_s = grouped_gemm_time_s(
                tokens=work.rows, n=n, k=k, groups=work.experts, device=device, dtype=dtype, kernel=kernel
            )
            return alone_s / self._in_step.expert_share

        def gradient_s(n: int, k: int) -> float:
            alone_s = grouped_gradient_time_s(
                tokens=work.rows, n=n, k=k, groups=work.experts, device=device, dtype=dtype, kernel=kernel
            )
            return alone_s / self._in_step.expert_share

        forward_s = product_s(*up) + product_s(*down) + work.forward_nbytes / bytes_per_s
        if not backward:
            return OpTime(forward_s, 0.0)
        backward_s = product_s(*reversed(down)) + work.backward_nbytes / bytes_per_s
        backward_s += product_s(*reversed(up)) if inputs[0].requires_grad else 0.0
        backward_s += gradient_s(*up) if inputs[3].requires_grad else 0.0
        backward_s += gradient_s(*down) if inputs[4].requires_grad else 0.0
        return OpTime(forward_s, backward_s)

    def _by_roofline(self, op: Op, profile: OpProfile, share: float, split: int, dtype: str) -> OpTime:
        matmul, device = profile.flops > 0, self._device
        nbytes, backward_nbytes = profile.nbytes, profile.backward_nbytes
        if self._host_op_s and not matmul:
            nbytes, backward_nbytes = profile.forward_dispatched.nbytes, profile.backward_dispatched.nbytes
        forward_s = op_time_s(
            flops=profile.flops / split, nbytes=nbytes * share, device=device, dtype=dtype, matmul=matmul
        )
        backward_s = op_time_s(
            flops=profile.backward_flops / split,
            nbytes=backward_nbytes * share,
            device=device,
            dtype=dtype,
            matmul=matmul,
        )
        stream_share = (
            self._in_step.fused_stream_share if op.target_name in fused_kernels.NAMES else self._in_step.stream_share
        )
        share_of_rate = self._in_step.gemm_share if matmul else stream_share
        return OpTime(forward_s / share_of_rate, backward_s / share_of_rate)


def _is_causal(op: Op) -> bool:
    """Tell whether ``op`` is attention of which the kernel itself masks the later half."""
    return op.target is ATTENTION and is_causal(op)
