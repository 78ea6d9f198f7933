"""Which torch is accepted, and a rule of it that is mended."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial

from planner.errors import UnsupportedTorchError
from planner.strategies.dtensor_rules import check_torch_version, mesh_without_groups


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0.0"])
def test_another_torch_is_refused_by_name(version: str) -> None:
    with pytest.raises(UnsupportedTorchError, match=rf"found {version.split('+')[0]}.*pip install"):
        check_torch_version(version)


def test_the_pinned_torch_is_accepted() -> None:
    check_torch_version("2.13.0+cpu")


def test_the_gradient_of_a_weight_that_is_viewed_and_transposed_stays_partial() -> None:
    gradient = DTensor.from_local(torch.zeros(8, 16, 4, device="meta"), mesh_without_groups([4]), [Partial()])
    copied = gradient.transpose(1, 2).reshape(32, 16)  # which copies: it is not contiguous
    assert copied.placements == (Partial(),)
