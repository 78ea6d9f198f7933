"""Uneven shards: the length at which a vocabulary is counted, and the largest piece."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cost_model.layouts.layout import Layout
from cost_model.layouts.uneven import largest_factor, may_be_uneven, piece_numel, rounded_length, shards_once

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.mark.parametrize(
    ("length", "per_node", "devices", "expected"),
    [
        (50_257, 8, 8, 50_264),
        (50_257, 8, 64, 50_304),
        (50_257, 8, 4096, 50_264),  # pieces of 4,096 ranks would be short
        (32_000, 8, 512, 32_000),  # the devices of a node divide it
        (257, 1, 4, 268),  # nodes of one device; 65 and 66 are products of small primes
        (100, 8, 8, 100),  # too short
    ],
)
def test_a_vocabulary_is_counted_at_a_length_that_divides(
    length: int, per_node: int, devices: int, expected: int
) -> None:
    assert rounded_length(length, per_node, devices) == expected


@given(length=st.integers(1, 100_000), pieces=st.integers(1, 300))
def test_no_rank_of_a_long_dim_is_left_empty(length: int, pieces: int) -> None:
    """By torch's own rule, and no piece is longer than the mean by more than 1 in 64."""
    if may_be_uneven(length, pieces):
        found = torch.empty(length, 0).chunk(pieces)
        assert len(found) == pieces
        assert len(found[0]) <= length / pieces * (1 + 1 / 64)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ((S0, R), True),
        ((R, S0), True),
        ((S0, S1), True),
        ((P, R), True),
        ((S0, S0), False),
        ((_StridedShard(0, split_factor=2), R), False),
    ],
)
def test_one_axis_shards_a_vocabulary(layout: Layout, expected: bool) -> None:
    assert shards_once((264, 64), layout, {264: 257}) is expected


def test_other_dims_may_be_sharded_by_several_axes() -> None:
    assert shards_once((264, 64), (S1, S1), {264: 257})


@pytest.mark.parametrize("layout", [(S0, R), (R, S0), (S0, S1), (S1, S0), (R, R), (S1, S1)])
def test_the_largest_piece_is_that_of_torch(layout: Layout) -> None:
    mesh, shape = (2, 4), [257, 64]
    for size, placement in zip(mesh, layout, strict=True):
        if isinstance(placement, Shard):
            pieces = torch.empty(shape[placement.dim], 0).chunk(size)
            shape[placement.dim] = max(map(len, pieces))
    assert piece_numel((264, 64), layout, mesh, {264: 257}) == math.prod(shape)


@given(length=st.integers(1, 300_000), per_node=st.sampled_from([1, 2, 4, 8]), nodes=st.integers(1, 64))
def test_a_longer_length_is_rare_and_little_longer(length: int, per_node: int, nodes: int) -> None:
    devices = per_node * nodes
    longer = rounded_length(length, per_node, devices)
    if longer == length:
        return
    assert longer % (per_node if per_node > 1 else devices) == 0
    assert largest_factor(longer) >= 29
    assert length < longer <= length * 1.07
