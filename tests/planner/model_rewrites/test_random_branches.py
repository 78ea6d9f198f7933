"""Branches on random numbers are planned as the likelier one, whatever the state of the generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from planner.build import build_plan
from planner.graph.trace_module import trace_module
from planner.model_rewrites.random_branches import likelier_branches

DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand([])": lambda: torch.rand([]),
    "torch.rand(())": lambda: torch.rand(()),
    "torch.rand(1).item()": lambda: torch.rand(1).item(),
    "torch.rand(size=(1,), dtype)": lambda: torch.rand(size=(1,), dtype=torch.float64),
    "random.random()": lambda: random.random(),
    "random.uniform": lambda: random.uniform(0, 1),
    "np.random.random()": lambda: np.random.random(),
    "np.random.rand(1)": lambda: np.random.rand(1).item(),
}


class DroppedLayers(nn.Module):
    def __init__(self, draw: Callable[[], Any], rate: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 1)
        self.draw, self.rate = draw, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and self.draw() < self.rate:
                continue
            x = layer(x).relu()
        return self.head(x).mean()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_layer_that_is_dropped_now_and_then_is_planned_to_run(draw: Callable[[], Any]) -> None:
    module = DroppedLayers(draw)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    traced = trace_module(module, example_inputs=(torch.zeros(8, 16),), batch=8)
    assert sum(op.target_name.startswith("aten.linear") for op in traced.graph.ops) == 5
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[0], torch.get_rng_state())


def test_a_layer_that_seldom_runs_is_planned_not_to_run() -> None:
    traced = trace_module(DroppedLayers(lambda: torch.rand([]), 0.9), example_inputs=(torch.zeros(8, 16),), batch=8)
    assert sum(op.target_name.startswith("aten.linear") for op in traced.graph.ops) == 1


def test_random_tensors_stay_random() -> None:
    with likelier_branches():
        assert len(set(torch.rand(8).tolist())) == 8
        assert torch.rand(1, generator=torch.Generator().manual_seed(0)).item() != 0.5
        assert torch.rand(1, device="meta").is_meta


def test_a_loop_until_a_number_is_large_ends() -> None:
    with likelier_branches():
        turns = 0
        while random.random() < 0.9:
            turns += 1
    assert turns > 1000


def test_speech_is_planned_as_it_is_trained() -> None:
    """Wav2Vec2 drops layers by numbers of torch, and masks spans of the input that NumPy draws."""
    config = transformers.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=99,
        conv_dim=(32,),
        conv_kernel=(10,),
        conv_stride=(5,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.4,
        mask_time_prob=0.3,
    )
    module = transformers.Wav2Vec2ForCTC(config)
    plan = build_plan(module, cluster="1x4xh100-sxm-80gb", batch=8, example_inputs=(torch.zeros(8, 3200),))
    assert not plan.opaque_modules
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
