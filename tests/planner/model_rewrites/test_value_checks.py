"""Branches on values that lead to an error: which they are, and which way they pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import checked_values
from torch import Tensor

from planner.model_rewrites.replaced_calls.value_checks import checks_pass


def raises_if(x: Tensor) -> int:
    if x.max() > 3:
        raise ValueError("too large")
    return 1


def raises_unless(x: Tensor) -> int:
    if not (x < 3).all():
        raise ValueError(f"too large: {x.max()}")
    return 1


def raises_of_two(x: Tensor) -> int:
    if x is not None and x.sum() > 0:
        raise ValueError("a sum")
    return 1


def raises_otherwise(x: Tensor) -> int:
    if x.sum() < 0:
        return 1
    raise ValueError("no sum")


def with_else(x: Tensor) -> int:
    if x.min() >= 0:
        message = "of a name"
        raise ValueError(message)
    return 1


def branches(x: Tensor) -> int:
    return 1 if x.max() > 3 else 0


def returns_early(x: Tensor) -> int:
    if x.max() > 3:
        return 1
    return 0


@pytest.mark.parametrize(
    "check",
    [raises_if, raises_unless, raises_of_two, raises_otherwise, checked_values.asserts],
    ids=lambda check: check.__name__,
)
def test_checks_pass_whatever_the_values(check: Callable[[Tensor], int]) -> None:
    with pytest.raises((ValueError, AssertionError)):
        check(torch.full((2,), 5.0))
    with checks_pass():
        assert check(torch.full((2,), 5.0)) == 1
        assert check(torch.empty(2, device="meta")) == 1


@pytest.mark.parametrize("branch", [branches, returns_early], ids=lambda check: check.__name__)
def test_other_branches_are_taken_by_value(branch: Callable[[Tensor], int]) -> None:
    with checks_pass():
        assert branch(torch.full((2,), 5.0)) == 1
        assert branch(torch.full((2,), 1.0)) == 0


def test_a_check_that_does_more_than_raise_is_made() -> None:
    with checks_pass(), pytest.raises(ValueError, match="of a name"):
        with_else(torch.full((2,), 5.0))
