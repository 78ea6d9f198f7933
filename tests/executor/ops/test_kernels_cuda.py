"""Kernels that run on a GPU alone equal the same numbers computed in float64. Skipped where torch sees no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from executor.ops.attention_kernels import attend, attend_backward
from executor.ops.grouped_gemm import GroupedGemm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

BF16_ERROR = 1e-2
"""Largest relative error of bf16 operands, as ‖actual - expected‖ / ‖expected‖."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "width"), [(8, 64), (2, 128), (8, 40)])
def test_attention_and_its_gradients(kv_heads: int, width: int, causal: bool) -> None:
    torch.manual_seed(0)
    queries, keys = 256, 256 if causal else 384
    q, k, v = draw(2, 8, queries, width), draw(2, kv_heads, keys, width), draw(2, kv_heads, keys, width)
    gradient = draw(2, 8, queries, width)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True, scale=0.2)
    expected.backward(gradient.double())
    result, lse = attend(q, k, v, None, causal, 0.2)
    scores = leaves[0] @ leaves[1].repeat_interleave(8 // kv_heads, 1).mT * 0.2
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    assert relative_error(lse, scores.logsumexp(-1)) < BF16_ERROR
    assert relative_error(result, expected) < BF16_ERROR
    for actual, leaf in zip(attend_backward(gradient, q, k, v, None, result, lse, causal, 0.2), leaves, strict=True):
        assert relative_error(actual, leaf.grad) < BF16_ERROR


def test_the_pieces_of_the_keys_combine_to_the_whole() -> None:
    torch.manual_seed(0)
    q, k, v = draw(2, 8, 128, 64), draw(2, 8, 512, 64), draw(2, 8, 512, 64)
    parts = [attend(q, *piece, None, False, 0.125) for piece in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)]
    lse = torch.stack([lse for _, lse in parts])
    weights = lse.softmax(0).unsqueeze(-1)
    combined = sum(weight * part for weight, (part, _) in zip(weights, parts, strict=True))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.125)
    assert relative_error(combined, expected) < BF16_ERROR


@pytest.mark.parametrize("per_expert", [True, False])
def test_grouped_gemms_and_the_gradient_of_their_weights(per_expert: bool) -> None:
    torch.manual_seed(0)
    counts = torch.tensor([64, 0, 192, 256], device="cuda")
    rows, weights, gradient = draw(512, 128), draw(4, 256, 128), draw(512, 256)
    gemm = GroupedGemm(counts.cpu() if per_expert else counts, per_expert=per_expert)
    sizes = counts.tolist()
    expected = torch.cat([r.double() @ w.double().T for r, w in zip(rows.split(sizes), weights, strict=True)])
    assert relative_error(gemm.forward(rows, weights), expected) < BF16_ERROR
    pairs = zip(gradient.split(sizes), rows.split(sizes), strict=True)
    of_weights = torch.stack([g.double().T @ r.double() for g, r in pairs])
    assert relative_error(gemm.weight_gradient(gradient, rows, weights), of_weights) < BF16_ERROR


def test_either_way_of_grouped_gemms_runs_where_it_is_chosen() -> None:
    for rows, experts in ((512, 4), (65_536, 8)):
        weights, counts = draw(experts, 256, 128), torch.full((experts,), rows // experts, device="cuda")
        gemm = GroupedGemm.choose(counts, None, rows, weights)
        assert gemm.forward(draw(rows, 128), weights).shape == (rows, 256)
