"""Calls that are made of other ops, which have rules: for tracing and running alike.

``torch.ctc_loss`` is the loss of each sample, and a mean or sum of these: its own result depends on all samples, and
the size of what it saves on values. ``tensor.exponential_()`` is a logarithm of uniform numbers, as in
`torch.nn.functional.gumbel_softmax`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

_NONE, _MEAN = 0, 1
"""Reductions, as `torch.ctc_loss` has them; 2 is a sum."""


@torch.library.custom_op("shardplan::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the CTC loss of each sample [samples], and what its backward reads.

    Args:
        log_probs: logarithms of probabilities [time, samples, classes].
        targets: classes [samples, longest target].
        input_lengths, target_lengths: of each sample. They are clamped to the sizes of the other two.
        blank: the class of no label.
        zero_infinity: whether a loss that is infinite counts as 0.
    """
    lengths = _clamped(log_probs, targets, input_lengths, target_lengths)
    losses, alpha = torch.ops.aten._ctc_loss.Tensor(log_probs, *lengths, blank, zero_infinity)
    # torch's has the size that the longest target asks for, and no values beyond what a sample is long.
    alpha = F.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[2]))
    _, inputs, outputs = (length.reshape(-1, 1, 1) for length in lengths)
    time, place = (torch.arange(size, device=alpha.device) for size in alpha.shape[1:])
    alpha = alpha.masked_fill((time[:, None] >= inputs) | (place > 2 * outputs), 0)
    return (torch.where(losses.isinf(), 0, losses) if zero_infinity else losses), alpha


@ctc_losses.register_fake
def _(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int, zero: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    time, samples, _ = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, time, 2 * targets.shape[1] + 1)


@torch.library.custom_op("shardplan::ctc_gradient", mutates_args=())
def ctc_gradient(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    losses: torch.Tensor,
    alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Return the gradient of ``log_probs``; ``gradient`` is that of the losses, and the rest as in `ctc_losses`."""
    targets, inputs, lengths = _clamped(log_probs, targets, input_lengths, target_lengths)
    alpha = alpha[:, :, : 2 * int(lengths.max()) + 1].contiguous()
    result: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        gradient, log_probs, targets, inputs, lengths, losses, alpha, blank, zero_infinity
    )
    return result


@ctc_gradient.register_fake
def _(gradient: torch.Tensor, log_probs: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _clamped(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        targets.clamp(0, log_probs.shape[2] - 1),
        input_lengths.clamp(0, log_probs.shape[0]),
        target_lengths.clamp(0, targets.shape[1]),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
    of_log_probs = torch.ops.shardplan.ctc_gradient(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return of_log_probs, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_save)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Any:
    """Return `torch.ctc_loss`, by the losses of the samples.

    NotImplemented for targets in one row for all samples: which belong to a sample is a matter of values.
    """
    if targets.dim() != 2 or log_probs.dim() != 3:
        return NotImplemented
    if log_probs.dtype in (torch.bfloat16, torch.float16):
        log_probs = log_probs.float()  # torch has no kernel for them
    targets = _on_device(targets, log_probs)
    # Lengths that the forward makes itself, as by torch.full, are whole on every rank: the sum is split as the targets.
    lengths = [targets.sum(1) * 0 + _on_device(each, log_probs) for each in (input_lengths, target_lengths)]
    losses, _ = torch.ops.shardplan.ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == _NONE:
        return losses
    return (losses / lengths[1].clamp(min=1)).mean() if reduction == _MEAN else losses.sum()


def _on_device(value: torch.Tensor | Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return ``value`` on the device of ``like``, as torch takes it from any."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, device=like.device)
    return value if value.device == like.device else value.to(like.device)


def exponential_(tensor: torch.Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Any:
    """Fill ``tensor`` with exponentially distributed numbers of rate ``lambd``, above 0, and return it.

    NotImplemented with a generator.
    """
    if generator is not None:
        return NotImplemented
    uniform = torch.rand_like(tensor)  # in [0, 1)
    return tensor.copy_(-torch.log1p(-uniform).clamp(max=-torch.finfo(tensor.dtype).tiny) / lambd)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ctc_loss: ctc_loss,
    torch.Tensor.exponential_: exponential_,
}
"""Function -> what runs in its place, unless that returns NotImplemented."""


@contextmanager
def other_ops() -> Iterator[None]:
    """Within this context, the calls are those of other ops."""
    with ExitStack() as stack:
        for owner in (torch, torch.Tensor):
            for function, replacement in REPLACEMENTS.items():
                if getattr(owner, function.__name__, None) is function:
                    stack.enter_context(mock.patch.object(owner, function.__name__, _either(replacement, function)))
        yield


def _either(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(second)
    def either(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is NotImplemented else result

    return either
