"""What is found in the arguments of calls."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.model_rewrites.tree_paths import leaves_in, tensors_in

Pair = namedtuple("Pair", "first second")
TENSOR = torch.zeros(2)

TREES: list[Any] = [
    (TENSOR, [1, 2.0, None, True], {"dim": -1, "dtype": torch.float32}),
    ([], (), {}, [[]]),
    ((torch.Size([2, 3]), slice(1, None), "x", Ellipsis),),
    (Pair(TENSOR, [nn.Parameter(TENSOR)]), OrderedDict(b=1, a=TENSOR)),
    (MappingProxyType({"x": TENSOR}), {"y": {"z": (TENSOR, range(3))}}),
    TENSOR,
    None,
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_leaves_are_those_of_pytree(tree: Any) -> None:
    assert list(map(id, leaves_in(tree))) == list(map(id, pytree.tree_leaves(tree)))


def test_tensors_come_in_order() -> None:
    tensors = [torch.zeros(size) for size in range(4)]
    found = tensors_in({"b": (tensors[0], [tensors[1]]), "a": Pair(1, tensors[2]), "c": tensors[3]})
    assert list(map(id, found)) == list(map(id, tensors))
