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


def plan(inner: nn.Module, shape: tuple[int, ...], **options: Any) -> ShardingPlan:
    return build_plan(Squares(inner), example_inputs=(torch.zeros(shape),), **{"cluster": "1x1xtoy", **options})


@pytest.mark.parametrize(
    ("inner", "shape", "op"),
    [
        (nn.Conv1d(4, 8, 3), (8, 4, 16), "aten.conv1d.default"),
        (nn.Conv3d(4, 8, 3), (8, 4, 8, 8, 8), "aten.conv3d.default"),
        (nn.ConvTranspose2d(4, 8, 3), (8, 4, 8, 8), "aten.conv_transpose2d.input"),
        (nn.GroupNorm(2, 4), (8, 4, 8, 8), "aten.group_norm.default"),
        (nn.Sequential(nn.Linear(8, 8), MaskedScatter()), (8, 8), "aten.masked_scatter.default"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_op_that_cannot_be_run_is_named(inner: nn.Module, shape: tuple[int, ...], op: str) -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        plan(inner, shape)
    assert [name for name, _, _ in caught.value.ops] == [op]
    assert caught.value.ops[0][1].startswith("inner")
    assert op in str(caught.value)


def test_all_such_ops_are_named_at_once_on_several_devices_and_within_any_cap() -> None:
    inner = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Unflatten(1, (8, 2, 7)), nn.ConvTranspose2d(8, 8, 3))
    with pytest.raises(UnsupportedOpError) as caught:
        plan(inner, (8, 4, 16), cluster="1x2xtoy", memory_gb=1e-6)
    assert {name for name, _, _ in caught.value.ops} == {"aten.conv1d.default", "aten.conv_transpose2d.input"}


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
