"""A job without a layout: the op that cannot be run, or the pin or baseline at fault with the sizes that would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner.build import build_plan
from planner.errors import MeshError, PlannerError, UnsupportedOpError
from planner.plan.sharding_plan import ShardingPlan


class Squares(nn.Module):
    """A module whose loss is the sum of the squares of another module's result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().pow(2).sum()


class MaskedScatter(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(x > 0, torch.ones_like(x))


class Renormed(nn.Module):
    """An embedding that writes to its table in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x > 0).long())


class Waiting(nn.Module):
    """Times from an exponential distribution, drawn in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty_like(x).renorm_(2, 0, 1.0)


def plan(inner: nn.Module, shape: tuple[int, ...], **options: Any) -> ShardingPlan:
    return build_plan(Squares(inner), example_inputs=(torch.zeros(shape),), **{"cluster": "1x1xtoy", **options})


def test_all_ops_that_cannot_be_run_are_named_at_once_on_several_devices_and_within_any_cap() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), Waiting(), Renormed())
    for options in ({}, {"cluster": "1x2xtoy", "memory_gb": 1e-6}):
        with pytest.raises(UnsupportedOpError) as caught:
            plan(inner, (8, 8), **options)
        assert {(name, module) for name, module, _ in caught.value.ops} == {
            ("aten.renorm_.default", "inner.*"),
            ("aten.embedding_renorm_.default", "inner.*.table"),
        }
        assert "aten.renorm_.default in inner.*" in str(caught.value)


@pytest.mark.parametrize(
    ("inner", "shape", "local"),
    [
        (nn.GroupNorm(2, 4), (8, 4, 8, 8), ("group_norm",)),
        (nn.Sequential(nn.Linear(8, 8), MaskedScatter()), (8, 8), ("masked_scatter",)),
        (nn.AvgPool2d(2), (8, 4, 8, 8), ("avg_pool2d",)),
    ],
)
def test_ops_without_a_rule_run_on_local_tensors(
    inner: nn.Module, shape: tuple[int, ...], local: tuple[str, ...]
) -> None:
    module = nn.Sequential(nn.Conv2d(4, 4, 1), inner) if len(shape) == 4 else inner
    made = plan(module, shape, cluster="1x2xtoy", micro_batches=1, ac="none")
    assert made.local_ops == local
    assert made.verification is not None
    assert made.verification.outcome == "as-planned"


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("inner.weight=S(0)@tp", "dim 0 of inner.weight has 3 elements, which tp=2 does not divide (1, 3 would do)"),
        ("inner.weight:used=S(0)@tp", "dim 0 of inner.weight has 3 elements"),
        ("inner.bias=S(1)@tp", "inner.bias has 1 dims (3), and no dim 1"),
    ],
)
def test_a_pin_that_cannot_be_kept_names_the_tensor_and_its_size(pin: str, words: str) -> None:
    with pytest.raises(MeshError) as caught:
        plan(nn.Linear(16, 3), (8, 16), cluster="1x4xtoy", mesh="dp=2,tp=2", pins=[pin])
    assert pin in str(caught.value)
    assert words in str(caught.value)


def test_a_pin_that_no_op_can_keep_names_the_op() -> None:
    inner = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8))
    with pytest.raises(PlannerError, match=r"inner.1.weight:used=S\(0\)@tp cannot be kept: aten.layer_norm"):
        plan(inner, (8, 16), cluster="1x4xtoy", mesh="dp=2,tp=2", pins=["inner.1.weight:used=S(0)@tp"])
