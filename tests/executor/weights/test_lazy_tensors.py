"""Lazy tensors read what the whole tensors hold at any indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.weights.lazy_tensors import (
    ComputedTensor,
    LazyTensor,
    SelectedTensor,
    StoredTensor,
    TransposedTensor,
    UnsqueezedTensor,
    concatenated,
    in_memory,
    read_into,
    stacked,
    write_at,
)

A = torch.arange(6 * 4.0).reshape(6, 4)
B = torch.arange(100, 100 + 3 * 4.0).reshape(3, 4)
ORDER = torch.tensor([5, 0, 1, 4])

CASES: dict[str, tuple[Callable[[], LazyTensor], torch.Tensor]] = {
    "in memory": (lambda: in_memory(A), A),
    "concatenated": (lambda: concatenated([in_memory(A), in_memory(B)], 0), torch.cat([A, B])),
    "concatenated along the last dim": (lambda: concatenated([in_memory(A), in_memory(A)], -1), torch.cat([A, A], -1)),
    "stacked": (lambda: stacked([in_memory(A), in_memory(A + 1)], 0), torch.stack([A, A + 1])),
    "stacked in the middle": (lambda: stacked([in_memory(A), in_memory(A + 1)], 1), torch.stack([A, A + 1], 1)),
    "selected": (lambda: SelectedTensor(in_memory(A), 0, ORDER), A[ORDER]),
    "transposed": (lambda: TransposedTensor(in_memory(A), 0, 1), A.T),
    "unsqueezed": (lambda: UnsqueezedTensor(in_memory(A), 1), A.unsqueeze(1)),
    "computed": (lambda: ComputedTensor(A.shape, A.dtype, lambda: A * 2), A * 2),
    "experts: gate and up of each": (
        lambda: concatenated([stacked([in_memory(A)] * 3, 0), stacked([in_memory(A + 9)] * 3, 0)], 1),
        torch.cat([torch.stack([A] * 3), torch.stack([A + 9] * 3)], 1),
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_indices_are_read(name: str, data: st.DataObject) -> None:
    make, whole = CASES[name]
    lazy = make()
    assert (lazy.shape, lazy.dtype) == (whole.shape, whole.dtype)
    indices = tuple(
        torch.tensor(data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size)), dtype=torch.int64)
        for size in whole.shape
    )
    expected = whole
    for dim, along in enumerate(indices):
        expected = expected.index_select(dim, along)
    assert torch.equal(lazy.prepared().read(indices), expected)
    values = torch.zeros(expected.shape, dtype=torch.float64)
    read_into(values, lazy.prepared(), indices)
    assert torch.equal(values, expected.double())
    target = torch.zeros_like(whole)
    write_at(target, indices, expected)
    assert target.sum() == expected.sum()


def test_many_runs_are_read_in_one_slice() -> None:
    boxes: list[tuple[slice, ...]] = []
    long = torch.arange(1000.0).unsqueeze(1)

    def read(box: tuple[slice, ...]) -> torch.Tensor:
        boxes.append(box)
        return long[box]

    every_second = (torch.arange(0, 1000, 2), torch.arange(1))
    assert torch.equal(StoredTensor(long.shape, long.dtype, read).read(every_second), long[::2])
    assert boxes == [(slice(0, 999), slice(0, 1))]


def test_a_scalar() -> None:
    values = torch.zeros((), dtype=torch.int64)
    read_into(values, in_memory(torch.tensor(3)), ())
    assert values.item() == 3
