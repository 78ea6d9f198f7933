"""Plans of transformers, by names of styles and by ``DistributedConfig``, on four processes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.executor_cases import make_batch, make_model
from support.gloo import run_on_gloo
from support.small_models import EIGHT_HEADS
from support.unsharded import differences
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig

from planner.imported.distributed_config import plan_from_distributed_config
from planner.imported.tp_plans import plan_from_tp_plan
from planner.plan.sharding_plan import PlanMesh


def family(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**EIGHT_HEADS)).train()
    if name == "phi3":
        config = transformers.Phi3Config(**EIGHT_HEADS, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0)
        return transformers.Phi3ForCausalLM(config).train()
    return make_model(name)


def config_plan(name: str, **sizes: Any) -> dict[str, Any]:
    return plan_from_distributed_config(family(name), DistributedConfig(**sizes), device="cpu").to_dict()


def tp_plan(name: str, mesh: str) -> dict[str, Any]:
    return plan_from_tp_plan(family(name), PlanMesh.from_mesh(PlanMesh.parse(mesh), "cpu")).to_dict()


CASES: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "llama": {
        "tp=4": lambda: tp_plan("llama", "tp=4"),
        "dp=2,tp=2": lambda: tp_plan("llama", "dp=2,tp=2"),
        "tp 2, fsdp 2": lambda: config_plan("llama", tp_size=2, fsdp_size=2),
        "fsdp 4": lambda: config_plan("llama", fsdp_size=4),
        "replicas 2, fsdp 2": lambda: config_plan("llama", dp_replicate_size=2, fsdp_size=2),
    },
    "mixtral": {
        "tp=4": lambda: tp_plan("mixtral", "tp=4"),
        "experts on 2": lambda: config_plan("mixtral", tp_size=2, fsdp_size=2, ep_size=2),
    },
    "deepseek": {"dp=2,tp=2": lambda: tp_plan("deepseek", "dp=2,tp=2")},
    "qwen3": {"tp=4": lambda: tp_plan("qwen3", "tp=4")},
    "phi3": {"tp=4": lambda: tp_plan("phi3", "tp=4")},
}


ORDINARY = ("llama, tp 2, fsdp 2", "mixtral, tp=4", "qwen3, tp=4")
"""One case each of styles with FSDP, experts and norms of split heads; the others are slow."""


def every_family(rank: int, chosen: tuple[str, ...]) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    results = {}
    for name, plans in CASES.items():
        for case, make in plans.items():
            if f"{name}, {case}" not in chosen:
                continue
            make_family = functools.partial(family, name)
            results[f"{name}, {case}"] = differences({case: make()}, make_family, lambda: make_batch("llama"))
    return results


NAMES = [f"{name}, {case}" for name, plans in CASES.items() for case in plans]


def check(chosen: tuple[str, ...]) -> None:
    expected: dict[str, list[str]] = {case: [] for case in chosen}
    assert run_on_gloo(every_family, 4, chosen) == [expected] * 4


def test_losses_and_gradients_are_the_unsharded_models() -> None:
    check(ORDINARY)


@pytest.mark.slow
def test_losses_and_gradients_of_all_families_and_meshes_are_the_unsharded_models() -> None:
    check(tuple(name for name in NAMES if name not in ORDINARY))
