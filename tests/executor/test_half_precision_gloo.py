"""A job in bf16: inputs in fp32 are cast, as under mixed precision, and running statistics stay in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import ShardingPlan, build_plan


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if index == 0 else 8, 8, 3, padding=1) for index in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Images(), {"x": torch.randn(8, 3, 8, 8), "labels": torch.randint(0, 4, (8,))}


def errors(rank: int, text: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors, against the unsharded module, of loss, gradients' norms and running variances."""
    (reference, batch), (module, _) = make(), make()
    reference.to(torch.bfloat16)
    reference.norms.float()
    plan = ShardingPlan.from_dict(text)
    mesh = device_mesh_for(plan, device_type="cpu")
    shard_module(module, mesh, plan)
    expected, loss = reference(**batch | {"x": batch["x"].bfloat16()}), module(**local_batch(batch, mesh, plan))
    expected.backward()
    loss.backward()

    assert all(buffer.dtype == torch.float32 for name, buffer in module.named_buffers() if "running" in name)
    pairs = {"loss": (loss.full_tensor() if isinstance(loss, DTensor) else loss, expected)}
    gradients = zip(module.named_parameters(), reference.parameters(), strict=True)
    for (name, actual), other in gradients:
        gradient = actual.grad.full_tensor() if isinstance(actual.grad, DTensor) else actual.grad
        if "convs" not in name or name.endswith("weight"):  # a bias before a normalization has no gradient
            pairs[name] = gradient.norm(), other.grad.norm()
    variances = ([norm.running_var for norm in model.norms] for model in (module, reference))
    pairs["variance"] = tuple(torch.cat(each).norm() for each in variances)
    return {name: abs((a - b) / b).item() for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("planner", ["fully-sharded", "fsdp", "ddp", "ilp"])
def test_numbers_are_those_of_the_unsharded_module_in_bf16(planner: str) -> None:
    module, batch = make()
    plan = build_plan(
        module, cluster="1x4xtoy", example_inputs=batch, dtype="bf16", planner=planner, micro_batches=1, ac="none",
        headroom=0.0,
    )  # fmt: skip
    assert plan.solver is not None
    assert plan.solver.name == planner  # no other plan's, in place of one that runs otherwise
    for of_rank in run_on_gloo(errors, 4, plan.to_dict()):
        assert max(of_rank.values()) < 0.02, of_rank
