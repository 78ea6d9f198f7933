"""Attention kernels, forward and backward as separate calls, with the log-sum-exp of each row.

The log-sum-exps ``lse`` [batch, heads, rows] are needed to combine attention over pieces of the keys. torch has such a
kernel for CPUs. On CUDA, for half precision without a mask, it has cuDNN's and FlashAttention-2. cuDNN's runs where
torch would choose it for ``scaled_dot_product_attention``, as on Hopper and Blackwell. FlashAttention-3 replaces both
where a plan says so. All other attention is computed with all scores in memory.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from executor.torch_internals import dtensor as torch_internals
from planner.errors import PlanError
from planner.plan.techniques import AttentionKernel

_aten = torch.ops.aten
_HOPPER = (9, 0)
_WIDTH_MULTIPLE, _MAX_WIDTH = 8, 256
"""FlashAttention-2 supports widths that are multiples of the first, and at most the second."""


def use_kernel(kernel: AttentionKernel | None, device_type: str) -> None:
    """Make this process run attention in ``kernel``.

    Args:
        kernel: the plan's kernel; None: the kernel that torch chooses.
        device_type: device type of the mesh; nothing changes unless it is "cuda".

    Raises:
        PlanError: the kernel is not available here.
    """
    if device_type != "cuda":
        return
    if kernel is None:
        torch_internals.restore_attention()
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
    """Return attention [batch, heads, rows, width] and its ``lse`` [batch, heads, rows].

    Args:
        q: [batch, heads, rows, width].
        k: [batch, kv heads, keys, width]; each kv head serves the same number of heads of ``q``.
        v: [batch, kv heads, keys, width]; its width may differ from that of ``q`` and ``k``.
        mask: [batch or 1, heads or 1, rows or 1, keys]; added to the scores, or boolean: True where a row sees a key.
        causal: whether each row sees the keys up to its own. Then there are as many rows as keys, and no mask.
        scale: factor on the scores.
    """
    if _runs_fused(q, v, mask):
        if _prefers_cudnn(q, k, v, causal, scale):
            outputs = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
            return outputs[0], outputs[1].squeeze(-1)
        outputs = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return outputs[0], outputs[1]
    if _runs_on_cpu(q, v):
        result, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale
        )
        return result, lse
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    p = _softmax(scores, lse)
    return (p.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


def attend_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    result: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``, given ``gradient``, the gradient of ``result``.

    ``result`` and ``lse`` are what ``attend`` returned; the other arguments are those of ``attend``. If ``k`` and ``v``
    are a piece of the keys, ``result`` and ``lse`` are combined over all keys, and the gradient of ``q`` is an addend.
    """
    if _runs_fused(q, v, mask):
        none = torch.empty(0, dtype=torch.int64, device=q.device)  # no packed sequences, no dropout
        queries, keys = q.shape[2], k.shape[2]
        if _prefers_cudnn(q, k, v, causal, scale):
            seeds = none.new_empty(()), none.new_empty(())
            # Without cumulative lengths: torch would take them for packed sequences (is_nested in its
            # _cudnn_attention_backward).
            lengths = None, None, None, queries, keys, 0.0, causal
            grad_q, grad_k, grad_v = _aten._scaled_dot_product_cudnn_attention_backward(
                gradient, q, k, v, result, lse.unsqueeze(-1).contiguous(), *seeds, *lengths, scale=scale
            )
        else:
            options = none, none, queries, keys, 0.0, causal, none, none
            grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_backward(
                gradient, q, k, v, result, lse.contiguous(), *options, scale=scale
            )
    elif _runs_on_cpu(q, v):
        grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, result, lse, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale
        )
    else:
        grad_q, grad_k, grad_v = _plain_backward(gradient, q, k, v, mask, result, lse, causal, scale)
    return grad_q, grad_k, grad_v


def _runs_fused(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    width = q.shape[3]
    fits = width == v.shape[3] and width % _WIDTH_MULTIPLE == 0 and width <= _MAX_WIDTH
    return q.is_cuda and mask is None and fits and q.dtype in (torch.bfloat16, torch.float16)


def _prefers_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> bool:
    """Return whether torch would run cuDNN's kernel.

    Forward and backward may run in different kernels, because all kernels define ``lse`` in the same way.
    """
    return torch_internals.chosen_attention(q, k, v, causal, scale) == SDPBackend.CUDNN_ATTENTION


def _runs_on_cpu(q: torch.Tensor, v: torch.Tensor) -> bool:
    # On meta too, where verify counts collectives.
    return not q.is_cuda and q.shape[3] == v.shape[3]


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return ``mask`` as an addend to the scores: a boolean mask becomes 0 where True and -inf where False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    """Return the masked scores [batch, kv heads, heads per kv head, rows, keys], in float32 or float64."""
    heads = k.shape[1]
    scores: torch.Tensor = q.unflatten(1, (heads, -1)) @ k.unsqueeze(2).transpose(-1, -2) * scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if causal:
        visible_pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible_pairs, -torch.inf)
    added = _added(mask, scores.dtype)
    if added is None:
        return scores
    return scores + (added.unsqueeze(2) if added.shape[1] == 1 else added.unflatten(1, (heads, -1)))


def _softmax(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the softmax of ``scores``, given their ``lse``; zeros in a row that sees no key."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()


def _plain_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    result: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split = (k.shape[1], -1)
    p = _softmax(_scores(q, k, mask, causal, scale), lse.unflatten(1, split))
    grad_out = gradient.unflatten(1, split)
    grad_v = (p.to(v.dtype).transpose(-1, -2) @ grad_out).sum(2)
    grad_p = (grad_out @ v.unsqueeze(2).transpose(-1, -2)).to(p.dtype)
    delta = (gradient * result).sum(-1, keepdim=True).to(p.dtype).unflatten(1, split)
    grad_scores = (p * (grad_p - delta) * scale).to(q.dtype)
    grad_q = (grad_scores @ k.unsqueeze(2)).flatten(1, 2)
    grad_k = (grad_scores.transpose(-1, -2) @ q.unflatten(1, split)).sum(2)
    return grad_q, grad_k, grad_v
