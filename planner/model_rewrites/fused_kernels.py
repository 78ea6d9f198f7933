"""Fused ops, one kernel per direction: RMSNorm, gated activation, rotary embedding, cross-entropy.

transformers writes each of these as a chain of element-wise ops. Every op of a chain reads and writes memory, and
autograd saves intermediate tensors, some in float32. Here each chain is one custom op, which is traced and priced under
its name. `executor.ops.fused` runs the formulas below on a rank's shards: compiled to one kernel on a GPU, op by op on
a CPU. `planner.model_rewrites.fuse_ops` replaces the modules' code.

The formulas round where the chains round, so results differ only by roundings that a compiled kernel omits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

RMS_NORM = "shardplan.rms_norm.default"
GATED = "shardplan.gated.default"
GATED_PAIRS = "shardplan.gated_pairs.default"
ROTARY = "shardplan.rotary.default"
CROSS_ENTROPY = "shardplan.cross_entropy.default"
NAMES = (RMS_NORM, GATED, GATED_PAIRS, ROTARY, CROSS_ENTROPY)
"""Names of the ops in graphs."""

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_ROW_NBYTES = 4
"""Bytes of a row's scale (RMSNorm) or log-sum-exp (cross-entropy), in float32."""


# --- the custom ops, for tracing ---

_ONLY_TRACED = "this op is only traced; shard_module replaces it by executor.ops.fused"


@torch.library.custom_op("shardplan::rms_norm", mutates_args=())
def rms_norm_op(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * x / sqrt(mean(x ** 2) + eps)``, of the shape of ``x``; the mean is over the last dim."""
    raise NotImplementedError(_ONLY_TRACED)


@rms_norm_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    torch._check(
        x.dim() > 0 and weight.shape == x.shape[-1:], lambda: f"rms_norm of {x.shape} with weight {weight.shape}"
    )
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


@torch.library.custom_op("shardplan::gated", mutates_args=())
def gated_op(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, all of the same shape; ``activation`` is a key of `ACTIVATIONS`."""
    raise NotImplementedError(_ONLY_TRACED)


@gated_op.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    torch._check(gate.shape == up.shape and gate.dtype == up.dtype, lambda: f"gate {gate.shape} with up {up.shape}")
    torch._check(activation in ACTIVATIONS, lambda: f"unknown activation {activation!r}")
    return gate.new_empty(gate.shape)


@torch.library.custom_op("shardplan::gated_pairs", mutates_args=())
def gated_pairs_op(pairs: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up`` ``[..., width]``; ``pairs`` ``[..., 2 * width]`` alternates gate and up."""
    raise NotImplementedError(_ONLY_TRACED)


@gated_pairs_op.register_fake
def _(pairs: torch.Tensor, activation: str) -> torch.Tensor:
    torch._check(pairs.dim() > 0 and pairs.shape[-1] % 2 == 0, lambda: f"odd last dim in {pairs.shape}")
    torch._check(activation in ACTIVATIONS, lambda: f"unknown activation {activation!r}")
    return pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2))


@torch.library.custom_op("shardplan::rotary", mutates_args=())
def rotary_op(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[batch, heads, seq, width]`` rotated; ``cos`` and ``sin`` are ``[batch or 1, seq, width]``."""
    raise NotImplementedError(_ONLY_TRACED)


@rotary_op.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    torch._check(x.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape, lambda: f"cos {cos.shape} for x {x.shape}")
    torch._check(
        cos.shape[1:] == (x.shape[2], x.shape[3]) and x.shape[3] % 2 == 0, lambda: f"cos {cos.shape}, x {x.shape}"
    )
    torch._check(cos.shape[0] in (1, x.shape[0]), lambda: f"cos of batch {cos.shape[0]} for x of batch {x.shape[0]}")
    return torch.empty_like(x)


@torch.library.custom_op("shardplan::cross_entropy", mutates_args=())
def cross_entropy_op(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, mean: bool) -> torch.Tensor:
    """Return the loss, a float32 scalar, of ``logits`` ``[rows, classes]`` and class indices ``labels`` ``[rows]``.

    The loss is the mean (or, without ``mean``, the sum) over the rows whose label is not ``ignore_index``.
    """
    raise NotImplementedError(_ONLY_TRACED)


@cross_entropy_op.register_fake
def _(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, mean: bool) -> torch.Tensor:
    fits = logits.dim() == 2 and labels.shape == logits.shape[:1] and not labels.dtype.is_floating_point
    torch._check(fits, lambda: f"cross_entropy of logits {logits.shape} and labels {labels.shape}")
    return logits.new_empty((), dtype=torch.float32)


# --- the formulas ---


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and the scale of each row in float32, ``[..., 1]``."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), scale


def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x`` and ``weight``, given the result's ``gradient``."""
    normalized = x.to(torch.float32) * scale
    grad_normalized = (gradient * weight).to(x.dtype).to(torch.float32)
    grad_x = scale * (grad_normalized - normalized * (grad_normalized * normalized).mean(-1, keepdim=True))
    grad_weight_rows = (gradient * normalized.to(x.dtype)).to(torch.float32)
    return grad_x.to(x.dtype), grad_weight_rows.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


def gated_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``."""
    return ACTIVATIONS[activation](gate) * up


def gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``gate`` and ``up``, given the result's ``gradient``."""
    aten, grad_activated = torch.ops.aten, gradient * up
    if activation == "silu":
        grad_gate = aten.silu_backward.default(grad_activated, gate)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        grad_gate = aten.gelu_backward.default(grad_activated, gate, approximate=approximate)
    return grad_gate, gradient * ACTIVATIONS[activation](gate)


def gated_pairs_forward(pairs: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up`` ``[..., width]`` of ``pairs`` ``[..., 2 * width]``."""
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return gated_forward(gate, up, activation)


def gated_pairs_backward(gradient: torch.Tensor, pairs: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradient of ``pairs``, given the result's ``gradient``."""
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack(gated_backward(gradient, gate, up, activation), -1).flatten(-2)


def rotary_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rotated; element i of its last dim is paired with element i + width / 2."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def rotary_backward(gradient: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``, given the result's ``gradient``: the inverse rotation."""
    first, second = (gradient * sin.unsqueeze(1)).chunk(2, -1)
    return gradient * cos.unsqueeze(1) + torch.cat((second, -first), -1)


def row_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each row, ``[rows]``, in float32."""
    return logits.to(torch.float32).amax(1)


def row_sums(logits: torch.Tensor, labels: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Return ``[2, rows]`` of this rank's shard: sums of ``exp(logit - maximum)``, and the target logits.

    A target logit is 0 where the target class is on another rank.

    Args:
        logits: this rank's classes, ``[rows, classes]``.
        labels: class indices, less the index of this rank's first class.
        maxima: ``[rows]``, the largest logit of each whole row, over all ranks.
    """
    wide = logits.to(torch.float32)
    is_local = (labels >= 0) & (labels < logits.shape[1])
    target = wide.gather(1, labels.masked_fill(~is_local, 0).unsqueeze(1)).squeeze(1).masked_fill(~is_local, 0)
    return torch.stack([(wide - maxima.unsqueeze(1)).exp().sum(1), target])


def logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_sums: torch.Tensor, row_scales: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of ``logits``: (softmax - one-hot target) times the scale of the row.

    Args:
        logits: this rank's classes, ``[rows, classes]``.
        labels: class indices, less the index of this rank's first class.
        log_sums: ``[rows]``, the log-sum-exp of each whole row, over all ranks.
        row_scales: ``[rows]``, in float32; 0 where the label is ignored.
    """
    softmax = (logits.to(torch.float32) - log_sums.unsqueeze(1)).exp()
    classes = torch.arange(logits.shape[1], device=logits.device)
    difference = torch.where(classes == labels.unsqueeze(1), softmax - 1.0, softmax)
    return (difference * row_scales.unsqueeze(1)).to(logits.dtype)


def run_forward(name: str, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the result of the op ``name`` on unsharded tensors, and the extra tensors that it saves for backward."""
    if name == RMS_NORM:
        return rms_norm_forward(*args)
    if name == GATED:
        return (gated_forward(*args),)
    if name == GATED_PAIRS:
        return (gated_pairs_forward(*args),)
    if name == ROTARY:
        return (rotary_forward(*args),)
    logits, labels, ignore_index, mean = args
    maxima = row_maxima(logits)
    sums, targets = row_sums(logits, labels, maxima)
    log_sums, label_mask = sums.log() + maxima, labels != ignore_index
    total = (log_sums - targets).masked_fill(~label_mask, 0).sum()
    return (total / label_mask.sum() if mean else total), log_sums


def run_backward(
    name: str, gradient: torch.Tensor, args: Sequence[Any], saved: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the op's tensor arguments, except labels, cosines and sines.

    Args:
        name: name of the op.
        gradient: gradient of the result.
        args: arguments of the forward.
        saved: the tensors that `run_forward` returned after the result.
    """
    if name == RMS_NORM:
        return rms_norm_backward(gradient, args[0], args[1], *saved)
    if name == GATED:
        return gated_backward(gradient, *args)
    if name == GATED_PAIRS:
        return (gated_pairs_backward(gradient, *args),)
    if name == ROTARY:
        return (rotary_backward(gradient, *args[1:]),)
    logits, labels, ignore_index, mean = args
    label_mask = labels != ignore_index
    scales = (gradient / label_mask.sum() if mean else gradient) * label_mask
    return (logits_gradient(logits, labels, saved[0], scales),)


# --- bytes ---


class FusedWork(NamedTuple):
    """Bytes that a fused op saves for backward, reads and writes.

    Attributes:
        saved: positions of the inputs that are saved for backward.
        saved_extra_nbytes: bytes saved besides these inputs.
        forward_nbytes: bytes read and written by the forward kernel.
        backward_nbytes: bytes read and written by the backward kernel.
    """

    saved: tuple[int, ...]
    saved_extra_nbytes: int
    forward_nbytes: int
    backward_nbytes: int


def fused_work(name: str, inputs: Sequence[tuple[Sequence[int], int]], output_nbytes: int) -> FusedWork:
    """Return the bytes that the op ``name`` saves for backward, reads and writes.

    Args:
        name: name of the op.
        inputs: (shape, bytes) of each tensor input.
        output_nbytes: bytes of the result.
    """
    shape, first_nbytes = inputs[0]
    input_nbytes = sum(nbytes for _, nbytes in inputs)
    if name == RMS_NORM:
        rows = _ROW_NBYTES * math.prod(shape[:-1])
        # Backward reads the result's gradient and what was saved, and writes the gradients of both inputs.
        return FusedWork((0, 1), rows, input_nbytes + output_nbytes + rows, 2 * input_nbytes + rows + output_nbytes)
    if name == GATED:
        return FusedWork((0, 1), 0, input_nbytes + output_nbytes, 2 * input_nbytes + output_nbytes)
    if name == GATED_PAIRS:
        return FusedWork((0,), 0, input_nbytes + output_nbytes, 2 * input_nbytes + output_nbytes)
    if name == ROTARY:
        return FusedWork((1, 2), 0, input_nbytes + output_nbytes, input_nbytes + output_nbytes)
    if name == CROSS_ENTROPY:
        rows = _ROW_NBYTES * shape[0]
        # Forward reads the logits twice: the ranks exchange maxima before they sum, where classes are sharded.
        passes = first_nbytes + input_nbytes
        return FusedWork((0, 1), rows, passes, passes + rows)
    raise ValueError(f"{name!r} is not a fused op")
