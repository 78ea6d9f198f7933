"""Optimizer states and the optimizer's seconds of plans, against figures worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cost_model import ClusterSpec, gemm_time_s
from planner import build_plan
from planner.errors import JobError
from planner.plan.sharding_plan import ShardingPlan

WIDTH, FFN, VOCAB, RANKS = 64, 192, 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def plan(optimizer: str, **options: Any) -> ShardingPlan:
    return build_plan(
        Model(),
        example_inputs={"tokens": torch.zeros(4, 8, dtype=torch.int64)},
        cluster=f"1x{RANKS}xtoy",
        mesh=f"dp={RANKS}",
        planner="fsdp",
        dtype="fp32",
        optimizer=optimizer,
        **options,
    )


def in_8_bits(numel: float) -> float:
    """Return the bytes of torchao's two states of a shard of ``numel`` elements."""
    quantized = numel >= 4096 and numel % 256 == 0
    return 2 * (numel + 4 * numel / 256 + 1024 if quantized else 4 * numel)


OUTER, MATRIX, NORM = VOCAB * WIDTH / RANKS, WIDTH * FFN / RANKS, WIDTH / RANKS
"""Elements of a shard of the embedding or the head, of a matrix in a block, and of a norm's weight."""


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("adamw", 8 * (2 * OUTER + 4 * MATRIX + 2 * NORM)),
        # shards of 8192 elements have 8-bit states, those of 3072 and of 16 do not
        ("adamw-8bit", 2 * in_8_bits(OUTER) + 4 * in_8_bits(MATRIX) + 2 * in_8_bits(NORM)),
        ("muon", 8 * (2 * OUTER + 2 * NORM) + 4 * 4 * MATRIX),
        ("adafactor", 4 * (2 * (VOCAB + WIDTH) + 4 * (WIDTH + FFN) + 2 * NORM)),
    ],
)
def test_states_by_hand(optimizer: str, expected: float) -> None:
    estimate = plan(optimizer, executable_only=optimizer != "adafactor").estimate
    assert estimate is not None
    assert estimate.memory["optimizer_state"] == pytest.approx(expected, abs=1)


def test_muon_gathers_and_orthogonalizes_whole_matrices() -> None:
    device = ClusterSpec.parse(f"1x{RANKS}xtoy").device
    with_adamw, with_muon = plan("adamw").estimate, plan("muon").estimate
    assert with_adamw is not None
    assert with_muon is not None
    sizes = [(WIDTH, WIDTH, FFN), (WIDTH, WIDTH, WIDTH), (WIDTH, FFN, WIDTH)]
    dtype = "bf16" if "bf16" in device.peak_flops else "fp32"
    products = 4 * 5 * sum(gemm_time_s(m=m, n=n, k=k, device=device, dtype=dtype) for m, n, k in sizes)
    states = 2 * 4 * 4 * MATRIX / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    gathers = with_muon.optimizer_s - (with_adamw.optimizer_s - states) - products
    # FSDP gathers a block's two matrices and its norm at once: as many bytes as Muon gathers of them, but for the norm.
    of_fsdp = [row.time_s / row.count for row in with_adamw.collectives if row.bytes == 4 * RANKS * (2 * MATRIX + NORM)]
    assert of_fsdp[0] <= gathers / 2 <= 2 * of_fsdp[0]
    assert with_muon.collectives == with_adamw.collectives


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw-8bit-bnb"])
def test_optimizers_that_the_executor_does_not_run_are_refused_or_noted(optimizer: str) -> None:
    with pytest.raises(JobError, match=r"shard_module does not run .* --no-executable-only"):
        plan(optimizer)
    assert any(note.startswith("shard_module does not run") for note in plan(optimizer, executable_only=False).notes)
