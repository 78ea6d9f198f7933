"""Layouts of arguments that a plan does not name."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard

from cost_model.layouts.layout import Layout
from executor.resolve.batch import layout_like
from planner.errors import UnmatchedKeyError

R, S0, S1 = Replicate(), Shard(0), Shard(1)
IDS: tuple[tuple[int, ...], Layout] = ((2, 8), (S0, S1))


@pytest.mark.parametrize(
    ("shape", "planned", "expected"),
    [
        ((2, 8), [IDS], (S0, S1)),  # a mask
        ((2, 8), [((8, 8), (R, R)), IDS], (S0, S1)),  # the tensor of the same shape says how
        ((2, 8, 4), [IDS], (S0, S1)),  # features of each token
        ((2, 1, 5, 5), [((2, 8), (S0, R))], (S0, R)),  # a mask of each sample
        ((1, 8), [((2, 8), (S0, R))], (R, R)),  # positions, the same for all samples
        ((7,), [((2, 8), (R, R))], (R, R)),  # nothing is split
    ],
)
def test_a_tensor_is_split_as_a_named_tensor(
    shape: tuple[int, ...], planned: list[tuple[tuple[int, ...], Layout]], expected: Layout
) -> None:
    assert layout_like(shape, planned, "extra", ["input_ids"]) == expected


@pytest.mark.parametrize("shape", [(2,), (3, 8), (2, 5), (1, 8, 3)])
def test_a_tensor_that_may_be_split_or_whole_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnmatchedKeyError, match=r"'extra' of shape .* does not say how it is split.*example inputs"):
        layout_like(shape, [((2, 8), (S0, S1))], "extra", ["input_ids"])
