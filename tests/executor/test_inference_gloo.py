"""Prefill and decoding on real processes: the logits are the unsharded model's, with a cache that stays in pieces."""

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
    """What a rank saw: the largest difference of any logit, and how its pieces of the cache lie."""

    difference: float
    cached: tuple[int, ...]
    whole: tuple[int, ...]


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def generate(rank: int, family: str, plans: list[dict[str, Any]]) -> list[Ran]:
    """Run a prompt and some steps behind it, sharded and unsharded, in one cache each."""
    found = []
    for plan in map(ShardingPlan.from_dict, plans):
        reference, model = make_model(family).eval(), make_model(family).eval()
        mesh = device_mesh_for(plan)
        shard_module(model, mesh, plan)
        theirs = ours = None
        cache = cache_argument(reference)
        assert cache is not None
        worst = 0.0
        for length in [PROMPT] + [1] * (STEPS if plan.job.phase == "decode" else 0):
            batch = {"input_ids": tokens(length)}
            with torch.no_grad():
                expected = reference(**batch, **{cache: theirs}, use_cache=True)
                got = model(**local_batch(batch, mesh, plan), **{cache: ours}, use_cache=True)
            theirs, ours = getattr(expected, cache), getattr(got, cache)
            worst = max(worst, (whole(got.logits) - expected.logits).abs().max().item())
        keys = ours.layers[0].keys
        found.append(Ran(worst, tuple(keys.to_local().shape), tuple(keys.shape)))
    return found


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
        assert ran.whole == (BATCH, ran.whole[1], PROMPT + (STEPS if phase == "decode" else 0), 8)
    # Somewhere the cache is split: each rank holds its own sequences, or its own heads.
    assert any(ran.cached != ran.whole for ran in ranks[0])
