"""Prefill and decoding on real processes: the logits equal the unsharded model's, and the cache is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.executor_cases import make_model
from support.gloo import run_on_gloo
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import PlanningSession
from planner.model_rewrites.cache_argument import cache_argument
from planner.plan.sharding_plan import ShardingPlan

BATCH, PROMPT, STEPS, VOCAB = 8, 12, 4, 256
MESH = "dp=2,tp=2"
TOLERANCE = 1e-5
PLANNERS = ("ilp", "random:1")


@dataclass(frozen=True)
class Ran:
    """The largest difference of a logit, and the local and global shape of the keys in the cache, on one rank."""

    difference: float
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def generate(rank: int, family: str, plans: list[dict[str, Any]]) -> list[Ran]:
    """Run a prompt and decoding steps, sharded and unsharded, each with its own cache."""
    results = []
    for plan in map(ShardingPlan.from_dict, plans):
        reference, model = make_model(family).eval(), make_model(family).eval()
        mesh = device_mesh_for(plan)
        shard_module(model, mesh, plan)
        reference_cache = sharded_cache = None
        cache = cache_argument(reference)
        assert cache is not None
        largest = 0.0
        for length in [PROMPT] + [1] * (STEPS if plan.job.phase == "decode" else 0):
            batch = {"input_ids": tokens(length)}
            with torch.no_grad():
                expected = reference(**batch, **{cache: reference_cache}, use_cache=True)
                output = model(**local_batch(batch, mesh, plan), **{cache: sharded_cache}, use_cache=True)
            reference_cache, sharded_cache = getattr(expected, cache), getattr(output, cache)
            largest = max(largest, (full(output.logits) - expected.logits).abs().max().item())
        keys = sharded_cache.layers[0].keys
        results.append(Ran(largest, tuple(keys.to_local().shape), tuple(keys.shape)))
    return results


@pytest.mark.parametrize(
    ("family", "phase"),
    [
        ("llama", "decode"),
        pytest.param("llama", "prefill", marks=pytest.mark.slow),
        *(pytest.param(family, "decode", marks=pytest.mark.slow) for family in ("gpt2", "mixtral")),
    ],
)
def test_logits_are_those_of_the_unsharded_model(family: str, phase: str) -> None:
    session = PlanningSession(make_model(family), cluster="1x4xtoy", phase=phase, batch=BATCH, seq=PROMPT, dtype="fp32")
    plans = [session.plan(planner=planner, mesh=MESH).to_dict() for planner in PLANNERS]
    ranks = run_on_gloo(generate, 4, family, plans)
    for ran in ranks[0]:
        assert ran.difference < TOLERANCE
        assert ran.global_shape == (BATCH, ran.global_shape[1], PROMPT + (STEPS if phase == "decode" else 0), 8)
    # Some plan shards the cache, by sequences or by heads.
    assert any(ran.local_shape != ran.global_shape for ran in ranks[0])
