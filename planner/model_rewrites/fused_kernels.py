"""Ops that run as one kernel each way, in place of chains of small ones: norm, gated activation, rotation, loss.

Written as chains of element-wise ops, as transformers has them, each of these reads and writes memory at every step,
and autograd keeps what lies in between, some of it in float32. Each is an op of ours here. It is traced and priced
under its name; `executor.ops.fused` runs its formulas, below, on a rank's pieces: compiled to one kernel on a GPU, step
by step on a CPU. `planner.model_rewrites.fuse_ops` puts them in the place of modules' own code.

Formulas are written as torch computes the chains, roundings included: what they give is what the modules give, but for
roundings that a compiled kernel leaves out.
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
"""As graphs have them."""

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_ROW_NBYTES = 4
"""Of a row's scale, or of a row's sum of exponentials: float32."""


# --- the ops as they are traced ---

_ONLY_TRACED = "only traced: shard_module puts executor.ops.fused in its place"


@torch.library.custom_op("shardplan::rms_norm", mutates_args=())
def rms_norm_op(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * x / sqrt(mean(x ** 2) + eps)``, the mean over the last dim of ``x``: of its shape."""
    raise NotImplementedError(_ONLY_TRACED)


@rms_norm_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    torch._check(x.dim() > 0 and weight.shape == x.shape[-1:], lambda: f"a norm of {x.shape} got {weight.shape}")
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


@torch.library.custom_op("shardplan::gated", mutates_args=())
def gated_op(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, all of one shape; ``activation`` is a name in `ACTIVATIONS`."""
    raise NotImplementedError(_ONLY_TRACED)


@gated_op.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    torch._check(gate.shape == up.shape and gate.dtype == up.dtype, lambda: f"a gate of {gate.shape} for {up.shape}")
    torch._check(activation in ACTIVATIONS, lambda: f"there is no activation {activation!r}")
    return gate.new_empty(gate.shape)


@torch.library.custom_op("shardplan::gated_pairs", mutates_args=())
def gated_pairs_op(pairs: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up`` [..., width] of ``pairs`` [..., 2 width], in which each gate precedes its up."""
    raise NotImplementedError(_ONLY_TRACED)


@gated_pairs_op.register_fake
def _(pairs: torch.Tensor, activation: str) -> torch.Tensor:
    torch._check(pairs.dim() > 0 and pairs.shape[-1] % 2 == 0, lambda: f"{pairs.shape} holds no pairs")
    torch._check(activation in ACTIVATIONS, lambda: f"there is no activation {activation!r}")
    return pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2))


@torch.library.custom_op("shardplan::rotary", mutates_args=())
def rotary_op(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [batch, heads, seq, width] turned by the angles of ``cos`` and ``sin`` [batch or 1, seq, width]."""
    raise NotImplementedError(_ONLY_TRACED)


@rotary_op.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    torch._check(x.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape, lambda: f"{cos.shape} for {x.shape}")
    torch._check(cos.shape[1:] == (x.shape[2], x.shape[3]) and x.shape[3] % 2 == 0, lambda: f"{cos.shape}, {x.shape}")
    torch._check(cos.shape[0] in (1, x.shape[0]), lambda: f"angles of {cos.shape[0]} samples for {x.shape[0]}")
    return torch.empty_like(x)


@torch.library.custom_op("shardplan::cross_entropy", mutates_args=())
def cross_entropy_op(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, mean: bool) -> torch.Tensor:
    """Return the loss, in float32, of ``logits`` [rows, classes] and class indices ``labels`` [rows].

    It is the mean over rows whose label is not ``ignore_index``, or their sum.
    """
    raise NotImplementedError(_ONLY_TRACED)


@cross_entropy_op.register_fake
def _(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, mean: bool) -> torch.Tensor:
    fits = logits.dim() == 2 and labels.shape == logits.shape[:1] and not labels.dtype.is_floating_point
    torch._check(fits, lambda: f"a loss of logits {logits.shape} and labels {labels.shape}")
    return logits.new_empty((), dtype=torch.float32)


# --- their formulas ---


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and each row's scale, in float32, with a last dim of 1."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), scale


def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x`` and ``weight``, given that of the result."""
    normal = x.to(torch.float32) * scale
    of_normal = (gradient * weight).to(x.dtype).to(torch.float32)
    of_x = scale * (of_normal - normal * (of_normal * normal).mean(-1, keepdim=True))
    products = (gradient * normal.to(x.dtype)).to(torch.float32)
    return of_x.to(x.dtype), products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


def gated_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``."""
    return ACTIVATIONS[activation](gate) * up


def gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``gate`` and ``up``, given that of the result."""
    aten, of_active = torch.ops.aten, gradient * up
    if activation == "silu":
        of_gate = aten.silu_backward.default(of_active, gate)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        of_gate = aten.gelu_backward.default(of_active, gate, approximate=approximate)
    return of_gate, gradient * ACTIVATIONS[activation](gate)


def gated_pairs_forward(pairs: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up`` of pairs [..., 2 width]."""
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return gated_forward(gate, up, activation)


def gated_pairs_backward(gradient: torch.Tensor, pairs: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradient of ``pairs``, given that of the result."""
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack(gated_backward(gradient, gate, up, activation), -1).flatten(-2)


def rotary_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` turned: the halves of its last dim are the two coordinates."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def rotary_backward(gradient: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the gradient of what is turned, given that of the result: it is turned back."""
    first, second = (gradient * sin.unsqueeze(1)).chunk(2, -1)
    return gradient * cos.unsqueeze(1) + torch.cat((second, -first), -1)


def row_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's largest logit, in float32."""
    return logits.to(torch.float32).amax(1)


def row_sums(logits: torch.Tensor, labels: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Return [2, rows]: sums of exponentials less ``maxima``, and target logits, 0 where the target is not held here.

    Args:
        labels: counted from the first class that is held here.
        maxima: of the whole rows.
    """
    wide = logits.to(torch.float32)
    held = (labels >= 0) & (labels < logits.shape[1])
    target = wide.gather(1, labels.masked_fill(~held, 0).unsqueeze(1)).squeeze(1).masked_fill(~held, 0)
    return torch.stack([(wide - maxima.unsqueeze(1)).exp().sum(1), target])


def logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_sums: torch.Tensor, row_scales: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of ``logits``: the softmax less one at the target, times each row's ``row_scales``.

    Args:
        labels: counted from the first class that is held here.
        log_sums: of each whole row's exponentials.
        row_scales: [rows], float32; 0 where the label is ignored.
    """
    softmax = (logits.to(torch.float32) - log_sums.unsqueeze(1)).exp()
    classes = torch.arange(logits.shape[1], device=logits.device)
    less = torch.where(classes == labels.unsqueeze(1), softmax - 1.0, softmax)
    return (less * row_scales.unsqueeze(1)).to(logits.dtype)


def run_forward(name: str, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the result of the op called ``name`` on whole tensors, and what it makes for its backward."""
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
    log_sums, counted = sums.log() + maxima, labels != ignore_index
    total = (log_sums - targets).masked_fill(~counted, 0).sum()
    return (total / counted.sum() if mean else total), log_sums


def run_backward(
    name: str, gradient: torch.Tensor, args: Sequence[Any], made: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the op's tensors, those of its labels, cosines and sines left out.

    Args:
        made: by the forward for this.
    """
    if name == RMS_NORM:
        return rms_norm_backward(gradient, args[0], args[1], *made)
    if name == GATED:
        return gated_backward(gradient, *args)
    if name == GATED_PAIRS:
        return (gated_pairs_backward(gradient, *args),)
    if name == ROTARY:
        return (rotary_backward(gradient, *args[1:]),)
    logits, labels, ignore_index, mean = args
    counted = labels != ignore_index
    scales = (gradient / counted.sum() if mean else gradient) * counted
    return (logits_gradient(logits, labels, made[0], scales),)


# --- what they take ---


class FusedWork(NamedTuple):
    """What an op keeps, and what it has alive.

    Attributes:
        saved: positions of the inputs that are kept for the backward.
        saved_extra_nbytes: kept beside them.
        forward_nbytes, backward_nbytes: read and written by one kernel each way.
    """

    saved: tuple[int, ...]
    saved_extra_nbytes: int
    forward_nbytes: int
    backward_nbytes: int


def fused_work(name: str, inputs: Sequence[tuple[Sequence[int], int]], output_nbytes: int) -> FusedWork:
    """Return what the op called ``name`` takes.

    Args:
        inputs: (shape, bytes) of each.
        output_nbytes: of the result.
    """
    shape, first_nbytes = inputs[0]
    read = sum(nbytes for _, nbytes in inputs)
    if name == RMS_NORM:
        rows = _ROW_NBYTES * math.prod(shape[:-1])
        # Backward: the gradient that comes, all that was kept, and the gradients of both inputs.
        return FusedWork((0, 1), rows, read + output_nbytes + rows, 2 * read + rows + output_nbytes)
    if name == GATED:
        return FusedWork((0, 1), 0, read + output_nbytes, 2 * read + output_nbytes)
    if name == GATED_PAIRS:
        return FusedWork((0,), 0, read + output_nbytes, 2 * read + output_nbytes)
    if name == ROTARY:
        return FusedWork((1, 2), 0, read + output_nbytes, read + output_nbytes)
    if name == CROSS_ENTROPY:
        rows = _ROW_NBYTES * shape[0]
        # Forward: maxima and sums are two passes, with an exchange between them where classes are split.
        passes = first_nbytes + read
        return FusedWork((0, 1), rows, passes, passes + rows)
    raise ValueError(f"{name!r} is no fused op")
