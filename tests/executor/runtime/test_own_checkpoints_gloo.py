"""A forward that calls torch.utils.checkpoint: the plan says what is recomputed instead; the numbers are right."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from support.gloo import run_on_gloo
from support.selected import selected
from support.trained_steps import Errors, errors_in_steps
from support.training_loops import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from executor import parallelize_module
from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

PLANS: dict[str, dict[str, Any]] = {
    "layers split": {"mesh": "dp=2,tp=2"},
    "recomputed": {"mesh": "dp=2,tp=2", "ac": "full"},
    "fsdp, selective": {"planner": "fsdp", "ac": "selective"},
}
MODULES = ("reentrant", "not reentrant", "transformers")
CASES = tuple(f"{name}; {option}" for name in MODULES for option in PLANS)


class Checkpointed(nn.Module):
    """Blocks that forward recomputes, as many models are written."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    if name != "transformers":
        return Checkpointed(use_reentrant=name == "reentrant"), (torch.randn(8, 16),)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config).train()
    model.activation_checkpointing_enable()
    return model, (torch.randint(0, 64, (8, 16)),)


def all_errors(rank: int, plans: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Errors]:
    return {
        case: errors_in_steps(ShardingPlan.from_dict(plan), functools.partial(made, name))
        for case, (name, plan) in plans.items()
    }


@pytest.fixture(scope="module")
def plans(request: pytest.FixtureRequest) -> dict[str, ShardingPlan]:
    found = {}
    for case in selected(request, "case"):
        name, option = case.split("; ")
        module, inputs = made(name)
        with pytest.warns(UserWarning, match="forward calls torch.utils.checkpoint"):
            found[case] = build_plan(
                module, example_inputs=inputs, cluster="1x4xtoy", dtype="fp32", micro_batches=1, **PLANS[option]
            )
    return found


@pytest.fixture(scope="module")
def errors(plans: dict[str, ShardingPlan]) -> dict[str, Errors]:
    given = {case: (case.split("; ")[0], plan.to_dict()) for case, plan in plans.items()}
    return run_on_gloo(all_errors, 4, given)[0]


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_unsharded_module(errors: dict[str, Errors], case: str) -> None:
    assert max(errors[case]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_plans_are_verified(plans: dict[str, ShardingPlan], case: str) -> None:
    plan = plans[case]
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.solver is not None
    assert plan.solver.name in ("ilp", "fsdp")


def by_hand(rank: int, use_reentrant: bool) -> tuple[float, int]:
    """Return the largest error of a gradient under a plan written by hand, and how often a block runs in a step."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Checkpointed(use_reentrant=use_reentrant))
    plain, module = modules
    parallelize_module(module, mesh, {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()})
    runs: list[None] = []
    module.blocks[0][1].register_forward_pre_hook(lambda *unused: runs.append(None))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for each in (plain, module):
        each(x).backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max((whole(a.grad) - b.grad).abs().max().item() for a, b in pairs), len(runs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_a_plan_written_by_hand_forward_keeps_its_checkpoints(use_reentrant: bool) -> None:
    for error, runs in run_on_gloo(by_hand, 4, use_reentrant):
        assert error < 1e-6
        assert runs == 2
