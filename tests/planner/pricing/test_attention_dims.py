"""Attention of tensors of other than four dims, which torch runs without a fused kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.attentions import OneHead, Windows
from torch import Tensor, nn

from planner import build_plan
from planner.errors import JobError
from planner.graph.op_graph import ATTENTION
from planner.graph.trace_module import trace_module
from planner.pricing.kernel_shapes import with_heads
from planner.strategies.context_parallel import may_split

H100 = {"cluster": "1x2xh100-sxm-80gb", "mesh": "dp=2", "micro_batches": 1, "ac": "none"}


class Attends(nn.Module):
    """Attention with 4 heads of 16 features in tensors of ``dims`` dims: 4, or 5 with a dim of 1 before the heads."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims, self.inputs = dims, nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.inputs(x).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.dims == 5:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return F.scaled_dot_product_attention(query, key, value).square().mean()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 5, 8), (2, 1, 5, 8)), ((2, 4, 5, 8), (2, 4, 5, 8)), ((2, 3, 4, 5, 8), (6, 4, 5, 8)), ((5, 8), (1, 1, 5, 8))],
)
def test_shapes_are_read_with_the_heads_before_the_sequence(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert with_heads(shape) == expected


def test_the_scores_are_kept_and_the_kernels_are_not_fused() -> None:
    inputs = (torch.zeros(4, 1024, 64, device="meta"),)
    fused, unfused = (build_plan(Attends(dims), example_inputs=inputs, **H100).estimate for dims in (4, 5))
    assert fused is not None
    assert unfused is not None
    scores = 2 * 4 * 1024 * 1024 * 2  # samples of a rank, heads, rows, columns, bytes
    assert unfused.memory["activations"] - fused.memory["activations"] >= scores
    assert unfused.compute_s > 1.5 * fused.compute_s


@pytest.mark.parametrize("module", [OneHead(), Windows()])
def test_neither_the_sequence_is_split_nor_a_fused_kernel_chosen(module: nn.Module) -> None:
    inputs = (torch.zeros(8, 4, 16),)
    graph = trace_module(module, example_inputs=inputs, dtype="fp32").graph
    (attention,) = (op for op in graph.ops if op.target is ATTENTION)
    assert not may_split(attention, [graph.values[name] for name in attention.inputs])
    with pytest.raises(JobError, match="takes tensors of four dims"):
        build_plan(module, example_inputs=inputs, techniques="flash3", **H100)
