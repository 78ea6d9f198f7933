"""One call of an attention kernel, forward and backward apart, with the logarithm of each row's sum of exponentials.

``sums`` [batch, heads, rows] are what attention over parts of the keys is put together by. torch has such kernels for
CPUs, and on CUDA, for half precision without a mask, cuDNN's and FlashAttention-2: cuDNN's where torch would choose it
for `scaled_dot_product_attention`, as it does on Hopper and Blackwell. FlashAttention-3 takes the place of both where a
plan says so. The rest is computed with all scores in memory.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from executor import torch_internals
from planner.errors import PlanError
from planner.plan.job import AttentionKernel

_aten = torch.ops.aten
_HOPPER = (9, 0)
_WIDTHS, _WIDEST = 8, 256
"""Widths that FlashAttention-2 takes are multiples of the one, and at most the other."""


def use_kernel(kernel: AttentionKernel | None, device_type: str) -> None:
    """Have attention run in ``kernel`` from now on, in this process, or in what torch chooses; on a GPU alone.

    Raises:
        PlanError: it cannot be had here.
    """
    if device_type != "cuda":
        return
    if kernel is None:
        torch_internals.use_own_attention()
        return
    if torch.cuda.get_device_capability() != _HOPPER:
        raise PlanError(
            f"The plan's attention runs in FlashAttention-3, which {torch.cuda.get_device_name()} does not run.",
            what_to_do="Plan for this device, or without attention_kernel.",
        )
    try:
        torch_internals.use_flash_attention_3()
    except (ImportError, RuntimeError) as error:
        raise PlanError(
            f"The plan's attention runs in FlashAttention-3, which torch cannot use here: {error}.",
            what_to_do="Install FlashAttention-3 (flash_attn_interface), or plan without attention_kernel.",
        ) from error


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [batch, heads, rows, width] and its ``sums``.

    Args:
        q: [batch, heads, rows, width].
        k, v: [batch, kv heads, keys, width]; each of their heads serves as many of ``q``.
        mask: added to the scores, or boolean: what is seen; [batch or 1, heads or 1, rows or 1, keys].
        causal: whether each row sees the keys up to its own; there are as many rows as keys then, and no mask.
    """
    if _runs_fused(q, v, mask):
        if _prefers_cudnn(q, k, v, causal, scale):
            found = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
            return found[0], found[1].squeeze(-1)
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return found[0], found[1]
    if _runs_on_cpu(q, v):
        result, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale
        )
        return result, sums
    scores = _scores(q, k, mask, causal, scale)
    sums = scores.logsumexp(-1)
    p = _shares(scores, sums)
    return (p.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2), sums.flatten(1, 2)


def attend_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    result: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``, given that of ``result``.

    Where ``k`` and ``v`` are a part of the keys, ``result`` and ``sums`` are those over all of them.
    """
    if _runs_fused(q, v, mask):
        none = torch.empty(0, dtype=torch.int64, device=q.device)  # neither packed sequences nor dropout
        queries, keys = q.shape[2], k.shape[2]
        if _prefers_cudnn(q, k, v, causal, scale):
            seeds = none.new_empty(()), none.new_empty(())
            # Lengths that are there are those of packed sequences to it (torch's _cudnn_attention_backward, is_nested).
            lengths = None, None, None, queries, keys, 0.0, causal
            of_q, of_k, of_v = _aten._scaled_dot_product_cudnn_attention_backward(
                gradient, q, k, v, result, sums.unsqueeze(-1).contiguous(), *seeds, *lengths, scale=scale
            )
        else:
            options = none, none, queries, keys, 0.0, causal, none, none
            of_q, of_k, of_v = _aten._scaled_dot_product_flash_attention_backward(
                gradient, q, k, v, result, sums.contiguous(), *options, scale=scale
            )
    elif _runs_on_cpu(q, v):
        of_q, of_k, of_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, result, sums, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale
        )
    else:
        of_q, of_k, of_v = _plain_backward(gradient, q, k, v, mask, result, sums, causal, scale)
    return of_q, of_k, of_v


def _runs_fused(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    width = q.shape[3]
    fits = width == v.shape[3] and width % _WIDTHS == 0 and width <= _WIDEST
    return q.is_cuda and mask is None and fits and q.dtype in (torch.bfloat16, torch.float16)


def _prefers_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> bool:
    """Tell whether torch would run cuDNN's kernel. Forward and backward need not agree: sums mean the same to both."""
    return torch_internals.chosen_attention(q, k, v, causal, scale) == SDPBackend.CUDNN_ATTENTION


def _runs_on_cpu(q: torch.Tensor, v: torch.Tensor) -> bool:
    # On meta too, where what runs is counted.
    return not q.is_cuda and q.shape[3] == v.shape[3]


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return ``mask`` as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    """Return the masked scores [batch, kv heads, heads of each, rows, keys], in float32 at least."""
    heads = k.shape[1]
    scores: torch.Tensor = q.unflatten(1, (heads, -1)) @ k.unsqueeze(2).transpose(-1, -2) * scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    added = _added(mask, scores.dtype)
    if added is None:
        return scores
    return scores + (added.unsqueeze(2) if added.shape[1] == 1 else added.unflatten(1, (heads, -1)))


def _shares(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return what each key has in a row; none has any in a row that sees none."""
    return (scores - sums.masked_fill(sums == -torch.inf, 0).unsqueeze(-1)).exp()


def _plain_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    result: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split = (k.shape[1], -1)
    p = _shares(_scores(q, k, mask, causal, scale), sums.unflatten(1, split))
    arrived = gradient.unflatten(1, split)
    of_v = (p.to(v.dtype).transpose(-1, -2) @ arrived).sum(2)
    of_p = (arrived @ v.unsqueeze(2).transpose(-1, -2)).to(p.dtype)
    mean = (gradient * result).sum(-1, keepdim=True).to(p.dtype).unflatten(1, split)
    of_scores = (p * (of_p - mean) * scale).to(q.dtype)
    of_q = (of_scores @ k.unsqueeze(2)).flatten(1, 2)
    of_k = (of_scores.transpose(-1, -2) @ q.unflatten(1, split)).sum(2)
    return of_q, of_k, of_v
