"""Profiles by formula in place of a measurement: flash attention, cross entropy, fused ops and experts.

A real step runs other code than the graph's ops: a fused attention kernel, or the executor's own ops
(``executor.ops``). So to run the graph's op on meta tensors would not measure what a step does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from planner.counting.live_bytes import NOTHING, Dispatched
from planner.graph.op_graph import Op, OpCache, Value
from planner.model_rewrites import fused_kernels, opaque_op
from planner.model_rewrites.experts.experts_op import ExpertsArguments
from planner.model_rewrites.experts.work import ExpertsWork
from planner.profile.dispatch_peak import OpRun, run_fused
from planner.profile.meta_tensors import MetaTensors
from planner.profile.op_profile import OpProfile

FLASH_BACKWARD_FLOPS = 2.5
"""FLOPs of flash attention's backward per FLOP of its forward: five GEMMs against two (FlashAttention-2, 2023)."""

CROSS_ENTROPY_COPIES = {True: 0, False: 1}
"""Float32 copies of the logits that `executor.ops.cross_entropy` has in its backward in addition to their gradient, by
whether the logits themselves are float32."""

CROSS_ENTROPY_PASSES = 6, 8
"""Times that `executor.ops.cross_entropy` reads or writes the logits: forward (largest, differences, exponentials,
sums) and backward (differences, exponentials, ignored rows, multiplication)."""


def flash_result(tensors: MetaTensors, result: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return attention's result as a fused kernel allocates it: its dims are in the memory order of the query's."""
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    positions = [order.index(dim) for dim in range(query.dim())]
    fused = torch.empty([result.shape[dim] for dim in order], dtype=result.dtype, device="meta").permute(positions)
    return tensors.non_leaf(fused) if result.requires_grad else fused


def flash_attention_profile(
    op: Op, inputs: Sequence[Value], outputs: Sequence[Value], tensors: MetaTensors
) -> OpProfile:
    """Return the profile of a fused attention kernel.

    It saves its inputs, its output and one float32 per row of scores (the logarithm of its sum of exponentials).
    """
    batch, heads, length, width = inputs[0].shape
    keys = inputs[1].shape[2]
    flops = 4.0 * batch * heads * length * keys * width
    nbytes = sum(min(v.nbytes, tensors.storage_nbytes[v.name]) for v in inputs) + sum(v.nbytes for v in outputs)
    return OpProfile(
        flops=flops,
        backward_flops=FLASH_BACKWARD_FLOPS * flops,
        nbytes=nbytes,
        backward_nbytes=2 * nbytes,
        saved=tuple(dict.fromkeys(tensors.root[name] for name in (*op.inputs, *op.outputs))),
        saved_extra_nbytes=4 * math.prod((batch, heads, length)),
        cached_extra_nbytes=0,
        forward_peak_nbytes=0,
        backward_extra_nbytes=0,
    )


def with_kv_cache(
    profile: OpProfile, inputs: Sequence[Value], cached_before: int, cache: OpCache | None, kv_heads: int
) -> OpProfile:
    """Return the profile of attention whose keys and values extend a cache of ``cached_before`` tokens per sequence.

    MLA computes the keys and values of all earlier tokens from their latents in every step, as transformers does. They
    exist until the op has run.

    Args:
        cache: what the cache keeps, where it is not the keys and values of all tokens.
        kv_heads: heads of keys and values that it keeps.
    """
    new, window = inputs[1].shape[2], None if cache is None else cache.window
    latents = None if cache is None else cache.latents
    kept_before = cached_before if window is None else min(cached_before, window)
    tokens = kept_before + new
    earlier_nbytes = sum(value.nbytes for value in inputs[1:3]) // new * kept_before
    flops, expanded_nbytes = profile.flops / new * tokens, 0
    if latents is not None:
        expansion = LatentExpansion.of(inputs[1].shape, inputs[2].shape, latents, kept_before)
        flops += expansion.flops
        expanded_nbytes = expansion.numel * inputs[1].dtype.itemsize
    return dataclasses.replace(
        profile,
        flops=flops,
        nbytes=profile.nbytes + earlier_nbytes,
        cached_extra_nbytes=profile.cached_extra_nbytes + expanded_nbytes,
        forward_peak_nbytes=profile.forward_peak_nbytes + expanded_nbytes,
        cached_tokens=tokens,
        kept_tokens=tokens if window is None else min(tokens, window),
        kv_heads=kv_heads,
        latents=latents,
    )


class LatentExpansion(NamedTuple):
    """The GEMM that computes keys and values of earlier tokens from their latents, and the tensors that it makes.

    Attributes:
        m, n, k: shape of the GEMM.
        numel: elements of its result and of the keys, which are concatenated with their rotary part.
    """

    m: int
    n: int
    k: int
    numel: int

    @classmethod
    def of(cls, keys: Sequence[int], values: Sequence[int], latents: tuple[int, int], tokens: int) -> LatentExpansion:
        """Return the expansion of ``tokens`` earlier tokens of each sequence.

        Args:
            keys: shape ``[batch, heads, new tokens, width]``, global or of one device.
            values: the same of the values.
            latents: widths of the latents and of the rotary keys.
        """
        (batch, heads, _, key_width), (rank, rotary) = keys, latents
        rows, width = batch * tokens, heads * (key_width - rotary + values[3])
        return cls(m=rows, n=width, k=rank, numel=rows * (width + heads * key_width))

    @property
    def flops(self) -> float:
        """FLOPs of the GEMM."""
        return 2.0 * self.m * self.n * self.k


def cross_entropy_run(logits: Value, result_nbytes: int) -> OpRun:
    """Return what `executor.ops.cross_entropy` allocates and dispatches, in place of torch's op.

    Its forward allocates one copy more than the logits that it gets, as its backward does for their gradient. In the
    forward the model's result is alive as well, the logits in the dtype of the job: that is the peak.

    Args:
        result_nbytes: bytes of the logits that the model returns, where they are other than those that the op gets.
    """
    nbytes = 4 * math.prod(logits.shape)  # in float32
    forward, backward = (Dispatched(0, passes * nbytes) for passes in CROSS_ENTROPY_PASSES)
    copies = CROSS_ENTROPY_COPIES[logits.dtype == torch.float32]
    return OpRun(copies * nbytes + result_nbytes, forward, backward)


def fused_op_profile(op: Op, inputs: Sequence[Value], output: Value, tensors: MetaTensors, compiles: bool) -> OpProfile:
    """Return the profile of one of `fused_kernels`, and add its result to ``tensors``.

    Args:
        compiles: whether it runs as one kernel each way; otherwise its formulas run step by step.
    """
    # An expanded tensor is read as often as it is stored.
    shapes = [(value.shape, min(value.nbytes, tensors.storage_nbytes[value.name])) for value in inputs]
    work = fused_kernels.fused_work(op.target_name, shapes, output.nbytes)
    if compiles:
        run = OpRun(0, Dispatched(1, work.forward_nbytes), Dispatched(1, work.backward_nbytes))
    else:
        run = run_fused(op, [tensors.tensor(name) for name in op.inputs])
    keeps_strides = op.target_name in (fused_kernels.GATED, fused_kernels.ROTARY)
    tensors.add_result(op.outputs[0], output, tensors.tensor(op.inputs[0]) if keeps_strides else None)
    backward = output.requires_grad
    crossing = len(inputs) + 1
    return OpProfile(
        flops=0.0,
        backward_flops=0.0,
        nbytes=work.forward_nbytes,
        backward_nbytes=work.backward_nbytes if backward else 0,
        saved=tuple(dict.fromkeys(tensors.root[op.inputs[i]] for i in work.saved)) if backward else (),
        saved_extra_nbytes=work.saved_extra_nbytes if backward else 0,
        cached_extra_nbytes=0,
        forward_peak_nbytes=0,
        backward_extra_nbytes=run.rise if backward else 0,
        forward_dispatched=run.forward._replace(ops=crossing),
        backward_dispatched=run.backward._replace(ops=crossing) if backward else NOTHING,
    )


def experts_profile(op: Op, inputs: Sequence[Value], output: Value, tensors: MetaTensors) -> OpProfile:
    """Return the profile of the experts' op (`planner.model_rewrites.experts`), and add its result to ``tensors``.

    The profile assumes that every expert gets the same number of tokens.
    """
    form = ExpertsArguments(*op.args).form
    shapes = [value.shape for value in inputs]
    work = ExpertsWork.from_shapes(form, shapes, inputs[4].shape[0], output.dtype.itemsize)
    tensors.add_result(op.outputs[0], output)
    backward = output.requires_grad
    differentiable = [inputs[position].requires_grad for position in (0, 3, 4)]
    positions = (0, 2, 3, 4, 6) if work.biased else (0, 2, 3, 4)
    saved = tuple(dict.fromkeys(tensors.root[op.inputs[position]] for position in positions))
    crossing = len(inputs) + 1
    return OpProfile(
        flops=work.flops,
        backward_flops=work.backward_flops(*differentiable) if backward else 0.0,
        nbytes=work.forward_nbytes + work.weight_nbytes,
        backward_nbytes=work.backward_nbytes + 2 * work.weight_nbytes if backward else 0,
        saved=saved if backward else (),
        saved_extra_nbytes=work.saved_nbytes if backward else 0,
        cached_extra_nbytes=work.gemm_output_nbytes,
        forward_peak_nbytes=work.forward_peak_nbytes,
        backward_extra_nbytes=work.backward_rise_nbytes if backward else 0,
        forward_dispatched=Dispatched(crossing, work.forward_nbytes),
        backward_dispatched=Dispatched(crossing, work.backward_nbytes) if backward else NOTHING,
    )


def opaque_profile(op: Op, inputs: Sequence[Value], outputs: Sequence[Value], tensors: MetaTensors) -> OpProfile:
    """Return the profile of the call of an opaque module, whose costs are among the op's arguments."""
    call = opaque_op.OpaqueArguments(*op.args)
    costs = call.costs
    for name, output in zip(op.outputs, outputs, strict=True):
        tensors.add_result(name, output)
    backward = any(output.requires_grad for output in outputs)
    saved = tuple(dict.fromkeys(tensors.root[op.inputs[position]] for position in call.saved))
    return OpProfile(
        flops=float(costs.flops),
        backward_flops=float(costs.backward_flops) if backward else 0.0,
        nbytes=costs.nbytes,
        backward_nbytes=costs.backward_nbytes if backward else 0,
        saved=saved if backward else (),
        saved_extra_nbytes=costs.saved_nbytes if backward else 0,
        cached_extra_nbytes=0,
        forward_peak_nbytes=0,
        backward_extra_nbytes=costs.rise_nbytes if backward else 0,
        forward_dispatched=Dispatched(costs.ops, costs.nbytes),
        backward_dispatched=Dispatched(costs.backward_ops, costs.backward_nbytes) if backward else NOTHING,
    )


def cached_state_profile(op: Op, output: Value, tensors: MetaTensors) -> OpProfile:
    """Return the profile of `cached_state`, which does nothing: the cache has its result in memory all the time."""
    tensors.add_uncounted(op.outputs[0], output, op.inputs[0])
    return OpProfile(
        flops=0.0,
        backward_flops=0.0,
        nbytes=0,
        backward_nbytes=0,
        saved=(),
        saved_extra_nbytes=0,
        cached_extra_nbytes=0,
        forward_peak_nbytes=0,
        backward_extra_nbytes=0,
    )
