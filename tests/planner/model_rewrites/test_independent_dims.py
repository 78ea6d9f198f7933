"""The dims along which an op works piece by piece, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from planner.model_rewrites.independent_dims import Dims, split_outputs, without_chance

FLOAT = torch.float32


@pytest.mark.parametrize(
    ("run", "shapes", "dims", "expected"),
    [
        (lambda t: F.avg_pool2d(t[0], 2), [(8, 4, 6, 6)], (0,), (0,)),
        (lambda t: F.avg_pool2d(t[0], 2), [(8, 4, 6, 6)], (1,), (1,)),
        (lambda t: F.group_norm(t[0], 2, t[1]), [(8, 4, 6), (4,)], (0, None), (0,)),
        (lambda t: F.group_norm(t[0], 2, t[1]), [(8, 4, 6), (4,)], (1, None), None),
        (lambda t: t[0].softmax(0), [(8, 4)], (0,), None),
        (lambda t: t[0].softmax(0), [(8, 4)], (1,), (1,)),
        (lambda t: t[0] @ t[1], [(8, 4), (4, 6)], (None, 1), (1,)),
        (lambda t: t[0].transpose(0, 1), [(8, 4)], (0,), (1,)),
        (lambda t: (t[0] * 2, t[1].sum()), [(8, 4), (3,)], (0, None), None),
        (lambda t: (t[0] * 2, t[0] + t[1]), [(8, 4), (4,)], (0, None), (0, 0)),
        (lambda t: t[0].sum(), [(8, 4)], (0,), None),
        (lambda t: torch.rand_like(t[0]), [(8, 4)], (0,), None),
        (lambda t: t[0].view(8, 2, 2), [(8, 4)], (0,), None),
    ],
)
def test_outputs_are_split_where_the_pieces_make_the_whole(
    run: Callable[[list[torch.Tensor]], Any], shapes: list[tuple[int, ...]], dims: Dims, expected: Dims | None
) -> None:
    before = torch.get_rng_state()
    assert split_outputs(run, shapes, [FLOAT] * len(shapes), dims) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_large_tensors_are_tried_small_and_what_needs_their_size_is_not_tried() -> None:
    assert split_outputs(lambda t: t[0] * 2, [(8, 30_000_000)], [FLOAT], (0,)) == (0,)
    assert split_outputs(lambda t: F.group_norm(t[0], 32, t[1]), [(8, 512, 512, 512), (512,)], [FLOAT] * 2, (0, None))
    assert split_outputs(lambda t: t[0].view(-1, 30_000_000), [(8, 30_000_000)], [FLOAT], (0,)) is None
    assert split_outputs(lambda t: t[0].repeat(1, 10**9), [(8, 4)], [FLOAT], (0,)) is None, "the result is large"


def test_pieces_with_another_number_of_results_are_no_split() -> None:
    assert split_outputs(lambda t: t[0].unbind(0), [(8, 4)], [FLOAT], (0,)) is None


def test_only_random_ops_lose_their_fractions() -> None:
    assert without_chance("lstm", 0.1) == 0.0
    assert without_chance("group_norm", 0.1) == 0.1
    assert without_chance("lstm", 2) == 2
    assert without_chance("no op of torch", 0.1) == 0.1
